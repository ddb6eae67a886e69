"""The cause of a measured op's waiting: of all that the schedule made it wait for, what was done last.

Candidates are the ops it comes ``after``, the op that had its place in its lane, and, for each buffer it takes, the op
that had to give one back first: the k-th take of a pool needs as many gives as the pool has too few buffers for.
"""

from collections.abc import Iterable, Sequence

from penstock.report.prediction import Prediction
from penstock.report.series import Bar, Side
from penstock.report.trace_file import MeasuredStep, Ran
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.sim.cause import Cause

_AT_ONCE = 5e-6
"""Seconds that starting the next op takes; a lane that stood still for less went on without a pause."""


def measured_bars(ops: Sequence[Ran], schedule: Schedule | None) -> list[Bar]:
    """The ops as bars, with what each waited for if the schedule that they followed is known."""
    by_id = {} if schedule is None else schedule.by_id
    known = {op.id: op for op in ops}
    givers = {} if schedule is None else _givers(schedule, known)
    before = predecessors(ops)
    bars = []
    for ran in ops:
        previous = before[ran.id]
        waited = ran.start - (previous.end if previous else 0.0)
        cause = None
        if waited > _AT_ONCE and ran.id in by_id:
            cause = _last(by_id[ran.id], ran, known, givers.get(ran.id, ()), previous)
        waited = max(waited, 0.0)
        bars.append(
            Bar(id=ran.id, lane=ran.lane, start=ran.start, end=ran.end, nbytes=ran.nbytes, waited=waited, cause=cause)
        )
    return bars


def sides_of(prediction: Prediction | None, step: MeasuredStep) -> list[Side]:
    """A step as predicted, where it was, and as measured, with what its ops waited for where that can be known."""
    bars = measured_bars(step.ops, None if prediction is None else prediction.schedule)
    measured = Side(name="measured", bars=bars, memory=step.memory)
    return [measured] if prediction is None else [prediction.side(), measured]


def _last(
    op: Op, ran: Ran, known: dict[str, Ran], givers: Iterable[tuple[str, str]], previous: Ran | None
) -> Cause | None:
    """The candidate that ended last before the op started; None if the lane was busy until later."""
    found = [(known[other].end, Cause(other)) for other in op.after if other in known]
    found += [(known[giver].end, Cause(giver, pool=pool)) for pool, giver in givers]
    found = [(end, cause) for end, cause in found if end <= ran.start + _AT_ONCE]
    if not found:
        return None
    end, cause = max(found)
    return cause if previous is None or end >= previous.end else None


def predecessors(ops: Sequence[Ran]) -> dict[str, Ran | None]:
    """For each op the one whose end made its lane idle: the last to end before it started."""
    ended: dict[Lane, list[Ran]] = {}
    for op in ops:
        ended.setdefault(op.lane, []).append(op)
    before: dict[str, Ran | None] = {}
    for lane_ops in ended.values():
        by_end, i, latest = sorted(lane_ops, key=lambda op: op.end), 0, None
        for op in sorted(lane_ops, key=lambda op: op.start):
            while i < len(by_end) and by_end[i].end <= op.start:
                latest, i = by_end[i], i + 1
            before[op.id] = latest
    return before


def _givers(schedule: Schedule, known: dict[str, Ran]) -> dict[str, list[tuple[str, str]]]:
    """For each op that had to wait for a buffer: (pool, the op whose give made one free)."""
    pool_of = {name: pool for name, _, pool in schedule.carried}
    free = {pool.name: pool.count for pool in schedule.pools}
    for _, _, pool in schedule.carried:
        free[pool] -= 1
    for op in schedule.ops:
        pool_of |= dict(op.takes)
    gives: dict[str, list[tuple[float, str]]] = {}
    for op in schedule.ops:
        if op.id in known:
            for name in op.gives:
                gives.setdefault(pool_of[name], []).append((known[op.id].end, op.id))
    for given in gives.values():
        given.sort()
    taken = dict.fromkeys(free, 0)
    found: dict[str, list[tuple[str, str]]] = {}
    for op in schedule.ops:
        for _, pool in op.takes:
            k = taken[pool] - free[pool]
            taken[pool] += 1
            if 0 <= k < len(gives.get(pool, ())):
                found.setdefault(op.id, []).append((pool, gives[pool][k][1]))
    return found
