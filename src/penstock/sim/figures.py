"""A rank in numbers: what a simulation says of it in one line of a table."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.config import Tier
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.references import Buffer
from penstock.sim.cause import Cause
from penstock.sim.result import Simulation


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Figures of one rank. ``busy``: time in which the rank computes or, doing one thing at a time, does anything.
    ``peak``: the most that is held of each tier. ``puzzle_time`` and ``puzzle_peak``: as the LLM training puzzles print
    them, the start of the last op, and the most that is held on the device when an op starts, before it takes anything
    itself.
    """

    end: float
    busy: float
    peak: Mapping[Tier, int]
    in_flight_peak: int
    puzzle_time: float
    puzzle_peak: int


def rank_figures(simulation: Simulation, rank: int, *, stage_ops: bool) -> RankFigures:
    """``stage_ops``: each op is a stage, not a layer of one."""
    spans = zip(simulation.starts[rank], simulation.ends[rank], strict=True)
    one_by_one = sum(end - start for start, end in spans) if simulation.serial else None
    return RankFigures(
        end=simulation.end(rank),
        busy=simulation.busy(rank).get("compute", 0.0) if one_by_one is None else one_by_one,
        peak=simulation.peak(rank),
        in_flight_peak=in_flight_peak(simulation, rank, stage_ops=stage_ops),
        puzzle_time=max(simulation.starts[rank], default=0.0),
        puzzle_peak=_puzzle_peak(simulation, rank),
    )


def in_flight_peak(simulation: Simulation, rank: int, *, stage_ops: bool) -> int:
    """The most micro-batches that a rank has in flight at once, counted for each stage that it holds.

    A micro-batch is in flight in a stage from the start of its forward to the end of its backward (of its weights' part
    where that is split). Without ``stage_ops``, consecutive layers of a rank are one stage; of several ranks, if every
    micro-batch goes on to the next layer at once (where a pipeline folds, a rank's two stages are consecutive, too).
    """
    schedule = simulation.world.ranks[rank]
    stage_of = _stages(schedule, stage_ops=stage_ops, folds=len(simulation.world.ranks) > 1)
    spans: dict[tuple[int, int], list[float]] = {}  # (stage, micro-batch) -> start, end, items
    for op, start, end in zip(schedule.ops, simulation.starts[rank], simulation.ends[rank], strict=True):
        key = (stage_of.get(op.id.stage, -1), op.id.micro_batch)
        if op.id.kind == "F":
            span = spans.setdefault(key, [start, end, op.items])
            span[:2] = min(span[0], start), max(span[1], end)
        elif op.id.kind in ("B", "I", "W") and key in spans:
            spans[key][1] = max(spans[key][1], end)
    changes = [(start, items) for start, _, items in spans.values()] + [(end, -n) for _, end, n in spans.values()]
    # At one moment, who leaves goes first.
    return round(max(accumulate((change for _, change in sorted(changes)), initial=0.0)))


def _stages(schedule: Schedule, *, stage_ops: bool, folds: bool) -> dict[int, int]:
    """The first layer of the stage that each layer with a forward is in."""
    idents = [op.id for op in schedule.lanes["compute"]]
    layers = sorted({ident.stage for ident in idents if ident.kind == "F"})
    apart = {
        ident.stage
        for before, ident in pairwise(idents)
        if ident.kind == "F"
        and (before.kind, before.stage, before.micro_batch) != ("F", ident.stage - 1, ident.micro_batch)
    }
    stage_of: dict[int, int] = {}
    for layer in layers:
        alone = stage_ops or (folds and layer in apart)
        stage_of[layer] = layer if alone else stage_of.get(layer - 1, layer)
    return stage_of


def _puzzle_peak(simulation: Simulation, rank: int) -> int:
    """Ops in the order of their starts; what was given back by then is gone, but by no op that comes later."""
    schedule = simulation.world.ranks[rank]
    size = {pool.name: pool.size for pool in schedule.pools if pool.tier == "device"}
    pool_of = {name: pool for name, _, pool in schedule.carried}
    pool_of |= {name: pool for op in schedule.ops for name, pool in op.takes}
    now = sum(amount for tier, _, amount in schedule.fixed if tier == "device")
    now += sum(size.get(pool, 0) for _, _, pool in schedule.carried)
    most = now
    starts, ends = simulation.starts[rank], simulation.ends[rank]
    under_way: list[tuple[float, int]] = []
    for i in sorted(range(len(starts)), key=lambda i: (starts[i], i)):
        while under_way and under_way[0] <= (starts[i], i):
            _, j = heapq.heappop(under_way)
            now -= _size(schedule.ops[j].gives, pool_of, size)
        most = max(most, now)
        now += sum(size.get(pool, 0) for _, pool in schedule.ops[i].takes)
        heapq.heappush(under_way, (ends[i], i))
    return most


def _size(names: Iterable[Buffer], pool_of: Mapping[Buffer, str], size: Mapping[str, int]) -> int:
    return sum(size.get(pool_of[name], 0) for name in names)


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A lane that stood idle: for how long, before which op. ``causes``: what that waited for, what this had
    waited for just before, and so on to the op that computed; the rank of each is as seen from the one before.
    """

    rank: int
    op: Op
    waited: float
    causes: tuple[Cause, ...]


def longest_stalls(simulation: Simulation, count: int) -> list[Stall]:
    """The ``count`` longest stalls of all ranks' compute lanes, the longest first; where a rank does one op at a time,
    of all that it does."""
    found = heapq.nlargest(
        count,
        (
            (waited, -rank, -i)
            for rank, schedule in enumerate(simulation.world.ranks)
            for i, (op, waited) in enumerate(zip(schedule.ops, simulation.waits[rank], strict=True))
            if waited > 0 and (simulation.serial or op.id.lane == "compute")
        ),
    )
    places: dict[int, dict[str, int]] = {}
    return [
        Stall(
            rank=-rank,
            op=simulation.world.ranks[-rank].ops[-i],
            waited=waited,
            causes=tuple(_causes(simulation, places, -rank, -i)),
        )
        for waited, rank, i in found
    ]


_LONGEST_CHAIN = 4


def _causes(simulation: Simulation, places: dict[int, dict[str, int]], rank: int, i: int) -> Iterator[Cause]:
    """``places``: position of each op of a rank; filled as ranks are met."""
    for _ in range(_LONGEST_CHAIN):
        cause = simulation.causes[rank][i]
        if cause is None:
            return
        yield cause
        rank = rank if cause.rank < 0 else cause.rank
        ops = simulation.world.ranks[rank].ops
        if rank not in places:
            places[rank] = {op.id: place for place, op in enumerate(ops)}
        i = places[rank][cause.op]
        if ops[i].lane == "compute":
            return
