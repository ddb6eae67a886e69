"""Whatever a model is and wherever its state lives: its schedule is safe, ends, and adds gradients up in one order.

``make proofs`` tries many more programs than ``make test``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Budget, Family, Tier
from penstock.errors import BudgetError
from penstock.planner.fit import fit
from penstock.planner.plan import Plan
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.search import search
from penstock.schedule.check import check
from penstock.schedule.check.order import run_order
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.seat import streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN, GroupSpec, Program, Stage
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.any_program import FORMATS, AnyCase, cases, programs
from tests.conftest import Campaign
from tests.questions import question

T = TypeVar("T")


def proved(campaign: Campaign, strategy: st.SearchStrategy[T], holds: Callable[[T], None], few: int) -> None:
    """``holds`` for examples of a strategy: the same few in each run, or many new ones in a campaign."""
    count = campaign.cases(few, 18_000)
    settings(max_examples=count, deadline=None, derandomize=not campaign.full, database=None)(given(strategy)(holds))()


def uneven(op: Op) -> float:
    """Costs under which no two lanes keep step."""
    return {"compute": 0.9, "h2d": 1.7, "read": 2.3}.get(op.lane, 0.31) + op.nbytes / 50_000


def test_every_schedule_of_every_program_is_safe_computes_its_step_and_ends(campaign: Campaign) -> None:
    def holds(case: AnyCase) -> None:
        schedule = case.build()
        check(schedule)
        prove(schedule, Needs.of(case.program, case.settings))
        result = simulate(World.of(schedule), Costs(name="uneven", seconds=uneven))
        for tier in ("device", "host"):
            assert result.peak(0)[tier] <= schedule.peak_bytes(tier)

    proved(campaign, cases(), holds, few=30)


def below(places: tuple[Tier, ...]) -> tuple[Tier, ...]:
    return tuple("host" if tier == "device" else tier for tier in places)


@pytest.mark.parametrize(("size", "copies", "hosts"), [(2, 1, 1), (3, 1, 1), (2, 2, 1), (4, 1, 2), (6, 1, 2)])
def test_every_schedule_of_ranks_that_share_a_program_is_safe_computes_its_step_and_ends(
    size: int, copies: int, hosts: int, campaign: Campaign
) -> None:
    """Each has its part of every group, on disk or in memory, or all of it, of one copy of the state or of two, on one
    host or two; what they add up is whole on each of them before."""
    ranks = Mesh(data=size).everyone()

    def holds(case: AnyCase) -> None:
        place, stage = case.settings.place, case.settings.stage if copies == 1 else case.settings.stage or 3
        shared = replace(place, weights=below(place.weights), state=below(place.state))
        part = ranks.part(case.program) if stage else case.program
        for secondary in (False, True) if stage == 3 and copies == 1 else (False,):
            asked = replace(case.settings, place=shared, stage=stage, secondary=secondary)
            seat = streaming_seat(size, stage, copies, hosts, secondary=secondary)
            schedule = lower_step(case.family, part, asked, seat=seat)
            world = seat.world(schedule)
            check_world(world)
            prove(schedule, Needs.of(part, asked, size, copies, seat.hosts.size))
            simulate(world, Costs(name="uneven", seconds=uneven))

    proved(campaign, cases(), holds, few=10)


def test_weights_are_loaded_ahead_only_as_far_as_buffers_reach(campaign: Campaign) -> None:
    """A load that waits for a visit holds up all that its lane has to do before that visit: so as the ops are written
    down, each load finds a buffer."""

    def holds(case: AnyCase) -> None:
        schedule = case.build()
        left = {pool.name: pool.count for pool in schedule.pools if pool.name.startswith("weights.")}
        pool_of: dict[str, str] = {}
        for op in schedule.ops:
            for name, pool in op.takes:
                if pool in left:
                    pool_of[name], left[pool] = pool, left[pool] - 1
                    assert left[pool] >= 0, op.id
            for name in op.gives:
                if name in pool_of:
                    left[pool_of[name]] += 1

    proved(campaign, cases(), holds, few=20)


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_new_weights_on_their_way_up_are_not_held_up_by_loads(order: Family, depth: int) -> None:
    """Three groups of every stage move, a large one lives on the device and is stepped on the host in many chunks."""
    stages, groups = [], []
    for k in range(6):
        own = tuple(range(4 * k, 4 * k + 4))
        groups += [
            GroupSpec(index=g, name=f"g{g}", trainable=(40 if g == own[-1] else 5) * ALIGN, frozen=0) for g in own
        ]
        size = 100 if k < 5 else 0
        stages.append(
            Stage(
                index=k,
                kind="segment" if k in (0, 5) else "call",
                name=f"stage{k}",
                forward_reads=own,
                backward_reads=own,
                gradients=own,
                activation=size,
                gradient=size,
                kept=0,
                forward_peak=0,
                backward_peak=0,
            )
        )
    program = Program(groups=tuple(groups), stages=tuple(stages))
    place = Placement(
        weights=("disk", "disk", "disk", "device") * 6,
        state=("host",) * 24,
        gradients="host",
        activations="host",
    )
    few = Depths(weights=depth, gradients=1, stage_in=1, stage_out=1, state=1, activations=1)
    form = Format.of("bf16", 2)
    check(
        lower_step(
            order, program, Settings(micro_batches=2, chunk=ALIGN, form=form, place=place, depths=few, wait=False)
        )
    )


Sum = tuple[object, ...]
"""A gradient as the sums that made it: (stage, micro-batch) or ("+", what was there, what was added)"""


def gradients(schedule: Schedule) -> dict[tuple[int, int], Sum]:
    """What the optimizer steps each chunk with, or what the step leaves for the next one: (group, chunk) -> sum."""
    held: dict[str, Sum] = {}
    disk: dict[str, Sum] = {}
    found: dict[tuple[int, int], Sum] = {}
    for op in run_order(schedule):
        word = op.id
        if word.kind in "BE":
            for name in op.writes:
                if name.startswith("G"):
                    part: Sum = (word.stage, word.micro_batch)
                    held[name] = ("+", held[name], part) if name in held else part
        elif word.kind == "DG":
            held[op.writes[0]] = held[op.reads[0]]
        elif word.kind in ("AG", "AD"):
            into, what = op.reads
            held[into] = ("+", held[into], held.pop(what))
        elif word.kind == "WG":
            disk[op.id[1:]] = held.pop(op.reads[0])
        elif word.kind == "RG" and op.id[1:] in disk:
            held[op.writes[0]] = disk.pop(op.id[1:])
        elif word.kind in ("OP", "MU") and op.reads[0] in held:
            found[word.group, word.chunk] = held.pop(op.reads[0])
        elif word.kind == "OD":
            found[word.group, -1] = held.pop(op.reads[0])
    for start, end, _ in schedule.carried:
        if start.holds == "chunk of gradient":  # and no state that is read for the next step
            found[start.group, start.chunk] = held.pop(end)
    for tag, left in disk.items():
        group, chunk = map(int, tag[1:].split("."))
        found[group, chunk] = left
    return found


def in_strands(stage: int, micro_batches: int, strands: int) -> Sum:
    """Level by level: neighbours are added up, and one that is left over, or alone, goes on as it is."""
    level: list[Sum | None] = []
    for s in range(strands):
        own: Sum | None = None
        for m in range(s * micro_batches // strands, (s + 1) * micro_batches // strands):
            own = (stage, m) if own is None else ("+", own, (stage, m))
        level.append(own)
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [both(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    assert level[0] is not None
    return level[0]


def both(one: Sum | None, other: Sum | None) -> Sum | None:
    return ("+", one, other) if one is not None and other is not None else one or other


def test_gradients_are_added_up_in_one_order(campaign: Campaign) -> None:
    """Micro-batches in order within a strand, strands in pairs, then stages in backward order, whatever the family and
    the settings."""

    def holds(case: AnyCase) -> None:
        found = gradients(case.build())
        stages: dict[int, list[int]] = {}
        for stage in reversed(case.program.stages if case.settings.train else ()):
            for g in stage.gradients:
                stages.setdefault(g, []).append(stage.index)
        assert {g for g, _ in found} == stages.keys()
        for (g, _), total in found.items():
            expected: Sum | None = None
            for k in stages[g]:
                part = in_strands(k, case.settings.micro_batches, case.settings.strands)
                expected = part if expected is None else ("+", expected, part)
            assert total == expected

    proved(campaign, cases(), holds, few=25)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question to the planner, and whether it has a machine to search with."""

    question: Question
    searched: bool

    def plan(self) -> Plan:
        return search(self.question).plan if self.searched else fit(self.question.request)

    def with_budget(self, **sizes: int) -> "Asked":
        request = self.question.request
        return replace(self, question=replace(self.question, request=with_budget(request, **sizes)))


