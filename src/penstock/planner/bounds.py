"""The least seconds that a step takes, given what it asks of each lane in each phase."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config import ZeroStage
from penstock.planner.phases import AHEAD, BEFORE_GRADIENTS, HOME
from penstock.schedule.ir.lanes import STREAM_LANES, Lane
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import group_op
from penstock.schedule.place import Depths, Settings
from penstock.sim.costs import Costs

Load = NDArray[np.float64]
"""Seconds, shape (phases + 2, lanes): the rows of ``Phases``."""


def limits_of(costs: Costs, depths: Depths, stage: ZeroStage = 3) -> NDArray[np.float64]:
    """Shape (limits, lanes): a phase takes at least ``sum_b limits[i, b] * load[b]`` for every limit i.

    First each lane. While lane b is busy beside a, a runs at u = 1 / (1 + c_ab) and b at v = 1 / (1 + c_ba) of its
    speed, so each second of b's work costs a (1 - u) / v; never more than the second that it takes by itself.

    Then each pool of n buffers: all the time that buffers are held in a phase is at most n times the phase. A buffer of
    weights is held from its upload to the end of the visit, one of gradients from the backward until it is down, one of
    state from its read to its write; with several ranks, whole weights from their gather on, and whole gradients until
    they are exchanged. What else these lanes do counts along, so that with few buffers this is too much.
    ``stage``: in 1 and 2 each group's weights have a buffer of their own, which holds nothing up; in 0 nothing is
    gathered.
    """
    rows = np.eye(len(STREAM_LANES))
    for i, a in enumerate(STREAM_LANES):
        for j, b in enumerate(STREAM_LANES):
            if a != b:
                u, v = (1 / (1 + costs.contention.get(pair, 0.0)) for pair in ((a, b), (b, a)))
                rows[i, j] = min((1 - u) / v, 1.0)
    held: list[tuple[int, tuple[Lane, ...]]] = [
        (depths.gradients, ("compute", "d2h")),
        (depths.gradients, ("compute", "net")),
        (depths.state, ("read", "cpu", "write")),
        (depths.stage_in, ("read", "h2d")),
    ]
    if stage in (0, 3):
        held.append((depths.weights, ("h2d", "compute")))
    if stage == 3:
        held.append((depths.weights, ("nic", "net", "compute")))
    pools = [[(lane in lanes) / count for lane in STREAM_LANES] for count, lanes in held]
    return np.concatenate((rows, np.array(pools)))


def bound(load: Load, limits: NDArray[np.float64]) -> float:
    """Seconds that a step takes at least if its phases do not overlap: the sum of each phase's tightest limit."""
    return float((load @ limits.T).max(axis=1).sum())


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Phases ``times`` together take at least what each limit asks for the rows ``loads``, less ``less``."""

    times: list[int]
    loads: list[int]
    less: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepBound:
    """The least seconds of a step. ``limits``: of ``limits_of``. ``late``: whether anything is delayed that comes from
    disk; without, the rows ``AHEAD`` and ``HOME`` are empty. ``buffered``: seconds of writes that the buffers of state
    hold: what is delayed and begins a step need not be home before its forward, as far as they do. ``ahead``: seconds
    of reads that they hold at its start: what the first of its steps take has been read by the step before, as far as
    they do (``Provision.ahead``).
    """

    limits: NDArray[np.float64]
    late: bool = False
    buffered: float = 0.0
    ahead: float = 0.0

    @staticmethod
    def of(costs: Costs, settings: Settings, *, disk: bool) -> "StepBound":
        """``disk``: whether anything can go home there."""
        limits = limits_of(costs, settings.depths, settings.stage)
        if not (disk and settings.delay):
            return StepBound(limits=limits)
        count, nbytes = settings.depths.state, round(settings.chunk * settings.form.per_element)
        write, read = (costs.seconds(Op(id=group_op(kind, 0, 0), nbytes=nbytes)) for kind in ("WS", "RS"))
        return StepBound(limits=limits, late=True, buffered=count * write, ahead=(count - 1) * read)

    def constraints(self, rows: int) -> Iterator[Constraint]:
        """``rows``: of a load, and as many times: of each phase; of the row ``AHEAD``, which takes none by itself; and
        those more that all phases up to the backward take together."""
        nothing = np.zeros(len(self.limits))
        for p in range(rows + AHEAD):
            yield Constraint(times=[p], loads=[p], less=nothing)
        yield from self._together(rows)

    def _together(self, rows: int) -> Iterator[Constraint]:
        """The constraints of several rows together."""
        if not self.late:
            return
        ahead, home, every = rows + AHEAD, rows + HOME, [*range(rows)]
        before, nothing = [*range(BEFORE_GRADIENTS), home], np.zeros(len(self.limits))
        read, write = (self.limits[:, STREAM_LANES.index(lane)] for lane in ("read", "write"))
        held = read * self.ahead
        yield Constraint(times=[0], loads=[0, ahead], less=held)
        yield Constraint(times=[0], loads=[0, ahead, home], less=held + write * self.buffered)
        yield Constraint(times=before, loads=before, less=nothing)
        yield Constraint(times=every, loads=every, less=nothing)

    def seconds(self, load: Load) -> float:
        """The least seconds that a step with this load takes."""
        times = np.zeros(len(load))
        times[:AHEAD] = np.maximum((load[:AHEAD] @ self.limits.T).max(axis=1), 0.0)
        for one in self._together(len(load)):
            needed = float((self.limits @ load[one.loads].sum(axis=0) - one.less).max())
            times[one.times[-1]] = max(times[one.times[-1]], needed - times[one.times[:-1]].sum())
        return float(times.sum())
