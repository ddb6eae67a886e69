"""The order of ops on one rank that is sure whatever the timing: a vector clock for each op.

"x happens before y" means: x is done when y starts. It follows from ``after``, from the order of a lane that does one
thing at a time, and from the fact that every lane publishes its ops as done in order. A clock says how many ops of each
lane are surely done when an op starts. The lanes ``read`` and ``write`` keep several ops in flight, so their order
alone says nothing about two ops of the same lane.

Only the rank's own lanes are in its clocks. What follows from a message that went to another rank and back is not
seen, so the checker may refuse what only such a detour makes safe, and never accepts what is not.
"""

from collections.abc import Iterable

from penstock.schedule.ir.lanes import LANES, Lane
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import OpId

Clock = tuple[int, ...]
_SEVERAL_AT_A_TIME = {"read", "write"}


class Clocks:
    """The clocks of one rank's ops, given in any order in which they can run."""

    def __init__(self, order: Iterable[Op]) -> None:
        ops = list(order)
        used = {op.id.lane for op in ops}
        self._index: dict[Lane, int] = {lane: i for i, lane in enumerate(lane for lane in LANES if lane in used)}
        self._at: dict[OpId, tuple[int, int, Clock, Clock]] = {}
        """lane, turn in it (from 1: the first op of a lane is done when the lane's clock shows 1), clocks at the op's
        start and when it is published"""
        self._run(ops)

    def before(self, first: Op, second: Op) -> bool:
        """True if ``first`` is surely done when ``second`` starts."""
        lane, turn, _, _ = self._at[first.id]
        return self._at[second.id][2][lane] >= turn

    def _run(self, ops: list[Op]) -> None:
        """Compute all clocks. A clock that shows a lane's turn has all that was known at that turn, so that most
        merges are left out."""
        nothing: Clock = (0,) * len(self._index)
        latest = [nothing] * len(self._index)  # what is surely done once the lane's newest op is published
        places, index = self._at, self._index
        for op in ops:
            name = op.id.lane
            lane = index[name]
            last = latest[lane]
            one_by_one = name not in _SEVERAL_AT_A_TIME
            clock = last if one_by_one else nothing
            for other in op.after:
                other_lane, other_turn, _, done = places[other]
                if clock[other_lane] < other_turn:
                    clock = tuple(map(max, clock, done))
            turn = last[lane] + 1
            known = clock if one_by_one else tuple(map(max, clock, last))
            latest[lane] = (*known[:lane], turn, *known[lane + 1 :])
            places[op.id] = lane, turn, clock, latest[lane]
