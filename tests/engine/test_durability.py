"""What a run that is killed goes on from, for each durability: the store as it lies there is copied, and resumed."""

import shutil
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.config import Tier
from penstock.errors import ConfigError, StoreError
from penstock.state import background
from penstock.store.facts import facts_of
from penstock.store.layout import Layout
from penstock.store.owner import Owner
from penstock.store.store import Store
from tests.models import TIED
from tests.patience import PATIENCE
from tests.training import ADAMW, Result, assert_same_state, budget, run_steps, state_of, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = TIED
STEPS = steps_of(CASE, 4, lengths=(12, 8))
MUON = penstock.Muon(lr=0.02, adamw=ADAMW)
COMMON: dict[str, Any] = {"clip_grad_norm": 0.1, "precision": "bf16"}


@cache
def wanted() -> Result:
    """Four steps that were never interrupted."""
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder, "store")), STEPS, speculate=False, delay=0.0, **COMMON)


def killed(store: Path, to: Path) -> Path:
    """The store of a run that ends here and now."""
    shutil.copytree(store, to, ignore=shutil.ignore_patterns("lock", "scratch"))
    return to


def partly_frozen(scale: float) -> nn.Module:
    """One group is frozen, and a part of each other one; ``scale``: of all weights."""
    model = CASE.model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(scale)
            parameter.requires_grad_(not name.endswith("bias") and "layers.0." not in name)
    return model


@pytest.fixture(scope="module")
def frozen_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, Result]:
    """A snapshot of another run after its first step, and that run then, and a step later."""
    folder = tmp_path_factory.mktemp("frozen")
    with wrap(CASE, budget(folder / "store"), model=partly_frozen(1.5), delay=0.0, **COMMON) as engine:
        first = run_steps(engine, STEPS[:1])
        engine.save(folder / "snapshot")
        return folder / "snapshot", first, run_steps(engine, STEPS[1:2])


