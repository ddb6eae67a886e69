"""The events of a simulation, one after the other in Python: the oracle of native code, which has the same bits."""

import heapq
from collections.abc import Sequence

import numpy as np

from penstock.schedule.ir.lanes import LANES
from penstock.schedule.ir.worlds import World
from penstock.sim.costs import Costs
from penstock.sim.result import Columns
from penstock.sim.template import Rank


def in_python(world: World, ranks: Sequence[Rank]) -> Columns | None:
    """The events of a world; None: no rank can go on, or a message is lost."""
    return _Run(world, ranks).run()


class _Pace:
    """The pace of a rank's lanes: how many ops each keeps in flight, and how these slow each other."""

    def __init__(self, costs: Costs) -> None:
        self.sharing = costs.sharing
        self.widths = costs.in_flight
        self._slows = [[costs.contention.get((a, b), 0.0) for b in LANES] for a in LANES]
        self._speeds: dict[tuple[int, ...], list[float]] = {}  # by how many ops each lane has under way

    def speeds(self, counts: tuple[int, ...]) -> list[float]:
        """The speed of each lane's ops, with so many of each lane under way."""
        speeds = self._speeds.get(counts)
        if speeds is None:
            speeds = self._speeds[counts] = [self._speed(lane, counts) if n else 0.0 for lane, n in enumerate(counts)]
        return speeds

    def _speed(self, lane: int, counts: tuple[int, ...]) -> float:
        slower = 0.0  # one after the other: ``sum`` of Python 3.12 rounds once
        for b, n in enumerate(counts):
            if n and b != lane:
                slower += self._slows[lane][b]
        return 1.0 / (counts[lane] * (1.0 + slower))


class _Rank:
    """The state of a rank while it runs. ``offset``: position of its first op among all ranks' ops."""

    def __init__(self, index: int, offset: int, rank: Rank, pace: _Pace) -> None:
        template = rank.template
        lanes = len(template.queues)
        self.to = rank.to
        self.pace = pace
        self.index = index
        self.offset = offset
        self.t = template
        self.missing = list(template.missing)
        self.free = list(template.free)
        self.next = [0] * lanes
        self.in_flight = [0] * lanes
        self.published = [0] * lanes
        self.arrived = [False] * lanes
        self.finished: set[int] = set()
        self.idle_since = [0.0] * lanes
        self.starving: dict[int, set[int]] = {}  # pool -> lanes whose next op wants a buffer of it
        self.done = 0
        self.active: dict[int, float] = {}  # op -> work left, where lanes share
        self.advancing = False  # whether ops are ended, after which the next end is looked for anyway
        self.counts = [0] * lanes  # of those, by lane
        self.now = 0.0  # the moment that ``active`` is true of
        self.version = 0


Trigger = tuple[_Rank, int, int]
"""The event after which a lane is looked at: (rank, op done there, pool that it gave a buffer back to or -1)."""


