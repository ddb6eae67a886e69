"""What follows a step: its commit, what is written in the background, the data's position, Ctrl-C. Whatever fails
there, the step counts, the engine says so, and the run goes on with the bits of one that nothing happened to."""

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

from penstock.engine import durability, fate
from penstock.engine.fate import State
from penstock.errors import ConfigError, StoreError
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
        for _ in range(2):
            with (
                no_commit(2 if delay else 1, after=1 if places else 0),
                pytest.raises(StoreError, match=r"step 1 counts.*not repeat it") as failure,
            ):
                engine.step(STEPS[engine.step_count])
            assert failure.value.errno == errno.ENOSPC
            assert engine.step_count == 1
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
