"""The facts that lanes look up while a schedule runs, found once for each op.

Ops of a lane start in its order and count as done in its order. So all ops that one waits for are done as soon as each
lane that they are on has so many done: *needs*, mostly one pair of numbers, or none where an op before it has waited
for as much. Nothing has to be counted down, or told to who depends on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from penstock.runtime.streams import Mark, Streams
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.references import OpId

Gate = SimpleQueue[None]
"""A queue at which a thread sleeps until an item is put; a second item only wakes it once more for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """An op in its lane. ``place``: how many are before it; ``needs``: (lane, how many of it must be done); ``waits``:
    marks of the ops that it waits for; ``counted``: whether it takes memory that torch allocates."""

    op: Op
    place: int
    mark: Mark
    needs: tuple[tuple["LaneState", int], ...]
    waits: tuple[Mark, ...]
    counted: bool


class LaneState:
    """A lane's place in its list of ops. What changes is guarded by the executor's lock."""

    __slots__ = ("finished", "name", "open", "published", "sleepers", "started", "turns")

    def __init__(self, name: Lane) -> None:
        self.name = name
        self.turns: tuple[Turn, ...] = ()
        self.sleepers: list[Gate] = []
        """gates of its threads that wait for the next op's turn"""
        self.open = 0
        """number of its ops that may start: all in a step, none between steps and after an error"""
        self.started = self.published = 0
        self.finished: set[int] = set()
        """places of ops that are finished, and not published as one before them is not"""

    def begin(self) -> None:
        """A step begins."""
        self.started = self.published = 0
        self.finished.clear()
        self.open = len(self.turns)


def lanes_of(schedule: Schedule, streams: Streams) -> dict[Lane, LaneState]:
    """A schedule's lanes, with nothing started."""
    lanes = {lane: LaneState(lane) for lane in schedule.lanes}
    places = {op.id: place for ops in schedule.lanes.values() for place, op in enumerate(ops)}
    marks = {op.id: streams.mark(op.lane) for op in schedule.ops}
    counted = {pool.name for pool in schedule.pools if not pool.backed}
    for lane, ops in schedule.lanes.items():
        waited: dict[Lane, int] = {}
        lanes[lane].turns = tuple(
            Turn(
                op=op,
                place=place,
                mark=marks[op.id],
                needs=tuple((lanes[other], count) for other, count in _further(schedule, op, places, waited).items()),
                waits=tuple(marks[other] for other in op.after),
                counted=any(pool in counted for _, pool in op.takes),
            )
            for place, op in enumerate(ops)
        )
    return lanes


def _further(schedule: Schedule, op: Op, places: Mapping[OpId, int], waited: dict[Lane, int]) -> dict[Lane, int]:
    """Numbers of ops of each lane that must be done for an op, where its lane has ``waited`` for fewer so far."""
    further: dict[Lane, int] = {}
    for other in op.after:
        lane, count = schedule.by_id[other].lane, places[other] + 1
        if count > waited.get(lane, 0):
            waited[lane] = further[lane] = count
    return further
