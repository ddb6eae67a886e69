"""Proves a schedule safe, or names the op that breaks a rule.

"x happens before y" means: x is done when y starts, whatever the timing. It follows from ``after``, from the order of
a lane that does one thing at a time, and from the fact that every lane publishes its ops as done in order. It is kept
as a vector clock: how many ops of each lane are surely done when y starts. The lanes ``read`` and ``write`` keep
several ops in flight, so their order alone says nothing about two ops of the same lane. On top of that:

1. every id is unique, every dependency exists, and there is no deadlock with the given pools;
2. a buffer is taken before it is touched and given back after its last use, exactly once (pools are returned);
3. two ops that touch a buffer are ordered if one of them writes it (no overwrite before last use);
4. an op that only reads a buffer comes after every op that only writes it (no use before load);
5. a pool is taken from in one order whatever the timing, which makes rule 1's proof hold for every timing;
6. outside the pools: weights are read where they are at home before the optimizer replaces them, what waits on disk is
   written before it is read, and the norm comes after all of its parts and before every optimizer step.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.config import Tier
from penstock.errors import ScheduleError
from penstock.schedule.op import LANES, Op, Schedule
from penstock.schedule.program import Program

_LANE_INDEX = {lane: i for i, lane in enumerate(LANES)}
_ONE_AT_A_TIME = {"compute", "h2d", "d2h", "cpu"}


def check(schedule: Schedule) -> None:
    """Check every rule.

    Raises:
        ScheduleError: names the rule, the op, and what it waits for or collides with.
    """
    _check_names(schedule)
    order = list(run_order(schedule))
    clocks = _clocks(order)
    _check_buffers(order, clocks)
    _check_pools(order, clocks)
    _check_homes(schedule, clocks)


def check_readers(schedule: Schedule, program: Program, weights: Sequence[Tier]) -> None:
    """Check what a schedule does not say of itself: weights that live on the device (by ``weights``, a tier for each
    group) are read by every stage that uses them, and no step may change them before the last of those.

    Raises:
        ScheduleError: names the op that may come too early.
    """
    clocks = _clocks(list(run_order(schedule)))
    readers: dict[int, list[Op]] = defaultdict(list)
    for op in schedule.lanes["compute"]:
        if op.word.kind in ("F", "B", "E"):
            stage = program.stages[op.word.stage]
            forward = () if op.word.kind == "B" else stage.forward_reads
            backward = () if op.word.kind == "F" else stage.backward_reads
            for group in {g for g in (*forward, *backward) if weights[g] == "device"}:
                readers[group].append(op)
    for op in schedule.ops:
        if op.word.kind in ("OP", "OD", "UN"):
            for reader in readers[op.word.group]:
                if not _before(reader, op, clocks):
                    raise ScheduleError(f"op {op.id} may run before {reader.id}, which reads the weights it changes")


def _check_names(schedule: Schedule) -> None:
    if len(schedule.by_id) != len(schedule.ops):
        seen: set[str] = set()
        for op in schedule.ops:
            if op.id in seen:
                raise ScheduleError(f"op {op.id} appears twice")
            seen.add(op.id)
    pools = {pool.name for pool in schedule.pools}
    if len(pools) != len(schedule.pools):
        names = [pool.name for pool in schedule.pools]
        raise ScheduleError(f"pool {next(name for name in names if names.count(name) > 1)} appears twice")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moment:
    """An op's place in the order: its lane, its turn there (from 1), and how far each lane surely is when it starts."""

    lane: int
    turn: int
    start: Clock


def _clocks(order: list[Op]) -> dict[str, _Moment]:
    moments: dict[str, _Moment] = {}
    done: dict[str, Clock] = {}  # how far each lane surely is once an op is published
    latest: list[Clock] = [(0,) * len(LANES) for _ in LANES]
    for op in order:
        lane = _LANE_INDEX[op.lane]
        known = [done[other] for other in op.after]
        if op.lane in _ONE_AT_A_TIME:
            known.append(latest[lane])
        start = tuple(map(max, zip(*known, strict=True))) if known else (0,) * len(LANES)
        turn = latest[lane][lane] + 1
        moments[op.id] = _Moment(lane=lane, turn=turn, start=start)
        published = [max(pair) for pair in zip(start, latest[lane], strict=True)]
        published[lane] = turn
        done[op.id] = latest[lane] = tuple(published)
    return moments


def _before(first: Op, second: Op, clocks: dict[str, _Moment]) -> bool:
    mine = clocks[first.id]
    return clocks[second.id].start[mine.lane] >= mine.turn


def _check_buffers(order: list[Op], clocks: dict[str, _Moment]) -> None:
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
    for name, first in taker.items():
        last, ops = giver[name], touched[name]
        for op in ops:
            if op is not first and not _before(first, op, clocks):
                raise ScheduleError(f"use before load: op {op.id} uses {name} before {first.id} has taken it")
        for op in ops:
            if op is not last and not _before(op, last, clocks):
                raise ScheduleError(
                    f"overwrite before last use: {last.id} gives {name} back while op {op.id} may use it"
                )
        if last is not first and not _before(first, last, clocks):
            raise ScheduleError(f"op {last.id} gives {name} back before {first.id} has taken it")
        _check_races(name, first, ops, clocks)


def _check_races(name: str, taker: Op, ops: list[Op], clocks: dict[str, _Moment]) -> None:
    """Rules 3 and 4 on one buffer. ``ops`` are in a possible order, so only neighbours that conflict are compared.

    Who takes a buffer may add to it at once (a gradient starts from zero); anybody else needs something to read.
    """
    loads = [op for op in ops if name in op.writes and name not in op.reads]
    for op in ops:
        if name not in op.writes and (late := [w for w in loads if not _before(w, op, clocks)]):
            raise ScheduleError(f"use before load: op {op.id} reads {name} before {late[0].id} has written it")
    last_write: Op | None = None
    since: list[Op] = []
    for op in ops:
        if name in op.reads and last_write is None and not (op is taker and name in op.writes):
            raise ScheduleError(f"use before load: op {op.id} reads {name}, which nothing has written")
        if name in op.writes:
            for other in since or ([last_write] if last_write else []):
                if not _before(other, op, clocks):
                    raise ScheduleError(f"race: op {op.id} writes {name} while {other.id} may use it")
            last_write, since = op, []
        else:
            if last_write is not None and not _before(last_write, op, clocks):
                raise ScheduleError(f"race: op {op.id} reads {name} while {last_write.id} may write it")
            since.append(op)


def _check_pools(order: list[Op], clocks: dict[str, _Moment]) -> None:
    """Rule 5. Ops of one lane start, and so take, in order; others must be ordered by what they wait for."""
    last: dict[str, Op] = {}
    for op in order:
        for name, pool in op.takes:
            before = last.get(pool)
            if before is not None and before.lane != op.lane and not _before(before, op, clocks):
                raise ScheduleError(f"pool {pool}: ops {before.id} and {op.id} take from it in no fixed order ({name})")
            last[pool] = op


def _check_homes(schedule: Schedule, clocks: dict[str, _Moment]) -> None:
    """Rule 6, from what the words mean."""
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
            needs = readers[word.group, word.chunk] + ([norm] if norm else [])
        elif word.kind == "NORM":
            needs = parts
        elif word.kind in ("RG", "RC"):
            writer = schedule.by_id.get(f"W{op.id[1:]}")
            if writer is None:
                raise ScheduleError(f"use before load: op {op.id} reads what no op has written to disk")
            needs = [writer]
        for other in needs:
            if not _before(other, op, clocks):
                raise ScheduleError(f"op {op.id} may run before {other.id}, which it has to come after")
