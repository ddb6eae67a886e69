"""The rules that one rank's schedule keeps by itself. ``check`` lists them."""

from collections import defaultdict
from collections.abc import Iterable

from penstock.errors import ScheduleError
from penstock.schedule.check.clocks import Clocks
from penstock.schedule.check.op_ids import check_op_ids
from penstock.schedule.ir.ops import Op, Schedule, refused
from penstock.schedule.ir.references import Buffer


def check_names(schedule: Schedule) -> None:
    """Rule 1: what is named exists, and once; raises ScheduleError."""
    if not schedule.ops:
        raise ScheduleError(f"schedule {schedule.name} has no ops", op=f"schedule {schedule.name}")
    if len(schedule.by_id) != len(schedule.ops):
        twice = _first_twice(op.id for op in schedule.ops)
        raise ScheduleError(f"op {twice} appears twice", op=twice)
    pools = {pool.name for pool in schedule.pools}
    if len(pools) != len(schedule.pools):
        twice = f"pool {_first_twice(pool.name for pool in schedule.pools)}"
        raise ScheduleError(f"{twice} appears twice", op=twice)
    for at, names in (("start", [c[0] for c in schedule.carried]), ("end", [c[1] for c in schedule.carried])):
        if len(set(names)) != len(names):
            raise ScheduleError(f"buffer {_first_twice(names)} is carried twice at the step's {at}", op="carry")
    for start, _, pool in schedule.carried:
        if pool not in pools:
            message = f"buffer {start} is carried in pool {pool}, which does not exist"
            raise ScheduleError(message, op=f"carry {start}")
    taken = {start for start, _, _ in schedule.carried}.union(name for op in schedule.ops for name, _ in op.takes)
    for op in schedule.ops:
        if op.id.micro_batch >= schedule.micro_batches:
            raise refused(op, f"is of a micro-batch that does not exist: numbers are below {schedule.micro_batches}")
        if op.items < 1:
            raise refused(op, "computes no micro-batch: write 'items 1' or more")
        for other in op.after:
            if other not in schedule.by_id:
                raise refused(op, f"waits for {other}, which does not exist")
        for name, pool in op.takes:
            if pool not in pools:
                raise refused(op, f"takes {name} from pool {pool}, which does not exist")
        for name in op.gives:
            if name not in taken:
                raise refused(op, f"gives back {name}, which is not taken")


def _first_twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def check_rules(schedule: Schedule, order: list[Op]) -> None:
    """Rules 2 to 7. ``order``: one in which the ops can run; raises ScheduleError."""
    clocks = Clocks(order)
    check_buffers(schedule, order, clocks)
    check_op_ids(schedule, clocks)


def check_buffers(schedule: Schedule, order: list[Op], clocks: Clocks) -> None:
    """Rules 2 to 5, which ask nothing of what ops mean. A buffer that is carried in was taken and written before, one
    that is carried on is kept. ``clocks``: of the ops in this order; raises ScheduleError."""
    touched: dict[Buffer, list[Op]] = defaultdict(list)
    carried = {name for name, _, _ in schedule.carried}
    taker: dict[Buffer, Op] = {}
    giver: dict[Buffer, Op] = {}
    for op in order:
        for name, _ in op.takes:
            if name in taker or name in carried:
                by = f"which {taker[name].id} took before" if name in taker else "which is held from the step before"
                raise refused(op, f"takes {name}, {by}")
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
            raise refused(ops[0], f"uses {name}, which no op takes")
    for name in [*taker, *carried]:
        ops = touched.get(name, [])
        _check_life(name, taker.get(name), giver.get(name), ops, clocks)
        _check_races(name, taker.get(name), ops, clocks)
    _check_pools(order, clocks)


def _check_life(name: Buffer, first: Op | None, last: Op | None, ops: list[Op], clocks: Clocks) -> None:
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
        raise refused(last, f"gives {name} back before {first.id} has taken it")


def _check_races(name: Buffer, taker: Op | None, ops: list[Op], clocks: Clocks) -> None:
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
