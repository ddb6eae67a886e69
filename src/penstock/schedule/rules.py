"""The rules that one rank's schedule keeps by itself. ``check`` lists them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from penstock.errors import ScheduleError
from penstock.schedule.clocks import Clocks
from penstock.schedule.op import Op, Schedule


def check_names(schedule: Schedule) -> None:
    """Rule 1: what is named exists, and once; raises ScheduleError."""
    if len(schedule.by_id) != len(schedule.ops):
        twice = _first_twice(op.id for op in schedule.ops)
        raise ScheduleError(f"op {twice} appears twice", op=twice)
    pools = {pool.name for pool in schedule.pools}
    if len(pools) != len(schedule.pools):
        raise ScheduleError(f"pool {_first_twice(pool.name for pool in schedule.pools)} appears twice")
    for at, names in (("start", [c[0] for c in schedule.carried]), ("end", [c[1] for c in schedule.carried])):
        if len(set(names)) != len(names):
            raise ScheduleError(f"buffer {_first_twice(names)} is carried twice at the step's {at}")
    for start, _, pool in schedule.carried:
        if pool not in pools:
            raise ScheduleError(f"buffer {start} is carried in pool {pool}, which does not exist")
    for op in schedule.ops:
        for other in op.after:
            if other not in schedule.by_id:
                raise ScheduleError(f"op {op.id} waits for {other}, which does not exist", op=op.id)
        for name, pool in op.takes:
            if pool not in pools:
                raise ScheduleError(f"op {op.id} takes {name} from pool {pool}, which does not exist", op=op.id)


def _first_twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def check_rules(schedule: Schedule, order: list[Op]) -> None:
    """Rules 2 to 6. ``order``: one in which the ops can run; raises ScheduleError."""
    clocks = Clocks(order)
    _check_buffers(schedule, order, clocks)
    _check_pools(order, clocks)
    _check_homes(schedule, clocks)


def _check_buffers(schedule: Schedule, order: list[Op], clocks: Clocks) -> None:
    """Rules 2 to 4. A buffer that is carried in was taken and written before, one that is carried on is kept."""
    touched: dict[str, list[Op]] = defaultdict(list)
    carried = {name for name, _, _ in schedule.carried}
    taker: dict[str, Op] = {}
    giver: dict[str, Op] = {}
    for op in order:
        for name, _ in op.takes:
            if name in taker or name in carried:
                by = f"which {taker[name].id} took before" if name in taker else "which is held from the step before"
                raise ScheduleError(f"op {op.id} takes {name}, {by}", op=op.id)
            taker[name] = op
        for name in op.writes:
            touched[name].append(op)
        for name in op.reads:
            if name not in op.writes:
                touched[name].append(op)
        for name in op.gives:
            giver[name] = op
    for name, ops in touched.items():
        if name not in taker and name not in carried:
            raise ScheduleError(f"op {ops[0].id} uses {name}, which no op takes", op=ops[0].id)
    for name in [*taker, *carried]:
        ops = touched.get(name, [])
        _check_life(name, taker.get(name), giver.get(name), ops, clocks)
        _check_races(name, taker.get(name), ops, clocks)


def _check_life(name: str, first: Op | None, last: Op | None, ops: list[Op], clocks: Clocks) -> None:
    """Rule 2 on one buffer: ``first`` takes it, None if it is carried in; ``last`` gives it, None if it is kept."""
    if first is not None:
        for op in ops:
            if op is not first and not clocks.before(first, op):
                raise ScheduleError(f"use before load: op {op.id} uses {name} before {first.id} has taken it", op=op.id)
    if last is not None:
        for op in ops:
            if op is not last and not clocks.before(op, last):
                message = f"overwrite before last use: {last.id} gives {name} back while op {op.id} may use it"
                raise ScheduleError(message, op=last.id)
    if first is not None and last is not None and last is not first and not clocks.before(first, last):
        raise ScheduleError(f"op {last.id} gives {name} back before {first.id} has taken it", op=last.id)


def _check_races(name: str, taker: Op | None, ops: list[Op], clocks: Clocks) -> None:
    """Rules 3 and 4 on one buffer. ``ops`` are in a possible order, so only neighbours that conflict are compared.

    Who takes a buffer may add to it at once (a gradient starts from zero); anybody else needs something to read, which
    a buffer that is carried in (``taker`` None) has.
    """
    loads = [op for op in ops if name in op.writes and name not in op.reads]
    if loads:
        for op in ops:
            if name not in op.writes and (late := [w for w in loads if not clocks.before(w, op)]):
                message = f"use before load: op {op.id} reads {name} before {late[0].id} has written it"
                raise ScheduleError(message, op=op.id)
    last_write: Op | None = None
    since: list[Op] = []
    for op in ops:
        writes = name in op.writes
        if last_write is None and name in op.reads and taker is not None and not (op is taker and writes):
            raise ScheduleError(f"use before load: op {op.id} reads {name}, which nothing has written", op=op.id)
        if writes:
            for other in since or ([last_write] if last_write else []):
                if not clocks.before(other, op):
                    raise ScheduleError(f"race: op {op.id} writes {name} while {other.id} may use it", op=op.id)
            last_write, since = op, []
        else:
            if last_write is not None and not clocks.before(last_write, op):
                raise ScheduleError(f"race: op {op.id} reads {name} while {last_write.id} may write it", op=op.id)
            since.append(op)


def _check_pools(order: list[Op], clocks: Clocks) -> None:
    """Rule 5. Ops of one lane start, and so take, in order; others must be ordered by what they wait for."""
    last: dict[str, Op] = {}
    for op in order:
        for name, pool in op.takes:
            before = last.get(pool)
            if before is not None and before.lane != op.lane and not clocks.before(before, op):
                message = f"pool {pool}: ops {before.id} and {op.id} take from it in no fixed order ({name})"
                raise ScheduleError(message, op=op.id)
            last[pool] = op


def _check_homes(schedule: Schedule, clocks: Clocks) -> None:
    """Rule 6, from what the words mean.

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
    left = {name for name, _, _ in schedule.carried} | set(_left_on_disk(schedule, clocks))
    for op in schedule.ops:
        word, needs = op.word, []
        if word.kind in ("OP", "OD"):
            if left.isdisjoint(op.reads):
                needs = readers[word.group, word.chunk] + ([norm] if norm else [])
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
