"""A call that Ctrl-C or an error breaks off at any line of the package: the engine then goes on with the bits of a run
that nothing happened to, or says that it cannot; no thread is left, and a store goes on from what was committed."""

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

import penstock
from penstock.engine import interrupt, turns
from penstock.engine.visiting import VisitingWeights
from penstock.errors import StoreError
from penstock.state.commits import Commits
from penstock.tape.buffers import BufferBefore
from penstock.tape.groups import ParamGroup
from tests.campaign import CASE, step_data
from tests.conftest import Campaign
from tests.training import assert_same_state, budget, state_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCES = Path(penstock.__file__).parent
PLANS = ("config", "hardware", "planner", "schedule", "shape", "sim")
"""Rooms that change nothing of an engine: lines of theirs are no cases."""
STEPS = [step_data(step) for step in (1, 2, 3)]
OTHER = step_data(9)
COMMON: dict[str, Any] = {"precision": "bf16", "clip_grad_norm": 1.25, "plan": None, "overlap": False}

CALLS: dict[str, tuple[int, Callable[[penstock.Engine, Path], object]]] = {
    "prepare": (0, lambda engine, _: engine.prepare(STEPS[0])),
    "first step": (0, lambda engine, _: engine.step(STEPS[0])),
    "step": (2, lambda engine, _: engine.step(STEPS[2])),
    "evaluate": (1, lambda engine, _: engine.evaluate(OTHER)),
    "save": (1, lambda engine, folder: engine.save(folder / "snapshot")),
    "load": (1, lambda engine, folder: engine.load(folder / "first")),
    "close": (1, lambda engine, _: engine.close()),
}
"""By name, the steps before a call, and the call."""
INTERVAL = {"weights": "host", "state": "host", "durability": "interval", "interval": 2}
HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "on disk": ({"delay": 0.0}, {}),
    "on the device": ({"delay": 0.0}, {"weights": "device"}),
    "delayed": ({"delay": 0.5}, {}),
    "speculating": ({"delay": 0.0, "speculate": True}, {}),
    "with lanes": ({"delay": 0.0, "overlap": True}, {}),
    "by interval": ({"delay": 0.0}, INTERVAL),
}
"""Settings of ``wrap``, and of the budget."""
KINDS: dict[str, tuple[int, type[BaseException]]] = {
    "Ctrl-C": (1, KeyboardInterrupt),
    "Ctrl-C twice": (2, KeyboardInterrupt),
    "out of memory": (0, MemoryError),
    "drive": (0, OSError),
}
"""Presses of Ctrl-C, or the error that is raised."""


def opened(how: str, folder: Path) -> penstock.Engine:
    settings, places = HOW[how]
    return wrap(CASE, budget(folder / "run", **places), **COMMON | settings)


@cache
def wanted() -> tuple[list[dict[str, Any]], list[float]]:
    """State, and the loss of an evaluation, after each number of steps."""
    with TemporaryDirectory() as folder, opened("on disk", Path(folder)) as engine:
        states, losses = [state_of(engine)], [engine.evaluate(OTHER)]
        for data in STEPS:
            engine.step(data)
            states.append(state_of(engine))
            losses.append(engine.evaluate(OTHER))
    return states, losses


def break_off(kind: str) -> None:
    presses, error = KINDS[kind]
    for _ in range(presses):
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(signal.SIGINT, None)
    if not presses:
        raise error("injected")


AROUND = {Path(interrupt.__file__), Path(turns.__file__)}
"""What is around each call: it holds Ctrl-C, and has no line that can raise an error and is not of a check."""


@cache
def is_case(file: str) -> bool:
    path = Path(file)
    if not path.is_relative_to(SOURCES) or path in AROUND:
        return False
    return path.relative_to(SOURCES).parts[0] not in PLANS


