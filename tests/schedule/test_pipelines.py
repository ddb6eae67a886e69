"""Pipelines: the published makespans and memory, and the published orders (torch's are the oracle)."""

import time
from collections import Counter

import pytest
from torch.distributed.pipelining import schedules as peers

from penstock.errors import ConfigError
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import VisitId, visit
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import build
from penstock.schedule.lower.folded import dualpipe_v, zero_bubble_v
from penstock.schedule.lower.orders import Order, interleaved, looped_bfs
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.lower.stages import Stages
from penstock.sim.models import CostModel, puzzle, unit
from penstock.sim.simulate import simulate


def ask(
    family: str,
    ranks: int,
    micro_batches: int,
    *,
    layers: int = 1,
    virtual: int | None = None,
    model: CostModel | None = None,
) -> World:
    model = model or unit()
    return build(
        FamilyRequest(
            family=family,
            layers=layers,
            ranks=ranks,
            micro_batches=micro_batches,
            sizes=model.sizes,
            stage_ops=model.stage_ops,
            virtual_stages=virtual,
        )
    )


def in_flight(schedule: Schedule) -> int:
    """The most micro-batch-stages that have begun their forward and not ended their backward. Under unit costs that is
    all the memory there is.
    """
    now = most = 0
    for op in schedule.ops:
        now += len(op.takes)
        most = max(most, now)
        now -= len(op.gives)
    return most


def measured(world: World) -> tuple[float, list[int]]:
    simulation = simulate(world, unit().costs)
    peaks = [in_flight(schedule) for schedule in world.ranks]
    assert [simulation.peak(rank)["device"] for rank in range(len(world.ranks))] == peaks
    return simulation.time, peaks


@pytest.mark.parametrize(
    ("family", "virtual", "makespan", "peaks"),
    [
        ("gpipe", None, 33, [8, 8, 8, 8]),
        ("1f1b", None, 33, [4, 3, 2, 1]),
        ("looped-bfs", 2, 57, [16, 16, 16, 16]),
        ("interleaved-1f1b", 2, 57, [11, 9, 7, 5]),
        ("looped-dfs", 2, 57, [11, 9, 7, 5]),
        ("zero-bubble", 1, 27, [4, 4, 4, 4]),
        ("zero-bubble", 2, 51, [8, 8, 8, 8]),
        ("dualpipe-v", None, 51, [9, 9, 9, 9]),
        ("pipeline", None, 96, [1, 1, 1, 1]),
    ],
)
def test_four_ranks_and_eight_micro_batches(
    family: str, virtual: int | None, makespan: float, peaks: list[int]
) -> None:
    """``pipeline`` holds one buffer, of all eight micro-batches."""
    world = ask(family, 4, 8, virtual=virtual)
    simulation = simulate(world, unit().costs)
    assert simulation.time == makespan
    assert [in_flight(schedule) for schedule in world.ranks] == peaks
    assert [simulation.peak(r)["device"] for r in range(4)] == [8 * p if family == "pipeline" else p for p in peaks]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_the_bubble_is_as_published(p: int, rounds: int) -> None:
    m = p * rounds
    for family in ("gpipe", "1f1b"):
        assert measured(ask(family, p, m))[0] == 3 * (m + p - 1)
    assert measured(ask("1f1b", p, m))[1] == [p - r for r in range(p)]
    for v in (1, 2, 3):
        for family in ("looped-bfs", "interleaved-1f1b", "looped-dfs"):
            assert measured(ask(family, p, m, virtual=v))[0] == 3 * (m * v + p - 1)
    assert measured(ask("interleaved-1f1b", p, m, virtual=2))[1] == [
        min(2 * (p - 1 - r) + p, 2 * m - 1) + 1 for r in range(p)
    ]
    assert measured(ask("zero-bubble", p, m)) == (3 * m + p - 1, [p] * p)
    assert measured(ask("zero-bubble", p, m, virtual=2)) == (6 * m + p - 1, [2 * p] * p)
    makespan, peaks = measured(ask("dualpipe-v", p, m))
    assert makespan == 6 * m + p - 1
    assert max(peaks) <= 2 * p + 1  # "PP + 1" in DeepSeek's table, where PP counts stages


