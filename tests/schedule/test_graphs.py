"""Graphs that are kept on the device from a call's forward to its backward: which calls these are, in which buffers,
and what a proof asks of them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.check.order import run_orders
from penstock.schedule.check.worlds import check_world
from penstock.schedule.dealt import program_of_rank, stages_dealt
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.lower.families import FAMILIES, build
from penstock.schedule.lower.offload import settings
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.place import Depths
from penstock.schedule.program import ALIGN, Program
from tests.programs import Case, all_on_disk
from tests.uniform import uniform_program

LAYERS, MICRO_BATCHES, GRAPH = 4, 3, 50 * ALIGN
OF_PIPELINES = ("vertical-pipeline", "streamed-1f1b", "streamed-interleaved-1f1b")


def program(layers: int = LAYERS) -> Program:
    size = 16 * ALIGN
    return uniform_program(layers, block=size, embedding=size, head=size, activation=10 * ALIGN, graph=GRAPH)


def case(family: str, graphs: int, *, activations: str = "host") -> Case:
    s = all_on_disk(program(), chunk=5 * ALIGN, micro_batches=MICRO_BATCHES, depths=Depths(graphs=graphs))
    s = replace(s, place=replace(s.place, activations=activations))  # type: ignore[arg-type]
    return Case(program=program(), settings=s, family=family)


def with_graph(schedule: Schedule) -> list[tuple[int, int]]:
    """(stage, micro-batch) of the calls that keep their graph, in the order of their forwards."""
    return [
        (o.id.stage, o.id.micro_batch)
        for o in schedule.ops
        if o.id.kind == "F" and any(b.kind == "K" for b in o.writes)
    ]


def most_held(schedule: Schedule, pool: str) -> int:
    held = most = 0
    mine: set[str] = set()
    for op in schedule.ops:
        fresh = {buffer for buffer, of in op.takes if of == pool}
        mine |= fresh
        held += len(fresh)
        most = max(most, held)
        held -= len(mine.intersection(op.gives))
    return most


@pytest.mark.parametrize(
    ("graphs", "kept"),
    [
        (0, []),
        (1, [(4, 2)]),
        (4, [(3, 2), (4, 0), (4, 1), (4, 2)]),
        (6, [(k, m) for k in (3, 4) for m in range(3)]),
        (99, [(k, m) for k in (1, 2, 3, 4) for m in range(3)]),
    ],
)
def test_vertically_the_last_calls_keep_theirs(graphs: int, kept: list[tuple[int, int]]) -> None:
    schedule = case("vertical", graphs).build()
    check(schedule)
    assert with_graph(schedule) == kept
    assert most_held(schedule, "graphs.0") == len(kept)


@pytest.mark.parametrize(("graphs", "stages"), [(1, [4]), (3, [2, 3, 4]), (99, [1, 2, 3, 4])])
def test_horizontally_each_micro_batch_keeps_those_of_its_last_calls_in_the_same_buffers(
    graphs: int, stages: list[int]
) -> None:
    schedule = case("horizontal", graphs).build()
    check(schedule)
    assert with_graph(schedule) == [(k, m) for m in range(MICRO_BATCHES) for k in stages]
    assert most_held(schedule, "graphs.0") == len(stages)


@pytest.mark.parametrize(("family", "under_way"), [("vertical", MICRO_BATCHES), ("horizontal", 1)])
def test_graphs_of_blocks_that_are_far_from_alike_take_their_own_sizes(family: str, under_way: int) -> None:
    """One large block among small ones: each call counts for what its own graph holds, not for the largest."""
    sizes, alike = {1: GRAPH, 2: GRAPH // 25, 3: GRAPH // 50, 4: GRAPH // 50}, program()
    stages = (replace(s, graph=sizes.get(s.index)) for s in alike.stages)
    other = replace(alike, stages=tuple(stages))
    for graphs, kept in ((99, sizes), (2 * under_way, (3, 4))):
        schedule = replace(case(family, graphs), program=other).build()
        check(schedule)
        prove(schedule, Needs.of(other, case(family, graphs).settings))
        pools = [pool for pool in schedule.pools if pool.name.startswith("graphs.")]
        assert sum(pool.size * pool.count for pool in pools) == under_way * sum(sizes[k] for k in kept)
        assert [pool.count for pool in pools] == [most_held(schedule, pool.name) for pool in pools]


@pytest.mark.parametrize(("family", "tier"), list(product(("vertical", "horizontal"), ("device", "host", "disk"))))
def test_what_a_graph_holds_stays(family: str, tier: str) -> None:
    """Its call's input neither leaves nor comes back, and no pool is larger than it has to be."""
    whole = case(family, 0, activations=tier).build()
    for graphs in (2, 5, 99):
        schedule = case(family, graphs, activations=tier).build()
        check(schedule)
        prove(schedule, Needs.of(program(), case(family, graphs, activations=tier).settings))
        kept = set(with_graph(schedule))
        for kind in ("DC", "UC", "WC", "RC"):
            moved = {(op.id.stage + 1, op.id.micro_batch) for op in schedule.ops if op.id.kind == kind}
            before = {(op.id.stage + 1, op.id.micro_batch) for op in whole.ops if op.id.kind == kind}
            assert not moved & kept
            assert moved <= before
            assert {stage for stage, _ in before - moved - kept} <= {LAYERS}, "of the last block more have room"
        for pool in schedule.pools:
            if pool.name in ("activations", "saved_activations") and pool.count:
                assert most_held(schedule, pool.name) <= pool.count <= most_held(schedule, pool.name) + 5


