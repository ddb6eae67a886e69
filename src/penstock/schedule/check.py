"""Proves a schedule safe, or names the op that breaks a rule.

Each lane starts and completes its ops in order, so "x happens before y" is a vector clock: how many ops of each lane
are surely done when y starts. On top of that:

1. every id is unique, every dependency exists, and there is no deadlock with the given pools;
2. a buffer is taken before it is touched and given back after its last use, exactly once (pools are returned);
3. two ops that touch a buffer are ordered if one of them writes it (no overwrite before last use);
4. an op that only reads a buffer comes after every op that only writes it (no use before load);
5. a pool is taken from in one order whatever the timing, which makes rule 1's proof hold for every timing.
"""

from collections import defaultdict, deque
from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.op import LANES, Op, Schedule

_LANE_INDEX = {lane: i for i, lane in enumerate(LANES)}


def check(schedule: Schedule) -> None:
    """Check every rule.

    Raises:
        ScheduleError: names the rule, the op, and what it waits for or collides with.
    """
    _check_names(schedule)
    order = list(run_order(schedule))
    clocks = _clocks(order)
    _check_buffers(order, clocks)
    _check_pools(schedule, clocks)


def _check_names(schedule: Schedule) -> None:
    if len(schedule.by_id) != len(schedule.ops):
        seen: set[str] = set()
        for op in schedule.ops:
            if op.id in seen:
                raise ScheduleError(f"op {op.id} appears twice")
            seen.add(op.id)
    pools = {pool.name for pool in schedule.pools}
    for op in schedule.ops:
        for other in op.after:
            if other not in schedule.by_id:
                raise ScheduleError(f"op {op.id} waits for {other}, which does not exist")
        for name, pool in op.takes:
            if pool not in pools:
                raise ScheduleError(f"op {op.id} takes {name} from pool {pool}, which does not exist")


def run_order(schedule: Schedule) -> Iterator[Op]:
    """Ops in an order in which they can run one at a time: the serial oracle's order, and the proof of no deadlock.

    Raises:
        ScheduleError: no lane can go on; says what the head of each lane waits for.
    """
    free = {pool.name: pool.count for pool in schedule.pools}
    pool_of: dict[str, str] = {}
    done: set[str] = set()
    queues = {lane: deque(ops) for lane, ops in schedule.lanes.items()}
    while any(queues.values()):
        progress = False
        for queue in queues.values():
            while queue and _ready(queue[0], done, free):
                op = queue.popleft()
                for name, pool in op.takes:
                    free[pool] -= 1
                    pool_of[name] = pool
                for name in op.gives:
                    if name not in pool_of:
                        raise ScheduleError(f"op {op.id} gives back {name}, which is not taken")
                    free[pool_of.pop(name)] += 1
                done.add(op.id)
                progress = True
                yield op
        if not progress:
            raise ScheduleError("deadlock: " + "; ".join(_stuck(q[0], done, free) for q in queues.values() if q))
    if pool_of:
        name, pool = next(iter(pool_of.items()))
        raise ScheduleError(f"buffer {name} is never given back to pool {pool}")


def _ready(op: Op, done: set[str], free: dict[str, int]) -> bool:
    if any(other not in done for other in op.after):
        return False
    wanted: dict[str, int] = defaultdict(int)
    for _, pool in op.takes:
        wanted[pool] += 1
    return all(free[pool] >= count for pool, count in wanted.items())


def _stuck(op: Op, done: set[str], free: dict[str, int]) -> str:
    missing = [f"op {other}" for other in op.after if other not in done]
    missing += [f"a buffer of pool {pool}" for _, pool in op.takes if free[pool] < 1]
    return f"{op.lane} {op.id} waits for {', '.join(missing) or 'its pools'}"


Clock = tuple[int, ...]


def _clocks(order: list[Op]) -> dict[str, Clock]:
    """For each op: how many ops of each lane are done when it is done (itself included)."""
    clocks: dict[str, Clock] = {}
    latest: dict[int, Clock] = {i: (0,) * len(LANES) for i in range(len(LANES))}
    for op in order:
        lane = _LANE_INDEX[op.lane]
        merged = list(latest[lane])
        for other in op.after:
            for i, count in enumerate(clocks[other]):
                merged[i] = max(merged[i], count)
        merged[lane] = latest[lane][lane] + 1
        clocks[op.id] = latest[lane] = tuple(merged)
    return clocks


def _before(first: Op, second: Op, clocks: dict[str, Clock]) -> bool:
    lane = _LANE_INDEX[first.lane]
    mine, other = clocks[first.id], clocks[second.id]
    return other[lane] >= mine[lane] if first.lane != second.lane else mine[lane] < other[lane]


def _check_buffers(order: list[Op], clocks: dict[str, Clock]) -> None:
    touched: dict[str, list[Op]] = defaultdict(list)
    taker: dict[str, Op] = {}
    giver: dict[str, Op] = {}
    for op in order:
        for name, _ in op.takes:
            if name in taker:
                raise ScheduleError(f"op {op.id} takes {name}, which {taker[name].id} took before")
            taker[name] = op
        for name in {*op.reads, *op.writes}:
            touched[name].append(op)
        for name in op.gives:
            giver[name] = op
    for name, ops in touched.items():
        if name not in taker:
            raise ScheduleError(f"op {ops[0].id} uses {name}, which no op takes")
        for op in ops:
            if op is not taker[name] and not _before(taker[name], op, clocks):
                raise ScheduleError(f"use before load: op {op.id} uses {name} before {taker[name].id} has taken it")
            if op is not giver[name] and not _before(op, giver[name], clocks):
                raise ScheduleError(
                    f"overwrite before last use: {giver[name].id} gives {name} back while op {op.id} may use it"
                )
        _check_races(name, ops, clocks)


def _check_races(name: str, ops: list[Op], clocks: dict[str, Clock]) -> None:
    """Rules 3 and 4 on one buffer. ``ops`` are in a possible order, so only neighbours that conflict are compared."""
    loads = [op for op in ops if name in op.writes and name not in op.reads]
    for op in ops:
        if name not in op.writes and (late := [w for w in loads if not _before(w, op, clocks)]):
            raise ScheduleError(f"use before load: op {op.id} reads {name} before {late[0].id} has written it")
    last_write: Op | None = None
    since: list[Op] = []
    for op in ops:
        if name in op.writes:
            for other in since or ([last_write] if last_write else []):
                if not _before(other, op, clocks):
                    raise ScheduleError(f"race: op {op.id} writes {name} while {other.id} may use it")
            last_write, since = op, []
        else:
            if last_write is None:
                raise ScheduleError(f"use before load: op {op.id} reads {name}, which nothing has written")
            if not _before(last_write, op, clocks):
                raise ScheduleError(f"race: op {op.id} reads {name} while {last_write.id} may write it")
            since.append(op)


def _check_pools(schedule: Schedule, clocks: dict[str, Clock]) -> None:
    last: dict[str, Op] = {}
    for op in schedule.ops:
        for name, pool in op.takes:
            before = last.get(pool)
            if before is not None and before is not op and not _before(before, op, clocks):
                raise ScheduleError(f"pool {pool}: ops {before.id} and {op.id} take from it in no fixed order ({name})")
            last[pool] = op
