"""The linear program's loads are the simulator's work, its sizes are the schedule's, its optimum is one, and rounding
keeps within the budget."""

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import highspy
import numpy as np
import pytest

from penstock.config import ZeroStage
from penstock.hardware.machine import Network
from penstock.planner import optimum
from penstock.planner.bounds import StepBound, bound, limits_of
from penstock.planner.costs import machine_costs
from penstock.planner.fit import fitted, settings_of, tied_groups
from penstock.planner.phase_costs import PhaseCosts
from penstock.planner.placement_lp import PlacementLP
from penstock.planner.rounding import PATTERNS, Rounding, assign
from penstock.schedule.ir.lanes import STREAM_LANES
from penstock.schedule.lower.provision import narrow_groups
from penstock.schedule.place import Depths, Format
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import Case, placement, random_case, transformer
from tests.questions import MACHINE, by_lane, question, request_of, times_for

ADAM32, ADAM16 = Format.of("fp32", 2), Format.of("bf16", 2)


LINK = Network(bandwidth=3e7, latency=2e-3)
Sharing = tuple[int, ZeroStage, int, bool]
"""ranks, their stage, their hosts, and whether these have secondary partitions"""
SHARED: tuple[Sharing, ...] = ((2, 3, 1, False), (3, 3, 1, False), (3, 2, 1, False), (2, 0, 1, False))
ON_HOSTS: tuple[Sharing, ...] = ((4, 3, 2, False), (4, 3, 2, True), (2, 3, 2, True))


def costs_of(case: Case) -> Costs:
    return machine_costs(
        replace(MACHINE, network=LINK, across=replace(LINK, bandwidth=1e7)),
        case.program,
        case.settings.form,
        times_for(case.program),
        "adamw.fp32",
        grad_dtype=case.settings.grad_dtype,
        narrow=narrow_groups(request_of(case).route, case.settings),
    )


def shared_by(case: Case, sharing: Sharing) -> Case:
    ranks, stage, hosts, secondary = sharing
    return case.shared_by(ranks, stage, hosts, secondary=secondary)


def compared(case: Case) -> list[tuple[str, float, float]]:
    """(lane, seconds by the linear program's coefficients, simulated seconds)"""
    costs = costs_of(case)
    found = by_lane(PhaseCosts(request_of(case), case.settings, costs).of(case.settings.place))
    work = simulate(request_of(case).world(case.build()), costs).work(0)
    return [(lane, seconds, work.get(lane, 0.0)) for lane, seconds in found.items()]


@pytest.mark.sampled(6, values=False)
@pytest.mark.parametrize("seed", range(60))
def test_loads_are_the_simulated_work_of_every_lane(seed: int) -> None:
    case = random_case(seed)
    if case.settings.speculate:  # where every group does: next to others, its norm is an op of its own
        count = len(case.program.groups)
        whole = replace(case.settings.place, weights=("disk",) * count, state=("disk",) * count)
        case = replace(case, settings=replace(case.settings, place=whole))
    for sharing in (None, *SHARED, *ON_HOSTS):
        for lane, load, work in compared(case if sharing is None else shared_by(case, sharing)):
            assert load == pytest.approx(work, rel=1e-9, abs=1e-12), (lane, sharing)


VERTICAL = [case for case in (random_case(seed, largest=6) for seed in range(40)) if case.family == "vertical"]


@pytest.mark.parametrize("delay", [0.25, 0.5, 1.0])
def test_with_a_delay_loads_are_the_work_but_for_whole_chunks(delay: float) -> None:
    for case in (case for case in VERTICAL if case.settings.train):
        late = replace(case.settings, delay=delay, chunk=4096)
        for lane, load, work in compared(replace(case, settings=late)):
            assert load == pytest.approx(work, rel=0.03, abs=0.03), lane


def test_two_lanes_that_share_evenly_are_bound_by_their_sum_and_duplex_lanes_by_the_larger() -> None:
    def costs(both: float) -> Costs:
        pairs = {("read", "write"): both, ("write", "read"): both} if both else {}
        return Costs(name="two", seconds=lambda op: 0.0, contention=pairs)

    load = np.zeros((1, len(STREAM_LANES)))
    load[0, 3], load[0, 4] = 3.0, 2.0  # read and write
    many = Depths(state=100, stage_in=100)
    assert bound(load, limits_of(costs(0.0), many)) == pytest.approx(3.0)
    assert bound(load, limits_of(costs(1.0), many)) == pytest.approx(5.0)
    # 1/3: three quarters of its rate beside the other, so that a second of the other costs a third of one
    assert bound(load, limits_of(costs(1 / 3), many)) == pytest.approx(3.0 + 2.0 / 3)


