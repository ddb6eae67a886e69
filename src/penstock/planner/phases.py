"""The phases of a step, and which of them each op of its schedule falls into.

A *phase* is a stretch of the step whose work can overlap with itself but hardly with that of the next one:

    start       the loads of the embedding and the first block, which the first block's compute waits for; and what they
                wait for themselves: the reads and writes that no buffer holds (see ``bounds``)
    forward     every F visit, and the other loads up to the epilogue's
    epilogue    vertical: its compute, before which no gradient is there. Horizontally it is a part of the backward
    backward    every B visit; without a norm to wait for, also the optimizer
    last        horizontal without such a wait: the last micro-batch's backward, which the optimizer's work falls into
    tail        the first block's and the embedding's gradients and steps: the last compute is over by then, but for
                the updates of their matrices, and of the second block's, which are made orthogonal there
    update      after the global norm, where the optimizer waits for it

Where ranks of a pipeline do forwards and backwards in turn, forwards are a part of the backward.

A delayed step falls where its group's weights are first loaded. For those that begin a step the one before has read as
much as buffers hold, and what brings their new weights and state home to disk nobody waits for: it may run in all
phases up to the epilogue. Both have rows of their own (``AHEAD``, ``HOME``).
"""

from collections.abc import Iterator, Mapping

from penstock.schedule.ir.ops import Op, Schedule, chunk_of
from penstock.schedule.ir.references import COMPUTES, OF_UPDATES, VisitId
from penstock.schedule.lower.route import Route

AHEAD, HOME = -2, -1
"""The rows after those of the phases."""
BEFORE_GRADIENTS = 3
"""Number of phases before the backward."""


class Phases:
    """The phases of one route. ``names``: in order; a row is the index of one of them, ``AHEAD`` or ``HOME``."""

    def __init__(self, route: Route, *, wait: bool, speculate: bool) -> None:
        """``wait``, ``speculate``: as in ``Settings``."""
        self.route = route
        self.micro_batches = 1 + max(visit.micro_batches[-1] for visit in route.visits)
        self.one_by_one = route.takes_turns or route.at_once < self.micro_batches
        self.split_last = self.one_by_one and (speculate or not wait)
        self.names = (
            "start",
            "forward",
            "epilogue",
            "backward",
            *(["last"] * self.split_last),
            "tail",
            *(["update"] * wait),
        )
        self._index: Mapping[str, int] = {name: i for i, name in enumerate(self.names)}
        visits, stages = route.visits, route.program.stages
        calls = [i for i, v in enumerate(visits) if stages[v.stage].kind == "call"]
        self._started = calls[0] if calls else 0
        self._tail = calls[-1] if calls and visits[calls[-1]].kind == "B" else len(visits)
        self._at: Mapping[VisitId, int] = {visit.name: i for i, visit in enumerate(visits)}
        self._computed = {(v.kind, v.stage, m): i for i, v in enumerate(visits) for m in v.micro_batches}

    @property
    def rows_of_load(self) -> int:
        return len(self.names) - AHEAD

    def compute_row(self, index: int) -> int:
        """The row of a visit's compute."""
        visit = self.route.visits[index]
        if visit.kind == "F" and not self.route.takes_turns:
            return self._index["forward"]
        if visit.kind == "E" and not self.one_by_one:
            return self._index["epilogue"]
        last = self.split_last and visit.kind != "F" and visit.micro_batches[-1] == self.micro_batches - 1
        return self._index["last" if last else "backward"]

    def load_row(self, index: int) -> int:
        """The row of the loads of a visit's weights."""
        if index <= self._started:
            return self._index["start"]
        ahead = self.route.visits[index].kind == "E" and not self.route.takes_turns
        return self._index["forward"] if ahead else self.compute_row(index)

    def gradient_row(self, index: int) -> int:
        """The row of a visit's gradients' way to the host, and of what they complete."""
        return self._index["tail"] if index >= self._tail else max(self.compute_row(index), BEFORE_GRADIENTS)

    def rows(self, schedule: Schedule) -> Iterator[tuple[Op, int]]:
        """Every op of a schedule that was lowered for this route, in order, with its row."""
        late = {chunk_of(op) for op in schedule.ops if op.id.kind in ("OP", "MU") and op.reads[0].kind in ("h", "r")}
        late |= {(g, -1) for g, _ in late}
        now, normed = 0, False
        for op in schedule.ops:
            ident, kind = op.id, op.id.kind
            if kind in COMPUTES:
                now = self._computed[kind, ident.stage, ident.micro_batch]
                yield op, self.compute_row(now)
            elif kind in ("RW", "UW", "HW", "GW", "UP"):
                assert ident.visit is not None
                yield op, self.load_row(self._at[ident.visit])
            elif kind == "DP":  # beside the visit
                assert ident.visit is not None
                yield op, self.compute_row(self._at[ident.visit])
            elif kind in ("RC", "UC"):
                yield op, self.compute_row(self._back(ident.stage + 1, ident.micro_batch))
            elif kind in ("DC", "WC"):
                yield op, self.compute_row(now)
            elif kind == "CM":
                yield op, self._index["forward"]
            elif kind in OF_UPDATES and chunk_of(op) in late:
                yield op, self._late_row(op)
            else:
                normed = normed or kind == "NORM"
                yield op, self._index["update"] if normed else self._row_after(now, kind)

    def _back(self, stage: int, micro_batch: int) -> int:
        """The visit that runs the backward of a stage, or the first part of it."""
        kind = "B" if ("B", stage, micro_batch) in self._computed else "I"
        return self._computed[kind, stage, micro_batch]

    def _late_row(self, op: Op) -> int:
        """The row of a delayed step's op: the first block waits for new weights, and not for what goes to disk, nor for
        what has been read."""
        g = op.id.group
        row = self.load_row(self.route.readers[g][0])
        if row != self._index["start"]:
            return row
        read = op.id.kind == "RS" and not self.route.program.groups[g].whole
        return HOME if op.lane == "write" else AHEAD if read else row

    def _row_after(self, index: int, kind: str) -> int:
        """The row of what follows a visit's compute. The norm waits for its parts, not for gradients to be on disk."""
        row = self.gradient_row(index)
        return self._index["update"] if kind == "WG" and row == self._index["tail"] and "update" in self.names else row