class _Run:
    def __init__(self, world: World, ranks: Sequence[Rank]) -> None:
        paces = {id(rank.costs): _Pace(rank.costs) for rank in ranks}
        self.world = world
        self.ranks: list[_Rank] = []
        total = 0
        for index, rank in enumerate(ranks):
            self.ranks.append(_Rank(index, total, rank, paces[id(rank.costs)]))
            total += len(rank.template.ops)
        self.starts = [0.0] * total
        self.takes = [0.0] * total
        self.ends = [0.0] * total
        self.waits = [0.0] * total
        self.triggers: list[tuple[int, int, int]] = [(-1, -1, -1)] * total
        self.heap: list[tuple[float, int, int, int, int]] = []  # (time, sequence, rank, op or -1, version)
        self.sequence = 0
        self.lost = False  # whether a message has nobody who receives it
        self.waiting: dict[tuple[str, str], list[tuple[_Rank, int]]] = {}  # a collective's ranks that have arrived

    def run(self) -> Columns | None:
        for rank in self.ranks:
            for lane, queue in enumerate(rank.t.queues):
                if queue:
                    self._start_lane(rank, lane, 0.0, None)
        heap = self.heap
        while heap:
            now, _, r, i, version = heapq.heappop(heap)
            rank = self.ranks[r]
            if i >= 0:
                self._end(rank, i, now)
            elif version == rank.version:
                self._advance(rank, now)
        return self._result()

    # ---- starting

    def _start_lane(self, rank: _Rank, lane: int, now: float, trigger: Trigger | None) -> None:
        """Start whatever can start on a lane."""
        t, queue = rank.t, rank.t.queues[lane]
        while rank.next[lane] < len(queue) and rank.in_flight[lane] < rank.pace.widths[lane] and not rank.arrived[lane]:
            i = queue[rank.next[lane]]
            if rank.missing[i]:
                return
            takes = t.takes[i]
            if takes and not self._take(rank, lane, takes):
                return
            self.takes[rank.offset + i] = now
            group = t.ops[i].group
            if group:
                rank.arrived[lane] = True
                self._arrive(rank, lane, i, group, now, trigger)
            else:
                self._start(rank, lane, i, now, trigger)

    def _take(self, rank: _Rank, lane: int, takes: tuple[int, ...]) -> bool:
        free = rank.free
        for pool in takes:
            free[pool] -= 1
        short = [pool for pool in takes if free[pool] < 0]
        if not short:
            return True
        for pool in takes:
            free[pool] += 1
        for pool in short:
            rank.starving.setdefault(pool, set()).add(lane)
        return False

    def _arrive(self, rank: _Rank, lane: int, i: int, group: str, now: float, trigger: Trigger | None) -> None:
        key = (group, rank.t.ops[i].id)
        here = self.waiting.setdefault(key, [])
        here.append((rank, i))
        if len(here) < len(self.world.groups[group]):
            return
        del self.waiting[key]
        for member, j in here:
            its_lane = member.t.lane[j]
            member.arrived[its_lane] = False
            self._start(member, its_lane, j, now, trigger if member is rank else (rank, i, -1))

    def _start(self, rank: _Rank, lane: int, i: int, now: float, trigger: Trigger | None) -> None:
        at = rank.offset + i
        self.starts[at] = now
        if not rank.in_flight[lane] and now > rank.idle_since[lane]:
            self.waits[at] = now - rank.idle_since[lane]
            if trigger is not None:
                other, j, pool = trigger
                self.triggers[at] = other.index, j, pool
        rank.next[lane] += 1
        rank.in_flight[lane] += 1
        if rank.pace.sharing:
            self._progress(rank, now)
            rank.active[i] = rank.t.seconds[i]
            rank.counts[lane] += 1
            if not rank.advancing:
                self._plan_next(rank)
        else:
            self.sequence += 1
            heapq.heappush(self.heap, (now + rank.t.seconds[i], self.sequence, rank.index, i, 0))

    # ---- ending

    def _end(self, rank: _Rank, i: int, now: float) -> None:
        t = rank.t
        lane = t.lane[i]
        self.ends[rank.offset + i] = now
        rank.in_flight[lane] -= 1
        rank.idle_since[lane] = now
        finished, queue = rank.finished, t.queues[lane]
        finished.add(i)
        while rank.published[lane] < len(queue) and queue[rank.published[lane]] in finished:
            head = queue[rank.published[lane]]
            finished.discard(head)
            rank.published[lane] += 1
            self._publish(rank, head, now)
        self._start_lane(rank, lane, now, (rank, i, -1))

    def _publish(self, rank: _Rank, i: int, now: float) -> None:
        """Count an op as done: whoever waits for it, or for a buffer that it gives back, may go on."""
        t = rank.t
        rank.done += 1
        gives = t.gives[i]
        for pool in gives:
            rank.free[pool] += 1
        missing = rank.missing
        for j in t.dependents[i]:
            missing[j] -= 1
            if not missing[j]:
                self._look(rank, j, now, (rank, i, -1))
        if gives and rank.starving:
            for pool in dict.fromkeys(gives):
                for hungry in sorted(rank.starving.pop(pool, ())):
                    self._start_lane(rank, hungry, now, (rank, i, pool))
        if t.channel[i] >= 0:
            self._deliver(rank, i, now)

    def _look(self, rank: _Rank, j: int, now: float, trigger: Trigger) -> None:
        """An op has all that it waited for: start it if it is its lane's turn."""
        lane = rank.t.lane[j]
        at = rank.next[lane]
        queue = rank.t.queues[lane]
        if at < len(queue) and queue[at] == j:
            self._start_lane(rank, lane, now, trigger)

    def _deliver(self, rank: _Rank, i: int, now: float) -> None:
        op, to = rank.t.ops[i], rank.to[rank.t.channel[i]]
        j = -1 if to is None else self.ranks[to[0]].t.recvs[to[1]].get(op.id.micro_batch, -1)
        if to is None or j < 0:
            self.lost = True
            return
        receiver = self.ranks[to[0]]
        receiver.missing[j] -= 1
        if not receiver.missing[j]:
            self._look(receiver, j, now, (rank, i, -1))

    # ---- lanes that share

    def _progress(self, rank: _Rank, now: float) -> None:
        """Take what has been done since the last change off the work that is left."""
        elapsed = now - rank.now
        rank.now = now
        if elapsed > 0:
            lane_of, speeds = rank.t.lane, rank.pace.speeds(tuple(rank.counts))
            for i in rank.active:
                rank.active[i] -= elapsed * speeds[lane_of[i]]

    def _plan_next(self, rank: _Rank) -> None:
        """Note when the next op of a rank will be done, if nothing changes before."""
        rank.version += 1
        if not rank.active:
            return
        lane_of, speeds = rank.t.lane, rank.pace.speeds(tuple(rank.counts))
        soonest = min([left / speeds[lane_of[i]] for i, left in rank.active.items()])
        self.sequence += 1
        heapq.heappush(self.heap, (rank.now + max(soonest, 0.0), self.sequence, rank.index, -1, rank.version))

    def _advance(self, rank: _Rank, now: float) -> None:
        """End the ops of a rank whose work is done."""
        self._progress(rank, now)
        nearest = min(rank.active.values())
        over = [i for i, left in rank.active.items() if left <= max(nearest, 0.0) + 1e-12]
        for i in over:
            del rank.active[i]
            rank.counts[rank.t.lane[i]] -= 1
        rank.advancing = True
        for i in over:
            self._end(rank, i, now)
        rank.advancing = False
        self._plan_next(rank)

    # ---- the end

    def _result(self) -> Columns | None:
        if self.lost or any(rank.done < len(rank.t.ops) for rank in self.ranks):
            return None
        starts, takes, ends, waits = np.array([self.starts, self.takes, self.ends, self.waits])
        return Columns(starts, takes, ends, waits, np.array(self.triggers, dtype=np.int32).reshape(-1, 3))
