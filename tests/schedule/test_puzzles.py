"""The LLM training puzzles (github.com/srush/LLM-Training-Puzzles): time and memory of the known best solutions."""

import pytest

from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import build
from penstock.schedule.lower.request import FamilyRequest, GatherGroup
from penstock.sim.models import PUZZLE_UNIT, puzzle
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate

MODEL = puzzle()


def ask(
    family: str, layers: int, ranks: int, *, micro_batches: int = 4, gather_group: GatherGroup | None = None
) -> World:
    return build(
        FamilyRequest(
            family=family,
            layers=layers,
            ranks=ranks,
            micro_batches=micro_batches,
            sizes=MODEL.sizes,
            stage_ops=MODEL.stage_ops,
            gather_group=gather_group,
        )
    )


def peak(schedule: Schedule) -> float:
    """In U: the most that is held when an op starts, without what it takes itself."""
    sizes = {pool.name: pool.size for pool in schedule.pools}
    held: dict[str, int] = {}
    now = most = sum(amount for _, _, amount in schedule.fixed)
    for op in schedule.ops:
        most = max(most, now)
        held |= {name: sizes[pool] for name, pool in op.takes}
        now += sum(held[name] for name, _ in op.takes) - sum(held[name] for name in op.gives)
    return most / PUZZLE_UNIT


def last_start(simulation: Simulation, rank: int) -> float:
    return max(simulation.starts[rank])


@pytest.mark.parametrize(
    ("family", "layers", "ranks", "ends", "peaks"),
    [
        ("single", 2, 1, [17.0], [20]),
        ("grad-accumulation", 2, 1, [17.0], [15]),
        ("ddp", 2, 4, [5.6] * 4, [14] * 4),
        ("weight-sharded", 6, 4, [20.4] * 4, [21] * 4),
        ("fsdp", 6, 4, [20.4] * 4, [18] * 4),
        ("pipeline", 8, 4, [67.4, 59.2, 50.8, 42.4], [24] * 4),
        ("gpipe", 8, 4, [33.8, 31.6, 29.2, 26.2], [31, 32, 32, 32]),
        ("pipeline-fsdp", 4, 16, [16.0] * 16, [7.375, 7.25, 7.125, 7.0] * 4),
    ],
)
def test_a_puzzle_takes_the_time_and_the_memory_of_its_known_best_solution(
    family: str, layers: int, ranks: int, ends: list[float], peaks: list[float]
) -> None:
    world = ask(family, layers, ranks)
    simulation = simulate(world, MODEL.costs)
    assert [simulation.end(rank) for rank in range(ranks)] == pytest.approx(ends)
    assert [last_start(simulation, rank) for rank in range(ranks)] == pytest.approx([end - 0.5 for end in ends])
    assert [peak(schedule) for schedule in world.ranks] == peaks


def test_a_process_group_for_each_stage_is_faster_than_gathers_of_the_world() -> None:
    world = ask("pipeline-fsdp", 4, 16, gather_group="world")
    stage = ask("pipeline-fsdp", 4, 16, gather_group="stage")
    assert sorted(stage.groups.values()) == [tuple(range(s, 16, 4)) for s in range(4)]
    assert simulate(stage, MODEL.costs).time < simulate(world, MODEL.costs).time - 1


def test_sharding_more_holds_less_and_moves_as_much_as_the_zero_paper_says() -> None:
    """Held by a rank when nothing runs, and bytes moved, relative to data parallelism's (arXiv 1910.02054)."""
    layers, ranks, weights = 6, 4, 2
    fixed, moved = {}, {}
    for family in ("ddp", "zero1", "zero2", "fsdp"):
        world = ask(family, layers, ranks)
        gradients = [pool for pool in world.ranks[0].pools if pool.name in ("gradients", "gradient_shards")]
        resident = sum(amount for _, _, amount in world.ranks[0].fixed)
        fixed[family] = (resident / PUZZLE_UNIT, {pool.name: pool.count for pool in gradients})
        moved[family] = sum(op.nbytes for op in world.ranks[0].ops)
    whole, shard = layers * weights, layers * weights / ranks
    assert fixed["ddp"] == (whole + whole, {"gradients": layers})
    assert fixed["zero1"][0] == whole + shard
    assert fixed["zero1"][1]["gradients"] == layers
    assert fixed["zero2"] == (whole + shard, {"gradients": 1, "gradient_shards": layers})
    assert fixed["fsdp"] == (shard + shard, {"gradients": 1, "gradient_shards": layers})
    assert moved["zero1"] == moved["zero2"] == moved["ddp"]
    assert moved["fsdp"] * 2 == moved["ddp"] * 3


def test_a_step_fused_into_the_backward_holds_one_gradient_and_takes_as_long() -> None:
    late = FamilyRequest(family="single", layers=4, ranks=1, micro_batches=4, sizes=MODEL.sizes)
    fused = FamilyRequest(family="single", layers=4, ranks=1, micro_batches=4, sizes=MODEL.sizes, fused=True)
    counts = []
    for request in (late, fused):
        world = build(request)
        counts.append(next(pool.count for pool in world.ranks[0].pools if pool.name == "gradients"))
        assert simulate(world, MODEL.costs).time == pytest.approx(4 * (4 + 4 + 0.5))
    assert counts == [4, 1]