@pytest.mark.parametrize(("home", "seconds"), [(0.0, 14.0), (7.0, 14.0), (11.0, 14.0), (12.0, 15.0)])
def test_the_way_home_of_what_begins_a_step_falls_into_its_start_and_forward(home: float, seconds: float) -> None:
    """A start of 10 s of reads, a forward and an epilogue of 4 s of compute with 3 s of writes: 11 s more of writes fit
    in."""
    load = np.zeros((7, len(STREAM_LANES)))
    load[0, STREAM_LANES.index("read")] = 10.0
    load[1, STREAM_LANES.index("compute")], load[1, STREAM_LANES.index("write")] = 3.0, 3.0
    load[2, STREAM_LANES.index("compute")] = 1.0
    load[3, STREAM_LANES.index("compute")] = 6.0
    load[-1, STREAM_LANES.index("write")] = home
    limits = np.eye(len(STREAM_LANES))
    assert StepBound(limits=limits, late=True, buffered=100.0).seconds(load) == pytest.approx(seconds + 6.0)
    without = StepBound(limits=limits, late=True).seconds(load)
    assert without == pytest.approx(max(home, 10.0) + 4.0 + 6.0), "no buffer holds it: the start waits for all of it"


@pytest.mark.parametrize(("ahead", "seconds"), [(0.0, 20.0), (3.0, 17.0), (8.0, 14.0), (100.0, 14.0)])
def test_what_the_step_before_has_read_the_start_does_not_wait_for(ahead: float, seconds: float) -> None:
    """A start of 10 s of reads, of which 6 s can be read ahead and the others are loads, and 10 s of compute."""
    load = np.zeros((7, len(STREAM_LANES)))
    load[0, STREAM_LANES.index("read")], load[-2, STREAM_LANES.index("read")] = 4.0, 6.0
    load[3, STREAM_LANES.index("compute")] = 10.0
    limits = np.eye(len(STREAM_LANES))
    assert StepBound(limits=limits, late=True, ahead=ahead).seconds(load) == pytest.approx(seconds)


def test_what_is_read_ahead_is_read_all_the_same() -> None:
    load = np.zeros((7, len(STREAM_LANES)))
    load[-2, STREAM_LANES.index("read")], load[1, STREAM_LANES.index("compute")] = 6.0, 5.0
    assert StepBound(limits=np.eye(len(STREAM_LANES)), late=True, ahead=100.0).seconds(load) == pytest.approx(6.0)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("sharing", [None, *SHARED[1:], ON_HOSTS[1]])
def test_a_program_of_sizes_never_promises_room_that_there_is_not(seed: int, sharing: Sharing | None) -> None:
    """What the program counts is at least what the schedule takes, and equal where every pool is needed."""
    case = random_case(seed)
    if case.settings.train:
        strands = Random(-seed - 1).choice((1, 2, 4))
        case = replace(case, settings=replace(case.settings, strands=strands))
    place = placement(Random(seed), case.program, tied=bool(tied_groups(case.program)))
    case = replace(case, settings=replace(case.settings, place=place))
    case = case if sharing is None else shared_by(case, sharing)
    lp = PlacementLP(
        request_of(case),
        case.settings,
        costs_of(case),
    )
    if not case.settings.train:
        return
    place = case.settings.place
    waits = place.gradients if place.gradients in lp.gradient_tiers else "host"
    place = replace(place, gradients=waits)
    counted = lp.base_sizes(place.activations, waits)
    for g, home in enumerate(zip(place.weights, place.state, strict=True)):
        counted = counted + lp.group_sizes(g, home, waits)
    taken = request_of(case).peaks(replace(case.settings, place=place))
    assert counted[0] >= taken[0]
    assert counted[1] >= taken[1]


@pytest.mark.parametrize("form", [ADAM32, ADAM16])
@pytest.mark.parametrize("wait", [False, True])
def test_the_optimum_is_no_worse_than_any_placement_that_fits(form: Format, wait: bool) -> None:
    asked = question(transformer(6, block=40), form=form, wait=wait, device=6 << 20, host=10 << 20)
    request = asked.request
    settings = settings_of(request, fitted(request).place, 1 << 16, Depths())
    lp = PlacementLP(request, settings, asked.costs)
    least = min(shares.seconds for shares in lp.solve_whole())
    rng, tried = Random(1), 0
    for _ in range(400):
        place = placement(rng, request.program, tied=False)
        option = replace(settings, place=place)
        sizes = lp.base_sizes(place.activations, place.gradients if wait else "host")
        homes = enumerate(zip(place.weights, place.state, strict=True))
        sizes = sizes + sum(lp.group_sizes(g, home, place.gradients if wait else "host") for g, home in homes)
        if (sizes <= lp.budget).all():
            tried += 1
            assert lp.bound.seconds(lp.loads.of(option.place)) >= least * (1 - 1e-3)
    assert tried > 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", [ADAM32, ADAM16])
