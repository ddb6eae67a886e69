"""A model's persistent buffers: running statistics and the like. Small, always on the device, and part of the state.

Buffers that a model leaves out of its ``state_dict`` (rotary frequencies, masks) follow from its configuration and are
none of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from penstock.compat.modules import buffers_of, persistent_buffers
from penstock.ranks.group import Ranks
from penstock.state.memory import HostSlab

Transfer = Callable[[str, int, NDArray[np.uint8]], None]
"""(name, byte offset, whole pages): how a store and a snapshot read and write."""

FIRST_BUFFERS = "each rank had buffers of its own (sync_buffers='own'), and all go on with those of the first"
"""For who does not keep them apart, or on as many ranks."""


class Buffers:
    """The persistent buffers that a model has when this is made; their tensors are looked up anew at each use."""

    def __init__(self, model: nn.Module, dtypes: Mapping[tuple[nn.Module, str], torch.dtype] | None = None) -> None:
        """``dtypes``: of those, by module and name in it, that will be in another one than they are in now."""
        self._places = {
            f"buffer.{prefix}.{key}" if prefix else f"buffer.{key}": (module, key)
            for prefix, module in model.named_modules()
            for key, buffer in persistent_buffers(module).items()
            if buffer.numel()
        }
        self._dtypes = {name: (dtypes or {}).get(place) for name, place in self._places.items()}
        self._written: dict[str, bytes] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: buffers_of(module)[key] for name, (module, key) in self._places.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def describe(self) -> list[list[Any]]:
        return [[name, list(t.shape), str(self._dtype(name, t))] for name, t in self.tensors().items()]

    def _dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        return self._dtypes[name] or tensor.dtype

    def digest(self) -> str:
        """A digest of the values of all."""
        values = xxhash.xxh3_64()
        for tensor in self.tensors().values():
            values.update(_bits(tensor).cpu().numpy().data)
        return values.hexdigest()

    def changed(self, before: Mapping[tuple[nn.Module, str], torch.Tensor]) -> list[str]:
        """The names of those that are other bits than they were ``before``, by (module, name in it)."""
        return [
            name
            for name, now in self.tensors().items()
            if not torch.equal(_bits(now), _bits(before[self._places[name]]))
        ]

    def of_all(self, ranks: Ranks, names: Collection[str] | None = None) -> dict[str, list[torch.Tensor]]:
        """By name, the values of some buffers on all ranks, by rank. ``names``: the same on each; None: of all."""
        tensors = {name: tensor for name, tensor in self.tensors().items() if names is None or name in names}
        if not tensors:
            return {}
        own = torch.cat([_bits(tensor) for tensor in tensors.values()])
        found = own.new_empty(ranks.size, own.numel())
        ranks.gather(found.view(-1), own)
        columns = torch.split(found, [tensor.numel() * tensor.itemsize for tensor in tensors.values()], dim=1)
        return {
            name: [row.clone().view(tensor.dtype).view(tensor.shape) for row in column]
            for (name, tensor), column in zip(tensors.items(), columns, strict=True)
        }

    def synchronise(self, names: Collection[str], ranks: Ranks, how: Literal["mean", "first"]) -> str | None:
        """Give all ranks the same values of some buffers, whose ``names`` all of them say: the mean of all, computed in
        fp64 in the order of the ranks and rounded once, or the first one's. Buffers of whole numbers have no mean: the
        name of the first one that is not the same on all, and nothing is changed then; None: it is done.
        """
        tensors, agreed = self.tensors(), dict[str, torch.Tensor]()
        for name, values in self.of_all(ranks, names).items():
            first = values[0]
            if how == "first":
                agreed[name] = first
            elif first.is_floating_point() or first.is_complex():
                wide = torch.complex128 if first.is_complex() else torch.float64
                agreed[name] = reduce(torch.add, [value.to(wide) for value in values]) / ranks.size
            elif all(torch.equal(value, first) for value in values):
                agreed[name] = first
            else:
                return name
        with torch.no_grad():
            for name, value in agreed.items():
                tensors[name].copy_(value)
        return None

    def take_first(self, ranks: Ranks) -> bool:
        """Give all ranks the first one's values of all buffers; False: they have them."""
        if len(set(ranks.gather_objects("buffers of the model", self.digest()))) == 1:
            return False
        self.synchronise(self.tensors(), ranks, "first")
        return True

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
                with HostSlab(tensor.numel() * tensor.itemsize) as slab:
                    read(name, 0, slab.bytes.numpy())
                    tensor.copy_(_view(slab, tensor))


def write_all(tensors: Mapping[str, torch.Tensor], write: Transfer) -> None:
    """Write each tensor under its name."""
    for name, tensor in tensors.items():
        with _page_copy(tensor) as pages:
            write(name, 0, pages)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, in one dimension."""
    return tensor.detach().reshape(-1).view(torch.uint8)


@contextmanager
def _page_copy(tensor: torch.Tensor) -> Iterator[NDArray[np.uint8]]:
    with HostSlab(tensor.numel() * tensor.itemsize) as slab:
        _view(slab, tensor).copy_(tensor)
        yield slab.bytes.numpy()


def _view(slab: HostSlab, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a slab that holds a tensor's bytes."""
    return slab.bytes[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
