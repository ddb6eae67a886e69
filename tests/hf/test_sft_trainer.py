"""``penstock.hf.SFTTrainer``: TRL's data, packing, losses and metrics on the engine, equal to TRL's own run."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file

import penstock
from penstock.compat.peft import base_name
from penstock.hf import SFTTrainer
from tests.library_runs import COMMON, check_same, in_memory, llama, on_disk, shown, tokenizer
from tests.overrides import foreign_overrides, public_overrides

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = [
    "import",
    "torch",
    "from",
    "pathlib",
    "the",
    "loops",
    "of",
    "other",
    "libraries",
    "with",
    "engine",
    "and",
    "without",
    "it",
    "small",
]


@pytest.fixture(scope="module", autouse=True)
def _no_progress() -> Iterator[None]:
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    yield
    del os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"]


def said(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))


def chats(count: int, seed: int = 0) -> Dataset:
    draw = random.Random(seed)
    rows = [[("user", said(draw)), ("assistant", said(draw))] for _ in range(count)]
    return Dataset.from_list([{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows])


def completions(count: int, seed: int = 0) -> Dataset:
    draw = random.Random(seed)
    return Dataset.from_list([{"prompt": said(draw), "completion": " " + said(draw)} for _ in range(count)])


def run(cls: Any, folder: Path, data: Any, given: dict[str, Any], **settings: Any) -> Any:
    common = COMMON | {"bf16": False, "max_length": 48, "eval_strategy": "epoch"}
    common["pad_to_multiple_of"] = None if settings.get("packing") else 16  # the engine makes a plan for each length
    trainer = cls(
        model=llama(),
        args=trl.SFTConfig(str(folder), **common | settings),
        train_dataset=data(8),
        eval_dataset=data(4, seed=1),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        pytest.param(chats, {"assistant_only_loss": True}, id="assistant-only"),
        pytest.param(chats, {"packing": True, "gradient_accumulation_steps": 2}, id="packed"),
        pytest.param(completions, {"loss_type": "dft"}, id="completions-dft"),
    ],
)
def test_losses_and_metrics_are_those_of_trls_own_run(tmp_path: Path, data: Any, settings: dict[str, Any]) -> None:
    """Its defaults hold: activation checkpointing is on, which is what the engine does."""
    settings = settings | {"max_steps": 3}  # into the second epoch
    theirs = run(trl.SFTTrainer, tmp_path / "plain", data, {}, **settings)
    mine = run(SFTTrainer, tmp_path / "engine", data, {"engine": on_disk(tmp_path / "store")}, **settings)
    check_same(shown(mine), shown(theirs))
    assert {"mean_token_accuracy", "entropy", "num_tokens", "eval_mean_token_accuracy"} <= {
        k for _, k, _ in shown(mine)
    }
    mine.end()


def test_books_are_kept_once_for_a_step_that_was_run_twice(tmp_path: Path) -> None:
    """Every step is over the limit of its norm, and repeated; tokens are counted once, and metrics are averages."""
    settings = {"max_grad_norm": 1e-3, "max_steps": 2}
    theirs = run(trl.SFTTrainer, tmp_path / "plain", chats, {}, **settings)
    given = {"engine": on_disk(tmp_path / "store", speculate=True)}
    mine = run(SFTTrainer, tmp_path / "engine", chats, given, **settings)
    assert mine.engine.last_step.repeats == 1
    check_same(shown(mine), shown(theirs))
    mine.end()


def test_an_adapter_trains_on_frozen_weights(tmp_path: Path) -> None:
    given = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}
    theirs = run(trl.SFTTrainer, tmp_path / "plain", chats, given, max_steps=3)
    mine = run(SFTTrainer, tmp_path / "engine", chats, given | {"engine": in_memory()}, max_steps=3)
    check_same(shown(mine), shown(theirs))
    base = llama().state_dict()
    for name, tensor in mine.engine.master_parameters():
        plain_name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert ("lora_" in name) != (plain_name in base)
        assert "lora_" in name or torch.equal(tensor, base[plain_name])
    mine.save_model(str(tmp_path / "out"))
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    trained = {
        name.replace(".default", ""): t.clone() for name, t in mine.engine.master_parameters() if "lora_" in name
    }
    assert sorted(saved) == sorted(trained)
    assert all(torch.equal(saved[name], trained[name]) for name in trained)
    mine.end()


def test_an_adapter_of_a_folder_trains_on_the_folders_weights(tmp_path: Path) -> None:
    """TRL puts it into a model that has no values yet."""
    llama().save_pretrained(tmp_path / "folder")
    loaded = penstock.hf.load(tmp_path / "folder")
    trainer = SFTTrainer(
        model=loaded.model,
        args=trl.SFTConfig(str(tmp_path), **COMMON | {"bf16": False}),
        train_dataset=chats(2),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
        engine=in_memory(weights=loaded.weights),
    )
    found = {base_name(name): value.clone() for name, value in trainer.engine.master_parameters()}
    assert all(torch.equal(found[name], value) for name, value in llama().state_dict().items())
    trainer.end()


def test_what_would_have_no_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match="loss_tile=8 would have no effect"):
        run(SFTTrainer, tmp_path, chats, {"engine": in_memory(loss_tile=8)})


def test_private_methods_of_the_libraries_are_overridden_in_compat_alone() -> None:
    assert foreign_overrides(SFTTrainer) == set()
    overriding = type("Overriding", (SFTTrainer,), {"_save": None, "__module__": "penstock.hf.elsewhere"})
    assert foreign_overrides(overriding) == {"Overriding._save"}


def test_public_names_of_the_libraries_mean_what_they_do_there() -> None:
    """Users call them. These are overridden, with what they take and give; no other is taken for something else."""
    names = {"create_accelerator_and_postprocess", "create_optimizer", "end", "evaluation_loop", "get_train_dataloader"}
    assert public_overrides(SFTTrainer) == names | {"compute_loss", "prediction_step", "train", "training_step"}