def with_budget(request: Request, **sizes: int) -> Request:
    return replace(request, budget=replace(request.budget, **sizes))


@st.composite
def questions(draw: st.DrawFn) -> Asked:
    """Any program with any budget, from far too little to more than it can use."""
    program, form = draw(programs(stages=6, groups=6)), draw(FORMATS.filter(lambda f: f.moments == 2))
    family: Family = draw(st.sampled_from(("vertical", "horizontal")))
    wait, disk = draw(st.booleans()), draw(st.booleans())
    sizes = st.sampled_from((1, 100_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 1 << 40))
    asked = question(program, form=form, wait=wait, family=family, micro_batches=draw(st.integers(1, 3)))
    tiers: st.SearchStrategy[Any] = st.sampled_from((None, None, None, "host", "disk" if disk else "host"))
    budget = Budget(
        device=draw(sizes),
        host=draw(sizes),
        disk="store" if disk else None,
        weights=draw(tiers),
        state=draw(tiers),
        activations=draw(tiers),
        gradients=draw(tiers) if wait else None,
    )
    early: Any = draw(st.sampled_from((False, None)))
    delay: Any = draw(st.sampled_from((0.0, None, 0.5))) if family == "vertical" else 0.0
    request = replace(asked.request, budget=budget, speculate=early, delay=delay)
    return Asked(question=replace(asked, request=request, simulated_ops=4000), searched=draw(st.booleans()))


