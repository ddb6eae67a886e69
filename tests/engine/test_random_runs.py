"""Runs of random settings to which random things happen: steps that are clipped or skipped, evaluations, snapshots,
other plans, and failures in ops of any kind. Each step has the loss, and the end the state, of a run to which none do.
"""

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import penstock
from penstock.engine.fate import State
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import LANE_OF
from tests.campaign import CASE
from tests.conftest import Campaign
from tests.other_plans import other_plans
from tests.training import ADAMW, MicroBatches, assert_same_state, budget, state_of, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

LAST, MOST = 8, 22
"""Steps of a run, and things that happen to it, at most."""
MUON = penstock.Muon(lr=0.02, adamw=ADAMW)
NUMBERS: tuple[tuple[str, penstock.AdamW | penstock.Muon], ...] = (
    ("fp32", ADAMW),
    ("bf16", ADAMW),
    ("fp16", ADAMW),
    ("bf16", MUON),
    ("fp16", MUON),
)
PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"weights": "host"},
    {"gradients": "disk"},
    {"slots": 1},
    {"weights": None, "state": None},
    {"activations": "disk"},
)
HAPPENS = (
    ("step",) * 6 + ("evaluate", "evaluate other shapes", "save", "load", "close", "rest", "change") + ("fail",) * 3
)


def data(step: int) -> MicroBatches:
    return steps_of(CASE, 1, first=step, lengths=(12, 8))[0]


@dataclass(kw_only=True)
class Run:
    """An engine whose steps' gradients are within the limit, over it, or infinite, by the step's number."""

    numbers: tuple[str, penstock.AdamW | penstock.Muon]
    where: penstock.Budget
    how: dict[str, Any]
    log: list[str] = field(default_factory=list)
    engine: penstock.Engine = field(init=False)
    _factor: float = 1.0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        precision, optimizer = self.numbers
        how = {"precision": precision, "optimizer": optimizer, "clip_grad_norm": 1.5, "plan": None} | self.how
        self.engine = wrap(CASE, self.where, loss_fn=self._loss, **how)

    def _loss(self, model: Any, micro_batch: Any) -> torch.Tensor:
        loss = CASE.loss_fn(model, micro_batch)
        if loss.requires_grad:
            factor = self._factor
            loss.register_hook(lambda grad: grad * factor)
        return loss

    def step(self) -> tuple[int, float]:
        """A step, by its number, and its loss."""
        number = self.engine.step_count + 1
        self._factor = math.inf if number % 5 == 4 else 16.0 if number % 3 == 2 else 0.25
        return number, self.engine.step(data(number)).loss

    @contextmanager
    def failing(self, kind: str, after: int) -> Iterator[None]:
        """An op of a kind fails, ``after`` so many of them that do not; nothing does where there are fewer."""
        runner = self.engine.inside.planning.runner
        real = None if runner is None else runner.actions.kinds.get(kind)
        if runner is None or real is None:
            yield
            return
        kinds, left = runner.actions.kinds, [after]

        def fail(op: Op) -> None:
            if not left[0]:
                kinds[kind] = real
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            left[0] -= 1
            real(op)

        kinds[kind] = fail
        try:
            yield
        finally:
            kinds[kind] = real


@dataclass(frozen=True, kw_only=True)
class Truth:
    """By step: its loss, the loss of an evaluation after it, and the state."""

    losses: dict[int, float]
    evaluations: dict[int, float]
    states: dict[int, dict[str, torch.Tensor]]


@cache
def truth(numbers: tuple[str, penstock.AdamW | penstock.Muon]) -> Truth:
    """One op at a time, nothing delayed, nothing stepped before the norm is known."""
    found = Truth(losses={}, evaluations={}, states={})
    with TemporaryDirectory() as folder:
        how = {"delay": 0.0, "overlap": False, "speculate": False}
        run = Run(numbers=numbers, where=budget(Path(folder)), how=how)
        with run.engine as engine:
            for _ in range(LAST):
                number, found.losses[number] = run.step()
                found.states[number], found.evaluations[number] = state_of(engine), engine.evaluate(data(99))
    return found


def test_whatever_happens_a_run_takes_the_steps_of_one_to_which_nothing_does(
    campaign: Campaign, tmp_path: Path
) -> None:
    read_ahead = 0
    for seed in range(campaign.cases(2, 300)):
        rng, folder = Random(seed), tmp_path / str(seed)
        folder.mkdir()
        places = rng.choice(PLACES)
        how = {
            "overlap": rng.random() < 0.7,
            "delay": rng.choice((0.25, 0.5, 1.0)),
            "speculate": None if "slots" in places else rng.choice((None, True, False)),
        }
        run = Run(numbers=rng.choice(NUMBERS), where=budget(folder / "store", **places), how=how)
        try:
            read_ahead += _live(run, rng, folder / "snapshot", may_fail="slots" not in places)
            number, found = run.engine.step_count, state_of(run.engine)
        except BaseException as error:
            error.add_note(f"seed {seed}: {run.numbers}, {places}, {how}: {', '.join(run.log)}")
            raise
        finally:
            run.engine.close()
        if number:
            assert_same_state(found, truth(run.numbers).states[number])
    assert read_ahead, "of no step the next one has found state read"


def _live(run: Run, rng: Random, snapshot: Path, *, may_fail: bool) -> int:
    """Let things happen to a run; the steps of it whose plan reads ahead. ``may_fail``: with one slot a step cannot be
    taken back."""
    known, read_ahead = truth(run.numbers), 0
    happens = [what for what in HAPPENS if may_fail or what != "fail"]
    while len(run.log) < MOST and run.engine.step_count < LAST:
        engine, what = run.engine, rng.choice(happens)
        run.log.append(what)
        match what:
            case "step":
                number, loss = run.step()
                assert loss == known.losses[number]
                carried = engine.plan.schedule.carried
                read_ahead += any(start.holds in ("state", "new weights") for start, _, _ in carried)
            case "evaluate" if engine.step_count:
                assert engine.evaluate(data(99)) == known.evaluations[engine.step_count]
            case "evaluate other shapes":
                engine.evaluate(steps_of(CASE, 1, first=99, lengths=(5, 7, 9))[0])
            case "save":
                engine.save(snapshot, overwrite=True)
            case "load" if snapshot.exists():
                engine.load(snapshot)
            case "close":
                engine.close()
                run.open()
            case "rest":
                engine.inside.rest()
            case "change":
                engine.prepare(data(1))
                planning = engine.inside.planning
                planning.change(next(other_plans(planning.request, seed=rng.randrange(10**6))))
            case "fail":
                kind, after = rng.choice(sorted(LANE_OF)), rng.choice((0, 0, 1, 2, 5))
                run.log.append(f"in {kind}, after {after}")
                try:
                    with run.failing(kind, after):
                        number, loss = run.step()
                    assert loss == known.losses[number]
                except (OSError, RuntimeError) as error:
                    run.log.append(type(error).__name__)
                if engine.inside.durability.state is State.BROKEN:
                    engine.close()
                    run.open()
    return read_ahead
