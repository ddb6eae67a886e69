"""A model's persistent buffers: running statistics and the like. Small, always on the device, and part of the state.

Buffers that a model leaves out of its ``state_dict`` (rotary frequencies, masks) follow from its configuration and are
none of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from penstock.compat.torch import buffers_of, persistent_buffers
from penstock.schedule.place import page_up
from penstock.state.memory import HostSlab

Transfer = Callable[[str, int, NDArray[np.uint8]], None]
"""(name, byte offset, whole pages): how a store and a snapshot read and write."""


class Buffers:
    """The persistent buffers that a model has when this is made; their tensors are looked up anew at each use."""

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            f"buffer.{prefix}.{key}" if prefix else f"buffer.{key}": (module, key)
            for prefix, module in model.named_modules()
            for key, buffer in persistent_buffers(module).items()
            if buffer.numel()
        }
        self._written: dict[str, bytes] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: buffers_of(module)[key] for name, (module, key) in self._places.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def sizes(self) -> list[tuple[str, int]]:
        """(name, bytes in whole pages) of each."""
        return [(name, page_up(t.numel() * t.itemsize)) for name, t in self.tensors().items()]

    def describe(self) -> list[list[Any]]:
        return [[name, list(t.shape), str(t.dtype)] for name, t in self.tensors().items()]

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def put_back(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Undo what has happened since ``copies`` were made."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(copies[name])

    def write(self, write: Transfer) -> None:
        """Write all."""
        for name, tensor in self.tensors().items():
            with _page_copy(tensor) as pages:
                write(name, 0, pages)

    def write_changed(self, write: Transfer, copies: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write those that have changed since this was last called; ``copies``: as they were when these were made."""
        for name, tensor in (self.tensors() if copies is None else copies).items():
            with _page_copy(tensor) as pages:
                digest = xxhash.xxh3_128_digest(pages.data)
                if self._written.get(name) != digest:
                    write(name, 0, pages)
                    self._written[name] = digest

    def read(self, read: Transfer) -> None:
        """Overwrite all."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                slab = HostSlab(tensor.numel() * tensor.itemsize)
                read(name, 0, slab.bytes.numpy())
                tensor.copy_(_view(slab, tensor))
                slab.close()


@contextmanager
def _page_copy(tensor: torch.Tensor) -> Iterator[NDArray[np.uint8]]:
    slab = HostSlab(tensor.numel() * tensor.itemsize)
    _view(slab, tensor).copy_(tensor)
    yield slab.bytes.numpy()
    slab.close()


def _view(slab: HostSlab, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a slab that holds a tensor's bytes."""
    return slab.bytes[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
