"""The actions that make the updates of matrices orthogonal before they are stepped with (Muon): momentum, and the way
to the device and back."""

from collections.abc import Callable, Iterator

import torch

from penstock.optim.codes import as_moments
from penstock.ranks import levels
from penstock.ranks.group import Ranks
from penstock.runtime.access import Access
from penstock.runtime.actions.norm import Norm
from penstock.runtime.context import Update
from penstock.runtime.stepping import Stepping
from penstock.schedule.ir.ops import Op
from penstock.schedule.place import BF16

_UPDATE = torch.bfloat16


class MatrixUpdates:
    """Acts on chunks of groups of matrices that step in host memory, and on their updates on the device.

    A buffer of momentum has a chunk's numbers and, in 8 bits, behind them its scales.
    """

    def __init__(self, access: Access, norm: Norm, stepping: Stepping, ranks: Ranks) -> None:
        self._to = access
        self._arrays = access.arrays
        self._norm = norm
        self._stepping = stepping
        self._ranks = ranks.of_copy
        self._host, self._place = ranks.of_host, ranks.of_place

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {
            "RM": self.read,
            "MU": self.make,
            "WM": self.write,
            "UU": self.lift,
            "GU": self.gather_within if self._host.size > 1 else self.gather,
            "HU": self.gather_between,
            "NS": self.orthogonalise,
            "DU": self.down,
        }

    def _momentum(self, op: Op, name: str | None) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The arrays of a chunk's momentum, where its part of each begins, and that: in a buffer, or in memory."""
        c, offset = self._to.bound.chunk(op), 0
        for array in self._arrays.parts_of_momentum(op.id.group):
            part = self._arrays.parts[array]
            own = part.own(c.start, c.numel)
            if name is None:
                yield array, own.start, self._arrays.array(array)[own]
                continue
            yield array, own.start, self._to.view(name, own.stop - own.start, part.dtype, offset)
            offset += (own.stop - own.start) * part.dtype.itemsize

    def _update(self, op: Op) -> Update | None:
        """The update that an op's gradients are stepped with; None: they are not stepped, or have been already."""
        context = self._to.context
        return context.left if self._to.bound.is_late(op) else None if context.idle else context.update

    def read(self, op: Op) -> None:
        before = self._to.bound.is_late(op) and self._to.context.left is not None
        for array, start, view in self._momentum(op, op.writes[0]):
            self._to.read(array, start, view, before=before)

    def write(self, op: Op) -> None:
        if not self._to.idle(op):
            for array, start, view in self._momentum(op, op.reads[0]):
                self._to.write(array, start, view)

    def make(self, op: Op) -> None:
        """The momentum takes a chunk's gradient in, and the update is made of both."""
        g, c = op.id.group, self._to.bound.chunk(op)
        update, late = self._update(op), self._to.bound.is_late(op)
        if update is None:
            return
        self._arrays.about_to_change(g, c.start, c.numel)
        self._arrays.note_step(g, late=late)
        arrays = [view for _, _, view in self._momentum(op, op.reads[1] if len(op.reads) > 1 else None)]
        gradient, made = self._to.gradient(op, op.reads[0]), self._to.view(op.writes[-1], c.numel, _UPDATE)
        norms = None if late or self._to.bound.normed else self._norm.in_passing(g, c.start, gradient)
        moments = as_moments(arrays, c.numel)
        self._stepping.step(update, g, c.start, gradient, made, None, moments, norms, half="first")

    def lift(self, op: Op) -> None:
        """A chunk's update up to those of its group, or of this rank's part of it."""
        c = self._to.bound.chunk(op)
        into = self._to.view(op.writes[0], c.numel, _UPDATE, c.start * BF16)
        self._to.copy(into, self._to.view(op.reads[0], c.numel, _UPDATE))

    def gather(self, op: Op) -> None:
        """A group's updates from the parts of all ranks."""
        own = self._to.bound.program.groups[op.id.group].trainable
        part, size = self._to.view(op.reads[0], own, _UPDATE), self._ranks.size
        self._ranks.gather(self._to.view(op.writes[0], size * own, _UPDATE), part)
        self._to.moved += part.numel() * BF16 * (size - 1)

    def gather_between(self, op: Op) -> None:
        """A group's updates as far as the ranks with this one's place on all hosts have them."""
        own = self._to.bound.program.groups[op.id.group].trainable
        whole = self._to.view(op.writes[0], self._ranks.size * own, _UPDATE)
        levels.gather_between(self._place, whole, self._to.view(op.reads[0], own, _UPDATE))
        self._to.moved += own * BF16 * (self._place.size - 1)

    def gather_within(self, op: Op) -> None:
        """A group's updates from what the ranks of this host have of them."""
        own = self._to.bound.program.groups[op.id.group].trainable
        levels.gather_within(self._host, self._place.size, self._to.view(op.writes[0], self._ranks.size * own, _UPDATE))
        self._to.moved += self._place.size * own * BF16 * (self._host.size - 1)

    def orthogonalise(self, op: Op) -> None:
        update = self._update(op)
        if update is None:
            return
        numel = self._to.bound.whole(self._to.bound.program.groups[op.id.group].trainable)
        self._stepping.orthogonalise(update, op.id.group, self._to.view(op.writes[0], numel, _UPDATE))

    def down(self, op: Op) -> None:
        """A chunk of this rank's part of the updates to the host."""
        c = self._to.bound.chunk(op)
        first = self._to.bound.first(op.id.group) + c.start
        source = self._to.view(op.reads[0], c.numel, _UPDATE, first * BF16)
        self._to.copy(self._to.view(op.writes[0], c.numel, _UPDATE), source)
