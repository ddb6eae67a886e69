"""State that a step reads at its end for the next one's delayed steps: whatever comes in between, the next one steps
what counts by then."""

import math
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.schedule.ir.ops import Schedule
from tests.campaign import CASE, step_data
from tests.training import assert_same_state, budget, state_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

WHATS = ("step", "clipped", "infinite", "evaluate", "save", "load", "close")
"""Things that a run may do next. ``clipped``: a step over the limit, which is run twice where it speculates."""


def carried_state(schedule: Schedule) -> list[str]:
    return [start for start, _, _ in schedule.carried if start.holds in ("state", "new weights")]


class Run:
    """A run that does one thing after the other."""

    def __init__(self, folder: Path, places: dict[str, Any], how: dict[str, Any]) -> None:
        self._folder, self._places, self._how = folder, places, how
        self._factor = 1.0
        self.read_ahead = False
        self.losses: list[float] = []
        self.engine = self._open()

    def _open(self) -> penstock.Engine:
        store = self._folder / "store"
        return wrap(CASE, budget(store, **self._places), loss_fn=self._loss, clip_grad_norm=1.5, plan=None, **self._how)

    def _loss(self, model: Any, micro_batch: Any) -> torch.Tensor:
        loss = CASE.loss_fn(model, micro_batch)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * self._factor)
        return loss

    def do(self, what: str) -> None:
        engine, snapshot = self.engine, self._folder / "snapshot"
        match what:
            case "step" | "clipped" | "infinite":
                self._factor = {"step": 0.25, "clipped": 16.0, "infinite": math.inf}[what]
                self.losses.append(engine.step(step_data(engine.step_count + 1)).loss)
                self.read_ahead |= bool(carried_state(engine.plan.schedule))
            case "evaluate":
                self.losses.append(engine.evaluate(step_data(99)))
            case "save":
                shutil.rmtree(snapshot, ignore_errors=True)
                engine.save(snapshot)
            case "load" if snapshot.exists():
                engine.load(snapshot)
            case "close":
                engine.close()
                self.engine = self._open()


def after(folder: Path, places: dict[str, Any], how: dict[str, Any], whats: tuple[str, ...]) -> Iterator[Any]:
    run = Run(folder, places, how)
    for what in whats:
        run.do(what)
    with run.engine as engine:
        yield run.losses, state_of(engine), run.read_ahead


@cache
def wanted(precision: str, whats: tuple[str, ...]) -> Any:
    """The same with state in host memory, and nothing delayed."""
    places = {"weights": "host", "state": "host"}
    with TemporaryDirectory() as folder:
        return next(iter([*after(Path(folder), places, {"precision": precision, "delay": 0.0}, whats)]))


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(("fp32", "bf16")),
    st.sampled_from(({}, {"weights": "host"}, {"gradients": "disk"}, {"slots": 1})),
    st.sampled_from((0.25, 1.0)),
    st.lists(st.sampled_from(WHATS), min_size=3, max_size=7).map(tuple),
)
def test_whatever_comes_between_two_steps(
    precision: str, places: dict[str, Any], delay: float, whats: tuple[str, ...]
) -> None:
    whats = ("step", *whats, "step", "step")
    with TemporaryDirectory() as folder:
        ((losses, state, read_ahead),) = after(Path(folder), places, {"precision": precision, "delay": delay}, whats)
    assert read_ahead
    expected, expected_state, _ = wanted(precision, whats)
    assert losses == expected
    assert_same_state(state, expected_state)
