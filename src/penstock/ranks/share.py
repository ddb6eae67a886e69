"""The elements of every param group that each rank has.

Each part of a group's flat buffer, the trainable and the frozen one, is cut into as many equal ranges as there are
ranks: rank r has the r-th of both. A group is laid out so that they are whole blocks of ``ALIGN`` elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.schedule.lower.dealt import emptied
from penstock.schedule.lower.mesh import Mesh
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
    many ranks as there are have it; but in a pipeline, where each group is whole on one of them: its ``holder``."""

    rank: int = 0
    size: int = 1
    holders: tuple[int, ...] | None = None
    """by group, the rank that has it; None: it is no pipeline"""

    @property
    def is_whole(self) -> bool:
        """True if this rank has all of everything."""
        return self.size == 1 and self.holders is None

    def holds(self, group: int) -> bool:
        """True if this rank has some of a group."""
        return self.holders is None or self.holders[group] == self.rank

    def part(self, group: GroupSpec) -> GroupSpec:
        """A group as one rank has it."""
        if not self.holds(group.index):
            return emptied(group)
        part = Mesh(data=self.size).everyone().part_of(group)
        assert (self.size * part.trainable, self.size * part.frozen) == (group.trainable, group.frozen), group
        return part

    def start(self, group: GroupSpec) -> int:
        """The first of this rank's trainable elements."""
        return 0 if self.holders is not None else self.rank * (group.trainable // self.size)

    def own(self, group: GroupSpec, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a group's flat buffer [numel]: its own [numel / size]."""
        if self.size == 1:
            return flat if self.holds(group.index) else flat[:0]
        cut = (flat[: group.trainable], flat[group.trainable :])
        return torch.cat([whole.view(self.size, whole.numel() // self.size)[self.rank] for whole in cut])

    def pieces(self, group: GroupSpec, offset: int, numel: int) -> Iterator[Piece]:
        """The pieces, each with the rank that has it, of a group's elements from ``offset`` on, all in its trainable or
        all in its frozen part."""
        if self.holders is not None:
            yield Piece(self.holders[group.index], offset, 0, numel)
            return
        part, frozen = self.part(group), offset >= group.trainable
        begin, each = (group.trainable, part.frozen) if frozen else (0, part.trainable)
        end, at = offset + numel, offset
        while at < end:
            rank = (at - begin) // each
            stop = min(begin + (rank + 1) * each, end)
            local = at - begin - rank * each + (part.trainable if frozen else 0)
            yield Piece(rank, local, at - offset, stop - at)
            at = stop


WHOLE = Share()
"""The share of a rank that has all elements."""
