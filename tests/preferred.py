"""Small runs of TRL's trainers of preferences and rewards, with the engine and without it."""

from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from torch import nn
from transformers import LlamaForSequenceClassification
from trl import DPOTrainer, KTOTrainer, RewardTrainer

import penstock
from penstock.hf.engine_arguments import EngineArguments
from tests.library_runs import COMMON, llama, shown, tokenizer

WORDS = ["all", "state", "on", "disk", "planned", "the", "same", "way", "in", "any", "machine"]
CONFIGS: dict[str, Any] = {
    DPOTrainer.__name__: trl.DPOConfig,
    KTOTrainer.__name__: trl.KTOConfig,
    RewardTrainer.__name__: trl.RewardConfig,
}
KEPT = {"precompute_ref_log_probs": True}
ROWS = (16, 6)
"""Examples that several processes train with, and evaluate with."""


def preferences(count: int) -> Dataset:
    """Prompts with two answers each, of several lengths."""
    return Dataset.from_list(
        [
            {
                "prompt": " ".join(WORDS[i % 7 :]),
                "chosen": " " + " ".join(WORDS[: 2 + 5 * i % 6]),
                "rejected": " " + " ".join(WORDS[3 : 5 + 3 * i % 4]),
            }
            for i in range(count)
        ]
    )


def judged(count: int) -> Dataset:
    """Prompts with one answer each, half of which are wanted."""
    rows = preferences(count).to_list()
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": i % 2 == 1}
            for i, row in enumerate(rows)
        ]
    )


def model_for(name: str) -> nn.Module:
    model = llama()
    if name != "RewardTrainer":
        return model
    model.config.num_labels, model.config.pad_token_id = 1, 0
    judge: nn.Module = LlamaForSequenceClassification(model.config)
    judge.load_state_dict(model.state_dict(), strict=False)
    nn.init.constant_(judge.score.weight, 0.02)
    return judge


def preferring(
    library: Any, name: str, folder: Path, each: int = 2, rows: tuple[int, int] = (16, 18), **given: Any
) -> Any:
    """A trainer of ``library`` (``trl`` or ``penstock.hf``). ``each``: micro-batches of a step in this process.
    ``rows``: examples to train with, and to evaluate with."""
    settings = COMMON | {"bf16": False, "gradient_accumulation_steps": each, "num_train_epochs": 1}
    settings |= {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}
    if name != "RewardTrainer" and "peft_config" not in given:
        # TRL's own would keep what the reference says in a temporary folder, where no other process finds it.
        settings |= KEPT if library is not trl else {}
        given |= {} if library is not trl else {"ref_model": llama()}
    settings |= given.pop("settings", {})
    if "args" not in given:
        given["args"] = CONFIGS[name](str(folder / "run"), **settings)
    data = judged if name == "KTOTrainer" else preferences
    return getattr(library, name)(
        **{
            "model": model_for(name),
            "train_dataset": data(rows[0]),
            "eval_dataset": data(rows[1]),
            "processing_class": tokenizer(),
        }
        | given
    )


def by_processes(folder: Path, each: int, engine: EngineArguments, *names: str) -> dict[str, list[Any]]:
    """What trainers of these ``names`` log in several processes: the engine's, and TRL's own. Of what they evaluate
    there is no whole round of batches at the end."""
    found = {}
    for name in names:
        plain = preferring(trl, name, folder / f"plain-{name}", each, ROWS)
        own = preferring(penstock.hf, name, folder / name, each, ROWS, engine=engine)
        for trainer in (plain, own):
            trainer.train()
        found[name] = [shown(own), shown(plain)]
        own.end()
    return found
