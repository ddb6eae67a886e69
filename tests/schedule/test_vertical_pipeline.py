"""A pipeline of ranks that stream: what crosses is the formula, each rank is proved, all are safe together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.check.order import run_orders
from penstock.schedule.check.worlds import check_world, violations
from penstock.schedule.dealt import dealt_out, program_of_rank, stages_dealt
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import FAMILIES, build
from penstock.schedule.lower.offload import settings
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.lower.seat import pipeline_world, streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.program import ALIGN, Program
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import all_on_disk, sent_bytes
from tests.uniform import uniform_program

LAYERS, ACTIVATION = 8, 10 * ALIGN
PROGRAM = uniform_program(LAYERS, block=64 * ALIGN, embedding=4 * ALIGN, head=4 * ALIGN, activation=ACTIVATION)


def request(ranks: int, micro_batches: int, **options: object) -> FamilyRequest:
    return FamilyRequest(
        family="vertical-pipeline", program=PROGRAM, ranks=ranks, micro_batches=micro_batches, chunks=4, **options
    )


def programs(ranks: int, besides: Sequence[int] = ()) -> list[Program]:
    of_stages = stages_dealt(PROGRAM, ranks)
    return [program_of_rank(PROGRAM, of_stages, rank, ranks, besides=besides) for rank in range(ranks)]


def sent(schedule: Schedule) -> int:
    return schedule.bytes_per_lane().get("send", 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_only_activations_and_their_gradients_cross_and_as_many_as_the_formula_says(ranks: int) -> None:
    """4 T h L / P bytes of bf16 on average: of each block's output, forward and backward, for each micro-batch."""
    micro_batches = 6
    world = build(request(ranks, micro_batches))
    assert sum(map(sent, world.ranks)) == 2 * micro_batches * LAYERS * ACTIVATION
    assert {op.id.kind for schedule in world.ranks for op in schedule.lanes.get("net", ())} == {"AN"}
    for schedule, program in zip(world.ranks, programs(ranks), strict=True):
        assert sent(schedule) == sent_bytes(program, micro_batches)
        assert schedule.bytes_per_lane()["h2d"] < build(request(1, micro_batches)).ranks[0].bytes_per_lane()["h2d"]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "wait", "delay", "activations"),
    list(product((2, 3), (1, 5), (False, True), (0.0, 0.5), ("device", "disk"))),
)
def test_every_rank_is_proved_and_all_are_safe_together(
    ranks: int, micro_batches: int, wait: bool, delay: float, activations: str
) -> None:
    asked = request(ranks, micro_batches, wait=wait, delay=delay, activations=activations)
    world = build(asked)
    check_world(world)
    streaming = FAMILIES[asked.family].streaming
    assert streaming is not None
    for schedule, program in zip(world.ranks, programs(ranks), strict=True):
        prove(schedule, Needs.of(program, settings(asked, streaming)))


def test_every_parameter_has_one_rank_and_every_stage_too() -> None:
    of_ranks = programs(3)
    for group in PROGRAM.groups:
        assert sum(program.groups[group.index].numel for program in of_ranks) == group.numel
    for stage in PROGRAM.stages:
        assert sum(program.has(stage.index) for program in of_ranks) == 1
    assert of_ranks[0].has(0), "rank 0 has the model's own code"
    assert of_ranks[0].has(len(PROGRAM.stages) - 1)


@pytest.mark.parametrize(
    ("blocks", "ranks", "ends", "expected"),
    [
        (8, 4, 0.0, (0, 1, 2, 3, 0, 1, 2, 3)),
        (4, 2, 0.1, (0, 1, 0, 1)),
        (8, 4, 1.0, (0, 1, 2, 3, 1, 2, 3, 1)),
        (4, 2, 9.0, (1, 1, 1, 1)),
        (2, 3, 5.0, (1, 2)),
        (5, 3, 0.0, (0, 1, 2, 1, 2)),
        (8, 4, 0.6, (0, 1, 2, 3, 0, 1, 2, 3)),
    ],
)
def test_blocks_are_dealt_out_in_loops_and_the_first_rank_has_fewer_for_the_ends(
    blocks: int, ranks: int, ends: float, expected: tuple[int, ...]
) -> None:
    assert dealt_out(blocks, ranks, ends) == expected


