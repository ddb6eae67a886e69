"""The rules that follow from what the words of one rank's ops mean. ``check`` lists them."""

from collections import defaultdict
from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.clocks import Clocks
from penstock.schedule.op import Op, Schedule, Word


def left_over(schedule: Schedule, clocks: Clocks) -> frozenset[str]:
    """The chunks ("5.1") that the step before has left to be stepped."""
    left = _left(schedule, clocks)
    return frozenset(op.id[2:] for op in schedule.ops if op.word.kind == "OP" and not left.isdisjoint(op.reads))


def _left(schedule: Schedule, clocks: Clocks) -> set[str]:
    """Buffers with gradients that the step before has left, in memory or on disk."""
    return {name for name, _, _ in schedule.carried} | set(_left_on_disk(schedule, clocks))


def check_words(schedule: Schedule, clocks: Clocks) -> None:
    """Rules 6 and 7; raises ScheduleError."""
    left = _left(schedule, clocks)
    _check_homes(schedule, clocks, left)
    order = _Order(schedule, left)
    for op in schedule.ops:
        for other in order.before(op) if op.word.kind in _ORDERED else ():
            _check_after(other, op, clocks)


# ---- rule 6: what lies outside the pools


def _check_homes(schedule: Schedule, clocks: Clocks, left: set[str]) -> None:
    """Rule 6. ``left``: buffers with gradients that the step before has left.

    An optimizer step whose gradient the step before has left (in a carried buffer, or on disk: read there before this
    step's own is written) is that step's own: its new weights come before all who read them here, and its norm was the
    step before's.
    """
    readers: dict[tuple[int, int], list[Op]] = defaultdict(list)
    parts: list[Op] = []
    for op in schedule.ops:
        if op.word.kind in ("RW", "UW"):
            readers[op.word.group, op.word.chunk].append(op)
        elif op.word.kind in ("NG", "ND"):
            parts.append(op)
    norm = schedule.by_id.get("NORM")
    for op in schedule.ops:
        word, needs = op.word, []
        if word.kind in ("OP", "OD"):
            if left.isdisjoint(op.reads):
                waits = norm is not None and not _speculates(schedule, op)
                needs = readers[word.group, word.chunk] + ([norm] if norm and waits else [])
            else:
                for other in readers[word.group, word.chunk]:
                    for made in _made(schedule, op, other):
                        _check_after(made, other, clocks)
                if norm:
                    _check_after(op, norm, clocks)
        elif word.kind == "NORM":
            needs = parts
        elif word.kind in ("RG", "RC"):
            writer = schedule.by_id.get(f"W{op.id[1:]}")
            if writer is None:
                message = f"use before load: op {op.id} reads what no op has written to disk"
                raise ScheduleError(message, op=op.id)
            needs = [] if left.intersection(op.writes) else [writer]
        for other in needs:
            _check_after(other, op, clocks)
    _check_commit(schedule, left, clocks)


def _speculates(schedule: Schedule, step: Op) -> bool:
    """Whether an optimizer step need not know the norm: what it changes comes from disk, and goes back beside it."""
    tag = step.id[2:]
    return schedule.speculative and f"RS{tag}" in schedule.by_id and f"WS{tag}" in schedule.by_id


def _check_commit(schedule: Schedule, left: set[str], clocks: Clocks) -> None:
    """``CM`` comes after all that the step before has left is stepped and at home, and before anything of this step is
    written."""
    late = {op.id[2:] for op in schedule.ops if op.word.kind == "OP" and not left.isdisjoint(op.reads)}
    commit = schedule.by_id.get("CM")
    for op in schedule.ops:
        if commit is not None and op.id[2:] in late and op.word.kind in ("OP", "UN", "WS", "WW"):
            _check_after(op, commit, clocks)
        elif op.word.kind not in ("WS", "WW"):
            continue
        elif commit is not None:
            _check_after(commit, op, clocks)
        elif op.id[2:] in late:
            message = f"op {op.id} ends the step before, which no op CM commits"
            raise ScheduleError(message, op=op.id)


