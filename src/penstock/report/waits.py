"""Divides a step's time among the lanes that it could not have gone on without.

From the op that ended last one goes back: an op's own time is its lane's, then comes what it waited for, and so on to
the step's beginning. What other lanes did meanwhile cost no time. So the seconds of all lanes add up to the step's, but
for gaps in which nothing that the schedule knows of held it up: the time that it takes to start an op.
"""

from collections.abc import Sequence

from penstock.report.causes import measured_bars, predecessors
from penstock.report.trace_file import Ran
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Schedule


def held_up(ops: Sequence[Ran], schedule: Schedule) -> dict[Lane, float]:
    """Seconds that each lane held up a step which ran as ``ops``; lanes that never did are left out."""
    bars = {bar.id: bar for bar in measured_bars(ops, schedule)}
    before = predecessors(ops)
    found: dict[Lane, float] = {}
    at = max(bars.values(), key=lambda bar: bar.end, default=None)
    until = 0.0 if at is None else at.end
    while at is not None:
        start = min(at.start, until)
        found[at.lane] = found.get(at.lane, 0.0) + until - start
        waited_for = None if at.cause is None else bars.get(at.cause.op)
        if waited_for is None and (last := before[at.id]) is not None:
            waited_for = bars[last.id]
        if waited_for is None or waited_for.start >= at.start:
            break  # the step's beginning, or an op too short for the clock
        at, until = waited_for, min(waited_for.end, start)
    return {lane: seconds for lane, seconds in found.items() if seconds > 0}
