"""A world: the schedules of all ranks of one step, and the process groups of their collectives. Plain data.

Text form: a header, the groups, then one schedule for each rank. Ranks that do the same share one.

    world fsdp ranks 4
    group all 0-3
    rank 0-3
    schedule fsdp micro-batches 4 chunk 0
    ...
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.schedule.ir.ops import Op, Schedule


class Channel(NamedTuple):
    """A row of messages, one for each micro-batch, from a rank to a ``peer`` or the other way: what passes behind a
    stage. ``what``: A, D or X, as in the ids of the ops that send and receive."""

    what: str
    stage: int
    peer: int


def channel_of(op: Op) -> Channel:
    """The channel of a send or a recv, as its rank sees it."""
    return Channel(op.id.kind[1], op.id.stage, op.peer)


@dataclass(frozen=True, kw_only=True, repr=False)
class World:
    """The schedules of all ranks. ``ranks[r]`` is rank r's schedule (the same object for ranks that do the same);
    ``groups``: name -> ranks.

    A collective op waits for the ops of the same id on all ranks of its group. A ``send`` op of activation or gradient
    x to peer q meets the ``recv`` op of x from this rank on q: the recv starts when the send is done.

    ``channels``: rank -> for a rank that does what another one does with other stages and peers, and has that one's
    schedule here, its own channel of each channel there. Such a world is for the simulator alone.
    """

    name: str
    ranks: tuple[Schedule, ...]
    groups: Mapping[str, tuple[int, ...]]
    channels: Mapping[int, Mapping[Channel, Channel]] = field(default_factory=dict)

    @staticmethod
    def of(schedule: Schedule) -> "World":
        """A world of one rank."""
        return World(name=schedule.name, ranks=(schedule,), groups={})

    def channel(self, rank: int, there: Channel) -> Channel:
        """The rank's own channel of one in its schedule."""
        return self.channels[rank][there] if rank in self.channels else there

    def __repr__(self) -> str:
        """``str`` is the text form, which may be long."""
        return f"<World {self.name}: {len(self.ranks)} ranks, {sum(len(s.ops) for s in self.ranks)} ops>"

    def __str__(self) -> str:
        assert not self.channels, "ranks have others' schedules"
        if len(self.ranks) == 1 and not self.groups:
            return str(self.ranks[0])
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"world {self.name} ranks {len(self.ranks)}"
        for name, members in self.groups.items():
            yield f"group {name} {format_ranks(members)}"
        together: dict[int, list[int]] = {}
        for rank, schedule in enumerate(self.ranks):
            together.setdefault(id(schedule), []).append(rank)
        for ranks in together.values():
            yield f"rank {format_ranks(ranks)}"
            yield str(self.ranks[ranks[0]]).rstrip("\n")


def format_ranks(ranks: Iterable[int]) -> str:
    """``0-3,8``: runs of consecutive ranks, in the order given."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