@given(blocks=st.integers(1, 40), ranks=st.integers(2, 8), ends=st.floats(0, 9))
def test_no_other_deal_leaves_the_busiest_rank_less_to_do(blocks: int, ranks: int, ends: float) -> None:
    assume(blocks >= ranks - 1)
    dealt = dealt_out(blocks, ranks, ends)
    busiest = max(dealt.count(rank) + ends * (not rank) for rank in range(ranks))
    others = (max(first + ends, -(-(blocks - first) // (ranks - 1))) for first in range(blocks - ranks + 2))
    assert busiest == min(others)


def test_rows_that_are_looked_up_are_no_work() -> None:
    """The first has the embedding and the head, and as many blocks as without the embedding."""
    groups = list(PROGRAM.groups)
    large = replace(groups[0], trainable=100 * groups[0].trainable)
    assert PROGRAM.stages[0].forward_reads == (0,)
    assert 0 not in PROGRAM.stages[-1].forward_reads
    grown = replace(PROGRAM, groups=(large, *groups[1:]))
    assert stages_dealt(grown, 3) == stages_dealt(PROGRAM, 3)


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="a pipeline of 10 ranks deals out blocks, and the model has 8"):
        build(request(10, 4))
    tied = replace(PROGRAM.stages[3], forward_reads=PROGRAM.stages[2].forward_reads)
    program = replace(PROGRAM, stages=(*PROGRAM.stages[:3], tied, *PROGRAM.stages[4:]))
    with pytest.raises(ConfigError, match="'block1' are used by 'block1' and by 'block2', which ranks 1 and 0"):
        program_of_rank(program, stages_dealt(program, 2), 0, 2)


def test_ranks_overlap() -> None:
    """Four ranks take little more than a fourth of the time, where each has a micro-batch at any moment."""

    def seconds(op: Op) -> float:
        return {"F": 1.0, "B": 3.0, "E": 0.0}.get(op.id.kind, 0.0)

    costs = Costs(name="compute", seconds=seconds)
    one, four = (simulate(build(request(ranks, 16)), costs).time for ranks in (1, 4))
    assert one == 16 * (LAYERS + 1) * 4, "the prologue takes as long as a block"
    assert four < one / 4 + 16 * 4


@pytest.mark.parametrize(("ranks", "activations"), [(2, "device"), (3, "host"), (4, "disk")])
def test_what_calls_are_handed_besides_comes_once_from_the_first_rank(ranks: int, activations: str) -> None:
    """Masks of two kinds, say: of the first block that a rank has, and of a later one."""
    of_stages = stages_dealt(PROGRAM, ranks)
    besides = [0] * len(PROGRAM.stages)
    for rank in range(1, ranks):
        besides[of_stages.index(rank)] = 7 * ALIGN
    besides[len(besides) - 1 - of_stages[::-1].index(ranks - 1)] = 3 * ALIGN
    asked = request(ranks, 3, activations=activations)
    streaming = FAMILIES[asked.family].streaming
    assert streaming is not None
    s, seat, schedules = settings(asked, streaming), streaming_seat(1, pipe=ranks), []
    for program, plain in zip(programs(ranks, besides), programs(ranks), strict=True):
        assert program.dealt is not None
        schedules.append(lower_step("vertical", program, s, (), "besides", seat))
        prove(schedules[-1], Needs.of(program, s))
        more = 3 * sum(besides) * (program.dealt.rank == 0)
        assert sent(schedules[-1]) == sent_bytes(program, 3) == sent_bytes(plain, 3) + more
        kept = [sum(stage.kept for stage in p.stages) for p in (program, plain)]
        assert kept[0] - kept[1] == sum(n for k, n in enumerate(besides) if program.has(k)), "until the step's end"
    check_world(World(name="besides", ranks=tuple(schedules), groups={"all": tuple(range(ranks))}))


def handed(
    ranks: int,
    layers: int,
    micro_batches: int,
    besides: Callable[[Sequence[int]], Sequence[int]],
    counts: Sequence[int] | None = None,
) -> World:
    """A pipeline in which stages are handed something besides, by the rank of each stage; proved. ``counts``: blocks of
    each rank."""
    whole = uniform_program(layers, block=64 * ALIGN, embedding=4 * ALIGN, head=4 * ALIGN, activation=ACTIVATION)
    of_stages = stages_dealt(whole, ranks, counts)
    sizes = besides(of_stages)
    of_ranks = [program_of_rank(whole, of_stages, rank, ranks, besides=sizes) for rank in range(ranks)]
    s = all_on_disk(whole, chunk=64 * ALIGN, micro_batches=micro_batches)
    schedules = [lower_step("vertical", of, s, seat=streaming_seat(1, pipe=ranks)) for of in of_ranks]
    for of, schedule in zip(of_ranks, schedules, strict=True):
        prove(schedule, Needs.of(of, s))
    return pipeline_world(schedules)


@settings_of_hypothesis(max_examples=40)
@given(st.data())
def test_what_is_handed_besides_to_any_stages_holds_up_no_rank_for_good(data: st.DataObject) -> None:
    ranks, micro_batches = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 7))
    counts = [data.draw(st.integers(rank > 0, 3)) for rank in range(ranks)]

    def any_of_them(of_stages: Sequence[int]) -> list[int]:
        return [bool(rank) * data.draw(st.sampled_from((0, ALIGN))) for rank in of_stages]

    world = handed(ranks, sum(counts), micro_batches, any_of_them, counts)
    check_world(world)
    run_orders(world)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (8, 16)])
