"""The ranks of a world: where each stands, and with which others it shares what."""

from dataclasses import dataclass, replace

from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.program import ALIGN, GroupSpec, Program, round_up


def is_branch(ranks: int) -> bool:
    """True if the sum of so many neighbouring ranks is a branch of the tree in which all are added up
    (``penstock.ranks.order``), wherever a multiple of as many begins."""
    return not ranks & (ranks - 1)


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """Ranks that share something: how large a rank's part is, and what their collectives send. A rank that is its only
    member has all of everything.
    """

    name: str
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def share(self, amount: int) -> int:
        """The largest part of an amount."""
        return -(-amount // self.size)

    def sent(self, amount: int) -> int:
        """The amount that a rank sends in a ring that gathers, or reduces and scatters, ``amount`` in all: (P - 1) /
        P."""
        return amount * (self.size - 1) // self.size

    def part(self, program: Program) -> Program:
        """A program with what each rank has of every param group: an even part, padded to multiples of ``ALIGN``."""
        if self.size == 1:
            return program

        return replace(program, groups=tuple(map(self.part_of, program.groups)))

    def padded(self, numel: int) -> int:
        """Elements of a group's buffer with the padding by which each rank has an even part of them."""
        return round_up(numel, ALIGN * self.size)

    def part_of(self, group: GroupSpec) -> GroupSpec:
        """A param group as each rank has it."""
        trainable, frozen = (self.padded(n) // self.size for n in (group.trainable, group.frozen))
        return replace(group, trainable=trainable, frozen=frozen)

    def world(self, schedule: Schedule) -> World:
        """The world of these ranks alone, who all do the same."""
        groups = {self.name: self.members} if self.size > 1 else {}
        return World(name=schedule.name, ranks=(schedule,) * self.size, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks on three axes: ``data`` replicas that share a step's micro-batches, each a pipeline of ``stages`` ranks,
    each of these ``model`` ranks that compute the same micro-batches (ZeRO-R). Rank (d * stages + s) * model + t stands
    at (d, s, t).
    """

    data: int = 1
    stages: int = 1
    model: int = 1

    @property
    def size(self) -> int:
        return self.data * self.stages * self.model

    def stands(self, rank: int) -> tuple[int, int, int]:
        """Replica, stage and number within the stage of a rank."""
        above, number = divmod(rank, self.model)
        return *divmod(above, self.stages), number

    def everyone(self) -> ProcessGroup:
        return ProcessGroup(name="all", members=tuple(range(self.size)))

    def replicas(self, rank: int) -> ProcessGroup:
        """The ranks that do in other replicas what a rank does in its own, and itself."""
        width = self.stages * self.model
        place = rank % width
        name = f"data{place}" if self.model > 1 else f"stage{place}"
        return ProcessGroup(name=name, members=tuple(range(place, self.size, width)))

    def together(self, rank: int) -> ProcessGroup:
        """The ranks that compute the same micro-batches of the same stage; ``ALONE`` where each rank does so by
        itself."""
        if self.model == 1:
            return ALONE
        first = rank - rank % self.model
        return ProcessGroup(name=f"model{first // self.model}", members=tuple(range(first, first + self.model)))


ALONE = Mesh().everyone()
