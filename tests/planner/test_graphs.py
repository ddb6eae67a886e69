"""Room on the device is weighed between weights, state and graphs of calls: what a step takes decides, and no plan is
slower for it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.config import Family, Tier
from penstock.errors import ScheduleError
from penstock.planner.fit import fit, fitted, settings_of
from penstock.planner.own_schedule import own_plan
from penstock.planner.placement_lp import PlacementLP
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.search import search
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.place import Depths, Format
from penstock.shape.model import StageTimes
from tests.programs import ACTIVATION, transformer
from tests.questions import question

ADAM16 = Format.of("bf16", 2)
MIB = 1 << 20
LAYERS, GRAPH = 4, 300_000


def asked(device: int, *, compute: float, family: Family = "vertical", recompute: bool | None = None) -> Question:
    """A question about blocks whose forward takes ``compute`` seconds, and whose backward three times as many."""
    program = transformer(LAYERS, block=20)
    stages = (stage if stage.graph is None else replace(stage, graph=GRAPH) for stage in program.stages)
    program = replace(program, stages=tuple(stages))
    found = question(program, form=ADAM16, device=device, host=64 * MIB, family=family)
    n = len(found.request.program.stages)
    times = StageTimes(forward=(compute,) * n, backward=(3 * compute,) * n)
    return replace(found, request=replace(found.request, recompute=recompute), times=times)


def kept(schedule: Schedule) -> int:
    return sum(op.id.kind == "F" and any(name.kind == "K" for name in op.writes) for op in schedule.ops)


def program_of(q: Question) -> PlacementLP:
    request = q.request
    return PlacementLP(request, settings_of(request, fitted(request).place, 1 << 16, Depths()), q.costs)


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("compute", [1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("family", ["vertical", "horizontal"])
@pytest.mark.parametrize("device", [2 * MIB, 3 * MIB, 6 * MIB, 12 * MIB])
def test_a_plan_that_may_keep_graphs_is_never_slower(device: int, family: Family, compute: float) -> None:
    """The best plan is compared with the best that computes all again; it keeps to the same budget."""
    without = search(asked(device, compute=compute, family=family, recompute=True))
    free = search(asked(device, compute=compute, family=family))
    assert free.seconds <= without.seconds * 1.01
    assert free.plan.device_bytes <= device
    assert kept(without.plan.schedule) == 0
    assert free.plan.graphs_kept == kept(free.plan.schedule)


def test_where_compute_is_the_bound_weights_and_state_make_room_for_graphs() -> None:
    device = 6 * MIB
    slow, fast = (search(asked(device, compute=compute)) for compute in (1.0, 1e-4))
    assert kept(slow.plan.schedule) > kept(fast.plan.schedule)
    higher = [sum(tier == "device" for tier in found.plan.settings.place.state) for found in (slow, fast)]
    assert higher[0] <= higher[1]


def test_the_programs_optimum_counts_what_graphs_save_and_take() -> None:
    """As many as the budget has room for beside all else, each with its call's input, and none more than calls."""
    q = asked(1 << 40, compute=1.0)
    everything = program_of(q).relaxed
    assert everything is not None
    able = sum(stage.graph is not None for stage in q.request.program.stages)
    assert everything.graphs == pytest.approx(able * q.request.micro_batches)
    none = program_of(asked(1 << 40, compute=1.0, recompute=True)).relaxed
    assert none is not None
    saved = able * q.request.micro_batches * 1.0  # seconds of a forward, of each
    assert none.seconds - everything.seconds == pytest.approx(saved, rel=0.02)
    few = replace(q, request=replace(q.request, budget=replace(q.request.budget, device=3 * MIB)))
    some = program_of(few).relaxed
    assert some is not None
    assert 0 < some.graphs < everything.graphs


def test_what_is_pinned_leaves_its_room_to_graphs() -> None:
    """Nothing else is to be chosen: the program is solved without the solver."""
    q = asked(3 * MIB, compute=1.0)
    budget = replace(q.request.budget, weights="disk", state="disk", activations="device", gradients=None)
    request = replace(q.request, budget=budget)
    lp = PlacementLP(request, settings_of(request, fitted(request).place, 1 << 16, Depths()), q.costs)
    shares = lp.relaxed
    assert shares is not None
    peak = request.peak_bytes(replace(lp.s, depths=replace(lp.s.depths, graphs=int(shares.graphs))), "device")
    assert peak <= request.budget.device_bytes < peak + 2 * (GRAPH + ACTIVATION)


def fits(request: Request, sizes: Sequence[int]) -> list[int]:
    return [fit(replace(request, budget=replace(request.budget, device=size))).graphs_kept for size in sizes]


def test_more_room_keeps_no_fewer_graphs() -> None:
    request = asked(1 << 40, compute=1.0).request
    request = replace(request, budget=replace(request.budget, weights="disk", state="disk", activations="device"))
    counts = fits(request, [size * MIB // 4 for size in range(8, 40, 4)])
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_schedule_of_ones_own_that_keeps_graphs_is_what_it_says() -> None:
    request = asked(1 << 40, compute=1.0).request
    schedules = {what: fit(replace(request, recompute=what)).schedule for what in (True, False)}
    for what, schedule in schedules.items():
        plan = own_plan(replace(request, speculate=None, delay=None), schedule)
        assert plan.graphs_kept == kept(schedule)
        own_plan(replace(request, speculate=None, delay=None, recompute=what), schedule)
        with pytest.raises(ScheduleError, match=f"leave recompute={not what} out"):
            own_plan(replace(request, speculate=None, delay=None, recompute=not what), schedule)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_saved_activations_that_are_to_leave_the_device_do(tier: Tier) -> None:
    request = asked(1 << 40, compute=1.0).request
    plan = fit(replace(request, budget=replace(request.budget, activations=tier)))
    assert plan.graphs_kept == 0
    assert {"DC", "UC"} <= {op.id.kind for op in plan.schedule.ops}
