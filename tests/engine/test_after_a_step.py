"""What follows a step: its commit, what is written in the background, the data's position, Ctrl-C. Whatever fails
there, the step counts, the engine says so, and the run goes on with the bits of one that nothing happened to."""

import errno
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine import durability, fate, runner
from penstock.engine.durability import Durability
from penstock.engine.fate import Action, Event, State
from penstock.engine.interrupt import holding, whole_steps
from penstock.errors import ConfigError, StoreError
from penstock.runtime.actions import Actions
from penstock.runtime.actions.compute import Compute
from penstock.runtime.pools import Pools
from penstock.store.records import CommitLog
from penstock.tape.groups import ParamGroup
from penstock.tape.parameters import GradientHooks
from penstock.tape.running import Running
from tests.campaign import CASE, step_data
from tests.training import Result, assert_same_state, budget, run_steps, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = [step_data(step) for step in (1, 2, 3)]
COMMON: dict[str, Any] = {"precision": "bf16", "clip_grad_norm": 1.0, "plan": None}


@cache
def wanted() -> Result:
    with TemporaryDirectory() as folder, wrap(CASE, budget(Path(folder) / "d"), delay=0.0, **COMMON) as engine:
        return run_steps(engine, STEPS)


@contextmanager
def no_commit(times: int, *, after: int = 0) -> Iterator[None]:
    """So many commit records cannot be flushed, ``after`` so many that can."""
    left, real = [after + times], os.fdatasync

    def fail(fd: int) -> None:
        if left[0] and Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith("commit"):
            left[0] -= 1
            if left[0] < times:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        yield
    assert not left[0]


def killed(store: Path, to: Path) -> Path:
    return Path(shutil.copytree(store, to, ignore=shutil.ignore_patterns("lock", "scratch")))


WHEN: dict[str, tuple[float, dict[str, Any], int]] = {
    "every step": (0.0, {}, 1),
    "within the next step": (0.5, {}, 2),
    "in one slot": (0.0, {"slots": 1}, 1),
}
"""The delay, the budget, and the step whose commit, or within which that of the one before, fails."""


@pytest.mark.parametrize("when", WHEN)
def test_a_commit_that_fails_is_made_by_the_next_step(when: str, tmp_path: Path) -> None:
    """Until then all is whole in memory: a snapshot can be saved, and a step that cannot commit it changes nothing."""
    delay, places, hit = WHEN[when]
    with wrap(CASE, budget(tmp_path / "run", **places), delay=delay, **COMMON) as engine:
        run_steps_before = [engine.step(data) for data in STEPS[: hit - 1]]
        for again in range(2):
            taken = not delay and not again
            says = (
                r"^step 1 counts, but.*\nDo not repeat" if taken else r"^step 2 was not taken: step 1 counts.*\nAsk for"
            )
            with (
                no_commit(2 if delay else 1, after=1 if places else 0),
                pytest.raises(StoreError, match=says) as failure,
            ):
                engine.step(STEPS[engine.step_count])
            assert failure.value.errno == errno.ENOSPC
            assert engine.step_count == 1
            last = engine.last_step
            assert last is not None
            assert (last.labels, last.flops > 0, last.bytes_written > 0) == ("all", True, True)
            assert {event.step for event in engine.trace} == {1}
            if places:
                break  # its next commit is that of step 2
        engine.save(tmp_path / "snapshot")
        rest = run_steps(engine, STEPS[1:])
        left = killed(tmp_path / "run", tmp_path / "left")
        engine.load(tmp_path / "snapshot")
        again = run_steps(engine, STEPS[1:])
    assert len(run_steps_before) == hit - 1
    for found in (rest, again):
        assert found.losses == wanted().losses[1:]
        assert_same_state(found.state, wanted().state)
    with wrap(CASE, budget(left, **places), delay=0.0, **COMMON) as engine:
        assert engine.step_count == 3