@pytest.mark.parametrize("family", ["vertical", "horizontal", "vertical-pipeline"])
def test_outputs_that_stay_anyway_take_no_buffers_of_saved_activations(family: str) -> None:
    """A stage whose output others read, too (a skip), has no saved activation: its bytes are among those kept."""
    of, skips = program(), (1, 2)
    stages = (replace(s, activation=0, gradient=0) if s.index in skips else s for s in of.stages)
    asked = FamilyRequest(
        family=family, program=replace(of, stages=tuple(stages)), ranks=2 if family == "vertical-pipeline" else 1,
        micro_batches=MICRO_BATCHES, chunks=2, activations="device",
    )  # fmt: skip
    world = build(asked)
    check_world(world)
    run_orders(world)
    for schedule in world.ranks:
        pools = [pool for pool in schedule.pools if pool.name in ("activations", "received")]
        assert pools
        assert [pool.count for pool in pools] == [most_held(schedule, pool.name) for pool in pools]


@pytest.mark.parametrize(("family", "graphs", "tier"), list(product(OF_PIPELINES, (1, 3, 7, 99), ("device", "host"))))
def test_every_rank_of_a_pipeline_is_proved_and_all_end(family: str, graphs: int, tier: str) -> None:
    of, ranks, count = program(8), 3, 5
    asked = FamilyRequest(
        family=family, program=of, ranks=ranks, micro_batches=count, chunks=2, depths=Depths(graphs=graphs),
        activations=tier,  # type: ignore[arg-type]
    )  # fmt: skip
    world, streaming = build(asked), FAMILIES[family].streaming
    assert streaming is not None
    check_world(world)
    run_orders(world)
    of_stages, found = stages_dealt(of, ranks, family=streaming.order), Counter[int]()
    for rank, schedule in enumerate(world.ranks):
        prove(schedule, Needs.of(program_of_rank(of, of_stages, rank, ranks), settings(asked, streaming)))
        pools = {pool.name: pool.count for pool in schedule.pools}
        assert most_held(schedule, "graphs.0") <= pools.get("graphs.0", 0) <= graphs
        found.update(stage for stage, _ in with_graph(schedule))
    if family == "vertical-pipeline":
        assert sum(found.values()) == min(3 * graphs, 8 * count)
    else:
        assert set(found.values()) <= {count}, "of a stage all are kept, or none"
    assert graphs < 99 or found == dict.fromkeys(range(1, 9), count)


def test_a_backward_in_two_parts_keeps_none() -> None:
    asked = FamilyRequest(
        family="streamed-zero-bubble", program=program(), ranks=2, micro_batches=3, chunks=2, depths=Depths(graphs=9)
    )
    assert not any(with_graph(schedule) for schedule in build(asked).ranks)


def test_an_evaluation_keeps_none() -> None:
    one = case("vertical", 9)
    schedule = replace(one, settings=replace(one.settings, train=False)).build()
    assert not with_graph(schedule)
    assert not [pool for pool in schedule.pools if pool.name.startswith("graphs")]


def changed(schedule: Schedule, ident: str, change: Callable[[Op], Op]) -> Schedule:
    ops = tuple(change(op) if op.id == ident else op for op in schedule.ops)
    return parse_schedule(str(replace(schedule, ops=ops)))


def test_a_proof_knows_what_can_be_kept_what_that_takes_and_who_needs_it() -> None:
    one = case("vertical", 99)
    schedule, needs = one.build(), Needs.of(one.program, one.settings)
    prove(schedule, needs)

    def of(graph: int | None) -> Needs:
        stages = (s if s.graph is None else replace(s, graph=graph) for s in one.program.stages)
        return replace(needs, program=replace(one.program, stages=tuple(stages)))

    with pytest.raises(ScheduleError, match=r"op F1m0 has K1m0, and the graph of its stage cannot be kept"):
        prove(schedule, of(None))
    with pytest.raises(
        ScheduleError, match=r"op F1m0 needs \d+ bytes on the device, counted for K1m0, and pool graphs.0 is"
    ):
        prove(schedule, of(GRAPH + 1))
    unread = changed(schedule, "B3m1", lambda op: replace(op, reads=tuple(b for b in op.reads if b != "K3m1")))
    with pytest.raises(ScheduleError, match=r"op B3m1 needs the graph that its forward has kept"):
        prove(unread, needs)


def test_a_proof_refuses_an_input_that_leaves_and_comes_back_beside_its_graph() -> None:
    """What the graph holds stays where it was, and would count twice."""
    away, kept = case("vertical", 0).build(), case("vertical", 99).build()
    pools = {pool.name: pool for pool in (*away.pools, *kept.pools)}
    of_kept = {op.id: op for op in kept.ops}
    both = tuple(
        replace(
            op,
            takes=(*op.takes, *((b, p) for b, p in of_kept[op.id].takes if p == "graphs.0")),
            reads=(*op.reads, *(b for b in of_kept[op.id].reads if b.kind == "K")),
            writes=(*op.writes, *(b for b in of_kept[op.id].writes if b.kind == "K")),
            gives=(*op.gives, *(b for b in of_kept[op.id].gives if b.kind == "K")),
        )
        if op.id.kind in "FB" and op.id in of_kept
        else op
        for op in away.ops
    )
    one = case("vertical", 99)
    with pytest.raises(ScheduleError, match=r"reads its input elsewhere than its forward, whose graph holds it"):
        prove(replace(away, pools=tuple(pools.values()), ops=both), Needs.of(one.program, one.settings))
