"""Ranks that share something among them: how large a rank's part is, and what their collectives send."""

from dataclasses import dataclass, replace

from penstock.schedule.program import ALIGN, GroupSpec, Program, round_up


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """``size`` ranks, by the name that the collectives among them have in a world. Size 1 is a rank alone, which has
    all of everything.
    """

    name: str = ""
    size: int = 1

    def share(self, amount: int) -> int:
        """The largest part of an amount."""
        return -(-amount // self.size)

    def sent(self, amount: int) -> int:
        """What a rank sends in a ring that gathers, or reduces and scatters, an amount in all: (P - 1) / P of it."""
        return amount * (self.size - 1) // self.size

    def part(self, program: Program) -> Program:
        """A program with what each rank has of every param group: an even part, padded to multiples of ``ALIGN``."""
        if self.size == 1:
            return program

        def own(group: GroupSpec) -> GroupSpec:
            trainable, frozen = (round_up(self.share(n), ALIGN) for n in (group.trainable, group.frozen))
            return replace(group, trainable=trainable, frozen=frozen)

        return replace(program, groups=tuple(map(own, program.groups)))


ALONE = ProcessGroup()
