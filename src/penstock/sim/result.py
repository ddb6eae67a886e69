"""The result of a simulation: every op's start and end, and what follows from them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from penstock.config import TIERS, Tier
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, reserved_bytes
from penstock.schedule.ir.worlds import World
from penstock.sim.cause import Cause


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One op in time. ``waited``: seconds that its lane stood idle before it; ``cause``: what it waited for then, None
    if it did not wait.
    """

    rank: int
    op: Op
    start: float
    end: float
    waited: float
    cause: Cause | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """A simulated world. Times are in the unit of the costs (seconds on a machine), one list per rank in the order of
    its schedule's ops.

    ``takes``: when each op takes its buffers, at its start or, a collective, when its rank arrives there.
    ``alone``: what each op costs when nothing else runs. ``causes``: as ``Timed.cause``. ``serial``: a rank did one op
    at a time, whatever the lane.
    """

    world: World
    starts: tuple[list[float], ...]
    takes: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    alone: tuple[list[float], ...]
    waits: tuple[list[float], ...]
    causes: tuple[list[Cause | None], ...]
    serial: bool = False

    def __repr__(self) -> str:
        return f"<Simulation of {self.world!r}: time {self.time:.6g}, lower bound {self.lower_bound:.6g}>"

    @cached_property
    def time(self) -> float:
        """The end of the last op."""
        return max(max(ends, default=0.0) for ends in self.ends)

    def end(self, rank: int) -> float:
        """The end of the rank's last op."""
        return max(self.ends[rank], default=0.0)

    def timed(self, rank: int) -> Iterator[Timed]:
        """The rank's ops in the schedule's order."""
        rows = zip(
            self.world.ranks[rank].ops,
            self.starts[rank],
            self.ends[rank],
            self.waits[rank],
            self.causes[rank],
            strict=True,
        )
        return (Timed(rank=rank, op=op, start=s, end=e, waited=w, cause=c) for op, s, e, w, c in rows)

    def busy(self, rank: int) -> dict[Lane, float]:
        """Time in which each lane that has ops has at least one under way."""
        spans: dict[Lane, list[tuple[float, float]]] = {}
        for op, start, end in zip(self.world.ranks[rank].ops, self.starts[rank], self.ends[rank], strict=True):
            spans.setdefault(op.lane, []).append((start, end))
        return {lane: covered(found) for lane, found in spans.items()}

    def work(self, rank: int) -> dict[Lane, float]:
        """Each lane's ops one after another, alone: the lane cannot be done sooner."""
        sums: dict[Lane, float] = {}
        for op, seconds in zip(self.world.ranks[rank].ops, self.alone[rank], strict=True):
            sums[op.lane] = sums.get(op.lane, 0.0) + seconds
        return sums

    @cached_property
    def lower_bound(self) -> float:
        """No order of the same ops is faster: the busiest lane's work, or all of the busiest rank's if it is serial."""
        least = sum if self.serial else max
        return max(least(self.work(rank).values() or [0.0]) for rank in range(len(self.world.ranks)))

    def bytes_per_lane(self) -> dict[Lane, int]:
        """Bytes moved by all ranks."""
        total: dict[Lane, int] = {}
        for schedule in self.world.ranks:
            for lane, nbytes in schedule.bytes_per_lane().items():
                total[lane] = total.get(lane, 0) + nbytes
        return total

    def memory(self, rank: int) -> dict[Tier, list[tuple[float, int]]]:
        """(time, amount from then on) of each tier; amounts in the unit of the pools' sizes. What is fixed and the
        pools that own their memory count in full all the time, as that memory is taken; of others what is held counts.
        """
        schedule = self.world.ranks[rank]
        pools = {pool.name: pool for pool in schedule.pools}
        held = {name: pools[pool] for name, _, pool in schedule.carried}
        now = reserved_bytes(schedule)
        for pool in held.values():
            now[pool.tier] += 0 if pool.backed else pool.size
        changes: list[tuple[float, int, Tier, int]] = []  # at one moment, what is given back goes before what is taken
        for op in schedule.ops:
            held |= {name: pools[pool] for name, pool in op.takes}
        for op, start, end in zip(schedule.ops, self.takes[rank], self.ends[rank], strict=True):
            taken = [pools[pool] for _, pool in op.takes]
            changes += [(start, 1, pool.tier, pool.size) for pool in taken if not pool.backed]
            given = [held[name] for name in op.gives]
            changes += [(end, 0, pool.tier, -pool.size) for pool in given if not pool.backed]
        curves: dict[Tier, list[tuple[float, int]]] = {tier: [(0.0, now[tier])] for tier in TIERS}
        for time, _, tier, size in sorted(changes, key=lambda change: change[:2]):
            now[tier] += size
            curves[tier].append((time, now[tier]))
        return curves

    def peak(self, rank: int) -> dict[Tier, int]:
        """The most that is taken of each tier."""
        return {tier: max(amount for _, amount in curve) for tier, curve in self.memory(rank).items()}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the spans, each from a start to an end."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
