"""The result of a simulation: every op's start and end, and what follows from them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


class Columns(NamedTuple):
    """The times of all ops, those of one rank behind those of the other, each of shape (ops,) in float64. ``triggers``:
    shape (ops, 3) in int32, what the op's lane stood idle for: the rank and the position of an op there, and the pool
    that it gave a buffer back to or -1; -1 three times: nothing."""

    starts: npt.NDArray[np.float64]
    takes: npt.NDArray[np.float64]
    ends: npt.NDArray[np.float64]
    waits: npt.NDArray[np.float64]
    triggers: npt.NDArray[np.int32]

    @staticmethod
    def empty(ops: int) -> "Columns":
        """Of so many ops that have not run."""
        starts, takes, ends, waits = np.zeros((4, ops))
        return Columns(starts, takes, ends, waits, np.full((ops, 3), -1, dtype=np.int32))


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """A simulated world. Times are in the unit of the costs (seconds on a machine), one list per rank in the order of
    its schedule's ops.

    ``takes``: when each op takes its buffers, at its start or, a collective, when its rank arrives there.
    ``alone``: what each op costs when nothing else runs. ``triggers``: by op of all ranks, as of ``Columns``.
    ``serial``: a rank did one op at a time, whatever the lane.
    """

    world: World
    starts: tuple[list[float], ...]
    takes: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    alone: tuple[list[float], ...]
    waits: tuple[list[float], ...]
    triggers: npt.NDArray[np.int32] = field(compare=False)  # numpy's == is by element
    serial: bool = False

    @staticmethod
    def of(world: World, columns: Columns, alone: Iterable[list[float]], *, serial: bool) -> "Simulation":
        """A world whose ops ran as ``columns`` say. ``alone``: by rank, as of the simulation."""
        cuts = list(pairwise(accumulate((len(schedule.ops) for schedule in world.ranks), initial=0)))
        starts, takes, ends, waits = (tuple([column[a:b].tolist() for a, b in cuts]) for column in columns[:4])
        return Simulation(
            world=world,
            starts=starts,
            takes=takes,
            ends=ends,
            alone=tuple(alone),
            waits=waits,
            triggers=columns.triggers,
            serial=serial,
        )

    def __repr__(self) -> str:
        return f"<Simulation of {self.world!r}: time {self.time:.6g}, lower bound {self.lower_bound:.6g}>"

    @cached_property
    def causes(self) -> tuple[list[Cause | None], ...]:
        """By rank and op, as ``Timed.cause``."""
        rows = iter(self.triggers.tolist())
        return tuple([self._cause(rank, *next(rows)) for _ in s.ops] for rank, s in enumerate(self.world.ranks))

    def _cause(self, rank: int, by: int, op: int, pool: int) -> Cause | None:
        if by < 0:
            return None
        there = self.world.ranks[by]
        return Cause(there.ops[op].id, -1 if by == rank else by, "" if pool < 0 else there.pools[pool].name)

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
        key = id(self.world.ranks[rank]), id(self.alone[rank])
        if key not in self._works:
            sums = self._works[key] = {}
            for op, seconds in zip(self.world.ranks[rank].ops, self.alone[rank], strict=True):
                sums[op.lane] = sums.get(op.lane, 0.0) + seconds
        return dict(self._works[key])

    @cached_property
    def _works(self) -> dict[tuple[int, int], dict[Lane, float]]:
        """``work`` by schedule and times, which ranks that do the same share."""
        return {}

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
