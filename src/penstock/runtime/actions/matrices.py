"""The actions that make the updates of matrices orthogonal before they are stepped with (Muon): momentum, and the way
to the device and back."""

from collections.abc import Callable, Iterator

import torch

from penstock.optim.codes import as_moments
from penstock.runtime.access import Access
from penstock.runtime.actions.norm import Norm
from penstock.runtime.stepping import Stepping
from penstock.schedule.ir.ops import Op
from penstock.schedule.place import BF16

_UPDATE = torch.bfloat16


class MatrixUpdates:
    """Acts on chunks of groups of matrices that step in host memory, and on their updates on the device.

    A buffer of momentum has a chunk's numbers and, in 8 bits, behind them its scales.
    """

    def __init__(self, access: Access, norm: Norm, stepping: Stepping) -> None:
        self._to = access
        self._arrays = access.arrays
        self._norm = norm
        self._stepping = stepping

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {
            "RM": self.read,
            "MU": self.make,
            "WM": self.write,
            "UU": self.lift,
            "NS": self.orthogonalise,
            "DU": self.down,
        }

    def _momentum(self, op: Op, name: str | None) -> Iterator[tuple[str, int, torch.Tensor]]:
        return self._to.state(op, self._arrays.parts_of_momentum(op.id.group), name)

    def read(self, op: Op) -> None:
        before = self._to.bound.is_late(op) and self._to.context.left is not None
        for array, start, view in self._momentum(op, op.writes[0]):
            self._to.read(array, start, view, before=before)

    def write(self, op: Op) -> None:
        if self._to.update(op) is not None:
            for array, start, view in self._momentum(op, op.reads[0]):
                self._to.write(array, start, view)

    def make(self, op: Op) -> None:
        """The momentum takes a chunk's gradient in, and the update is made of both."""
        g, c = op.id.group, self._to.bound.chunk(op)
        update, late = self._to.update(op), self._to.bound.is_late(op)
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

    def orthogonalise(self, op: Op) -> None:
        if (update := self._to.update(op)) is not None:
            numel = self._to.bound.whole(self._to.bound.group(op).trainable)
            self._stepping.orthogonalise(update, op.id.group, self._to.view(op.writes[0], numel, _UPDATE))

    def down(self, op: Op) -> None:
        """A chunk of this rank's part of the updates to the host."""
        c = self._to.bound.chunk(op)
        first = self._to.bound.first(op.id.group) + c.start
        source = self._to.view(op.reads[0], c.numel, _UPDATE, first * BF16)
        self._to.copy(self._to.view(op.writes[0], c.numel, _UPDATE), source)