class AtLine:
    """Within: ``do`` is called at the given line of those that this thread runs of the package."""

    def __init__(self, line: int, do: Callable[[], None]) -> None:
        self.lines = 0
        self.place = ""
        self._line, self._do = line, do

    def _of_file(self, frame: FrameType, event: str, _: object) -> Any:
        return self._at if is_case(frame.f_code.co_filename) else None

    def _at(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._do()
        return self._at

    def __enter__(self) -> "AtLine":
        sys.settrace(self._of_file)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def begun(call: str, how: str, folder: Path) -> tuple[penstock.Engine, Callable[[], object]]:
    before, made = CALLS[call]
    engine = opened(how, folder)
    for data in STEPS[:before]:
        engine.step(data)
    if call == "load":
        engine.save(folder / "first")
    return engine, partial(made, engine, folder)


@cache
def lines_of(call: str, how: str) -> int:
    with TemporaryDirectory() as folder:
        engine, made = begun(call, how, Path(folder))
        with engine, AtLine(0, int) as found:
            made()
    return found.lines


def refuses(error: BaseException) -> bool:
    return isinstance(error, StoreError) and "half updated" in str(error)


def goes_on(engine: penstock.Engine) -> bool:
    """Whether it does; what it says then has to be true."""
    states, losses = wanted()
    try:
        assert engine.evaluate(OTHER) == losses[engine.step_count]
        for data in STEPS[engine.step_count :]:
            engine.step(data)
        assert_same_state(state_of(engine), states[-1])
    except StoreError as error:
        if not refuses(error):
            raise
        return False
    return True


def check_case(kind: str, how: str, call: str, line: int, folder: Path) -> None:
    before = threading.enumerate()  # other tests' own, whose engines nobody has closed, too
    engine, made = begun(call, how, folder)
    with suppress(KINDS[kind][1]), AtLine(line, partial(break_off, kind)) as injected:
        try:
            made()
        except StoreError as error:
            if "injected" not in str(error):  # else it says what became of the call
                raise
    try:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        went_on = call != "close" and goes_on(engine)
        engine.close()
        gc.collect()
        left = {thread.name for thread in threading.enumerate() if thread not in before}
        assert not [name for name in left if name.startswith("penstock") and "-io" not in name]
        with opened(how, folder) as again:
            assert again.step_count == len(STEPS) if went_on else again.step_count >= CALLS[call][0] - 2
            assert goes_on(again)
    except BaseException as error:
        error.add_note(f"{kind} in {call}, {how}, at line {line}: {injected.place}")
        raise


def test_a_call_that_is_broken_off_at_any_line_costs_nothing_else(tmp_path: Path, campaign: Campaign) -> None:
    # An error at any line of close() is no case: those that stop threads can raise none, and have no second try.
    cases = [(kind, how, call) for kind in KINDS for how in HOW for call in CALLS if call != "close" or KINDS[kind][0]]
    draw = random.Random(2)
    for number in range(campaign.cases(2, 600)):
        kind, how, call = draw.choice(cases)
        folder = tmp_path / str(number)
        folder.mkdir()
        check_case(kind, how, call, draw.randint(1, lines_of(call, how)), folder)


BROKEN: dict[str, tuple[Any, str, int, str]] = {
    "weights let go": (ParamGroup, "detach", 2, "Ctrl-C"),
    "weights let go, for want of memory": (ParamGroup, "detach", 2, "out of memory"),
    "buffers put back": (BufferBefore, "put_back", 1, "Ctrl-C"),
    "a probe's weights brought": (VisitingWeights, "load", 1, "Ctrl-C"),
}
"""By what an evaluation does: the function that is broken off, where it is called for which time, and by what."""


@pytest.mark.parametrize("what", BROKEN)
def test_a_clean_up_that_is_broken_off_is_done_before_anything_else(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, time, kind = BROKEN[what]
    engine, evaluate = begun("evaluate", "on the device", tmp_path)
    if owner is not VisitingWeights:  # which brings them for a plan's probe
        evaluate()
    real, left = getattr(owner, name), [time]

    def broken(*args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            if owner is VisitingWeights:
                real(*args)
            break_off(kind)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(KINDS[kind][1]):
            evaluate()
    assert goes_on(engine)
    engine.close()


def test_an_engine_whose_closing_an_error_has_broken_off_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = begun("step", "on disk", tmp_path)

    def fail(*_: Any) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Commits, "close", fail)
        with pytest.raises(MemoryError, match="injected"):
            engine.close()
    engine.close()
    engine.close()
    with opened("on disk", tmp_path) as again:
        assert again.step_count == 2