def planned(asked: Asked) -> tuple[Plan | None, list[tuple[str, int]]]:
    """A plan, or the tier that is too small and what it takes, as the refusal says."""
    try:
        return asked.plan(), []
    except BudgetError as error:
        found = re.search(
            r"budget\.(device|host)=.* (?:the smallest that works|enough) is .* \((\d+) bytes\)", str(error)
        )
        if found is None:
            raise
        return None, [(found[1], int(found[2]))]


def waiting_on_disk(plan: Plan) -> int:
    """Bytes of what waits there no longer than a step: each saved activation, and whole gradients."""
    written = plan.schedule.lanes["write"]
    waiting = {op.id.group for op in written if op.id.kind == "WG"}
    gradients = sum(plan.program.groups[g].trainable * (2 if g in plan.schedule.narrow else 4) for g in waiting)
    return gradients + sum(op.nbytes for op in written if op.id.kind == "WC")


def test_every_plan_is_safe_and_within_its_budget_or_refused_with_what_would_do(campaign: Campaign) -> None:
    """Whoever follows the refusals comes to a plan."""

    def holds(asked: Asked) -> None:
        for _ in range(4):
            plan, wanted = planned(asked)
            if plan is not None:
                break
            assert all(nbytes > getattr(asked.question.request.budget, f"{tier}_bytes") for tier, nbytes in wanted)
            asked = asked.with_budget(**dict(wanted))
        assert plan is not None
        check(plan.schedule)
        prove(plan.schedule, Needs.of(plan.program, plan.settings))
        budget = asked.question.request.budget
        assert plan.device_bytes <= budget.device_bytes
        assert plan.host_bytes <= budget.host_bytes
        assert asked.question.request.scratch_bytes(plan.settings) >= waiting_on_disk(plan)

    proved(campaign, questions(), holds, few=16)
