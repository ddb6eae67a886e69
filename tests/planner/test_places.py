"""Ranks of a pipeline that do the same are lowered once, and nothing comes out otherwise for it."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from penstock.config import Budget, Family
from penstock.hardware.machine import Machine, Network
from penstock.planner import dealt
from penstock.planner.dealt import Pace, plans_of, preferred
from penstock.planner.fit import fit
from penstock.planner.pipelines import pipeline, simulated
from penstock.planner.places import Asked, Places, Plans
from penstock.planner.request import Request
from penstock.schedule.dealt import programs_of_ranks, stages_dealt
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Format, Settings
from penstock.schedule.program import ALIGN
from penstock.shape.model import StageTimes
from penstock.sim.costs import Costs
from penstock.sim.result import Simulation
from penstock.sim.template import Rank, Template, ranks_of
from tests.planner.test_layouts import FAST, SLOW, as_pipelines, asked
from tests.uniform import uniform_program

INTEGERS = ("free", "lane", "queues", "missing", "dependents", "takes", "gives", "channel")


def random_pipeline(seed: int, family: Family = "vertical") -> tuple[list[Asked], Pace]:
    """A pipeline of few blocks or many to a rank, in which also masks may cross; on ranks that see what they do
    otherwise, here and there."""
    rng = Random(seed)
    ranks, beside = rng.randint(3, 12), rng.choice((1, 1, 2))
    layers = rng.randint(ranks - 1, 3 * ranks)
    whole = uniform_program(
        layers,
        block=rng.choice((16, 64)) * ALIGN,
        embedding=4 * ALIGN,
        head=4 * ALIGN,
        activation=10 * ALIGN,
        graph=rng.choice((None, 5 * ALIGN)),
    )
    program = Mesh(data=beside).everyone().part(whole)
    of_stages = stages_dealt(whole, ranks, _deal(rng, layers, ranks), family)
    mask = rng.choice((0, 0, 0, 64))
    besides = [mask * (stage.kind == "call" and of_stages[stage.index] > 0) for stage in whole.stages]
    device, state = rng.choice((6, 1 << 20)) << 20, rng.choice(("disk", "host"))
    request = Request(
        program=program,
        budget=Budget(device=device, host=1 << 40, disk="store", state=state),
        form=Format.of("bf16", 2),
        micro_batches=rng.randint(1, 5),
        wait=rng.random() < 0.5,
        delay=rng.choice((None, 0.0, 0.5)),
        family=family,
        inputs=4096,
        ranks=beside,
    )
    slow, odd = rng.choice(((), (), (rng.randrange(ranks),))), rng.choice((-1, -1, rng.randrange(layers)))
    n = len(whole.stages)
    times = StageTimes(
        forward=tuple(0.01 + 0.007 * (k == odd) for k in range(n)), backward=tuple(0.021 for _ in range(n))
    )
    border = rng.randint(1, ranks)

    def machine(rank: int) -> Machine:
        return replace(SLOW if rank in slow else FAST, network=Network(bandwidth=1e8, latency=1e-4))

    def link(rank: int, peer: int) -> Network:
        return Network(bandwidth=2e7 if (rank < border) == (peer < border) else 3e6, latency=1e-4)

    programs = programs_of_ranks(program, of_stages, ranks, besides=besides)
    pace = Pace(machine=machine, times=lambda _: times, link=link, optimizer="adamw.bf16")
    return [Asked(request=replace(request, program=program)) for program in programs], pace


def _deal(rng: Random, layers: int, ranks: int) -> Sequence[int] | None:
    """Blocks of each rank, as some deal has them; None: the deal by what they compute."""
    if rng.random() < 0.6:
        return None
    counts = [0] + [1] * (ranks - 1)
    for _ in range(layers - sum(counts)):
        counts[rng.randrange(ranks)] += 1
    return counts


def check_as_each_alone(plans: Plans, pace: Pace) -> None:
    """A plan that each rank's own request has made, and a world of all of their schedules."""
    each = Plans.of([*plans])
    assert each.twin == range(len(plans))
    shared, alone = pace.step(plans), pace.step(each)
    assert shared.seconds == alone.seconds
    for name in ("starts", "takes", "ends", "waits", "alone"):
        assert getattr(shared.simulation, name) == getattr(alone.simulation, name), name
    assert np.array_equal(shared.simulation.triggers, alone.simulation.triggers)
    costs = [pace.costs(rank, plan) for rank, plan in enumerate(each)]
    few = ranks_of(plans.world, [costs[first] for first in plans.twin])
    for rank, (one, own) in enumerate(zip(few, ranks_of(each.world, costs), strict=True)):
        assert_same(one, own)
        assert plans.sent(rank) == each.sent(rank)
        assert plans.figures(rank).state_bytes == each[rank].state_bytes
        assert plans.figures(rank).schedule.bytes_per_lane() == each[rank].schedule.bytes_per_lane()
        assert plans.figures(rank).taken_back_bytes == each[rank].taken_back_bytes


def assert_same(few: Rank, own: Rank) -> None:
    """One schedule and the other are the same but for the names in them, and so is where messages arrive."""
    one, other = few.template, own.template
    assert one.schedule.fixed == other.schedule.fixed
    assert [(p.tier, p.size, p.count) for p in one.schedule.pools] == [
        (p.tier, p.size, p.count) for p in other.schedule.pools
    ]
    assert [(op.id.kind, op.nbytes) for op in one.ops] == [(op.id.kind, op.nbytes) for op in other.ops]
    for name in INTEGERS:
        assert getattr(one, name) == getattr(other, name), name
    assert one.seconds == other.seconds
    assert _arrivals(few) == _arrivals(own)


