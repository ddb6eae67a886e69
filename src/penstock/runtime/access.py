"""The access of actions to the schedule's buffers, arrays at home and scratch space. What is moved is counted here."""

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.runtime.bound import Bound
from penstock.runtime.context import StepContext, Update
from penstock.runtime.pools import Pools
from penstock.schedule.ir.ops import Op
from penstock.schedule.program import ALIGN
from penstock.state.arrays import StateArrays
from penstock.state.memory import numpy_bytes
from penstock.store.store import Store


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes of equal length; asynchronous when a GPU is involved, else without torch's thread pool."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(numpy_bytes(target), numpy_bytes(source))
    else:
        target.copy_(source, non_blocking=True)


class _Tally(threading.local):
    """Bytes that the op under way in a thread has moved."""

    moved = 0


class Access:
    """The state and memory that the actions of one schedule share. ``context``: of the step under way."""

    def __init__(self, bound: Bound, pools: Pools, arrays: StateArrays, scratch: Store | None) -> None:
        self.bound = bound
        self.pools = pools
        self.arrays = arrays
        self.context = StepContext(step=0, update=Update(count=1, hypers=()))
        self._scratch = scratch
        self._tally = _Tally()

    # ---- views

    def view(self, name: str, numel: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
        """``numel`` elements of a buffer, from byte ``offset`` on."""
        return self.pools.buffer(name)[offset : offset + numel * dtype.itemsize].view(dtype)

    def gradient(self, op: Op, name: str) -> torch.Tensor:
        """The gradient of an op's chunk in a host buffer, as wide as it crosses to it."""
        dtype = torch.bfloat16 if op.id.group in self.bound.schedule.narrow else torch.float32
        return self.view(name, self.bound.chunk(op).numel, dtype)

    def state(self, op: Op, names: Iterable[str], buffer: str | None) -> Iterator[tuple[str, int, torch.Tensor]]:
        """An op's chunk of arrays of state, each with the element that it begins at: one behind the other in a
        ``buffer``, or (None) in memory."""
        c, offset = self.bound.chunk(op), 0
        for name in names:
            part = self.arrays.parts[name]
            own = part.own(c.start, c.numel)
            if buffer is None:
                yield name, own.start, self.arrays.array(name)[own]
            else:
                yield name, own.start, self.view(buffer, own.stop - own.start, part.dtype, offset)
                offset += (own.stop - own.start) * part.dtype.itemsize

    def update(self, op: Op) -> Update | None:
        """The update that an op's chunk is stepped with; None: it is not stepped, or was when the step before ended,
        and an op on its way has nothing to do."""
        if self.bound.is_late(op):
            return self.context.left
        return None if self.context.idle else self.context.update

    # ---- bytes

    @property
    def moved(self) -> int:
        """Bytes that the op under way in this thread has moved; set to 0 when it starts."""
        return self._tally.moved

    @moved.setter
    def moved(self, nbytes: int) -> None:
        self._tally.moved = nbytes

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy(target, source)
        self.moved += source.numel() * source.itemsize

    def read(self, name: str, start: int, out: torch.Tensor, *, before: bool = False) -> None:
        """Elements of an array from ``start`` on; ``before``: as in ``StateArrays.read``."""
        self.arrays.read(name, start, out, before=before)
        self.moved += out.numel() * out.itemsize

    def write(self, name: str, start: int, data: torch.Tensor) -> None:
        self.arrays.write(name, start, data)
        self.moved += data.numel() * data.itemsize

    def read_scratch(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Bytes from ``offset`` on of what lives on disk no longer than a step."""
        self._of_scratch().read(name, offset, numpy_bytes(out))
        self.moved += out.numel() * out.itemsize

    def write_scratch(self, name: str, offset: int, data: torch.Tensor) -> None:
        self._of_scratch().write(name, offset, numpy_bytes(data))
        self.moved += data.numel() * data.itemsize

    def _of_scratch(self) -> Store:
        assert self._scratch is not None
        return self._scratch

    def partials(self, g: int, start: int, numel: int) -> NDArray[np.float64]:
        """The sums of squares of a range of this rank's part of a group's gradient, one for each ``ALIGN`` elements."""
        start += self.bound.first(g)
        return self.context.partials[g][start // ALIGN : (start + numel) // ALIGN]
