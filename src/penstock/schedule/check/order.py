"""An order in which all ops of all ranks can run: the serial oracle's order, and the proof that there is no deadlock.

Every lane runs its ops in order. One that cannot go on is put down beside the first thing that it waits for, and taken
up again when that comes: no lane is looked at in vain, so the work is proportional to the ops and their dependencies.
An op of a collective holds its buffers from when it is ready, which is when the others may count on it. Where groups
stream, a send and its recv meet in the same way: what crosses goes from one buffer into the other, and lies nowhere in
between. Of ranks that hold layers, which are only simulated, a send waits for nobody.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.references import Buffer, OpId, answer_to
from penstock.schedule.ir.worlds import World

LaneAt = tuple[int, Lane]
"""A lane of a rank."""


@dataclass(kw_only=True, slots=True)
class _Rank:
    """The progress of a rank. ``waiting``: lanes by the op that they wait for; ``starving``: by the pool."""

    schedule: Schedule
    free: dict[str, int]
    held: dict[Buffer, str]
    heads: dict[Lane, int]
    done: set[OpId] = field(default_factory=set)
    order: list[Op] = field(default_factory=list)
    waiting: dict[str, list[LaneAt]] = field(default_factory=dict)
    starving: dict[str, list[LaneAt]] = field(default_factory=dict)


def on_rank(world: World, rank: int, what: str) -> str:
    """``what``, with the rank before it in a world of several."""
    return what if len(world.ranks) == 1 else f"rank {rank}: {what}"


def run_order(schedule: Schedule) -> Iterator[Op]:
    """An order in which the ops of a single rank can run one at a time; other ranks are taken to be there.

    Raises:
        ScheduleError: no lane can go on; says what the head of each lane waits for.
    """
    return iter(run_orders(World.of(schedule))[0])


def run_orders(world: World) -> list[list[Op]]:
    """For each rank, its ops in an order in which they can run one at a time. Sends, receives and groups must match.

    Raises:
        ScheduleError: no lane can go on; says what it waits for. A buffer is given back that is not taken, or is not
            given back.
    """
    progress = _Progress(world)
    progress.run()
    for rank in range(len(world.ranks)):
        progress.check_returned(rank)
    return [rank.order for rank in progress.ranks]


class _Progress:
    """All ranks on their way through the step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ranks = [self._start(rank) for rank in range(len(world.ranks))]
        self._alone = len(world.ranks) == 1
        self._meets = not self._alone and any(schedule.chunk for schedule in world.ranks)
        self.ready: list[set[str]] = [set() for _ in world.ranks]  # sends and receives whose peer is not there yet
        self.arrived: dict[tuple[str, OpId], list[LaneAt]] = {}  # collective's group and id -> who is there
        self.agenda: deque[LaneAt] = deque((i, lane) for i, rank in enumerate(self.ranks) for lane in rank.heads)

    def _start(self, rank: int) -> _Rank:
        schedule = self.world.ranks[rank]
        free = {pool.name: pool.count for pool in schedule.pools}
        for _, _, pool in schedule.carried:
            free[pool] -= 1
            if free[pool] < 0:
                what = f"more buffers of pool {pool} are carried than it has"
                raise ScheduleError(on_rank(self.world, rank, what), op=f"pool {pool}", rank=rank)
        heads = {lane: 0 for lane, ops in schedule.lanes.items() if ops}
        held = {name: pool for name, _, pool in schedule.carried}
        return _Rank(schedule=schedule, free=free, held=held, heads=heads)

    def run(self) -> None:
        while self.agenda:
            rank, lane = self.agenda.popleft()
            self._advance(rank, lane)
        if any(len(rank.order) < len(rank.schedule.ops) for rank in self.ranks):
            raise self._deadlock()

    def _advance(self, index: int, lane: Lane) -> None:
        """Run a lane's ops until one has to wait."""
        rank = self.ranks[index]
        ops, done = rank.schedule.lanes[lane], rank.done
        while (head := rank.heads[lane]) < len(ops):
            op = ops[head]
            for other in op.after:
                if other not in done:
                    rank.waiting.setdefault(other, []).append((index, lane))
                    return
            if op.takes and (pool := _short(op, rank.free)):
                rank.starving.setdefault(pool, []).append((index, lane))
                return
            if lane == "recv" and op.peer >= 0 and not (self._meets or self._alone):
                peer, send = self.ranks[op.peer], answer_to(op.id)
                if send not in peer.done:
                    peer.waiting.setdefault(send, []).append((index, lane))
                    return
            _take(op, rank)
            if op.group and not self._meet(index, op):
                return
            if self._meets and op.peer >= 0 and not self._hand_over(index, op):
                return
            self._finish(index, op)

    def _meet(self, index: int, op: Op) -> bool:
        """True if this rank is the last of its group to arrive; if so, the others are done, too."""
        members = self.world.groups.get(op.group, (index,))
        there = self.arrived.setdefault((op.group, op.id), [])
        if len(there) + 1 < len(members):
            there.append((index, op.lane))
            return False
        for other, lane in there:
            rank = self.ranks[other]
            self._finish(other, rank.schedule.lanes[lane][rank.heads[lane]])
            self.agenda.append((other, lane))
        return True

    def _hand_over(self, index: int, op: Op) -> bool:
        """True if the peer of a send, or of a recv, has come to the other one of the two, which is done, too."""
        other, answer = self.ranks[op.peer], answer_to(op.id)
        if answer not in self.ready[op.peer]:
            self.ready[index].add(op.id)
            return False
        self.ready[op.peer].discard(answer)
        lane: Lane = "send" if op.id.lane == "recv" else "recv"
        self._finish(op.peer, other.schedule.lanes[lane][other.heads[lane]])
        self.agenda.append((op.peer, lane))
        return True

    def _finish(self, index: int, op: Op) -> None:
        rank = self.ranks[index]
        for name in op.gives:
            if name not in rank.held:
                message = f"op {op.id} gives back {name}, which is not taken"
                raise ScheduleError(on_rank(self.world, index, message), op=op.id, rank=index)
            pool = rank.held.pop(name)
            rank.free[pool] += 1
            if pool in rank.starving:
                self.agenda += rank.starving.pop(pool)
        rank.done.add(op.id)
        rank.order.append(op)
        rank.heads[op.id.lane] += 1
        if op.id in rank.waiting:
            self.agenda += rank.waiting.pop(op.id)

    def check_returned(self, index: int) -> None:
        """At the end exactly what is carried into the next step is held, each from its pool."""
        rank = self.ranks[index]
        ends = {name: pool for _, name, pool in rank.schedule.carried}
        for name in [*rank.held, *ends]:
            pool, wanted = rank.held.get(name), ends.get(name)
            if pool == wanted:
                continue
            if wanted is None:
                what = f"buffer {name} is never given back to pool {pool}"
            elif pool is None:
                what = f"buffer {name} is to be carried on, but is not held at the end"
            else:
                what = f"buffer {name} is carried on as one of pool {wanted}, but is from pool {pool}"
            taker = next((op.id for op in rank.order if name in dict(op.takes)), "")
            raise ScheduleError(on_rank(self.world, index, what), op=taker, rank=index)

    # ---- who waits for whom

    def _deadlock(self) -> ScheduleError:
        stuck = [(i, lane) for i, rank in enumerate(self.ranks) for lane in rank.heads if self._head((i, lane))]
        if len(self.ranks) > 1:
            stuck = self._circle(stuck[0])
        first = self._head(stuck[0])
        assert first is not None
        described = "; ".join(self._described(at) for at in stuck[:_MOST_NAMED])
        if len(stuck) > _MOST_NAMED:
            described += f"; ... ({len(stuck)} in a circle)"
        return ScheduleError(f"deadlock: {described}", op=first.id, rank=stuck[0][0])

    def _head(self, at: LaneAt) -> Op | None:
        rank = self.ranks[at[0]]
        ops, head = rank.schedule.lanes[at[1]], rank.heads[at[1]]
        return ops[head] if head < len(ops) else None

    def _described(self, at: LaneAt) -> str:
        index, op = at[0], self._head(at)
        assert op is not None
        rank = self.ranks[index]
        missing = [f"op {other}" for other in op.after if other not in rank.done]
        if (index, op.lane) in self.arrived.get((op.group, op.id), ()):
            missing.append(f"op {op.id} of rank {self._absent(op)[0]}")
        elif op.id not in self.ready[index]:
            missing += [f"a buffer of pool {pool}" for _, pool in op.takes if rank.free[pool] < 1]
        if self._awaited(index, op):
            missing.append(f"op {answer_to(op.id)} of rank {op.peer}")
        return on_rank(self.world, index, f"{op.lane} {op.id} waits for {', '.join(missing) or 'its pools'}")

    def _awaited(self, index: int, op: Op) -> bool:
        """True if an op cannot go on before its peer has come to the other end of what it sends or receives."""
        if self._meets:
            return op.id in self.ready[index]
        return op.lane == "recv" and not self._alone and answer_to(op.id) not in self.ranks[op.peer].done

    def _absent(self, op: Op) -> list[int]:
        there = {index for index, _ in self.arrived[op.group, op.id]}
        return [index for index in self.world.groups[op.group] if index not in there]

    def _circle(self, at: LaneAt) -> list[LaneAt]:
        """Lanes that wait for each other, found by going from one that is stuck to one that it waits for."""
        path: dict[LaneAt, int] = {}
        while at not in path:
            path[at] = len(path)
            at = self._blocker(at)
        return list(path)[path[at] :]

    def _blocker(self, at: LaneAt) -> LaneAt:
        """The lane whose head must move before this one's can. A stuck lane always waits for another stuck lane."""
        index, op = at[0], self._head(at)
        assert op is not None
        rank = self.ranks[index]
        for other in op.after:
            if other not in rank.done:
                return index, rank.schedule.by_id[other].lane
        if at in self.arrived.get((op.group, op.id), ()):
            other_rank = self._absent(op)[0]
            return other_rank, op.lane
        if op.id not in self.ready[index] and (pool := _short(op, rank.free)):
            for giver in rank.schedule.ops:
                if giver.id not in rank.done and any(rank.held.get(name) == pool for name in giver.gives):
                    return index, giver.lane
        if self._awaited(index, op):
            return op.peer, "send" if op.lane == "recv" else "recv"
        return at  # it waits for a pool that nobody will give back to


_MOST_NAMED = 9
"""The most lanes that a message about a deadlock describes: as many as a rank has."""


def _short(op: Op, free: dict[str, int]) -> str:
    """The pool that has too few buffers for what an op takes; empty if none."""
    if len(op.takes) == 1:
        pool = op.takes[0][1]
        return "" if free[pool] > 0 else pool
    wanted: dict[str, int] = {}
    for _, pool in op.takes:
        wanted[pool] = wanted.get(pool, 0) + 1
    return next((pool for pool, count in wanted.items() if free[pool] < count), "")


def _take(op: Op, rank: _Rank) -> None:
    for name, pool in op.takes:
        rank.free[pool] -= 1
        rank.held[name] = pool
