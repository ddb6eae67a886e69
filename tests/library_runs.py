"""Small training runs by the loops of other libraries, with the engine and without it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

import penstock
from penstock.engine import batch
from penstock.hf.engine_arguments import EngineArguments
from tests import models
from tests.models import VOCABULARY

SHOWN = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
"""fp32 on both sides: sums in another order, and a dozen steps of the optimizer on top of that"""


def llama(*, seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    ends = {"bos_token_id": None, "eos_token_id": 0}  # those of ``tokenizer``
    sizes = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes["num_hidden_layers"] = 2
    return models.llama(attention_dropout=dropout, attn_implementation="sdpa", **ends, **sizes).to(dtype)


def examples(count: int, *, longest: int = 12) -> list[dict[str, list[int]]]:
    """Token sequences of unequal length, padded: micro-batches differ in how many labels count."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, longest + 1, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        pad = longest - length
        found.append(
            {
                "input_ids": ids + [0] * pad,
                "attention_mask": [1] * length + [0] * pad,
                "labels": ids + [-100] * pad,
            }
        )
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of ``VOCABULARY`` tokens with a chat template, trained on this file."""
    made = Tokenizer(BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<eos>", "<unk>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special)
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        chat_template=(
            "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
            "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
            "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        ),
    )


def on_disk(folder: Path, **settings: Any) -> EngineArguments:
    """An engine with all state on disk, planned in the same way on any machine."""
    budget = penstock.Budget(device="64MiB", host="64MiB", disk=folder, weights="disk", state="disk")
    return EngineArguments(**{"budget": budget, "plan": None} | settings)


def in_memory(**settings: Any) -> EngineArguments:
    return EngineArguments(**{"budget": penstock.Budget(device="64MiB", host="64MiB"), "plan": None} | settings)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **COMMON | settings)


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}


class StopAfter(TrainerCallback):
    """Ends training after a step, as a user's callback may."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def shown(trainer: Any) -> list[tuple[int, str, float]]:
    """Every number that a run logged, but for times."""
    return [
        (line["step"], key, value)
        for line in trainer.state.log_history
        for key, value in sorted(line.items())
        if key in SHOWN or "/" in key or key.endswith(("entropy", "accuracy", "num_tokens", "reward", "margin", "kl"))
    ]


def check_same(found: Sequence[tuple[int, str, float]], plain: Sequence[tuple[int, str, float]]) -> None:
    """Two runs print the same lines with the same numbers, up to rounding. Where rewards do not differ, as those of a
    model that is its own reference, the share of pairs in which one is larger is nothing but rounding."""
    assert [line[:2] for line in found] == [line[:2] for line in plain]
    assert len(plain) > 4
    margins = {
        (step, key): max(abs(mine), abs(theirs)) for (step, key, mine), (*_, theirs) in zip(found, plain, strict=True)
    }
    for (step, key, mine), (_, _, theirs) in zip(found, plain, strict=True):
        margin = margins.get((step, key.replace("rewards/accuracies", "rewards/margins")), 1.0)
        if key.endswith("rewards/accuracies") and margin <= CLOSE["atol"]:
            continue
        torch.testing.assert_close(mine, theirs, **CLOSE, msg=lambda why, s=step, k=key: f"step {s}: {k}: {why}")


def check_kept_whole(engine: penstock.Engine, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` gives the engine micro-batches of tensors and an object, which reaches the loss as it is; what the engine
    counts of them are the tensors, once.
    """
    given: list[Any] = []
    for name in ("step", "evaluate"):
        method = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda mbs, of=method, **more: (given.extend(mbs), of(mbs, **more))[1])
    run()
    assert given
    for micro_batch in given:
        tensors = {name: value for name, value in micro_batch.items() if isinstance(value, torch.Tensor)}
        moved = batch.to_device(micro_batch, torch.device("meta"), torch.bfloat16)
        others = micro_batch.keys() - tensors.keys()
        assert others
        assert all(moved[name] is micro_batch[name] for name in others)
        assert batch.shapes(micro_batch) == batch.shapes(tensors)
        once = {id(t): t.nbytes for t in tensors.values()}
        assert batch.nbytes(micro_batch, torch.float32) == sum(once.values())


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def check_same_weights(engine: penstock.Engine, plain: Any) -> None:
    mine = {name: tensor.clone() for name, tensor in engine.master_parameters()}
    torch.testing.assert_close(mine, weights(plain), rtol=1e-3, atol=2e-5)  # AdamW divides by gradients near 0
