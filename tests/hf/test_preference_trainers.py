"""``penstock.hf.DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer``: TRL's losses and figures on the engine, equal to
TRL's own run; and what the reference says of the data, computed once, by the engine."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset, concatenate_datasets, disable_progress_bars, enable_progress_bars
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from trl.trainer.dpo_trainer import DataCollatorForPreference

import penstock
from penstock.hf import EngineMixin
from tests.library_runs import StopAfter, check_same, in_memory, llama, on_disk, shown
from tests.overrides import foreign_overrides, public_overrides
from tests.preferred import CONFIGS, KEPT, preferences
from tests.preferred import preferring as preferring_any

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def preferring(library: Any, name: str, folder: Path, settings: Any = None, **given: Any) -> Any:
    """Few examples, in batches of few shapes: for each of these the engine makes a plan."""
    settings = {"pad_to_multiple_of": 16, **(settings or {})}
    return preferring_any(library, name, folder, rows=(8, 6), settings=settings, **given)


FIGURES = {
    "DPOTrainer": {"rewards/margins", "logps/chosen", "mean_token_accuracy", "eval_rewards/accuracies"},
    "KTOTrainer": {"rewards/margins", "logps/chosen", "kl", "eval_kl"},
    "RewardTrainer": {"mean_reward", "margin", "accuracy", "eval_accuracy"},
}


@pytest.fixture(scope="module", autouse=True)
def _no_progress() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_figures_are_those_of_trls_own_run(tmp_path: Path, name: str) -> None:
    """Each step is over the limit of its norm, and done again; figures are counted once."""
    settings = {"max_grad_norm": 1e-3}
    theirs = preferring(trl, name, tmp_path / "plain", settings=settings)
    mine = preferring(
        penstock.hf, name, tmp_path, settings=settings, engine=on_disk(tmp_path / "store", speculate=True)
    )
    for trainer in (theirs, mine):
        trainer.train()
    assert mine.engine.last_step.repeats == 1
    check_same(shown(mine), shown(theirs))
    assert FIGURES[name] | {"num_tokens"} <= {key for _, key, _ in shown(mine)}
    mine.end()


def test_adapters_have_the_model_without_them_for_a_reference(tmp_path: Path) -> None:
    given: dict[str, Any] = {"peft_config": ADAPTER, "settings": {"max_steps": 2}}
    theirs = preferring(trl, "DPOTrainer", tmp_path / "plain", **given)
    mine = preferring(penstock.hf, "DPOTrainer", tmp_path, engine=in_memory(), **given)
    for trainer in (theirs, mine):
        trainer.train()
    check_same(shown(mine), shown(theirs))
    assert not list((tmp_path / "run").glob("reference-*"))
    mine.end()
    given["settings"] |= KEPT
    before = preferring(penstock.hf, "DPOTrainer", tmp_path, engine=in_memory(), **given)
    before.train()
    check_same(shown(before), shown(theirs))
    before.end()


def columns(trainer: Any) -> dict[str, list[float]]:
    return {name: list(trainer.train_dataset[name]) for name in ("ref_chosen_logps", "ref_rejected_logps")}


def test_a_reference_without_values_in_memory_says_the_same_and_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It streams from a folder. Another start has what it said from the run's folder, and makes no engine for it; other
    data, another model and other settings have not."""
    llama().save_pretrained(tmp_path / "model")
    llama(seed=1).save_pretrained(tmp_path / "other")
    turned: Any = llama()
    turned.config.rope_parameters["rope_theta"] = 50.0
    turned.save_pretrained(tmp_path / "turned")

    def streamed(folder: str = "model", store: str = "store", **given: Any) -> Any:
        loaded = penstock.hf.load(tmp_path / folder)
        engine = on_disk(tmp_path / store, weights=loaded.weights)
        return preferring(penstock.hf, "DPOTrainer", tmp_path, model=loaded.model, engine=engine, **given)

    def trains_alone(folder: str = "model", settings: Any = None, **given: Any) -> Any:
        """Without data to evaluate with, which would be tokenised first each time."""
        none = {"settings": {"eval_strategy": "no", **(settings or {})}, "eval_dataset": None}
        return streamed(folder, **none, **given)

    first = streamed()
    theirs = preferring(trl, "DPOTrainer", tmp_path / "plain")
    batches = [theirs.data_collator([row]) for row in theirs.train_dataset]
    wanted = [theirs.compute_ref_log_probs(theirs.ref_model, batch) for batch in batches]
    for values, said in zip(columns(first).values(), zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(torch.tensor(values), torch.cat(said), rtol=1e-5, atol=1e-5)
    first.end()
    files = sorted((tmp_path / "run").glob("reference-*.safetensors"))
    assert sorted(len(load_file(path)["ref_chosen_logps"]) for path in files) == [6, 8]

    def asked(*_: Any) -> None:
        raise AssertionError("the reference is asked again")

    with monkeypatch.context() as patch:
        patch.setattr(trl.DPOTrainer, "compute_ref_log_probs", asked)
        shards = concatenate_datasets([preferences(8).select(range(a, b)) for a, b in ((0, 3), (3, 4), (4, 8))])
        again = streamed(store="another", train_dataset=shards)
        assert columns(again) == columns(first) == columns(trains_alone())
        assert (tmp_path / "store").exists()
        assert not (tmp_path / "another").exists()
        others: list[dict[str, Any]] = [
            {"folder": "other"},
            {"folder": "turned"},
            {"settings": {"max_length": 24}},
            {"settings": {"ld_alpha": 0.5}},
            {"settings": {"bf16": True}},
            {"data_collator": DataCollatorForPreference(pad_token_id=0, pad_to_multiple_of=32)},
            {"train_dataset": preferences(3)},
        ]
        for other in others:
            with pytest.raises(AssertionError, match="asked again"):
                trains_alone(**other)


def test_a_run_that_was_stopped_goes_on_with_its_reference(tmp_path: Path) -> None:
    """Its data are in memory alone, and its store has a model that has been trained already."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_strategy": "no"}

    def trained(folder: Path, resume: bool = False, **given: Any) -> Any:
        engine = on_disk(folder / "store")
        trainer = preferring(penstock.hf, "DPOTrainer", folder, settings=settings, engine=engine, **given)
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    whole = trained(tmp_path / "whole")
    stopped = trained(tmp_path / "stopped", callbacks=[StopAfter(1)])
    stopped.engine.close()
    resumed = trained(tmp_path / "stopped", resume=True)
    lines, of_whole = (
        [line for line in shown(run)[:-1] if not line[1].endswith("num_tokens")] for run in (resumed, whole)
    )
    assert lines == of_whole  # but for the mean loss since the start, and TRL's count of tokens since then
    for (name, one), (_, other) in zip(
        resumed.engine.master_parameters(), whole.engine.master_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    for trainer in (whole, resumed):
        trainer.end()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"train_dataset": preferences(4).to_iterable_dataset(), "settings": {"max_steps": 1}},
            "train data are iterated",
        ),
        ({"model": get_peft_model(llama(), ADAPTER)}, "the model has adapters already, of which DPOTrainer would"),
        (
            {"train_dataset": preferences(4).map(lambda _: {"ref_chosen_logps": 0.5})},
            "the train data have ref_chosen_logps already",
        ),
        ({"ref_model": llama()}, "ref_model cannot be honoured: it would be whole in memory"),
        ({"settings": {"precompute_ref_log_probs": False}}, "set precompute_ref_log_probs=True, and the engine"),
        ({"args": None}, "set precompute_ref_log_probs=True, and the engine"),
        ({"settings": {"sync_ref_model": True}}, "sync_ref_model=True cannot be honoured: the reference is the model"),
        ({"engine": in_memory(loss_tile=8)}, "loss_tile=8 would have no effect"),
    ],
    ids=["iterated", "adapters", "columns", "second-model", "none", "defaults", "follows", "tile"],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(penstock.ConfigError, match=why):
        preferring(penstock.hf, "DPOTrainer", tmp_path, **{"engine": in_memory()} | given)


@pytest.mark.parametrize(
    ("name", "settings"), [("DPO", KEPT), ("GRPO", {"num_generations": 4, "per_device_train_batch_size": 4})]
)
def test_trainers_of_trl_whose_books_would_be_wrong_are_refused(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """By name, and not for arguments that only they have."""
    mixed = type("Mixed", (EngineMixin, getattr(trl, f"{name}Trainer")), {})
    args = getattr(trl, f"{name}Config")(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **settings)
    with pytest.raises(penstock.ConfigError, match=rf"{name}Trainer is one of TRL's trainers .*penstock\.hf\.SFTTrai"):
        mixed(llama(), args=args, train_dataset=preferences(2), engine=in_memory())


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("name", ["DPOTrainer", "KTOTrainer"])
def test_in_bf16_a_model_says_at_first_what_its_reference_does(tmp_path: Path, name: str) -> None:
    """Log probabilities of long answers are in the hundreds, where bf16 has steps of 2 and 4."""
    long = {"prompt": "on disk", "chosen": " all state" * 60, "rejected": " the same way" * 45}
    judged = {"prompt": long["prompt"], "completion": long["chosen"], "label": True}
    rows = [long] * 4 if name == "DPOTrainer" else [judged, {**judged, "label": False}] * 2
    trainer = preferring(
        penstock.hf,
        name,
        tmp_path,
        engine=in_memory(budget=penstock.Budget(device="256MiB", host="64MiB")),
        settings={"bf16": True, "max_steps": 1, "max_length": 512, "gradient_accumulation_steps": 1},
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(EQUAL[name], abs=1e-3)
    trainer.train()
    first = trainer.state.log_history[-3]
    assert first["loss"] == pytest.approx(EQUAL[name], abs=1e-3)
    assert first["logps/chosen"] < -300
    trainer.end()


EQUAL = {"DPOTrainer": math.log(2), "KTOTrainer": 0.5}
"""Losses of a model that says what its reference does."""


def test_margins_of_rewards_are_not_rounded(tmp_path: Path) -> None:
    data = preferences(4).map(lambda _: {"margin": 100.3})
    given = {"train_dataset": data, "eval_dataset": data, "settings": {"bf16": True}}
    trainer = preferring(penstock.hf, "RewardTrainer", tmp_path, engine=in_memory(), **given)
    seen, compute = [], trainer.compute_loss

    def looked_at(model: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        seen.append(inputs["margin"].clone())
        return compute(model, inputs, *rest, **more)

    trainer.compute_loss = looked_at
    trainer.train()
    assert seen
    assert all(torch.equal(margin, torch.full((2,), 100.3)) for margin in seen)
    trainer.end()


def test_new_data_are_evaluated_by_the_same_reference(tmp_path: Path) -> None:
    """Before the first step. Afterwards there is no reference any more, as in TRL's own run, and who goes on with other
    data is told."""
    new = preferences(7).select([5, 6])
    theirs = preferring(trl, "DPOTrainer", tmp_path / "plain").evaluate(new)
    trainer = preferring(penstock.hf, "DPOTrainer", tmp_path, engine=on_disk(tmp_path / "store"))
    assert trainer.evaluate(new)["eval_rewards/margins"] == pytest.approx(theirs["eval_rewards/margins"], abs=1e-5)
    trainer.train()
    with pytest.raises(ValueError, match="Cannot compute reference log-probs"):
        trainer.evaluate(preferences(3))
    trainer.end()
    with pytest.raises(penstock.ConfigError, match="is not there, with what the model says of the train data before"):
        preferring(
            penstock.hf, "DPOTrainer", tmp_path, engine=on_disk(tmp_path / "store"), train_dataset=preferences(3)
        )


def test_a_loss_that_is_made_of_what_all_gather_is_for_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = trl.KTOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **KEPT)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(penstock.ConfigError, match="KTOTrainer in 2 processes cannot be honoured"):
        preferring(penstock.hf, "KTOTrainer", tmp_path, args=args, engine=in_memory())


@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_the_libraries_mean_what_they_do_there(name: str) -> None:
    cls = getattr(penstock.hf, name)
    assert foreign_overrides(cls) == set()
    names = {"create_accelerator_and_postprocess", "create_optimizer", "end", "evaluation_loop", "get_train_dataloader"}
    assert public_overrides(cls) == names | {"prediction_step", "train", "training_step"}