def _check_after(first: Op, second: Op, clocks: Clocks) -> None:
    if not clocks.before(first, second):
        message = f"op {second.id} may run before {first.id}, which it has to come after"
        raise ScheduleError(message, op=second.id)


def _left_on_disk(schedule: Schedule, clocks: Clocks) -> Iterator[str]:
    """Buffers into which gradients are read that the step before has left on disk."""
    for op in schedule.lanes["read"]:
        if op.word.kind == "RG" and (writer := schedule.by_id.get(f"W{op.id[1:]}")) and clocks.before(op, writer):
            yield from op.writes


def _made(schedule: Schedule, step: Op, reader: Op) -> list[Op]:
    """What makes the new weights that an op reads: the optimizer step, and on disk the write that brings them there
    (with the state where that has them). An upload reads a buffer, or the array that the step itself has written.
    """
    tag = step.id[2:]
    home = schedule.by_id.get(f"WW{tag}", schedule.by_id.get(f"WS{tag}")) if reader.word.kind == "RW" else None
    return [step] if home is None else [step, home]


# ---- rule 7: one group, or one stage and micro-batch, has its ops in the order that their words mean


_ORDERED = frozenset(("B", "I", "W", "DG", "AG", "SG", "AR", "OP", "OD", "WW", "WS", "UN", "GN"))


class _Order:
    """What has to come before an op of the same group, or of the same stage and micro-batch.

    In a schedule whose groups are the stages' own (``chunk`` 0), a gradient is whole when its stage's backwards are
    done. Elsewhere the visit that an op names, and the buffers, say where a gradient is from.
    """

    def __init__(self, schedule: Schedule, left: set[str]) -> None:
        self._by_id = schedule.by_id
        self._own = not schedule.chunk
        self._left = left
        self._visits: dict[str, list[Op]] = defaultdict(list)
        """who makes gradients, by visit: ``B3``, ``B3m0``, ``E9``"""
        self._sums: dict[int, list[Op]] = defaultdict(list)
        """who brings a group's gradient together"""
        self._stepped: dict[int, Op] = {}
        for op in schedule.ops:
            word = op.word
            if word.kind in ("B", "W", "E"):
                visit = f"{'E' if word.kind == 'E' else 'B'}{word.stage}"
                self._visits[visit].append(op)
                self._visits[f"{visit}m{word.micro_batch}"].append(op)
            elif word.kind in ("DG", "AG", "SG", "AR"):
                self._sums[word.group].append(op)
            elif word.kind == "OP":
                self._stepped[word.group] = op

    def before(self, op: Op) -> list[Op]:
        """Raises ScheduleError: nothing makes what the op brings home, or a group is stepped in two places."""
        word = op.word
        match word.kind:
            case "B" | "I" | "W":
                first = self._by_id.get(f"{'I' if word.kind == 'W' else 'F'}{op.id[1:]}")
                return [first] if first else []
            case "DG" | "AG" | "SG" | "AR":
                return self._visits.get(word.visit, []) if word.visit else self._backwards(word.group)
            case "OD" if word.group in self._stepped:
                raise ScheduleError(f"op {op.id} steps what {self._stepped[word.group].id} steps, too", op=op.id)
            case "OP" | "OD" if self._left.isdisjoint(op.reads):
                sums = [other for other in self._sums[word.group] if self._same(word, other.word)]
                return sums + self._backwards(word.group)
            case "WW" | "WS" | "UN":
                return [self._maker(op, f"OP{op.id[2:]}")]
            case "GN":
                return [self._maker(op, f"OD{op.id[2:]}")]
        return []

    def _same(self, one: Word, other: Word) -> bool:
        """Whether two chunks have something in common: a group that is not cut has all of its chunks."""
        return one.chunk == other.chunk or -1 in (one.chunk, other.chunk)

    def _backwards(self, group: int) -> list[Op]:
        return self._visits.get(f"B{group}", []) if self._own else []

    def _maker(self, op: Op, ident: str) -> Op:
        maker = self._by_id.get(ident)
        if maker is None:
            raise ScheduleError(f"op {op.id} brings home what nothing has made: there is no op {ident}", op=op.id)
        return maker
