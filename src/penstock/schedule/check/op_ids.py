"""The rules that follow from what the ids of one rank's ops mean. ``check`` lists them."""

from collections import defaultdict

from penstock.errors import ScheduleError
from penstock.schedule.check.clocks import Clocks
from penstock.schedule.check.late import late_chunks, left_buffers
from penstock.schedule.ir.ops import ChunkAt, Op, Schedule, chunk_of, refused
from penstock.schedule.ir.references import Buffer, OpId, VisitId, visit


def check_op_ids(schedule: Schedule, clocks: Clocks) -> None:
    """Rules 6 and 7; raises ScheduleError."""
    left, late = left_buffers(schedule, clocks), late_chunks(schedule, clocks)
    _check_homes(schedule, clocks, left, late)
    _check_commit(schedule, clocks, late)
    order = _Order(schedule, left)
    for op in schedule.ops:
        for other in order.before(op) if op.id.kind in _ORDERED else ():
            _check_after(other, op, clocks)


# ---- rule 6: what lies outside the pools


def _check_homes(schedule: Schedule, clocks: Clocks, left: set[Buffer], late: frozenset[ChunkAt]) -> None:
    """Rule 6, but for the commit. ``left``: buffers with gradients that the step before has left; ``late``: chunks that
    are stepped with them.

    An optimizer step whose gradient the step before has left (in a carried buffer, or on disk: read there before this
    step's own is written) is that step's own: its new weights come before all who read them here, and its norm was the
    step before's.
    """
    readers: dict[ChunkAt, list[Op]] = defaultdict(list)
    parts: list[Op] = []
    for op in schedule.ops:
        if op.id.kind in ("RW", "UW"):
            readers[chunk_of(op)].append(op)
        elif op.id.kind in ("NG", "ND"):
            parts.append(op)
    norm = schedule.by_id.get("NORM")
    for op in schedule.ops:
        ident, needs = op.id, list[Op]()
        if ident.kind in ("OP", "OD"):
            if chunk_of(op) not in late:
                waits = norm is not None and not _speculates(schedule, op)
                needs = readers[chunk_of(op)] + ([norm] if norm and waits else [])
            else:
                for other in readers[chunk_of(op)]:
                    for made in _made(schedule, op, other):
                        _check_after(made, other, clocks)
                if norm:
                    _check_after(op, norm, clocks)
        elif ident.kind == "NORM":
            needs = parts
        elif ident.kind in ("RG", "RC"):
            writer = schedule.by_id.get(ident.of("WG" if ident.kind == "RG" else "WC"))
            if writer is None:
                raise ScheduleError(f"use before load: op {op.id} reads what no op has written to disk", op=op.id)
            needs = [] if left.intersection(op.writes) else [writer]
        for other in needs:
            _check_after(other, op, clocks)


def _speculates(schedule: Schedule, step: Op) -> bool:
    """True if an optimizer step need not know the norm: what it changes goes to disk, beside what was there. Where
    state lives is not known here: a proof (``schedule.meaning``) sees whether all of it does."""
    return schedule.speculative and any(step.id.of(kind) in schedule.by_id for kind in ("WS", "WW"))


def _check_commit(schedule: Schedule, clocks: Clocks, late: frozenset[ChunkAt]) -> None:
    """``CM`` comes after all that the step before has left is stepped and at home, and before anything of this step is
    written."""
    commit = schedule.by_id.get("CM")
    for op in schedule.ops:
        if commit is not None and chunk_of(op) in late and op.id.kind in ("OP", "MU", "UN", "WS", "WM", "WW"):
            _check_after(op, commit, clocks)
        elif op.id.kind not in ("WS", "WM", "WW"):
            continue
        elif commit is not None:
            _check_after(commit, op, clocks)
        elif chunk_of(op) in late:
            raise refused(op, "ends the step before, which no op CM commits")


def _check_after(first: Op, second: Op, clocks: Clocks) -> None:
    if not clocks.before(first, second):
        raise refused(second, f"may run before {first.id}, which it has to come after")


