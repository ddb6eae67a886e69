"""A schedule as it is simulated: ops, lanes, pools and messages as small integers. Ranks with one schedule share it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from penstock.errors import ScheduleError
from penstock.schedule.ir.lanes import LANES
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import Channel, World, channel_of
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
    | ``collective[i]`` | of a collective, its number in ``collectives``; -1 of others |
    | ``channel[i]`` | of a send, the number in ``sent`` of what it is a message of; -1 of others |

    A message is known by its channel and its micro-batch. ``sent``, ``received``: channels that go out of the rank and
    come in, each with its number; ``recvs[channel][micro_batch]``: the op that receives it.

    Raises:
        ScheduleError: an op that does not exist is waited for, a buffer or pool is not there, or a cost is no time.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        ops = schedule.ops
        self.ops = ops
        self.schedule = schedule
        self.pools = {pool.name: i for i, pool in enumerate(schedule.pools)}
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
        self._messages()

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

    def _messages(self) -> None:
        self.sent: dict[Channel, int] = {}
        self.received: dict[Channel, int] = {}
        self.recvs: list[dict[int, int]] = []
        self.collectives: dict[tuple[str, str], int] = {}
        self.channel, self.collective = [-1] * len(self.ops), [-1] * len(self.ops)
        for i, op in enumerate(self.ops):
            if op.group:
                self.collective[i] = self.collectives.setdefault((op.group, op.id), len(self.collectives))
            elif op.lane == "send":
                self.channel[i] = self.sent.setdefault(channel_of(op), len(self.sent))
            elif op.lane == "recv":
                channel = self.received.setdefault(channel_of(op), len(self.received))
                if channel == len(self.recvs):
                    self.recvs.append({})
                self.recvs[channel][op.id.micro_batch] = i
                self.missing[i] += 1


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank of a world as it is simulated. ``to``: by channel that goes out, the rank that receives it and the number
    of the channel there; None: nobody does."""

    template: Template
    costs: Costs
    to: Sequence[tuple[int, int] | None]


def ranks_of(world: World, costs: Sequence[Costs]) -> list[Rank]:
    """The ranks of a world, each with its costs; those with one schedule and costs share a template."""
    templates: dict[tuple[int, int], Template] = {}
    found: list[Template] = []
    for schedule, own in zip(world.ranks, costs, strict=True):
        key = id(schedule), id(own)
        if key not in templates:
            templates[key] = Template(schedule, own)
        found.append(templates[key])
    arrives: dict[tuple[int, Channel], tuple[int, int]] = {}
    for rank, template in enumerate(found):
        for channel, number in template.received.items():
            arrives[rank, world.channel(rank, channel)] = rank, number
    ranks: list[Rank] = []
    for rank, (template, own) in enumerate(zip(found, costs, strict=True)):
        channels = (world.channel(rank, channel) for channel in template.sent)
        to = [arrives.get((channel.peer, channel._replace(peer=rank))) for channel in channels]
        ranks.append(Rank(template=template, costs=own, to=to))
    return ranks
