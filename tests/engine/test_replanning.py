"""A plan that is changed between two steps changes no bit, loses no commit, and stays within the budget."""

import errno
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.models import TIED
from tests.other_plans import other_plans
from tests.training import Result, abandon, assert_same, assert_same_state, budget, result_of, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = TIED
STEPS = steps_of(CASE, 5)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A way to train, whose plan may be changed: of the budget, and of what is asked of ``wrap``."""

    budget: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    disk: bool = True

    def engine(self, folder: Path) -> penstock.Engine:
        where = budget(folder / "store" if self.disk else None, **{"weights": None, "state": None, **self.budget})
        return wrap(CASE, where, **self.settings)


ANYWHERE = {"durability": "none"}
RUNS = {
    "every step durable, speculating or not": Run(settings={"clip_grad_norm": 0.17}),
    "every step durable, bf16": Run(settings={"clip_grad_norm": 0.17, "precision": "bf16"}),
    "every step durable, fp16": Run(settings={"clip_grad_norm": 0.17, "precision": "fp16"}),
    "state anywhere": Run(budget=ANYWHERE, settings={"clip_grad_norm": 0.17}),
    "state anywhere, bf16": Run(budget=ANYWHERE, settings={"clip_grad_norm": None, "precision": "bf16"}),
    "gradients in bf16": Run(budget=ANYWHERE, settings={"precision": "bf16", "grad_dtype": "bf16", "strands": 2}),
    "commits now and then": Run(budget={"durability": "interval", "interval": 2}, settings={"precision": "bf16"}),
    "without a disk": Run(disk=False, settings={"precision": "bf16", "clip_grad_norm": 0.17}),
    "micro-batch by micro-batch": Run(budget=ANYWHERE, settings={"schedule": "horizontal"}),
}


@cache
def steady(name: str) -> Result:
    """The steps by one plan."""
    run = RUNS[name]
    with wrap(CASE, budget(None), **{**run.settings, "schedule": "vertical"}) as engine:
        return run_steps(engine, STEPS)


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("name", RUNS)
def test_plans_in_any_order_give_the_bits_of_one(name: str, tmp_path: Path) -> None:
    with RUNS[name].engine(tmp_path) as engine:
        engine.prepare(STEPS[0])
        plans = other_plans(engine.inside.planning.request, seed=7)
        chosen, stats = [], []
        for micro_batches in STEPS:
            chosen.append(next(plans))
            engine.inside.planning.change(chosen[-1])
            stats.append(engine.step(micro_batches))
            assert engine.plan.settings == chosen[-1]
            check_placed(engine)
        found = result_of(engine, stats)
    assert len({repr(settings) for settings in chosen}) == len(STEPS)
    assert_same(found, steady(name))


def check_placed(engine: penstock.Engine) -> None:
    """Arrays are where the plan says, and what is held is within the budget."""
    place, arrays = engine.plan.settings.place, engine.inside.resources.arrays
    for group in arrays.groups:
        assert arrays.found_on(group.index) == place.weights[group.index]
        assert arrays.tier_of(f"weights.{group.index}") == place.home(group)
        assert all(
            arrays.tier_of(part.name) == place.state[group.index]
            for part in arrays.parts.values()
            if part.group == group.index and not part.name.startswith("weights")
        )
    for tier, most in (("device", engine.budget.device_bytes), ("host", engine.budget.host_bytes)):
        assert (engine.last_step is None) or engine.last_step.peak_bytes[tier] <= most


KEPT = ("every step durable, bf16", "commits now and then")


@pytest.mark.parametrize("name", KEPT)
def test_a_run_that_is_killed_right_after_a_change_goes_on_from_its_last_commit(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    with run.engine(tmp_path) as engine:
        engine.prepare(STEPS[0])
        plans = other_plans(engine.inside.planning.request, seed=3)
        for micro_batches in STEPS[:3]:
            engine.inside.planning.change(next(plans))
            engine.step(micro_batches)
        engine.inside.planning.change(next(plans))
        engine.prepare(STEPS[3])  # completes what a delay has left, and moves arrays
        check_placed(engine)
        abandon(engine)
    with run.engine(tmp_path) as engine:
        done = engine.step_count
        assert done == (3 if name == KEPT[0] else 2)
        found = run_steps(engine, STEPS[done:])
    assert found.losses == steady(name).losses[done:]
    assert_same_state(found.state, steady(name).state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(("name", "call"), list(zip(KEPT, ("preadv", "pwritev"), strict=True)))
def test_a_plan_that_cannot_be_had_is_not_changed_to(
    name: str, call: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read that fails while copies of weights are made, or a write while arrays move to disk, costs the change, and
    nothing else."""
    with RUNS[name].engine(tmp_path) as engine:
        before = engine.prepare(STEPS[0])
        stats = [engine.step(STEPS[0])]
        engine.inside.rest()
        plans = other_plans(engine.inside.planning.request, seed=5)
        tier = "disk" if call == "pwritev" else "host"
        found_there = lambda place: (place.state if call == "pwritev" else place.weights).count(tier)  # noqa: E731
        now = found_there(engine.plan.settings.place)
        engine.inside.planning.change(next(p for p in plans if found_there(p.place) > now + 2))
        with failing_once(call, after, monkeypatch) as failed, caplog.at_level("WARNING"):
            engine.prepare(STEPS[1])
        assert failed
        assert "the plan is not changed" in caplog.text
        assert engine.plan.settings == before.settings
        check_placed(engine)
        stats += [engine.step(micro_batches) for micro_batches in STEPS[1:]]
        found = result_of(engine, stats)
    assert_same(found, steady(name))


@contextmanager
def failing_once(call: str, after: int, patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One call to a drive fails inside, once so many have worked; yields which one did."""
    real, count, failed = getattr(os, call), itertools.count(), list[int]()

    def fail(*args: Any) -> int:
        if (number := next(count)) == after:
            failed.append(number)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with patch.context() as patched:
        patched.setattr(os, call, fail)
        yield failed
