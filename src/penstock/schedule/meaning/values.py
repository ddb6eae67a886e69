"""The values of a step as a proof sees them: what is in a buffer, and what a schedule needs and has."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from penstock.config.step import parts_of
from penstock.schedule.check.clocks import Clocks
from penstock.schedule.ir.ops import Op, refused
from penstock.schedule.mesh import is_branch
from penstock.schedule.place import Settings
from penstock.schedule.program import Program

BEFORE, NOW, AFTER = -1, 0, 1
"""Versions of a chunk: without the step that the step before has left; as this step's stages need it; stepped."""

LEFT = -1
"""The sum that is the whole gradient of the step before."""


class Weights(NamedTuple):
    """Chunks of a group's weights. ``versions``: chunk -> version."""

    group: int
    versions: dict[int, int]


class Gradient(NamedTuple):
    """A group's gradient on the device (``chunk`` -1), or one chunk of it.

    ``sum``: how it was added up, a number of the proof's ``Sums``, or LEFT. ``over``: what it is not added up over yet,
    a key of ``OVER``.
    """

    group: int
    chunk: int
    sum: int
    over: str = ""


OVER = {
    "": "a gradient",
    "ranks": "a gradient of all ranks' parts",
    "copies": "a gradient of one copy",
    "hosts": "a gradient of one host",
}
"""Gradients that are not added up over all yet: of every rank's part, as one of several ranks has summed them; over the
ranks of one copy of the state; over those of one host, of the parts of all ranks with this one's place on theirs."""


class OfPlace(NamedTuple):
    """A group's weights, of which the parts of all ranks with this one's place on their hosts are there. ``versions``:
    as of ``Weights``."""

    group: int
    versions: dict[int, int]


class Crossed(NamedTuple):
    """A group's weights in host memory, as far as they had to cross between hosts: all ranks of a host together have
    all of them. ``versions``: as of ``Weights``."""

    group: int
    versions: dict[int, int]


class State(NamedTuple):
    """A chunk's optimizer state, which lives on disk."""

    group: int
    chunk: int
    version: int


class Momentum(NamedTuple):
    """A chunk of the momentum of a group of matrices, which lives on disk."""

    group: int
    chunk: int
    version: int


class Update(NamedTuple):
    """Chunks of the updates of a group of matrices. ``late``: of the gradient that the step before has left;
    ``gathered``: with those of all other ranks, or of those with this one's place on their hosts."""

    group: int
    chunks: frozenset[int]
    late: bool
    orthogonal: bool = False
    gathered: Literal["", "place", "all"] = ""


class Activation(NamedTuple):
    """A stage's saved activation on the device, or the gradient with respect to it."""

    stage: int
    micro_batch: int
    gradient: bool


class Half(NamedTuple):
    """The tensors that the first part of a backward holds for the second."""

    stage: int
    micro_batch: int


class Graph(NamedTuple):
    """The graph of a call, kept from its forward."""

    stage: int
    micro_batch: int


class Kept(NamedTuple):
    """One part of so many of a saved activation in host memory."""

    stage: int
    micro_batch: int
    part: int
    parts: int


Value = Weights | Gradient | OfPlace | Crossed | State | Momentum | Update | Activation | Half | Graph | Kept
V = TypeVar("V", bound=Value)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The requirements of a step: what it has to compute, and where its arrays live. Where gradients and saved
    activations wait is the schedule's own affair, whatever the ``settings`` say."""

    program: Program
    settings: Settings
    ranks: int = 1
    """number of ranks that do the same, and share one copy of the state"""
    copies: int = 1
    """number of copies, whose ranks do the same"""
    hosts: int = 1
    """number of hosts that the ranks are on, where collectives have two levels: within each, and between them"""

    @staticmethod
    def of(program: Program, settings: Settings, ranks: int = 1, copies: int = 1, hosts: int = 1) -> "Needs":
        """The needs of a step that is built from these settings."""
        return Needs(program=program, settings=settings, ranks=ranks, copies=copies, hosts=hosts)

    @property
    def train(self) -> bool:
        return self.settings.train

    @property
    def parts(self) -> int:
        """Parts of every group, of which each rank has one, that in ``program``; 1: each has all of it."""
        return parts_of(self.settings.stage, self.ranks)

    @property
    def shared(self) -> bool:
        """True if gradients are added up over several ranks."""
        return self.ranks > 1

    @property
    def cut(self) -> bool:
        """True if each of them has a part of every group."""
        return self.parts > 1

    @property
    def on_host(self) -> int:
        """Number of the ranks that are on one host."""
        return self.ranks // self.hosts

    @property
    def crossed(self) -> int:
        """The number of ranks of a host that have all of a group's weights together once these have crossed."""
        return self.on_host if self.hosts > 1 else 1

    @property
    def adds_on_levels(self) -> bool:
        """True if gradients are added up on two levels."""
        return self.cut and self.hosts > 1 and is_branch(self.on_host)

    @property
    def brings(self) -> tuple[str, ...]:
        """The kinds of ops that fill a buffer of a group's weights on the device, in order."""
        return ("UW",) if not self.cut else ("GW",) if self.hosts == 1 else ("HW", "GW")

    @property
    def normed_apart(self) -> bool:
        """True if this rank has a part of what the norm is of, and others the rest."""
        return self.cut or self.program.dealt is not None


class Accesses:
    """Accesses to what is in no buffer: each two to one place are ordered if one of them changes it."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._writer: dict[tuple[str | int, ...], Op] = {}
        self._readers: dict[tuple[str | int, ...], list[Op]] = defaultdict(list)

    def read(self, op: Op, *place: str | int) -> None:
        if place in self._writer:
            self._check(self._writer[place], op, place)
        self._readers[place].append(op)

    def write(self, op: Op, *place: str | int) -> None:
        for other in (*self._readers.pop(place, ()), *([self._writer[place]] if place in self._writer else [])):
            if other is not op:
                self._check(other, op, place)
        self._writer[place] = op

    def _check(self, first: Op, second: Op, place: tuple[str | int, ...]) -> None:
        if not self._clocks.before(first, second):
            where = f"{place[0]} {'.'.join(map(str, place[1:]))}".rstrip()
            raise refused(second, f"may run before {first.id}, which it has to come after: both are about {where}")


SHOWN: dict[type, str] = {
    Weights: "weights",
    Gradient: OVER[""],
    OfPlace: "the weights of one rank of each host",
    Crossed: "weights that have crossed between hosts",
    State: "optimizer state",
    Momentum: "momentum",
    Update: "updates",
    Activation: "an activation",
    Half: "what the first part of a backward holds",
    Graph: "a call's graph",
    Kept: "a saved activation",
}
