"""A schedule as the simulator runs it: ops, lanes and pools as small integers. Ranks with one schedule share it."""

from collections.abc import Sequence
from math import inf

from penstock.errors import ScheduleError
from penstock.schedule.ir.lanes import LANES
from penstock.schedule.ir.ops import Schedule
from penstock.sim.costs import Costs


class Template:
    """One schedule, indexed by the position of its ops.

    | attribute | meaning, for op i |
    |---|---|
    | ``lane[i]`` | index of its lane in ``queues`` |
    | ``missing[i]`` | ops that it waits for: ``after``, and for a recv its send |
    | ``dependents[i]`` | ops that wait for it |
    | ``takes[i]``, ``gives[i]`` | pools, one entry for each buffer |
    | ``seconds[i]`` | time that it takes alone; of compute, with what others take of the interpreter |

    ``recvs[peer, op]`` is the op that receives from that rank.

    Raises:
        ScheduleError: an op that does not exist is waited for, a buffer or pool is not there, or a cost is no time.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        ops = schedule.ops
        self.ops = ops
        self.schedule = schedule
        self.pools = {pool.name: i for i, pool in enumerate(schedule.pools)}
        self.names = [pool.name for pool in schedule.pools]
        self.free = [pool.count for pool in schedule.pools]
        self.seconds = list(map(costs.seconds, ops))
        for op, seconds in zip(ops, self.seconds, strict=True):
            if not 0 <= seconds < inf:
                raise ScheduleError(f"op {op.id} takes {seconds} by the costs {costs.name}, which is no time")
        lanes = {lane: 0 if costs.serial else i for i, lane in enumerate(LANES)}
        self.lane = [lanes[op.lane] for op in ops]
        self.queues: list[list[int]] = [[] for _ in range(max(lanes.values()) + 1)]
        for i, lane in enumerate(self.lane):
            self.queues[lane].append(i)
        if costs.interpreter and not costs.serial:
            self._hold_compute_up(costs.interpreter)
        self._link()
        self._buffers()
        self.recvs: dict[tuple[int, str], int] = {(op.peer, op.id): i for i, op in enumerate(ops) if op.lane == "recv"}
        for i in self.recvs.values():
            self.missing[i] += 1

    def _hold_compute_up(self, interpreter: float) -> None:
        """Ops of other lanes cost the next op of compute in the schedule's order, which is about when they run; those
        behind the last one cost that."""
        compute = LANES.index("compute")
        others, last = 0, -1
        for i, lane in enumerate(self.lane):
            if lane == compute:
                self.seconds[i] += others * interpreter
                others, last = 0, i
            else:
                others += 1
        if last >= 0:
            self.seconds[last] += others * interpreter

    def _link(self) -> None:
        place = {op.id: i for i, op in enumerate(self.ops)}
        self.missing = [len(op.after) for op in self.ops]
        self.dependents: list[Sequence[int]] = [()] * len(self.ops)
        for i, op in enumerate(self.ops):
            for other in op.after:
                j = place.get(other, -1)
                if j < 0:
                    raise ScheduleError(f"op {op.id} waits for {other}, which does not exist")
                found = self.dependents[j]
                self.dependents[j] = (*found, i)

    def _buffers(self) -> None:
        pool_of: dict[str, int] = {}
        for start, _, pool in self.schedule.carried:
            pool_of[start] = self._pool(pool, "the step before")
            self.free[pool_of[start]] -= 1
        self.takes: list[tuple[int, ...]] = []
        for op in self.ops:
            found = tuple([self._pool(pool, op.id) for _, pool in op.takes]) if op.takes else ()
            self.takes.append(found)
            pool_of |= {name: pool for (name, _), pool in zip(op.takes, found, strict=True)}
        self.gives: list[tuple[int, ...]] = []
        for op in self.ops:
            if missing := [name for name in op.gives if name not in pool_of]:
                raise ScheduleError(f"op {op.id} gives back {missing[0]}, which is not taken")
            self.gives.append(tuple([pool_of[name] for name in op.gives]) if op.gives else ())

    def _pool(self, name: str, taker: str) -> int:
        if name not in self.pools:
            raise ScheduleError(f"{taker} takes from pool {name}, which does not exist")
        return self.pools[name]
