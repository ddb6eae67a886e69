"""Checkpoints of ``penstock.hf.Trainer``: which ones a run goes on from, and which store gives way to them."""

import errno
import gc
import os
import random
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock
from penstock.hf import Trainer, checkpoint, last_checkpoint
from penstock.store import Layout, Store
from penstock.store.facts import facts_of
from penstock.store.owner import Owner
from penstock.store.removal import delete_store
from tests.cli.test_claim import as_nobody
from tests.folder_power import LOSSES, FlushLog, Loss
from tests.hf.test_trainer import DATA, HELD_OUT, on_engine, streamed
from tests.library_runs import StopAfter, arguments, in_memory, llama, on_disk, shown
from tests.training import abandon

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_store_of_another_run_is_not_continued_silently(tmp_path: Path) -> None:
    first = streamed(tmp_path, max_steps=2)
    first.end()
    model = llama()
    with pytest.raises(penstock.ConfigError, match=r"after step 2.*resume_from_checkpoint.*overwrite"):
        streamed(tmp_path, model, max_steps=2)
    assert torch.equal(model.lm_head.weight, llama().lm_head.weight)  # it can still be used
    elsewhere = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    other = streamed(tmp_path, given={"engine": in_memory()}, **elsewhere)
    other.end()
    with pytest.raises(penstock.ConfigError, match=r"another run after step 2"):
        on_engine(tmp_path, model, **elsewhere).train(resume_from_checkpoint=True)
    anew = streamed(tmp_path, given={"engine": on_disk(tmp_path / "store", overwrite=True)}, max_steps=2)
    assert shown(anew) == shown(first)
    anew.end()


def test_a_trainer_that_has_trained_and_is_dropped_gives_its_store_back(tmp_path: Path) -> None:
    """Nothing that an engine has leads to the trainer, so that it is gone with it."""
    trainer = streamed(tmp_path, max_steps=1)
    there = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert there() is None
    streamed(tmp_path, given={"engine": on_disk(tmp_path / "store", overwrite=True)}, max_steps=1).end()


