"""Gradients on their way from the device to the optimizer."""

from collections.abc import Callable

import torch

from penstock.optim.crossing import copy_cast
from penstock.runtime.access import Access
from penstock.runtime.bound import gradient_extent
from penstock.runtime.stepping import Stepping
from penstock.schedule.ir.ops import Op
from penstock.schedule.place import FP32


class Gradients:
    """Brings chunks of gradients down, adds them up, and puts them aside on disk."""

    def __init__(self, access: Access, stepping: Stepping) -> None:
        self._to = access
        self._stepping = stepping

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {"DG": self.down, "AG": self.add, "UG": self.lift, "WG": self.put_aside, "RG": self.fetch}

    def down(self, op: Op) -> None:
        """From the device to a host buffer, rounded on the device where the op has a buffer for that."""
        c, target = self._to.bound.chunk(op), self._to.gradient(op, op.writes[0])
        of_group = op.reads[0].chunk < 0  # else it is of the chunk alone, which ranks have added up
        if of_group and self._to.bound.share.size > 1:
            self._all_parts_down(op)
            return
        source = self._to.view(op.reads[0], c.numel, offset=c.start * FP32 if of_group else 0)
        if target.dtype == source.dtype:
            self._to.copy(target, source)
            return
        # Where host and device are one memory the cast is the copy, and has no use for the buffer.
        staging = None if source.device.type == "cpu" else self._to.view(op.writes[1], c.numel, torch.bfloat16)
        copy_cast(target, source, staging)
        self._to.moved += target.numel() * target.itemsize

    def _all_parts_down(self, op: Op) -> None:
        """Copy a chunk of each rank's part [ranks, chunk] out of a whole group's gradient [ranks, own], to be
        summed."""
        c, size = self._to.bound.chunk(op), self._to.bound.share.size
        own = self._to.bound.group(op).trainable
        parts = self._to.view(op.reads[0], size * own).view(size, own)
        target = self._to.view(op.writes[0], size * c.numel).view(size, c.numel)
        for into, part in zip(target, parts, strict=True):
            self._to.copy(into, part[c.start : c.start + c.numel])

    def add(self, op: Op) -> None:
        """One host buffer to another, which the op writes: of visits that several ranks have not exchanged yet, all
        ranks' parts of the chunk."""
        c, (into,) = self._to.bound.chunk(op), op.writes
        (what,) = (name for name in op.reads if name != into)
        numel = c.numel if op.id.visit is None else self._to.bound.whole(c.numel)
        self._stepping.add(self._to.view(into, numel), self._to.view(what, numel))

    def lift(self, op: Op) -> None:
        """All ranks' parts of a chunk up to where they are exchanged."""
        numel = self._to.bound.whole(self._to.bound.chunk(op).numel)
        self._to.copy(self._to.view(op.writes[0], numel), self._to.view(op.reads[0], numel))

    def put_aside(self, op: Op) -> None:
        """To disk, where it waits."""
        gradient = self._to.gradient(op, op.reads[0])
        self._to.write_scratch(gradient_extent(op), self._offset(op, gradient), gradient)

    def fetch(self, op: Op) -> None:
        """Back from there."""
        if self._to.update(op) is None:
            return
        gradient = self._to.gradient(op, op.writes[0])
        self._to.read_scratch(gradient_extent(op), self._offset(op, gradient), gradient)

    def _offset(self, op: Op, gradient: torch.Tensor) -> int:
        return self._to.bound.chunk(op).start * gradient.itemsize
