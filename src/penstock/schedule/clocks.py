"""What surely happens before what on one rank, whatever the timing: a vector clock for each op.

"x happens before y" means: x is done when y starts. It follows from ``after``, from the order of a lane that does one
thing at a time, and from the fact that every lane publishes its ops as done in order. A clock says how many ops of each
lane are surely done when an op starts. The lanes ``read`` and ``write`` keep several ops in flight, so their order
alone says nothing about two ops of the same lane.

Only the rank's own lanes are in its clocks. What follows from a message that went to another rank and back is not
seen, so the checker may refuse what only such a detour makes safe, and never accepts what is not.
"""

from collections.abc import Iterable

from penstock.schedule.op import LANES, Lane, Op

Clock = tuple[int, ...]
_SEVERAL_AT_A_TIME = {"read", "write"}


class Clocks:
    """The clocks of one rank's ops, given in any order in which they can run."""

    def __init__(self, order: Iterable[Op]) -> None:
        ops = list(order)
        used = {op.word.lane for op in ops}
        self._index: dict[Lane, int] = {lane: i for i, lane in enumerate(lane for lane in LANES if lane in used)}
        self._lane: dict[str, int] = {}
        self._turn: dict[str, int] = {}
        """from 1: the first op of a lane is done when the lane's clock shows 1"""
        self._start: dict[str, Clock] = {}
        self._run(ops)

    def before(self, first: Op, second: Op) -> bool:
        """Whether ``first`` is surely done when ``second`` starts."""
        return self._start[second.id][self._lane[first.id]] >= self._turn[first.id]

    def _run(self, ops: list[Op]) -> None:
        """Who knows that a lane is at a turn knows all that was known there: most merges have nothing to add."""
        nothing: Clock = (0,) * len(self._index)
        latest = [nothing] * len(self._index)  # what is surely done once the lane's newest op is published
        done: dict[str, Clock] = {}
        lanes, turns, starts, index = self._lane, self._turn, self._start, self._index
        for op in ops:
            ident, lane = op.id, index[op.word.lane]
            last = latest[lane]
            one_by_one = op.word.lane not in _SEVERAL_AT_A_TIME
            clock = last if one_by_one else nothing
            for other in op.after:
                if clock[lanes[other]] < turns[other]:
                    clock = tuple(map(max, clock, done[other]))
            turn = last[lane] + 1
            lanes[ident], turns[ident], starts[ident] = lane, turn, clock
            known = clock if one_by_one else tuple(map(max, clock, last))
            done[ident] = latest[lane] = (*known[:lane], turn, *known[lane + 1 :])
