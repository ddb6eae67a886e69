"""Plans of a pipeline's ranks: never slower than by the order of preference, near the best of a grid."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest

from penstock.config import Budget, Family, Tier
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.machine import Machine
from penstock.planner.dealt import Foreseen, Pipeline, improved, plans_of
from penstock.planner.fit import fit
from penstock.planner.joint import JointSearch, Pipelined
from penstock.planner.layouts import Asked
from penstock.planner.phase_costs import PhaseCosts
from penstock.planner.pipelines import simulated
from penstock.planner.places import Asked as Wanted
from penstock.planner.places import Plans
from penstock.planner.plan import Plan
from penstock.planner.question import Question
from penstock.schedule.ir.lanes import STREAM_LANES
from penstock.schedule.place import Settings
from penstock.schedule.program import ALIGN
from tests.conftest import Campaign
from tests.planner.test_layouts import FAST, as_pipelines, asked
from tests.questions import by_lane

SLOW_DRIVE = replace(FAST, drives=tuple(replace(d, read=d.read / 4, write=d.write / 4) for d in FAST.drives))


def random_pipeline(seed: int) -> Asked:
    """A small pipeline whose ranks have memory for a part of their state only."""
    rng = Random(seed)
    machine: Machine = rng.choice((FAST, SLOW_DRIVE))
    ranks = rng.choice((2, 2, 3))
    layers, batch = rng.randint(2 * ranks, 3 * ranks), rng.choice((8, 16))
    what = asked((machine, ranks), each=1, layers=layers, batch=batch, delay=None)
    budget = Budget(
        device=rng.choice((12, 16, 28)) << 20,
        host=rng.choice((10, 14, 20)) << 20,
        disk="/disk",
        durability=rng.choice((None, "interval")),
    )
    return replace(what, task=replace(what.task, budget=budget, clip_grad_norm=rng.choice((None, 1.0))))


@cache
def small(seed: int) -> tuple[Pipeline, Foreseen]:
    """A random pipeline by preference, and with better plans."""
    found = by_preference(random_pipeline(seed))
    return found, improved([Wanted(request=request) for request in found.requests], found.pace, found.step)


def by_preference(what: Asked) -> Pipeline:
    return simulated(*as_pipelines(what), 2)


def grid(found: Pipeline) -> Iterator[float]:
    """Seconds of a step with each of some forced placements, the same on all ranks."""
    first = found.requests[0].budget
    tiers: tuple[Tier | None, ...] = (None, "host", "disk")
    for weights, activations, delay, early in product(tiers, tiers, (0.0, 0.2, 0.4), (None, False)):
        pins = {"weights": weights or first.weights, "activations": activations or first.activations}
        requests = [
            replace(request, budget=replace(request.budget, **pins), delay=delay, speculate=early)
            for request in found.requests
        ]
        try:
            plans = plans_of([Wanted(request=request) for request in requests])
        except (BudgetError, ConfigError):
            continue
        yield found.pace.step(Plans.of(plans)).seconds
        smaller: list[Plan] = []
        for request, plan in zip(requests, plans, strict=True):
            option: Settings = replace(plan.settings, chunk=max(plan.settings.chunk // 2 // ALIGN * ALIGN, 1 << 16))
            smaller.append(request.plan(option))
        yield found.pace.step(Plans.of(smaller)).seconds


def check(seed: int) -> bool:
    """True if there is such a pipeline."""
    try:
        found, better = small(seed)
    except BudgetError:
        return False
    assert better.seconds <= found.step.seconds
    assert better.seconds <= 1.03 * min(grid(found)), seed
    for request, plan in zip(found.requests, better.plans, strict=True):
        assert plan.device_bytes <= request.budget.device_bytes
        assert plan.host_bytes <= request.budget.host_bytes
    return True


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("seed", range(4))
def test_a_pipeline_s_plans_are_as_fast_as_the_best_of_a_grid(seed: int) -> None:
    assert check(seed)


def test_any_pipeline_s_plans_are_as_fast_as_the_best_of_a_grid(campaign: Campaign) -> None:
    if not campaign.full:
        pytest.skip("a campaign takes many pipelines: --campaign")
    assert sum(check(seed) for seed in range(4, 60)) > 30


def test_the_search_goes_on_where_there_is_no_room_for_the_best_plans() -> None:
    what, best = small(0)
    asks = [Wanted(request=request) for request in what.requests]

    def check(step: Foreseen) -> None:
        if step.seconds <= best.seconds:
            raise BudgetError("no room")

    assert best.seconds < improved(asks, what.pace, what.step, check).seconds < what.step.seconds


@pytest.mark.parametrize("family", ["vertical", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("wait", [False, True])
def test_the_coefficients_of_a_rank_are_the_work_of_its_schedule(family: Family, wait: bool) -> None:
    """All that it does, but for messages, which it waits for."""
    what = by_preference(asked((FAST, 3), each=1, layers=9))
    for rank, request in enumerate(what.requests):
        one = replace(request, family=family, wait=wait, speculate=False, delay=0.0)
        question = what.pace.question(rank, one, {}, 3)
        (own,) = question.requests
        plan = fit(own)
        costs = question.costs_of(own)
        found = PhaseCosts(own, plan.settings, costs).of(plan.settings.place)
        work = dict.fromkeys(STREAM_LANES, 0.0)
        for op in plan.schedule.ops:
            if op.lane in work:
                work[op.lane] += costs.seconds(op)
            if op.lane != "compute":
                work["compute"] += costs.interpreter
        assert by_lane(found) == pytest.approx(work, rel=0.02), (rank, family)


def test_ranks_that_are_alike_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    what = by_preference(replace(asked((FAST, 6), each=1, layers=17, batch=6), size=1))
    kinds = list[int]()

    class Counted(JointSearch):
        def __init__(self, questions: Sequence[Question], **more: Any) -> None:
            kinds.append(len(questions))
            super().__init__(questions, **more)

    monkeypatch.setattr("penstock.planner.dealt.JointSearch", Counted)
    better = improved([Wanted(request=request) for request in what.requests], what.pace, what.step)
    assert kinds == [3], "the first; those with as many blocks as each other; the one that has the last"
    assert better.seconds <= what.step.seconds


def test_every_rank_waits_for_the_one_with_the_most_to_do() -> None:
    what = by_preference(asked((FAST, 3), each=1, layers=9))
    compute = Pipelined.of(what.requests, what.pace.times)
    assert compute.seconds <= what.step.simulation.time
    busy = [what.step.simulation.work(rank)["compute"] for rank in range(3)]
    waits = [sum(phases.values()) for phases in compute.waits]
    assert waits.index(min(waits)) == busy.index(max(busy))
    assert all(seconds >= 0 for phases in compute.waits for seconds in phases.values())
