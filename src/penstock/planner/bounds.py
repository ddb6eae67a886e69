"""The least seconds that a step takes, given what it asks of each lane in each phase."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config import ZeroStage
from penstock.planner.phases import BEFORE_GRADIENTS
from penstock.schedule.ir.lanes import STREAM_LANES, Lane
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import group_op
from penstock.schedule.place import Depths, Settings
from penstock.sim.costs import Costs

Load = NDArray[np.float64]
"""Seconds, shape (phases + 1, lanes): the rows of ``Phases``."""


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
    """The least seconds of a step. ``limits``: of ``limits_of``. ``buffered``: seconds of writes that the buffers of
    state hold: what is delayed and begins a step need not be home before its forward, as far as they do. ``ahead``:
    seconds of reads for the first steps of what is delayed that the step before may have done, at most
    (``Provision.ahead``): the start does not wait for them, and the whole step does."""

    limits: NDArray[np.float64]
    buffered: float
    ahead: float

    @staticmethod
    def of(costs: Costs, settings: Settings, *, disk: bool) -> "StepBound":
        """``disk``: whether anything can go home there."""
        limits = limits_of(costs, settings.depths, settings.stage)
        if not (disk and settings.delay):
            return StepBound(limits=limits, buffered=0.0, ahead=0.0)
        count, nbytes = settings.depths.state, round(settings.chunk * settings.form.per_element)
        write, read = (costs.seconds(Op(id=group_op(kind, 0, 0), nbytes=nbytes)) for kind in ("WS", "RS"))
        return StepBound(limits=limits, buffered=count * write, ahead=(count - 1) * read)

    def constraints(self, home: int) -> Iterator[Constraint]:
        """``home``: index of the last row, and of the last of the times: those more that all phases up to the backward
        take together."""
        nothing = np.zeros(len(self.limits))
        for p in range(home):
            yield Constraint(times=[p], loads=[p], less=nothing if p else self._ahead)
        yield from self._together(home)

    def _together(self, home: int) -> Iterator[Constraint]:
        """The constraints of several phases together."""
        before, ahead = [*range(BEFORE_GRADIENTS), home], self._ahead
        late = self.limits[:, STREAM_LANES.index("write")] * self.buffered
        yield Constraint(times=[0], loads=[0, home], less=late + ahead)
        yield Constraint(times=before, loads=before, less=ahead)
        if self.ahead:
            yield Constraint(times=[*range(home + 1)], loads=[*range(home + 1)], less=np.zeros(len(self.limits)))

    @property
    def _ahead(self) -> NDArray[np.float64]:
        less: NDArray[np.float64] = self.limits[:, STREAM_LANES.index("read")] * self.ahead
        return less

    def seconds(self, load: Load) -> float:
        """The least seconds that a step with this load takes."""
        home = len(load) - 1
        times = np.zeros(len(load))
        needed = load[:home] @ self.limits.T
        needed[0] -= self._ahead
        times[:home] = np.maximum(needed.max(axis=1), 0.0)
        for one in self._together(home):
            together = float((self.limits @ load[one.loads].sum(axis=0) - one.less).max())
            times[one.times[-1]] = max(times[one.times[-1]], together - times[one.times[:-1]].sum())
        return float(times.sum())