@pytest.mark.parametrize(
    "places",
    [
        {"weights": "host"},
        {"weights": "device"},
        {"weights": "host", "state": "host", "durability": "interval", "interval": 1},
    ],
    ids=["host", "device", "interval"],
)
def test_frozen_weights_in_memory_that_a_snapshot_brings_outlive_a_kill(
    tmp_path: Path, places: dict[str, Any], frozen_elsewhere: tuple[Path, Result, Result]
) -> None:
    """Frozen weights follow from nothing that a step writes."""
    settings: dict[str, Any] = COMMON | {"delay": 0.0}
    snapshot, wanted, later = frozen_elsewhere
    with wrap(CASE, budget(tmp_path / "run", **places), model=partly_frozen(1.0), **settings) as engine:
        engine.step(STEPS[0])
        assert {part.trainable for part in engine.inside.resources.arrays.parts.values() if part.group == 1} == {0}
        engine.load(snapshot)
        loaded = killed(tmp_path / "run", tmp_path / "loaded")
        engine.step(STEPS[1])
        engine.inside.rest()
        stepped = killed(tmp_path / "run", tmp_path / "stepped")
    for store, result in ((loaded, wanted), (stepped, later), (tmp_path / "run", later)):
        with wrap(CASE, budget(store, **places), model=partly_frozen(1.0), **settings) as engine:
            assert_same_state(state_of(engine), result.state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weights", ["host", "device"])
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_copies_of_weights_in_memory_follow_from_what_is_on_disk(tmp_path: Path, weights: str, delay: float) -> None:
    """Every step is a commit all the same."""
    with wrap(CASE, budget(tmp_path / "run", weights=weights), speculate=True, delay=delay, **COMMON) as engine:
        run = [engine.step(micro_batches) for micro_batches in STEPS[:3]]
        arrays = engine.inside.resources.arrays
        assert {arrays.found_on(g.index) for g in arrays.groups} == {weights}
        assert arrays.state_on_disk()
        left = killed(tmp_path / "run", tmp_path / "left")
    assert len(run) == 3
    with wrap(CASE, budget(left, weights=weights), **COMMON) as engine:
        assert engine.step_count == (2 if delay else 3)
        assert_same_state(run_steps(engine, STEPS[engine.step_count :]).state, wanted().state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", [{"weights": "host", "state": "host"}, {"weights": "device", "state": "device"}])
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_state_in_memory_is_committed_every_interval(tmp_path: Path, place: dict[str, Any], delay: float) -> None:
    where = {"durability": "interval", "interval": 2} | place
    with wrap(CASE, budget(tmp_path / "run", **where), delay=delay, **COMMON) as engine:
        for micro_batches in STEPS[:3]:
            engine.step(micro_batches)  # the third changes what the second has left while that is being written
        engine.inside.rest()
        left = killed(tmp_path / "run", tmp_path / "left")
        assert_same_state(run_steps(engine, STEPS[3:]).state, wanted().state)
    with wrap(CASE, budget(left, **where), **COMMON) as engine:
        assert engine.step_count == 2
        assert_same_state(run_steps(engine, STEPS[2:]).state, wanted().state)


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_mixed_placement_is_committed_every_interval(tmp_path: Path, delay: float) -> None:
    where: dict[str, Any] = {"durability": "interval", "interval": 2, "weights": None, "state": None}
    where |= {"device": "400KiB", "host": "600KiB"}
    with wrap(CASE, budget(tmp_path / "run", **where), delay=delay, **COMMON) as engine:
        for micro_batches in STEPS[:3]:
            engine.step(micro_batches)
        tiers = {
            engine.inside.resources.arrays.tier_of(name)
            for name in engine.inside.resources.arrays.parts
            if name.startswith("m")
        }
        assert "disk" in tiers
        assert len(tiers) > 1
        left = killed(tmp_path / "run", tmp_path / "left")
        assert_same_state(run_steps(engine, STEPS[3:]).state, wanted().state)
    with wrap(CASE, budget(left, **where), **COMMON) as engine:
        assert engine.step_count == 2
        assert_same_state(run_steps(engine, STEPS[2:]).state, wanted().state)


def test_without_durability_a_run_that_is_killed_is_refused_and_one_that_is_closed_goes_on(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "run", durability="none"), speculate=True, **COMMON) as engine:
        run_steps(engine, STEPS[:2])
        left = killed(tmp_path / "run", tmp_path / "left")
    with pytest.raises(StoreError, match="was stopped in or before step"):
        wrap(CASE, budget(left, durability="none"), **COMMON)
    with wrap(CASE, budget(tmp_path / "run"), **COMMON) as engine:
        assert engine.step_count == 2
        assert_same_state(run_steps(engine, STEPS[2:]).state, wanted().state)


def test_a_commit_writes_no_byte_of_state_beyond_the_steps(tmp_path: Path) -> None:
    written = []
    for durability in ("step", "none"):
        with wrap(CASE, budget(tmp_path / durability, durability=durability), delay=0.0, **COMMON) as engine:
            found = run_steps(engine, STEPS[:2])
            written.append([s.bytes_moved["write"] for s in found.stats])
            state_of(engine)
    assert written[0] == written[1]


def test_durability_by_the_step_puts_all_state_on_disk(tmp_path: Path) -> None:
    where = penstock.Budget(device="64MiB", host="64MiB", disk=tmp_path, durability="step")
    with wrap(CASE, where, **COMMON) as engine:
        engine.step(STEPS[0])
        assert engine.inside.resources.commits.every_step
        assert engine.inside.resources.arrays.state_on_disk()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"durability": "often"}, "must be one of step, interval, none or None"),
        ({"durability": "interval", "interval": "soon"}, "budget.interval: 'soon' is not a time"),
        ({"durability": "interval", "interval": "0min"}, "is not a time"),
        ({"interval": 3}, "give both"),
        ({"durability": "interval", "interval": 0}, "at least 1 step"),
        ({"durability": "interval", "interval": 2, "slots": 1}, "needs budget.slots=2"),
        ({"durability": "step", "slots": 1}, "needs budget.slots=2"),
        ({"durability": "step", "state": "host"}, "use 'interval'"),
        ({"durability": "interval", "disk": None}, "needs budget.disk"),
        ({"slots": 1, "disk": None}, "budget.slots=1 has no effect without budget.disk"),
    ],
)
def test_what_cannot_be_promised_is_refused(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        penstock.Budget(**{"device": "1MiB", "host": "1MiB", "disk": tmp_path} | wrong)


@pytest.mark.parametrize("weights", ["host", "device"])
def test_in_fp32_a_copy_of_weights_in_memory_costs_no_durability(tmp_path: Path, weights: Any) -> None:
    """The weights are the master copy then, and are at home on disk all the same."""
    where = penstock.Budget(device="64MiB", host="64MiB", disk=tmp_path / "run", durability="step", weights=weights)
    with wrap(CASE, where, precision="fp32") as engine:
        expected = run_steps(engine, STEPS[:2]).state
        left = killed(tmp_path / "run", tmp_path / "left")
    with wrap(CASE, replace(where, disk=left), precision="fp32") as engine:
        assert engine.step_count == 2
        assert_same_state(state_of(engine), expected)


@pytest.mark.parametrize(("had", "asked"), [(1, 2), (2, 1)])
def test_a_store_keeps_the_slots_that_it_was_made_with(had: int, asked: int, tmp_path: Path) -> None:
    """In one slot a step cannot be dropped, and is no commit, whatever a budget says of two."""
    with wrap(CASE, budget(tmp_path / "run", slots=had), **COMMON) as engine:
        engine.step(STEPS[0])
    with pytest.raises(ConfigError, match=rf"^budget.slots={asked}: the store in .*run was made with slots={had}, "):
        wrap(CASE, budget(tmp_path / "run", slots=asked), **COMMON)
    with wrap(CASE, budget(tmp_path / "run", slots=had), **COMMON) as engine:
        assert engine.step_count == 1


def test_a_program_may_go_elsewhere_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are where they were as the engine was made."""
    monkeypatch.chdir(tmp_path)
    with wrap(CASE, budget(Path("run"), activations="disk"), delay=0.0, **COMMON) as engine:
        monkeypatch.chdir("/")
        run_steps(engine, STEPS[:2])
    assert not (tmp_path / "run" / "scratch").exists()
    with wrap(CASE, budget(tmp_path / "run"), **COMMON) as engine:
        assert engine.step_count == 2


@pytest.mark.parametrize("rate", [np.float32(0.25), torch.tensor(0.25)], ids=["numpy", "torch"])
def test_a_rate_may_be_a_number_of_another_library(rate: Any, tmp_path: Path) -> None:
    """A commit and a snapshot have it as a number."""
    with wrap(CASE, budget(tmp_path / "run"), delay=0.0, **COMMON) as engine:
        engine.optimizer.param_groups[0]["lr"] = rate
        engine.step(STEPS[0])
        engine.save(tmp_path / "snapshot")
        engine.load(tmp_path / "snapshot")
        assert engine.optimizer.param_groups[0]["lr"] == 0.25


def test_what_a_start_that_failed_has_left_without_a_commit_makes_room_for_another_model(tmp_path: Path) -> None:
    wrong = penstock.Muon(splits=(penstock.Split(match="no_such", parts=2),))
    with pytest.raises(ConfigError, match="no_such"):
        wrap(CASE, budget(tmp_path / "run", slots=1), optimizer=wrong)
    facts = facts_of([tmp_path / "run"])
    assert facts is not None
    assert facts.record is None
    with wrap(CASE, budget(tmp_path / "run"), **COMMON) as engine:
        assert_same_state(run_steps(engine, STEPS).state, wanted().state)


def test_what_another_run_has_left_without_a_commit_stays_its_own(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    owner = Owner.new(tmp_path / "folder")
    layout = Layout.build([("a", 4096, 1)])
    Store.create([tmp_path / "run"], layout, model={}, owner=owner).close()
    with pytest.raises(StoreError, match="holds the state of another run"):
        wrap(CASE, budget(tmp_path / "run"), **COMMON)


def test_a_store_without_a_commit_is_not_made_anew_where_a_drive_may_not_be_mounted(tmp_path: Path) -> None:
    places = tmp_path / "a", tmp_path / "b"
    Store.create(places, Layout.build([("a", 1 << 23, 1)]), model={}).close()
    shutil.rmtree(places[1])
    places[1].mkdir()
    with pytest.raises(StoreError, match=f"{places[1]} holds no store"):
        wrap(CASE, budget(list(places)), **COMMON)
    assert not list(places[1].iterdir())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_step_writes_what_it_changes_before_a_commit_in_the_background_has_come_to_it(
    tier: Tier, optimizer: penstock.AdamW | penstock.Muon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes begins when the next step has changed everything: what it commits is the step before."""
    gate, take = threading.Event(), background.Pieces.take

    def held(pieces: background.Pieces, piece: Any, *, wait: bool) -> bool:
        assert wait or gate.wait(PATIENCE)
        return take(pieces, piece, wait=wait)

    monkeypatch.setattr(background.Pieces, "take", held)
    settings: dict[str, Any] = {**COMMON, "optimizer": optimizer, "delay": 0.0}
    places: dict[str, Any] = {"weights": tier, "state": tier, "durability": "interval", "interval": 2}
    with wrap(CASE, budget(tmp_path / "run", **places), **settings) as engine:
        run_steps_alone(engine, 3)
        writes = engine.inside.durability.background
        assert writes is not None
        assert writes.guarded is not None, "the commit of the second step is not made yet"
        gate.set()
        writes.wait()
        left = killed(tmp_path / "run", tmp_path / "left")
    with wrap(CASE, budget(tmp_path / "other", **places), **settings) as engine:
        run_steps_alone(engine, 2)
        second = state_of(engine)
    with wrap(CASE, budget(left, **places), **settings) as engine:
        assert engine.step_count == 2
        assert_same_state(state_of(engine), second)


def run_steps_alone(engine: penstock.Engine, count: int) -> None:
    """The first steps, without a look at the state after them."""
    for step in STEPS[:count]:
        engine.step(step)
