"""The elements of every param group that each rank has.

Each part of a group's flat buffer, the trainable and the frozen one, is cut into as many equal ranges as there are
ranks: rank r has the r-th of both. A group is laid out so that they are whole blocks of ``ALIGN`` elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.schedule.dealt import emptied
from penstock.schedule.mesh import Mesh
from penstock.schedule.program import GroupSpec


class Piece(NamedTuple):
    """Elements of a group that one rank has: ``numel`` of them from ``start`` on of its own part, and from ``first`` on
    of what was asked for."""

    rank: int
    start: int
    first: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's share of everything: part ``rank`` of ``size``. Where there is one part, that is all of it, and as
    many ranks as there are have it. In pipelines groups are those of one place, its ``holder``, whose ``size`` ranks,
    neighbours of as many pipelines, have the parts."""

    rank: int = 0
    size: int = 1
    holders: tuple[int, ...] | None = None
    """by group, the place in a pipeline that has it; None: it is no pipeline"""

    @property
    def is_whole(self) -> bool:
        """True if this rank has all of everything."""
        return self.size == 1 and self.holders is None

    @property
    def place(self) -> int:
        """This rank's place in its pipeline; 0: there is none."""
        return 0 if self.holders is None else self.rank // self.size

    @property
    def number(self) -> int:
        """The number of this rank's part of the groups that it holds."""
        return self.rank % self.size

    def holds(self, group: int) -> bool:
        """True if this rank has some of a group."""
        return self.holders is None or self.holders[group] == self.place

    def part(self, group: GroupSpec) -> GroupSpec:
        """A group as one rank has it."""
        return self.part_of(group) if self.holds(group.index) else emptied(group)

    def part_of(self, group: GroupSpec) -> GroupSpec:
        """A group as each rank has it that holds it."""
        part = Mesh(data=self.size).everyone().part_of(group)
        assert (self.size * part.trainable, self.size * part.frozen) == (group.trainable, group.frozen), group
        return part

    def start(self, group: GroupSpec) -> int:
        """The first of this rank's trainable elements."""
        return self.number * (group.trainable // self.size)

    def own(self, group: GroupSpec, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a group's flat buffer [numel]: its own [numel / size]."""
        if self.size == 1 or not self.holds(group.index):
            return flat if self.holds(group.index) else flat[:0]
        cut = (flat[: group.trainable], flat[group.trainable :])
        return torch.cat([whole.view(self.size, whole.numel() // self.size)[self.number] for whole in cut])

    def pieces(self, group: GroupSpec, offset: int, numel: int) -> Iterator[Piece]:
        """The pieces, each with the rank that has it, of a group's elements from ``offset`` on, all in its trainable or
        all in its frozen part."""
        holder = 0 if self.holders is None else self.holders[group.index] * self.size
        part, frozen = self.part_of(group), offset >= group.trainable
        begin, each = (group.trainable, part.frozen) if frozen else (0, part.trainable)
        end, at = offset + numel, offset
        while at < end:
            rank = (at - begin) // each
            stop = min(begin + (rank + 1) * each, end)
            local = at - begin - rank * each + (part.trainable if frozen else 0)
            yield Piece(holder + rank, local, at - offset, stop - at)
            at = stop


WHOLE = Share()
"""The share of a rank that has all elements."""