@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_rounded_shares_fit(form: Format, family: str) -> None:
    asked = question(transformer(7, block=40), form=form, wait=True, family=family)
    low = 3 << 20
    fitting = 0
    for device, host in itertools.product((low, 2 * low, 5 * low), (4 * low, 6 * low, 12 * low)):
        request = replace(asked.request, budget=replace(asked.request.budget, device=device, host=host))
        lp = PlacementLP(request, settings_of(request, fitted(request).place, 1 << 16, Depths()), asked.costs)
        for shares, pattern in itertools.product(lp.solve_whole(), PATTERNS):
            settings = Rounding(lp, shares).settings(pattern)
            if settings is not None:
                fitting += 1
                peaks = request.peaks(settings)
                assert peaks[0] <= device
                assert peaks[1] <= host
    assert fitting > 10


def test_a_budget_for_everything_on_the_device_is_used() -> None:
    """The program counts pools that are not needed when nothing moves; rounding finds that out."""
    asked = question(transformer(5), form=ADAM16, device=1 << 40, host=1 << 40)
    alone = fitted(asked.request)
    device, _ = asked.request.peaks(alone)
    request = replace(asked.request, budget=replace(asked.request.budget, device=device), recompute=True)
    lp = PlacementLP(request, settings_of(request, alone.place, 1 << 16, Depths()), asked.costs)
    placed = Rounding(lp, lp.solve_whole()[0]).settings("last")
    assert placed is not None
    assert placed.place.weights == alone.place.weights
    assert placed.place.state == alone.place.state


def test_pins_are_constraints() -> None:
    asked = question(transformer(4), form=ADAM16, wait=True)
    for kind, tier in itertools.product(("weights", "state", "gradients", "activations"), ("device", "host", "disk")):
        if (kind, tier) in (("gradients", "device"), ("state", "device")):
            continue
        request = replace(asked.request, budget=replace(asked.request.budget, **{kind: tier}))
        lp = PlacementLP(request, settings_of(request, fitted(request).place, 1 << 16, Depths()), asked.costs)
        for shares in lp.solve_whole():
            settings = Rounding(lp, shares).settings("last")
            assert settings is not None
            found = getattr(settings.place, kind)
            assert (set(found) if isinstance(found, tuple) else {found}) == {tier}


@pytest.mark.parametrize("form", [ADAM32, ADAM16])
@pytest.mark.parametrize("family", ["vertical", "horizontal"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_where_nothing_is_left_to_choose_the_answer_is_that_of_the_only_placement(
    form: Format, family: str, tier: str
) -> None:
    """Its bound is that of its loads, and it fits exactly if its sizes do; in shares and in whole groups."""
    asked = question(transformer(4, block=40), form=form, wait=True, family=family, device=1 << 40, host=1 << 40)
    pins = {"weights": tier, "state": tier, "gradients": "host", "activations": "host"}
    roomy = replace(asked.request, budget=replace(asked.request.budget, **pins))
    settings = settings_of(roomy, fitted(roomy).place, 1 << 16, Depths())
    place, groups = settings.place, range(len(roomy.program.groups))
    assert {*place.weights, *place.state} == {tier}
    free = PlacementLP(roomy, settings, asked.costs)
    sizes = free.base_sizes("host", "host") + sum(free.group_sizes(g, (tier, tier), "host") for g in groups)
    answers = []
    for device, host in itertools.product((0.99, 1), (0.99, 1)):
        device_bytes, host_bytes = int(sizes[0] * device), int(sizes[1] * host)
        budget = replace(roomy.budget, device=device_bytes, host=host_bytes)
        lp = PlacementLP(replace(roomy, budget=budget), settings, asked.costs)
        for shares in (lp.solve(), lp.solve("host", "host", integer=True)):
            answers.append(shares is not None)
            if shares is not None:
                assert shares.seconds == pytest.approx(lp.bound.seconds(lp.loads.of(place)), rel=1e-9)
                assert [sum(home.values()) for home in shares.homes] == [len(kind.members) for kind in lp.classes]
                assert {home for kind in shares.homes for home in kind} == {(tier, tier)}
    assert answers == [False] * 6 + [True] * 2


def test_patterns() -> None:
    lp_class = PlacementLP(
        *(lambda q: (q.request, fitted(q.request), q.costs))(question(transformer(7), form=ADAM16))
    ).classes
    blocks = max(lp_class, key=lambda kind: len(kind.members))
    counts = {("device", "host"): 2, ("host", "host"): 4}
    last = assign(blocks, counts, "last")
    assert [g for g in blocks.members if last[g] == ("device", "host")] == list(blocks.members[-2:])
    spread = assign(blocks, counts, "spread")
    on_device = [i for i, g in enumerate(blocks.members) if spread[g] == ("device", "host")]
    assert len(on_device) == 2
    assert on_device[1] - on_device[0] == 3


def test_a_solver_is_silent_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS 1.16 prints its name as callbacks are enabled, which would stand in the JSON of a plan."""
    seen: list[Any] = []
    monkeypatch.setattr(highspy.Highs, "enableCallbacks", lambda self: seen.append(self.getOptionValue("output_flag")))
    optimum.Solver()  # type: ignore[no-untyped-call]
    assert [value for _, value in seen] == [False]