def test_a_store_is_not_deleted_for_a_checkpoint_that_the_run_cannot_go_on_from(tmp_path: Path) -> None:
    """Settings that are not those that the checkpoint was saved with, and a snapshot that is damaged."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    first = streamed(tmp_path, **settings)
    first.end()

    def check_refused(message: str, model: Any = None, engine: Any = None, **changes: Any) -> None:
        given = {"engine": on_disk(tmp_path / "store", **engine or {})}
        with pytest.raises((penstock.StoreError, penstock.ConfigError), match=message):
            on_engine(tmp_path, model, given=given, **settings | changes).train(True)
        facts = facts_of([tmp_path / "store"])
        assert facts is not None
        assert facts.step == 1

    frozen: Any = llama()
    frozen.lm_head.requires_grad_(False)
    check_refused("another precision", bf16=True)
    check_refused("another optimizer", optim="sgd")
    check_refused("another model", model=frozen)
    check_refused("1 ranks cannot go on|give strands=1", engine={"strands": 2})
    check_refused("started with seed=42, not 7", seed=7)
    snapshot = tmp_path / "engine" / "checkpoint-1" / "penstock.snapshot"
    with (snapshot / "penstock.snapshot").open("r+b") as values:
        values.seek(values.seek(0, os.SEEK_END) // 2)
        values.write(bytes(range(100)))
    check_refused("is damaged in bytes .*: its checksum does not match")
    manifest = snapshot / "snapshot.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    check_refused("snapshot.json")


def test_a_run_with_muon_goes_on_to_the_bits_of_one_that_did_not_stop(tmp_path: Path) -> None:
    """Its param groups are of matrices, and of what is none. Settings that make other updates leave the store."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}

    def trainer(folder: Path, stop: int = 99, **muon: Any) -> Any:
        optimizer = {"optimizer_cls_and_kwargs": (penstock.Muon, {"lr": 2e-2, **muon})}
        return on_engine(folder, given=optimizer | {"callbacks": [StopAfter(stop)]}, **settings)

    whole, stopped = trainer(tmp_path / "whole"), trainer(tmp_path, stop=3)
    for first in (whole, stopped):
        first.train()
    stopped.end()
    split = penstock.Split(match=r"q_proj", dim=0, parts=2)
    for muon, message in (
        ({"elementwise": "mlp"}, r"in another of the optimizer's param groups"),
        ({"splits": (split,)}, r"Muon's splits were \{\}, by parameter, and are .*q_proj"),
    ):
        with pytest.raises(penstock.StoreError, match=message):
            trainer(tmp_path, **muon).train(resume_from_checkpoint=True)
        facts = facts_of([tmp_path / "store"])
        assert facts is not None
        assert facts.step == 3
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert shown(resumed)[:-1] == shown(whole)[:-1]  # the last number is the mean loss since the resumption
    mine, theirs = ({n: t.clone() for n, t in t.engine.master_parameters()} for t in (resumed, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    resumed.end()
    whole.end()


def test_a_checkpoint_that_was_broken_off_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory())
    with pytest.raises(penstock.ConfigError, match=r"no complete checkpoint: .*Remove .*checkpoint-2, and begin anew"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(penstock.ConfigError, match=r"checkpoint-3: there is no such folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    (tmp_path / "checkpoint-2").rmdir()
    with pytest.raises(ValueError, match="No valid checkpoint found"):  # the library's own words
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_that_lacks_a_file_is_refused_by_name(tmp_path: Path) -> None:
    """Before the store is touched: as a kill leaves it, or a copy that was broken off."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    streamed(tmp_path, **settings).end()
    checkpoint = tmp_path / "engine" / "checkpoint-1"
    for lost in ("scheduler.pt", "trainer_state.json"):
        there = (checkpoint / lost).read_bytes()
        (checkpoint / lost).unlink()
        again = on_engine(tmp_path, **settings)
        with pytest.raises(penstock.ConfigError, match=f"checkpoint-1 has no {lost}: saving it was broken off"):
            again.train(resume_from_checkpoint=str(checkpoint))
        facts = facts_of([tmp_path / "store"])
        assert facts is not None
        assert facts.step == 1
        (checkpoint / lost).write_bytes(there)


@pytest.mark.parametrize("damaged", ["trainer_state.json", "penstock.json", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_with_a_damaged_file_is_refused_by_name(tmp_path: Path, damaged: str) -> None:
    """One that ends too soon, and of those that torch writes one with other bytes, which it would load, or that says
    that its list of contents is beyond all bounds."""
    snapshot = tmp_path / checkpoint.SNAPSHOT
    snapshot.mkdir()
    for name in ("trainer_state.json", "penstock.json"):
        (tmp_path / name).write_text('{"epoch": 1.0}')
    for name in ("scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.arange(64)}, tmp_path / name)
    checkpoint.require(tmp_path)
    path = tmp_path / damaged
    whole = path.read_bytes()
    other = whole.replace(bytes(range(63, 64)), b"\x07")
    beyond = [whole[:at] + b"\x7f" + whole[at + 1 :] for at in range(len(whole) - 50, len(whole) - 42)]
    for content in (whole[: len(whole) // 2], b"", *([other, *beyond] if path.suffix != ".json" else [])):
        path.write_bytes(content)
        with pytest.raises(penstock.ConfigError, match=f"{damaged} is damaged: put back what was there"):
            checkpoint.require(tmp_path)


def test_an_old_checkpoint_does_not_replace_what_a_later_run_has_put_in_its_stores_place(tmp_path: Path) -> None:
    """Both runs have the same folders, and the later one was told to overwrite the store."""
    first = streamed(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    first.end()
    later = streamed(tmp_path, given={"engine": on_disk(tmp_path / "store", overwrite=True)}, max_steps=2)
    later.end()
    checkpoint = str(tmp_path / "engine" / "checkpoint-1")

    def resumed(**more: Any) -> Any:
        return on_engine(tmp_path, given={"engine": on_disk(tmp_path / "store", **more)}, max_steps=2)

    with pytest.raises(penstock.ConfigError, match=r"another run after step 2"):
        resumed().train(resume_from_checkpoint=checkpoint)
    for engine in ({"overwrite": True}, {}):  # and the run that was resumed is still that of the old checkpoint
        trainer = resumed(**engine)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.end()


def test_a_start_that_is_refused_leaves_the_run_that_it_was_to_replace(tmp_path: Path) -> None:
    """One that is not replaces it, and nothing else is left; but for a part of ``penstock train``'s, whose other parts
    stay, too."""
    streamed(tmp_path, max_steps=2).end()
    before, names = facts_of([tmp_path / "store"]), sorted((tmp_path / "store").iterdir())
    assert before is not None
    for engine, said in (({"schedule": "1f1b"}, "1f1b"), ({"strands": 3}, "strands=3")):
        trainer = on_engine(tmp_path, given={"engine": on_disk(tmp_path / "store", overwrite=True, **engine)})
        with pytest.raises((penstock.ConfigError, penstock.ModelError), match=said):
            trainer.train()
        trainer.end()
        assert facts_of([tmp_path / "store"]) == before
    theirs = [tmp_path / "store" / "rank-0"]
    Store.create(theirs, Layout.build([("a", 8192, 2)]), model={}, owner=Owner.new(tmp_path), stripe=4096).close()
    with pytest.raises(penstock.ConfigError, match="rank-0 holds the state of a run of penstock train"):
        streamed(tmp_path, given={"engine": on_disk(tmp_path / "store", overwrite=True)}, max_steps=1)
    assert facts_of([tmp_path / "store"]) == before
    delete_store(theirs)
    theirs[0].rmdir()
    streamed(tmp_path, given={"engine": on_disk(tmp_path / "store", overwrite=True)}, max_steps=1).end()
    assert sorted((tmp_path / "store").iterdir()) == names


def test_a_store_in_which_no_step_was_taken_does_not_replace_the_models_values(tmp_path: Path) -> None:
    """Evaluation leaves such a store, or a run that ended before its first step."""
    losses = []
    for seed in (0, 3):
        trainer = on_engine(tmp_path, llama(seed=seed))
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.end()
    args = arguments(tmp_path / "plain")
    theirs = transformers.Trainer(model=llama(seed=3), args=args, eval_dataset=HELD_OUT).evaluate()
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(theirs["eval_loss"], rel=1e-6)


def test_a_checkpoint_is_resumed_whatever_a_kill_has_left_of_the_store(tmp_path: Path) -> None:
    """State in one slot, or in memory, is not whole after a kill: the checkpoint is."""
    budget = penstock.Budget(device="64MiB", host="64MiB", disk=tmp_path / "store", slots=1, durability="none")
    given = {"engine": in_memory(budget=budget)}
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = streamed(tmp_path, given=given, **settings)
    abandon(whole.engine)  # what a kill within a step leaves: a store that says so
    whole.end()
    resumed = on_engine(tmp_path, llama(seed=1), given=given, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "engine" / "checkpoint-2"))
    assert shown(resumed)[:-1] == shown(whole)[:-1]
    resumed.end()


def test_a_checkpoint_that_cannot_be_read_once_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one would be gone on from, and a store that has more steps removed."""
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    newest, read = tmp_path / "checkpoint-2", Path.read_text

    def failing(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.parent == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", failing)
        with pytest.raises(OSError, match="checkpoint-2"):
            last_checkpoint(tmp_path)
    assert last_checkpoint(tmp_path) == str(newest)
    (newest / "trainer_state.json").write_text("{")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1"), "it was broken off"


def test_a_resumption_that_failed_does_not_have_a_later_call_replace_the_store(tmp_path: Path) -> None:
    streamed(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).end()
    args = arguments(tmp_path / "engine", max_steps=2)
    trainer = Trainer(model=llama(), args=args, eval_dataset=HELD_OUT, engine=on_disk(tmp_path / "store"))
    with pytest.raises(ValueError, match="requires a train_dataset"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train_dataset = DATA
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(penstock.ConfigError, match="another run after step 2"):
            call()


@pytest.mark.parametrize("part", ["write_model", "save", "wait_for_all"])
def test_a_checkpoint_that_another_run_has_begun_to_write_over_is_not_taken_for_a_whole_one(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have the one's weights, and the other's learning rate."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    streamed(tmp_path, given={"engine": in_memory()}, **settings).end()
    assert last_checkpoint(tmp_path / "engine") == str(tmp_path / "engine" / "checkpoint-2")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer if part == "wait_for_all" else checkpoint, part, killed)
    with pytest.raises(KeyboardInterrupt):
        streamed(tmp_path, given={"engine": in_memory()}, **settings | {"save_steps": 2, "learning_rate": 0.5})
    assert last_checkpoint(tmp_path / "engine") == str(tmp_path / "engine" / "checkpoint-1")


def test_a_checkpoint_that_is_written_again_at_its_step_stays_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the only one, and all of it is the same."""
    real = Trainer.save_whole

    def killed_the_second_time(trainer: Any, folder: Path) -> None:
        if folder.exists() and (folder / "penstock.snapshot").exists():
            raise KeyboardInterrupt
        real(trainer, folder)

    class AsksAgain(transformers.TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

    monkeypatch.setattr(Trainer, "save_whole", killed_the_second_time)
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    given = {"engine": in_memory(), "callbacks": [AsksAgain()]}
    with pytest.raises(KeyboardInterrupt):
        streamed(tmp_path, given=given, num_train_epochs=1, **settings)
    assert last_checkpoint(tmp_path / "engine") is not None


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_power_cut_leaves_a_checkpoint_that_training_goes_on_from(loss: Loss, tmp_path: Path) -> None:
    """Also where the library has removed the ones before as soon as the new one was written."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    folder = tmp_path / "engine"
    folder.mkdir()
    with closing(FlushLog(folder)) as log:
        with log.recording():
            first = streamed(tmp_path, given={"engine": in_memory()}, **settings, max_steps=2)
        first.end()
        assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
        assert log.image(loss, random.Random(0), tmp_path / "left")
    assert last_checkpoint(tmp_path / "left") == str(tmp_path / "left" / "checkpoint-2")
    args = arguments(tmp_path / "left", **settings, max_steps=3)
    later = Trainer(model=llama(), args=args, train_dataset=DATA, engine=in_memory())
    later.train(resume_from_checkpoint=True)
    later.end()
    assert later.state.global_step == 3


def test_a_checkpoint_is_flushed_below_a_folder_that_may_not_be_looked_into(for_all: Path) -> None:
    """As ``/home`` or ``/scratch`` where users may only pass."""
    folder = for_all / "mine" / "checkpoint-1"
    folder.mkdir(parents=True)
    if not os.geteuid():
        os.chown(folder.parent, 65534, 65534)
        os.chown(folder, 65534, 65534)
    for_all.chmod(0o111)
    with as_nobody():
        checkpoint.flush(folder)
    for_all.chmod(0o755)


class ElsewhereTrainer(transformers.Trainer):
    """A trainer that gives its checkpoints names of its own."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(str(self.args.output_dir), f"after-{self.state.global_step}")
        self.save_model(str(folder), _internal_call=True)
        self.state.save_to_json(str(folder / "trainer_state.json"))


class Elsewhere(penstock.hf.EngineMixin, ElsewhereTrainer): ...


def test_a_class_behind_the_engine_may_give_checkpoints_other_names(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer = Elsewhere(model=llama(), args=args, train_dataset=DATA, engine=in_memory())
    trainer.train()
    trainer.end()
    assert [path.name for path in tmp_path.iterdir()] == ["after-1"]
