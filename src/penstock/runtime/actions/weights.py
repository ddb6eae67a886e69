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
        return {"RW": self.read, "UW": self.up, "WW": self.write, "UN": self.renew}

    def read(self, op: Op) -> None:
        """From disk to a host buffer."""
        c = self._to.bound.chunk(op)
        out = self._to.view(op.writes[0], c.numel, self._arrays.dtype)
        self._to.read(f"weights.{op.id.group}", c.start, out)

    def up(self, op: Op) -> None:
        """To its place in the group's buffer on the device: from a host buffer, or from where it lives on the host."""
        c, dtype = self._to.bound.chunk(op), self._arrays.dtype
        if op.reads:
            source = self._to.view(op.reads[0], c.numel, dtype)
        else:
            source = self._arrays.array(f"weights.{op.id.group}")[c.start : c.start + c.numel]
        self._to.copy(self._to.view(op.writes[0], c.numel, dtype, c.start * dtype.itemsize), source)

    def write(self, op: Op) -> None:
        """New weights to disk."""
        if self._to.idle(op):
            return
        c = self._to.bound.chunk(op)
        data = self._to.view(op.reads[0], c.numel, self._arrays.dtype)
        self._to.write(f"weights.{op.id.group}", c.start, data)

    def renew(self, op: Op) -> None:
        """New weights up to where they live on the device."""
        c, g = self._to.bound.chunk(op), op.id.group
        self._arrays.about_to_change(g, c.start, c.numel)
        home = self._arrays.array(f"weights.{g}")[c.start : c.start + c.numel]
        self._to.copy(home, self._to.view(op.reads[0], c.numel, self._arrays.dtype))