def test_a_step_that_changes_nothing_is_committed_by_the_next_one_as_well(tmp_path: Path) -> None:
    """One that is skipped flips no slot, and counts all the same."""
    gradient = [1.0]

    def loss_fn(model: Any, micro_batch: Any) -> torch.Tensor:
        loss = CASE.loss_fn(model, micro_batch)
        loss.register_hook(lambda grad: grad * gradient[0])
        return loss

    with wrap(CASE, budget(tmp_path / "run"), delay=0.0, loss_fn=loss_fn, **COMMON) as engine:
        gradient[0] = math.inf
        with no_commit(1), pytest.raises(StoreError, match="step 1 counts"):
            engine.step(STEPS[0])
        assert engine.last_step is not None
        assert engine.last_step.skipped
        gradient[0] = 1.0
        with no_commit(1), pytest.raises(StoreError, match="step 2 was not taken: step 1 counts"):
            engine.step(STEPS[1])
        assert engine.step(STEPS[1]).step == 2


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("of whatever kind")], ids=["memory", "other"])
def test_a_commit_that_fails_of_whatever_says_that_the_step_counts(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    with wrap(CASE, budget(tmp_path / "run"), delay=0.0, **COMMON) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(CommitLog, "append", fail)
            with pytest.raises(StoreError, match="step 1 counts, but its commit failed") as failure:
                engine.step(STEPS[0])
        assert failure.value.__cause__ is error
        assert_same_state(run_steps(engine, STEPS[1:]).state, wanted().state)


def test_what_is_said_of_a_commit_that_fails_elsewhere_is_true_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said of a snapshot that was not written, nor of a step where all of the state is another."""
    run, snapshot = tmp_path / "run", tmp_path / "snapshot"
    engine = wrap(CASE, budget(run), delay=0.5, **COMMON)
    engine.step(STEPS[0])
    with no_commit(1), pytest.raises(StoreError, match=r"^step 1 counts, but.*\nNothing else was done") as failure:
        engine.save(snapshot)
    assert "engine.save" not in "".join([str(failure.value), *failure.value.__notes__])
    assert not snapshot.exists()
    engine.save(snapshot)
    engine.step(STEPS[1])
    with no_commit(1, after=1), pytest.raises(StoreError, match=f"^{snapshot} is loaded, but its commit failed"):
        engine.load(snapshot)
    assert engine.step_count == 1
    engine.step(STEPS[1])
    records, append = [0], CommitLog.append

    def counted(*words: Any) -> None:
        records[0] += 1
        append(*words)

    monkeypatch.setattr(CommitLog, "append", counted)
    engine.close()
    assert records == [1], "an error of the one commit that closing makes means that it is not made"


def test_the_machine_is_told_durable_after_a_commit_and_not_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing steps what a delay has left, and commits when all ranks have."""
    engine = wrap(CASE, budget(tmp_path / "run"), delay=0.5, **COMMON)
    engine.step(STEPS[0])
    happened: list[str] = []
    tell, append = Durability.tell, CommitLog.append

    def told(durability: Durability, event: Event) -> tuple[Action, ...]:
        happened.append(event.value)
        return tell(durability, event)

    def appended(*words: Any) -> None:
        happened.append("commit")
        append(*words)

    monkeypatch.setattr(Durability, "tell", told)
    monkeypatch.setattr(CommitLog, "append", appended)
    engine.close()
    assert happened == ["end", "completed", "rest", "close", "commit"]  # rest: nothing is pending before buffers go


def test_an_engine_that_is_closed_makes_the_commit_that_has_failed(tmp_path: Path) -> None:
    engine = wrap(CASE, budget(tmp_path / "run"), delay=0.0, **COMMON)
    with no_commit(1), pytest.raises(StoreError, match="step 1 counts"):
        engine.step(STEPS[0])
    engine.close()
    with wrap(CASE, budget(tmp_path / "run"), delay=0.0, **COMMON) as engine:
        assert engine.step_count == 1
        assert_same_state(run_steps(engine, STEPS[1:]).state, wanted().state)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=["thread", "memory"])