def theirs(cls: type, p: int, v: int, m: int, rank: int) -> list[VisitId]:
    """A rank's order of compute by torch, pairs that overlap there one after the other."""
    schedule = cls.__new__(cls)
    schedule.pp_group_size, schedule._n_microbatches, schedule.n_local_stages = p, m, v
    schedule._num_stages = schedule.num_stages = p * v
    schedule._stages = [None] * v
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    actions = [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]
    flat = [part for action in actions for part in action.sub_actions or (action,)]
    return [visit(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in flat]


@pytest.mark.parametrize(
    ("order", "cls", "virtual", "folded"),
    [
        (zero_bubble_v, peers.ScheduleZBVZeroBubble, 2, True),
        (dualpipe_v, peers.ScheduleDualPipeV, 2, True),
        (interleaved, peers.ScheduleInterleaved1F1B, 2, False),
        (interleaved, peers.ScheduleInterleaved1F1B, 3, False),
        (looped_bfs, peers.ScheduleLoopedBFS, 2, False),
    ],
)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_order_of_each_rank_is_that_of_an_independent_implementation(
    order: Order, cls: type, virtual: int, folded: bool, p: int
) -> None:
    stages = Stages(layers=p * virtual, ranks=p, per_rank=virtual, folded=folded)
    for m in (2 * p, 3 * p, 4 * p, *([p, 2 * p - 1] if order is zero_bubble_v else [])):
        for rank in range(p):
            expected = theirs(cls, p, virtual, m, rank)
            if order is looped_bfs:  # gradients are summed from micro-batch 0 on here, from the last one on there
                expected = [visit("B", v.stage, m - 1 - v.micro_batch) if v.kind == "B" else v for v in expected]
            assert order(stages, rank, m) == expected


def test_neighbours_on_one_rank_do_not_send_to_each_other() -> None:
    p, m = 4, 8
    world = ask("zero-bubble", p, m, virtual=2)
    assert all(op.peer != rank for rank, schedule in enumerate(world.ranks) for op in schedule.ops)
    sends = Counter(op.id.stage for s in world.ranks for op in s.ops if op.id.kind == "SA")
    assert sends == {stage: m for stage in range(2 * p - 1) if stage != p - 1}  # from p - 1 to p is the fold


def test_a_rank_without_layers_passes_on() -> None:
    ranks, layers, m = 6, 4, 3
    for family in ("gpipe", "1f1b", "pipeline", "zero-bubble"):
        world = ask(family, ranks, m, layers=layers, model=puzzle())
        idle = [r for r, s in enumerate(world.ranks) if not any(op.id.kind == "F" for op in s.ops)]
        assert len(idle) == ranks - layers
        assert 0 not in idle
        lanes = {op.lane for r in idle[:1] for op in world.ranks[r].ops}
        assert lanes == {"send", "recv"}
        done = [op.id.stage for s in world.ranks for op in s.ops if op.id.kind == "F"]
        assert sorted(done) == sorted(list(range(layers)) * (1 if family == "pipeline" else m))


def test_layers_are_spread_evenly_and_in_order() -> None:
    for layers in range(1, 30):
        for ranks in range(1, 9):
            stages = Stages(layers=layers, ranks=ranks, per_rank=1, folded=False)
            held = [stages.held(rank) for rank in range(ranks)]
            assert [layer for mine in held for layer in mine] == list(range(layers))
            assert {len(mine) for mine in held} <= {layers // ranks, -(-layers // ranks)}


@pytest.mark.parametrize(
    ("family", "ranks", "micro_batches", "virtual", "says"),
    [
        ("looped-dfs", 4, 6, 2, "multiple of 4"),
        ("interleaved-1f1b", 4, 6, 2, "multiple of 4"),
        ("dualpipe-v", 4, 7, None, "at least 8 micro-batches"),
        ("dualpipe-v", 4, 8, 3, "2 virtual stages"),
        ("zero-bubble", 4, 8, 3, "1 virtual stage"),
        ("1f1b", 4, 8, 2, "no option virtual_stages"),
        ("1f1b", 0, 8, None, "ranks=0 must be at least 1"),
        ("1f1b", 4, 0, None, "micro_batches=0 must be at least 1"),
    ],
)
def test_what_a_pipeline_cannot_do_is_said(
    family: str, ranks: int, micro_batches: int, virtual: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ask(family, ranks, micro_batches, virtual=virtual)


def test_a_virtual_stage_needs_a_layer() -> None:
    with pytest.raises(ConfigError, match="at least 8 layers"):
        ask("looped-bfs", 4, 8, layers=7, virtual=2, model=puzzle())


@pytest.mark.parametrize(("model", "ranks", "most"), [(unit(), 1024, 4), (puzzle(), 256, 1)], ids=["stages", "layers"])
def test_many_ranks_are_built_in_seconds(model: CostModel, ranks: int, most: float) -> None:
    start = time.process_time()
    world = ask("1f1b", ranks, 16, layers=96, model=model)
    assert time.process_time() - start < most
    assert len(world.ranks) == ranks
