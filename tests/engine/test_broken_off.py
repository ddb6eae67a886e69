"""Steps that end where it hurts: between the last op and the commit, with a step before that is not complete, or while
something is written in the background. What the engine says of itself afterwards must be true."""

import errno
import os
import shutil
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch import nn

from penstock.engine.fate import State
from penstock.engine.runner import Runner
from penstock.errors import ScheduleError, StoreError
from penstock.runtime.actions import Actions
from penstock.runtime.pools import Pools
from penstock.schedule.ir.ops import Op
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN
from penstock.state.memory import DeviceSlab, HostSlab
from penstock.state.slots import Slots
from penstock.store.layout import Layout
from penstock.store.store import Store
from penstock.store.transfer import aligned_bytes
from tests import campaign
from tests.models import TIED
from tests.programs import transformer
from tests.training import Result, assert_same_state, budget, run_steps, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = TIED
STEPS = steps_of(CASE, 3)
COMMON: dict[str, Any] = {"clip_grad_norm": 0.1, "precision": "bf16", "plan": None}


def frozen_biases() -> nn.Module:
    model = CASE.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    return model


@cache
def two_steps_of_frozen_biases() -> Result:
    with TemporaryDirectory() as folder:
        where = budget(Path(folder, "store"))
        with wrap(CASE, where, model=frozen_biases(), delay=0.0, **COMMON) as engine:
            return run_steps(engine, STEPS[:2])


