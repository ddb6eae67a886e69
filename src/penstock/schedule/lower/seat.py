"""A rank's seat in its world, besides its route: what it shares with which ranks, and how much it does at a time.

| family | sharded | weights | gradients |
|---|---|---|---|
| ``single``, ``grad-accumulation``, pipelines | nothing | stay | stay |
| ``ddp`` | nothing | stay | all-reduced after the backward |
| ``weight-sharded`` | weights, state | gathered for each use | all-reduced after the backward |
| ``zero1`` | state | gathered after the step | reduce-scattered after the backward |
| ``zero2`` | state, gradients | gathered after the step | reduce-scattered during the backward |
| ``fsdp``, also with pipelines; ``zero-infinity`` | all three | gathered for each use | reduce-scattered during the
backward |
| streams, stage 3 | all three | gathered for each use | reduce-scattered when all micro-batches are in them |
| streams, stage 3, ``secondary`` | all three | as in stage 3, but across hosts for the first use in a step | as in
stage 3 |
| streams, stages 2 and 1 | state, gradients; weights between steps | gathered once a step, and stay on the device until
its last use | as in stage 3 |
| streams, stage 0 | nothing | brought for each use, by each rank its own | all-reduced when all micro-batches are in
them |
| streams, ``copies`` | the same within a copy of the state | as in its stage | as in its stage, and what each rank then
has is all-reduced between copies |
| streams, stages 3 to 1 on several ``hosts`` of several ranks | as in the stage | first between the ranks of each
place, then within hosts | first within hosts, then between the ranks of each place |

ZeRO and ZeRO-R are arXiv 1910.02054. Groups that stream are shared as one of the last six rows says, or not at all
(``not_streamed``): ``zero-infinity`` and stage 3 differ where several visits make a gradient. A gradient that streams
leaves the device as soon as it is complete, so that stages 1 and 2 are one: nobody has it whole for longer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from penstock.config import ZeroStage
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.mesh import ALONE, Mesh, ProcessGroup, is_branch
from penstock.schedule.place import Placement


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """One row of the table above. ``reduce``: what is done about gradients, and when. ``piece``: they cross the network
    in pieces of this amount, through one buffer (ZeRO-R). ``apart``: on the device, each visit has a gradient of its
    own, and the optimizer's step adds them up; otherwise a group has one. ``stay``: weights that are gathered stay on
    the device until the last visit of the step that reads them. ``secondary``: as in ``Settings``.
    """

    weights: bool = False
    state: bool = False
    reduce: Literal["none", "all", "scatter-late", "scatter-early"] = "none"
    piece: int | None = None
    apart: bool = False
    stay: bool = False
    secondary: bool = False


FULLY = Sharding(weights=True, state=True, reduce="scatter-early")
"""ZeRO-3"""

SUMMED = Sharding(weights=True, state=True, reduce="scatter-late")
"""ZeRO-3 whose gradients cross once a step, however many micro-batches there are."""

CROSSING_ONCE = replace(SUMMED, secondary=True)
"""ZeRO-3 whose weights cross between hosts once a step."""

GATHERED_ONCE = replace(SUMMED, stay=True)
"""ZeRO-2, of which a step begins with what ZeRO-3 has: each rank has its part of the new weights."""

REPLICATED = Sharding(reduce="all")
"""Data parallelism: each rank has all of everything, and does the same with the same sum of gradients."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place.

    | field | meaning |
    |---|---|
    | ``sharding``, ``shards`` | what each rank has only its part of, and the ranks that have the parts |
    | ``copies`` | the ranks that have the same part, where there are several copies of the state (HSDP): one of each |
    | ``hosts`` | the ranks with this one's place on their hosts, where ``shards`` are as many neighbours on each of
    several: collectives then have two levels, and what goes between hosts does so beside what goes within them |
    | ``model`` | the ranks that compute the same micro-batches, and keep one copy of each stage's input (ZeRO-R) |
    | ``items`` | micro-batches that an op computes at once |
    | ``inputs`` | of the model, what the first stage takes up for a micro-batch; 0 where the inputs are there before |
    | ``lookahead`` | loads of weights that come before their turn |
    | ``pipe`` | the ranks of a pipeline that streams, each of which has stages of its own; where ``shards`` share
    what one of them has, there are as many pipelines beside each other |
    | ``steps`` | when a group steps that waits for no norm: with the last visit that needs it, or after all visits, the
    first group first (``up``, each stage's gradient crosses while those before it step) or the last one first |
    """

    shards: ProcessGroup = ALONE
    sharding: Sharding = Sharding()
    copies: ProcessGroup = ALONE
    hosts: ProcessGroup = ALONE
    model: ProcessGroup = ALONE
    items: int = 1
    inputs: int = 0
    lookahead: int = 0
    pipe: ProcessGroup = ALONE
    steps: Literal["within", "up", "down"] = "within"

    @property
    def parts(self) -> int:
        """The number of parts that the groups are cut into, of which this rank has one."""
        return self.shards.size if self.sharding.state else 1

    @property
    def near(self) -> ProcessGroup:
        """The ranks of one host, of those that share the state; all of them where collectives have one level."""
        if self.hosts.size == 1:
            return self.shards
        return ProcessGroup(name=HOST, members=tuple(range(self.shards.size // self.hosts.size)))

    @property
    def crossed(self) -> int:
        """The number of ranks of a host that have all of a group's weights together once these have crossed."""
        return self.near.size if self.hosts.size > 1 else 1

    @property
    def adds_on_levels(self) -> bool:
        """True if gradients are added up within hosts and then between them: their order allows it."""
        return self.hosts.size > 1 and is_branch(self.near.size)

    @property
    def normed_with(self) -> ProcessGroup:
        """The ranks that have a part of the norm each."""
        if self.pipe.size == 1 or self.parts == 1:
            return self.shards if self.parts > 1 else self.pipe
        return replace(self.pipe, members=tuple(range(self.pipe.size * self.shards.size)))

    def world(self, schedule: Schedule) -> World:
        """The world of these ranks alone, who all do the same: copy by copy, or host by host, the ranks of each one
        after the other."""
        near, far = (self.near, self.hosts) if self.copies.size == 1 else (self.shards, self.copies)
        if far.size == 1:
            return self.shards.world(schedule)
        each, size = near.size, near.size * far.size

        def of(rank: int) -> Schedule:
            which, place = divmod(rank, each)
            return _renamed(schedule, {near.name: f"{near.name}{which}", far.name: f"{far.name}{place}"})

        groups = {f"{near.name}{n}": tuple(range(n * each, (n + 1) * each)) for n in range(far.size)}
        groups |= {f"{far.name}{place}": tuple(range(place, size, each)) for place in range(each)}
        if self.hosts.size > 1:
            groups[self.shards.name] = self.shards.members
        return World(name=schedule.name, ranks=tuple(map(of, range(size))), groups=groups)

    def of_few(self) -> "Seat":
        """The seat among two copies at most, of two hosts at most with two ranks: all do the same, so that a schedule
        which is right for two of a kind is right for any number."""

        def two(group: ProcessGroup) -> ProcessGroup:
            return replace(group, members=group.members[:2])

        if self.hosts.size == 1:
            return replace(self, shards=two(self.shards), copies=two(self.copies))
        return replace(self, shards=replace(self.shards, members=self.shards.members[:4]), hosts=two(self.hosts))

    def in_step(self, schedule: Schedule) -> World:
        """A world that stands for ``world`` where an op takes as long on each rank: one of them, whose collectives
        begin when it arrives, as all others do then."""
        groups = (self.shards, self.copies, self.hosts, self.near)
        together = {group.name: (0,) for group in groups if group.size > 1}
        return World(name=schedule.name, ranks=(schedule,), groups=together)

    def of_kinds(self, schedule: Schedule, kinds: int) -> World:
        """A world of one rank on each of so many kinds of host, whose collectives wait for all that they would meet:
        within a host for nobody, and where there are copies of the state, each is within one."""
        world, together = self.in_step(schedule), tuple(range(kinds))
        if kinds == 1 or (self.copies.size == 1 and self.hosts.size == 1):
            return replace(world, ranks=(schedule,) * kinds, groups=dict.fromkeys(world.groups, together))
        near = self.near
        ranks = tuple(_renamed(schedule, {near.name: f"{near.name}{kind}"}) for kind in together)
        groups: dict[str, tuple[int, ...]] = {f"{near.name}{kind}": (kind,) for kind in together}
        groups |= {name: together for name in world.groups if name != near.name}
        return World(name=schedule.name, ranks=ranks, groups=groups)


def pipeline_world(schedules: Sequence[Schedule]) -> World:
    """The world of all ranks of a pipeline that streams, by rank. Of several beside each other it stands for all: ranks
    that have one place do the same, and so meet when one of them arrives."""
    everyone = Mesh(stages=len(schedules)).everyone()
    groups = {everyone.name: everyone.members}
    for place, schedule in enumerate(schedules):
        if any(op.group == shards_at(place) for op in schedule.lanes.get("net", ())):
            groups[shards_at(place)] = (place,)
    return World(name=schedules[0].name, ranks=tuple(schedules), groups=groups)


def _renamed(schedule: Schedule, own: Mapping[str, str]) -> Schedule:
    """The schedule with one rank's own names of groups."""
    return replace(schedule, ops=tuple(replace(op, group=own.get(op.group, op.group)) for op in schedule.ops))


ONE_RANK = Seat()
"""All of everything is this rank's."""


def not_streamed(seat: Seat, place: Placement) -> str:
    """The reason that a rank which streams cannot take a seat, or hold in it what is placed there; empty: it can."""
    alone = seat.shards.size == 1
    if replace(seat, model=ALONE, items=1, inputs=0, lookahead=0, steps="within") != seat:
        return "a rank that streams computes a micro-batch at a time, whole, and steps within its visits"
    if seat.sharding not in ((Sharding(),) if alone else (FULLY, SUMMED, CROSSING_ONCE, GATHERED_ONCE, REPLICATED)):
        return "groups that stream are shared as one of the stages of ZeRO shares them, and those of one rank are not"
    if not alone and "device" in (*place.weights, *place.state):
        return "of groups that stream, what several ranks share lives below the device"
    return ""


def shards_at(place: int) -> str:
    """The name of the process group of the ranks that have one place in pipelines beside each other."""
    return f"shards{place}"


COPIES, HOST, HOSTS = "copies", "host", "hosts"
"""The names of the process groups of the ranks that have the same part of different copies, of those of a host, and of
those with the same place on different hosts."""


@lru_cache(maxsize=256)
def streaming_seat(
    ranks: int,
    stage: ZeroStage = 3,
    copies: int = 1,
    hosts: int = 1,
    *,
    secondary: bool = False,
    pipe: int = 1,
    place: int = 0,
) -> Seat:
    """The seat of each of so many ranks that stream what they have of a program, in a stage of ZeRO, on so many
    ``hosts`` if they share one copy of it, with a ``secondary`` partition on each or without; or of each of as many for
    each of several ``copies`` of the state; or of as many that have one ``place`` in pipelines of ``pipe`` ranks."""
    pipeline = ALONE if pipe == 1 else Mesh(stages=pipe).everyone()
    if ranks == 1:
        return ONE_RANK if pipe == 1 else Seat(pipe=pipeline)
    on_levels = stage > 0 and copies == pipe == 1 and 1 < hosts < ranks
    shards = Mesh(data=ranks).everyone()
    return Seat(
        shards=shards if pipe == 1 else replace(shards, name=shards_at(place)),
        pipe=pipeline,
        copies=ProcessGroup(name=COPIES, members=tuple(range(copies))) if copies > 1 else ALONE,
        hosts=ProcessGroup(name=HOSTS, members=tuple(range(hosts))) if on_levels else ALONE,
        sharding={3: CROSSING_ONCE if secondary else SUMMED, 2: GATHERED_ONCE, 1: GATHERED_ONCE, 0: REPLICATED}[stage],
    )
