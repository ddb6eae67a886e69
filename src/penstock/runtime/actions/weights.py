"""Weights on their way between disk, host and device."""

from collections.abc import Callable

from penstock.runtime.access import Access
from penstock.schedule.ir.ops import Op


class Weights:
    """Moves chunks of groups' weights, in the dtype that computes."""

    def __init__(self, access: Access) -> None:
        self._to = access
        self._arrays = access.arrays

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {"RW": self.read, "UW": self.up, "UN": self.renew}

    def read(self, op: Op) -> None:
        """From disk to a host buffer."""
        c = self._to.bound.chunk(op)
        out = self._to.view(op.writes[0], c.numel, self._arrays.dtype)
        self._to.read(f"weights.{op.id.group}", c.start, out)

    def up(self, op: Op) -> None:
        """To its place in the group's buffer on the device: from a host buffer, or from host memory where stages find
        it."""
        c, dtype = self._to.bound.chunk(op), self._arrays.dtype
        if op.reads:
            source = self._to.view(op.reads[0], c.numel, dtype)
        else:
            source = self._arrays.weights(op.id.group)[c.start : c.start + c.numel]
        self._to.copy(self._to.view(op.writes[0], c.numel, dtype, c.start * dtype.itemsize), source)

    def renew(self, op: Op) -> None:
        """New weights up to the copy on the device: from a host buffer, or from their home in host memory."""
        c, g = self._to.bound.chunk(op), op.id.group
        if op.reads:
            new = self._to.view(op.reads[0], c.numel, self._arrays.dtype)
        else:
            new = self._arrays.array(f"weights.{g}")[c.start : c.start + c.numel]
        self._to.copy(self._arrays.weights(g)[c.start : c.start + c.numel], new)