@cache
def three_steps() -> Result:
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder, "store")), STEPS, delay=0.0, **COMMON)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [StoreError("injected"), KeyboardInterrupt()], ids=["drive", "interrupt"])
@pytest.mark.parametrize("where", ["frozen", "trace"])
def test_a_step_that_ends_after_its_last_op_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str
) -> None:
    """What it does not write is copied then, and its trace is made: either may fail."""
    settings = COMMON | {"delay": 0.0}
    wanted = two_steps_of_frozen_biases()
    owner, name = (Slots, "complete") if where == "frozen" else (Runner, "trace")
    with wrap(CASE, budget(tmp_path / "run"), model=frozen_biases(), **settings) as engine:
        calls = [0]
        real = getattr(owner, name)

        def fail(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == (3 if where == "frozen" else 1):
                raise error
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(type(error)):
                engine.step(STEPS[0])
    with wrap(CASE, budget(tmp_path / "run"), model=frozen_biases(), **settings) as engine:
        assert engine.step_count == 0
        assert_same_state(run_steps(engine, STEPS[:2]).state, wanted.state)


def test_a_runner_whose_closing_is_broken_off_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locked memory takes a while to be given back."""
    with wrap(CASE, budget(tmp_path / "run"), delay=0.0, **COMMON) as engine:
        engine.step(STEPS[0])
        close = Pools.close

        def interrupted(pools: Pools) -> None:
            close(pools)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Pools, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.evaluate(STEPS[0])
        assert engine.step(STEPS[1]).loss == three_steps().losses[1]


def broken_in(engine: Any, kind: str, *, late: bool) -> None:
    """Make the first op of a kind fail, of a delayed chunk or of another."""
    runner = engine.inside.planning.runner
    kinds = runner.actions.kinds
    real = kinds[kind]

    def fail(op: Op) -> None:
        if runner.bound.is_late(op) == late:
            kinds[kind] = real
            raise OSError(errno.EIO, "injected")
        real(op)

    kinds[kind] = fail


@pytest.mark.parametrize("place", [{}, {"weights": "host", "state": "host"}], ids=["disk", "host"])
def test_what_was_pending_when_a_step_broke_does_not_come_back_with_a_snapshot(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    wanted = three_steps()
    with wrap(CASE, budget(tmp_path / "run", **place), delay=0.5, **COMMON) as engine:
        engine.step(STEPS[0])
        engine.save(tmp_path / "snapshot")
        engine.step(STEPS[1])
        broken_in(engine, "OP", late=True)
        with pytest.raises(OSError, match="injected"):
            engine.step(STEPS[2])
        if engine.inside.durability.state is State.PENDING:  # it was the first one: nothing had been changed
            broken_in(engine, "WS" if not place else "OP", late=False)
            with pytest.raises(OSError, match="injected"):
                engine.step(STEPS[2])
        engine.load(tmp_path / "snapshot")
        assert engine.step_count == 1
        assert_same_state(run_steps(engine, STEPS[1:]).state, wanted.state)


def test_a_commit_in_the_middle_of_a_step_waits_for_delayed_chunks_in_memory_too(tmp_path: Path) -> None:
    where = budget(tmp_path, weights="host", state=None, durability="none", device="300KiB", host="850KiB")
    with wrap(CASE, where, delay=1.0, **COMMON) as engine:
        engine.step(STEPS[0])
        arrays = engine.inside.resources.arrays
        in_memory = [n for n in arrays.parts if n[0] == "m" and arrays.tier_of(n) != "disk"]
        assert in_memory
        commit = engine.plan.schedule.by_id["CM"]
        for name in in_memory:
            assert f"OP{arrays.parts[name].group}.0" in commit.after


def test_a_failure_in_the_background_is_said_by_the_next_step_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = three_steps()
    where = budget(tmp_path / "run", weights="host", state="host", durability="interval", interval=1)
    with wrap(CASE, where, delay=0.0, **COMMON) as engine:
        store = engine.inside.resources.commits.store
        assert store is not None
        real = store.write

        def fail(*args: Any) -> None:
            raise StoreError("injected: no room in the background")

        with monkeypatch.context() as patch:
            patch.setattr(store, "write", fail)
            engine.step(STEPS[0])
            background = engine.inside.durability.background
            assert background is not None
            assert background.thread is not None
            background.thread.join()
        assert store.write.__func__ is real.__func__
        with pytest.raises(StoreError, match="no room in the background"):
            engine.step(STEPS[1])
        assert engine.step_count == 1
        assert_same_state(run_steps(engine, STEPS[1:]).state, wanted.state)
    with wrap(CASE, where, delay=0.0, **COMMON) as engine:
        assert engine.step_count == 3


def test_a_snapshot_that_was_loaded_is_committed(tmp_path: Path) -> None:
    where = {"weights": "host", "state": "host", "durability": "interval", "interval": 100}
    with wrap(CASE, budget(tmp_path / "run", **where), delay=0.0, **COMMON) as engine:
        engine.step(STEPS[0])
        engine.save(tmp_path / "snapshot")
        engine.step(STEPS[1])
        engine.load(tmp_path / "snapshot")
        shutil.copytree(tmp_path / "run", tmp_path / "left", ignore=shutil.ignore_patterns("lock", "scratch"))
        state = run_steps(engine, STEPS[1:]).state
    with wrap(CASE, budget(tmp_path / "left", **where), delay=0.0, **COMMON) as engine:
        assert engine.step_count == 1
        assert_same_state(run_steps(engine, STEPS[1:]).state, state)


def test_a_commit_that_failed_is_taken_back_before_what_it_names_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record may have reached the file all the same."""
    store = Store.create([tmp_path / "store"], Layout.build([("a", 1 << 20, 2)]), model={})
    pages = aligned_bytes(1 << 20)
    pages[:] = 1
    store.write("a", 0, pages, 0)
    store.commit({"step": 1})
    real = os.fdatasync

    def fail(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith("commit"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    pages[:] = 2
    store.write("a", 0, pages, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreError, match="commit before it still stands"):
            store.commit({"step": 2})
        with pytest.raises(StoreError, match="cannot be taken back"):
            store.write("a", 0, pages, 1)
    pages[:] = 3
    store.write("a", 0, pages, 1)
    shutil.copytree(tmp_path / "store", tmp_path / "killed", ignore=shutil.ignore_patterns("lock"))
    store.close()
    with Store.open([tmp_path / "killed"]) as found:
        assert found.last_commit() == {"step": 1}
        assert not [damage for _, damage in found.verify({"a": 0}) if damage]


def test_a_schedule_of_ones_own_may_not_step_in_place_before_the_norm() -> None:
    """With weights on disk and moments in memory, something comes from disk and goes there, and yet not all."""
    program = transformer(2)
    count = len(program.groups)
    settings = Settings(
        micro_batches=2,
        chunk=5 * ALIGN,
        form=Format.of("fp32", 2),
        place=Placement(
            weights=("disk",) * count, state=("host", *("disk",) * (count - 1)), gradients="host", activations="device"
        ),
        depths=Depths(),
        wait=True,
        speculate=True,
    )
    schedule = lower_step("vertical", program, settings)
    prove(schedule, Needs.of(program, settings))
    early = schedule.by_id["OP0.0"]
    ops = [op for op in schedule.ops if op is not early]
    ops.insert(ops.index(schedule.by_id["NORM"]), replace(early, after=tuple(n for n in early.after if n != "NORM")))
    with pytest.raises(ScheduleError, match=r"op OP0\.0 may run before NORM"):
        prove(replace(schedule, ops=tuple(ops)), Needs.of(program, settings))


MADE: dict[str, tuple[Any, str, int]] = {
    "memory": (DeviceSlab, "__init__", 0),
    "actions": (Actions, "__init__", 0),
    "first thread": (threading.Thread, "start", 0),
    "a later thread": (threading.Thread, "start", 3),
}
"""What fails while a plan is made executable, after how many that were made."""


@pytest.mark.parametrize("which", MADE)
def test_a_plan_that_cannot_be_made_executable_leaves_no_thread_no_memory_and_no_file(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it can be tried again."""
    open_slabs: set[int] = set()
    make, close = HostSlab.__init__, HostSlab.close

    def made(slab: HostSlab, *args: Any, **more: Any) -> None:
        make(slab, *args, **more)
        open_slabs.add(id(slab))

    def closed(slab: HostSlab) -> None:
        open_slabs.discard(id(slab))
        close(slab)

    def look() -> tuple[Any, ...]:
        threads = sorted(t.name for t in threading.enumerate() if "-io" not in t.name)
        return threads, len(os.listdir("/proc/self/fd")), set(open_slabs), sorted((tmp_path / "run").rglob("*"))

    owner, name, after = MADE[which]
    real, left = getattr(owner, name), [after]

    def fail(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("injected")
        return real(*args, **more)

    where, steps = budget(tmp_path / "run", gradients="disk", activations="disk"), campaign.step_data(1)
    with wrap(campaign.CASE, where, delay=0.0, **COMMON) as engine:
        engine.prepare(steps)
        engine.inside.planning.close()
        monkeypatch.setattr(HostSlab, "__init__", made)
        monkeypatch.setattr(HostSlab, "close", closed)
        before = look()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(RuntimeError, match="injected"):
                engine.prepare(steps)
        assert look() == before
        assert engine.step(steps).step == 1