def test_whatever_fails_after_a_step_is_said_by_the_next_one(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step counts and is reported; the commit that could not begin does after the next one."""
    where = budget(tmp_path / "run", weights="host", state="host", durability="interval", interval=2)
    real = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "penstock-background":
            raise error
        real(thread)

    with wrap(CASE, where, delay=0.0, **COMMON) as engine:
        engine.step(STEPS[0])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            assert engine.step(STEPS[1]).loss == wanted().losses[1]
        with pytest.raises(type(error)):
            engine.step(STEPS[2])
        assert engine.step_count == 2
        assert_same_state(run_steps(engine, STEPS[2:]).state, wanted().state)
        left = killed(tmp_path / "run", tmp_path / "left")
    with wrap(CASE, budget(left), delay=0.0, **COMMON) as engine:
        assert engine.step_count == 3


def test_a_position_that_is_set_is_part_of_the_commit_that_a_delay_has_left(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "run"), delay=0.5, **COMMON) as engine:
        engine.step(STEPS[0], position={"row": 1})
        assert engine.inside.durability.state is State.PENDING
        engine.position = {"row": 2}
        with pytest.raises(ConfigError, match="a commit holds what JSON holds"):
            engine.position = {"row": object()}
        with pytest.raises(ConfigError, match="position=3: must be a mapping"):
            engine.position = 3  # type: ignore[assignment]
        engine.inside.rest()
        left = killed(tmp_path / "run", tmp_path / "left")
        engine.step(STEPS[1], position={"row": 3})
        engine.position = {"row": 4}
        engine.step(STEPS[2])
        within = killed(tmp_path / "run", tmp_path / "within")
    for store, step, row in ((left, 1, 2), (within, 2, 4)):
        with wrap(CASE, budget(store), **COMMON) as engine:
            assert (engine.step_count, engine.position) == (step, {"row": row})
    with pytest.raises(ConfigError, match="closed"):
        engine.position = None


def nested(depth: int) -> dict[str, Any]:
    """A position of so many brackets within brackets."""
    position: dict[str, Any] = {"row": 1}
    for _ in range(depth - 1):
        position = {"within": position}
    return position


def test_a_position_is_refused_where_no_commit_could_be_read_with_it(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "run"), **COMMON) as engine:
        engine.step(STEPS[0], position=nested(64))
        group = engine.optimizer.param_groups[0]
        for depth in (66, 80, 5000):
            with pytest.raises(ConfigError, match=r"position=.*brackets within brackets"):
                engine.step(STEPS[1], position=nested(depth))
            group["note"] = nested(depth)
            with pytest.raises(ConfigError, match=r"param_groups: note=.*brackets within brackets"):
                engine.step(STEPS[1])
            del group["note"]
    with wrap(CASE, budget(tmp_path / "run"), **COMMON) as engine:
        assert (engine.step_count, engine.position) == (1, nested(64))


def test_a_position_that_was_asked_for_may_be_written_to(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path / "run"), delay=0.5, **COMMON) as engine:
        engine.step(STEPS[0], position={"row": 1, "files": {"a": 1}})
        asked: Any = engine.position
        asked["row"] = asked["files"]["a"] = 2
        assert engine.position == {"row": 1, "files": {"a": 1}}


# ---- Ctrl-C

_MACHINE = {durability.__file__, fate.__file__}


def interrupt_at(line: int) -> Any:
    """A trace function: Ctrl-C comes as a step begins, and again at one of the lines that the machine of ``fate`` and
    its driver run."""
    lines = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in _MACHINE:
            return None
        if event == "line" and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            lines[0] += 1
            if lines[0] in (1, line):
                ctrl_c()
        return trace

    return trace


@contextmanager
def traced(function: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(function)
    try:
        yield
    finally:
        sys.settrace(before)


def ctrl_c() -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, None)


def test_ctrl_c_is_neither_lost_with_a_step_that_fails_nor_left_to_another_one() -> None:
    def fails() -> None:
        with whole_steps(), holding(True):
            ctrl_c()
            ctrl_c()
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as ended:
        fails()
    assert isinstance(ended.value.__context__, ValueError)

    def later() -> str:
        with whole_steps(), holding(True), holding(False):
            return "done"

    with ThreadPoolExecutor(1) as other:
        assert other.submit(later).result() == "done"


@pytest.mark.parametrize(
    ("of", "name", "first"),
    [(Pools, "take", False), (ParamGroup, "attach", False), (Actions, "let_go", True), (Running, "begin", True)],
    ids=["between two ops", "attached", "let go", "begun"],
)
def test_a_step_that_ctrl_c_breaks_off_between_two_ops_can_be_taken(
    of: Any, name: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes twice, before (``first``) or behind a function that a step calls between its ops."""
    real = getattr(of, name)

    def pressed(*args: Any, **settings: Any) -> Any:
        monkeypatch.setattr(of, name, real)
        found = None if first else real(*args, **settings)
        ctrl_c()
        ctrl_c()
        return real(*args, **settings) if first else found

    where = budget(tmp_path / "run", weights="device" if first else "disk")
    with wrap(CASE, where, delay=0.0, overlap=False, **COMMON) as engine:
        engine.step(STEPS[0])
        monkeypatch.setattr(of, name, pressed)
        with pytest.raises(KeyboardInterrupt):
            engine.step(STEPS[1])
        assert_same_state(run_steps(engine, STEPS[engine.step_count :]).state, wanted().state)


def test_a_gradient_that_ctrl_c_comes_before_is_not_added_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = list[int]()

    def hooks(groups: Any, of_tensor: Any, after_accumulation: Any) -> GradientHooks:
        def pressed(parameter: torch.Tensor) -> None:
            while presses:
                presses.pop()
                ctrl_c()
            after_accumulation(parameter)

        return GradientHooks(groups, of_tensor, pressed)

    monkeypatch.setattr("penstock.tape.running.GradientHooks", hooks)
    with wrap(CASE, budget(tmp_path / "run"), delay=0.0, **COMMON) as engine:
        engine.step(STEPS[0])
        presses += [1, 2]
        with pytest.raises(KeyboardInterrupt):
            engine.step(STEPS[1])
        assert_same_state(run_steps(engine, STEPS[engine.step_count :]).state, wanted().state)


@pytest.mark.parametrize(
    ("of", "name"),
    [(Running, "begin"), (Actions, "let_go"), (Compute, "forward")],
    ids=["begun", "let go", "within"],
)
def test_an_evaluation_that_ctrl_c_breaks_off_changes_nothing(
    of: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(of, name)

    def pressed(*args: Any, **settings: Any) -> Any:
        monkeypatch.setattr(of, name, real)
        ctrl_c()
        return real(*args, **settings)

    with wrap(CASE, budget(tmp_path / "run", weights="device"), delay=0.0, **COMMON) as engine:
        run_steps(engine, STEPS[:1])
        loss = engine.evaluate(STEPS[1])
        monkeypatch.setattr(of, name, pressed)
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate(STEPS[1])
        assert all(module.training for module in engine.model.modules())
        assert engine.evaluate(STEPS[1]) == loss
        assert_same_state(run_steps(engine, STEPS[1:]).state, wanted().state)


def test_a_runner_that_cannot_be_made_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with wrap(CASE, budget(None, weights="host", state="host"), delay=0.0, **COMMON) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "np", SimpleNamespace(zeros=fail, float64=float))
            threads = threading.active_count()
            with pytest.raises(MemoryError):
                engine.step(STEPS[0])
            assert threading.active_count() == threads
        assert engine.step(STEPS[0]).loss == wanted().losses[0]


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_however_often_ctrl_c_comes_a_step_counts_or_never_was(
    delay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every few lines of the machine, and from then on whenever it is told anything: the engine knows what its state
    is worth, and goes on with the right bits."""
    real = durability.transition

    def again(*words: Any) -> Any:
        if sys.gettrace() is None:  # what it has raised ended it
            ctrl_c()
        return real(*words)

    with wrap(CASE, budget(tmp_path / "run"), delay=delay, overlap=False, **COMMON) as engine:
        engine.step(STEPS[0])
        engine.save(tmp_path / "snapshot")
        for line in range(11, 105, 18):
            monkeypatch.setattr(durability, "transition", again)
            with pytest.raises(KeyboardInterrupt), traced(interrupt_at(line)):
                engine.step(STEPS[1])
            monkeypatch.setattr(durability, "transition", real)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert engine.inside.durability.state in (State.WHOLE, State.PENDING)
            assert engine.step_count in (1, 2)
            if engine.step_count == 1:
                assert engine.step(STEPS[1]).loss == wanted().losses[1]
            if line in (29, 101):
                assert_same_state(run_steps(engine, STEPS[2:]).state, wanted().state)
            engine.load(tmp_path / "snapshot")