def _arrivals(rank: Rank) -> list[tuple[int, int] | None]:
    return list(rank.to)


TELLING = (1, 4, 9, 11, 22, 27, 34, 36)
"""Pipelines of which some come out otherwise if anything that twins have in common is left out of what they are told
apart by: times of stages (22 alone), links, or what is passed on (1 and 11)."""


@pytest.mark.parametrize("seed", TELLING)
def test_twins_do_what_each_would_do_alone_op_by_op(seed: int) -> None:
    everyone, pace = random_pipeline(seed)
    check_as_each_alone(preferred(everyone, pace).plans, pace)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("seed", [seed for seed in range(40) if seed not in TELLING])
def test_twins_of_any_pipeline_do_so_too(seed: int) -> None:
    test_twins_do_what_each_would_do_alone_op_by_op(seed)


def test_there_are_twins_among_these_pipelines_and_ranks_that_are_none() -> None:
    """Those that only see otherwise, or have a mask sooner, among them."""
    found = [Places(*random_pipeline(seed)) for seed in range(40)]
    assert sum(len(places.firsts) < len(places.twin) for places in found) > 20
    assert sum(len(places.firsts) > len(places.kinds) for places in found) > 10


def test_ranks_that_take_turns_have_no_twins() -> None:
    """They have other numbers of micro-batches under way."""
    everyone, pace = random_pipeline(3, "1f1b")
    places = Places(everyone, pace)
    assert places.firsts == list(range(len(everyone)))


def pipeline_with_a_rank_for_itself(case: str) -> list[Asked]:
    """The ranks of a pipeline of which 1 to 3 have a large block and a small one each, and rank 2 besides what the
    ``case`` says."""
    whole = uniform_program(7, block=ALIGN, embedding=ALIGN, head=ALIGN, splits=False)
    groups, stages = list(whole.groups), list(whole.stages)
    of_stages, own = (0, 1, 2, 3, 1, 2, 3, 0, 0), {k: k + 1 for k in range(1, 8)}
    shares = case == "one group for two stages"
    if case == "groups in another order":
        own |= {2: own[5], 5: own[2]}
    for k, g in own.items():
        groups[g] = replace(groups[g], trainable=(64 if k < 4 or shares else 16) * ALIGN)
    if shares:
        own[5] = own[2]
    for k, g in own.items():
        stages[k] = replace(stages[k], forward_reads=(g,), backward_reads=(g,), gradients=(g,), activation=10 * ALIGN)
    if case == "a stage that trains nothing":
        stages[5] = replace(stages[5], gradients=())
    holders = [0, 0, *(of_stages[g - 1] for g in range(2, 9))]
    if case == "groups in another order":
        holders[3], holders[6] = 2, 2
    if case == "a group that no stage uses":
        groups.append(replace(groups[2], index=len(groups), name="unused"))
        holders.append(2)
    programs = programs_of_ranks(
        replace(whole, groups=tuple(groups), stages=tuple(stages)), of_stages, 4, holders=holders
    )
    request = Request(
        program=programs[0],
        budget=Budget(device="8MiB", host=4600 << 10, disk="store", durability="interval"),
        form=Format.of("bf16", 2),
        micro_batches=2,
        wait=True,
        inputs=4096,
        ranks=2,
    )
    return [Asked(request=replace(request, program=program)) for program in programs]


@pytest.mark.parametrize(
    "case",
    [
        "nothing",
        "a group that no stage uses",
        "one group for two stages",
        "groups in another order",
        "a stage that trains nothing",
    ],
)
def test_ranks_are_alike_only_if_their_groups_are(case: str) -> None:
    everyone = pipeline_with_a_rank_for_itself(case)
    plans = plans_of(everyone)
    for one, plan in zip(everyone, plans, strict=True):
        assert str(plan.schedule) == str(fit(one.request).schedule)
    assert (Places(everyone).like[2] == 1) == (case == "nothing")


def test_a_search_goes_by_the_simulation_that_each_rank_alone_would_have_had() -> None:
    found = simulated(*as_pipelines(asked((FAST, 6), each=1, layers=17, batch=6, delay=None)), 1).improved(
        lambda _: None
    )
    assert len(found.step.plans.firsts) < 6
    check_as_each_alone(found.step.plans, found.pace)
    assert found.step.seconds == found.pace.step(Plans.of([*found.step.plans])).seconds


def test_of_many_places_few_are_lowered_and_simulated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where hosts have several of them and some have a block more: so that 1,024 take a minute, not an hour. The
    programs that a search probes are as many for any number of places."""
    lowered, templates, worlds = list[int](), list[int](), list[int]()
    build, make, run = Request.build, Template.__init__, dealt.simulate

    def counted(request: Request, settings: Settings) -> Schedule:
        lowered.append(len(request.program.stages))
        return build(request, settings)

    def made(template: Template, schedule: Schedule, costs: Costs) -> None:
        templates.append(len(schedule.ops))
        make(template, schedule, costs)

    def simulated_once(world: World, costs: Sequence[Costs]) -> Simulation:
        worlds.append(len(world.ranks))
        return run(world, costs)

    monkeypatch.setattr(Request, "build", counted)
    monkeypatch.setattr(Template, "__init__", made)
    monkeypatch.setattr(dealt, "simulate", simulated_once)
    what, layout, _ = as_pipelines(replace(asked((FAST, 32), each=4, layers=150, batch=8, delay=None), size=1))
    found = pipeline(what, layout)
    assert set(worlds) == {128}
    assert 0 < sum(n == 152 for n in lowered) <= 12 * len(worlds)
    assert 0 < len(templates) <= 12 * len(worlds)
    assert sum(host.blocks * host.hosts for host in found.hosts) >= 150