def _made(schedule: Schedule, step: Op, reader: Op) -> list[Op]:
    """The ops that make the new weights that an op reads: the optimizer step, and on disk the write that brings them
    there. An upload reads a buffer, or the array that the step itself has written.
    """
    home = schedule.by_id.get(step.id.of("WW")) if reader.id.kind == "RW" else None
    return [step] if home is None else [step, home]


# ---- rule 7: one group, or one stage and micro-batch, has its ops in the order that their ids mean


_SUMS = ("DG", "AG", "UG", "SG", "AR", "HG", "HR")
_ORDERED = frozenset(("B", "I", "W", *_SUMS, "MU", "OP", "OD", "WW", "WS", "WM", "UN", "GN"))


class _Order:
    """The ops that have to come before an op of the same group, or of the same stage and micro-batch.

    In a schedule whose groups are the stages' own (``chunk`` 0), a gradient is whole when its stage's backwards are
    done. Elsewhere the visit that an op names, and the buffers, say where a gradient is from.
    """

    def __init__(self, schedule: Schedule, left: set[Buffer]) -> None:
        self._by_id = schedule.by_id
        self._own = not schedule.chunk
        self._left = left
        self._visits: dict[VisitId, list[Op]] = defaultdict(list)
        """ops that make gradients, by visit: ``B3``, ``B3m0``, ``W3m0``, ``E9``"""
        self._sums: dict[int, list[Op]] = defaultdict(list)
        """ops that sum up a group's gradient"""
        self._stepped: dict[int, Op] = {}
        for op in schedule.ops:
            ident = op.id
            if ident.kind in ("B", "W", "E"):
                kind = "E" if ident.kind == "E" else "B"
                self._visits[visit(kind, ident.stage)].append(op)
                self._visits[visit(kind, ident.stage, ident.micro_batch)].append(op)
                if ident.kind == "W":
                    self._visits[visit("W", ident.stage)].append(op)
                    self._visits[visit("W", ident.stage, ident.micro_batch)].append(op)
            elif ident.kind in _SUMS:
                self._sums[ident.group].append(op)
            elif ident.kind == "OP":
                self._stepped[ident.group] = op

    def before(self, op: Op) -> list[Op]:
        """Raises ScheduleError: nothing makes what the op brings home, or a group is stepped in two places."""
        ident = op.id
        match ident.kind:
            case "B" | "I" | "W":
                first = self._by_id.get(ident.of("I" if ident.kind == "W" else "F"))
                return [first] if first else []
            case kind if kind in _SUMS:
                if ident.use:
                    return []
                return self._visits.get(ident.visit, []) if ident.visit else self._backwards(ident.group)
            case "OD" if ident.group in self._stepped:
                raise refused(op, f"steps what {self._stepped[ident.group].id} steps, too")
            case "MU" | "OP" | "OD" if self._left.isdisjoint(op.reads) and self._gradient_of(op):
                sums = [other for other in self._sums[ident.group] if self._same(ident, other.id)]
                return sums + self._backwards(ident.group)
            case "WW" | "WS" | "UN":
                return [self._maker(op, ident.of("OP"))]
            case "WM":
                return [self._maker(op, ident.of("MU"))]
            case "GN":
                return [self._maker(op, ident.of("OD"))]
        return []

    def _gradient_of(self, op: Op) -> bool:
        """True if an op takes a gradient: the step of matrices takes what another op has made of it."""
        return op.id.kind != "OP" or op.id.of("MU") not in self._by_id

    def _same(self, one: OpId, other: OpId) -> bool:
        """True if two chunks have something in common: a group that is not cut has all of its chunks."""
        return one.chunk == other.chunk or -1 in (one.chunk, other.chunk)

    def _backwards(self, group: int) -> list[Op]:
        return self._visits.get(visit("B", group), []) if self._own else []

    def _maker(self, op: Op, ident: OpId) -> Op:
        maker = self._by_id.get(ident)
        if maker is None:
            raise refused(op, f"brings home what nothing has made: there is no op {ident}")
        return maker