def test_what_each_rank_is_handed_besides_delays_none(ranks: int, micro_batches: int) -> None:
    """Position embeddings, say: a rank that had them only after the last micro-batch's would begin that much later."""
    costs = Costs(name="compute", seconds=lambda op: {"compute": 1.0, "send": 0.01, "recv": 0.01}.get(op.lane, 0.0))

    def once(of_stages: Sequence[int]) -> list[int]:
        return [(rank > 0 and rank not in of_stages[:k]) * ALIGN for k, rank in enumerate(of_stages)]

    without, found = (
        simulate(handed(ranks, 2 * ranks, micro_batches, besides), costs).time
        for besides in (lambda of_stages: [0] * len(of_stages), once)
    )
    assert without <= found < without + 0.01 * (ranks + micro_batches)


def broken(world: World, rank: int, change: "dict[str, Op | None]") -> World:
    """The world with some ops of a rank replaced; None: left out."""
    schedule = world.ranks[rank]
    ops = tuple(new for op in schedule.ops if (new := change.get(op.id, op)) is not None)
    return replace(world, ranks=tuple(replace(s, ops=ops) if r == rank else s for r, s in enumerate(world.ranks)))


def test_a_message_that_is_missing_too_early_or_of_something_else_is_refused() -> None:
    world = build(request(2, 2))
    program = programs(2)[1]
    streaming = FAMILIES["vertical-pipeline"].streaming
    assert streaming is not None
    needs = Needs.of(program, settings(request(2, 2), streaming))
    by_id = world.ranks[1].by_id
    assert any("has no op SA2m0" in fault for fault in violations(broken(world, 1, {"SA2m0": None})))
    early = broken(world, 1, {"F2m0": replace(by_id["F2m0"], after=by_id["F2m0"].after[:-1])})
    assert violations(early), "a stage that does not wait for what it receives"
    other = replace(by_id["SA2m0"], reads=by_id["SA2m1"].reads)
    with pytest.raises(ScheduleError, match="op SA2m0 sends A2m1, which is something else"):
        prove(broken(world, 1, {"SA2m0": other}).ranks[1], needs)
    with pytest.raises(ScheduleError, match="is to or from rank 3, and rank 0 has stage 3"):
        prove(broken(world, 1, {"SA2m0": replace(by_id["SA2m0"], peer=3)}).ranks[1], needs)


def test_a_pool_that_is_too_small_for_messages_that_meet_is_a_deadlock() -> None:
    """What is sent lies nowhere in between: a rank that cannot receive holds up the one that sends."""
    world = build(request(2, 8))
    run_orders(world)
    pools = [tuple(replace(p, count=1) if p.name == "received" else p for p in s.pools) for s in world.ranks]
    small = replace(world, ranks=tuple(replace(s, pools=p) for s, p in zip(world.ranks, pools, strict=True)))
    with pytest.raises(ScheduleError, match="deadlock"):
        run_orders(small)
