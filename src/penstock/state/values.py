"""A model's values by name, read piece by piece out of wherever its state lives: of an engine, or of a store or a
snapshot alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.schedule.place import Format, page_up
from penstock.state.buffers import Transfer
from penstock.state.layout import fetch, values_of
from penstock.state.memory import HostSlab, numpy_bytes
from penstock.state.parts import Parts, WholeArrays, share_of
from penstock.state.record import check_kept
from penstock.state.slots import whole_commit
from penstock.store.parts import opened_parts
from penstock.store.snapshot import SnapshotReader
from penstock.store.snapshot_parts import opened_snapshot

_BUFFER = "buffer."


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a parameter: the arrays that have its master copy together (its weights, if it is frozen), and its
    first element there.
    """

    arrays: tuple[str, ...]
    offset: int
    shape: torch.Size
    trainable: bool


class Arrays(Protocol):
    """Holds all arrays of all groups, wherever they live."""

    @property
    def form(self) -> Format: ...

    def fetch(self, names: Sequence[str], offset: int, flat: torch.Tensor) -> None:
        """As ``StateArrays.fetch``."""


class Values:
    """The values of a model. ``parameters``: name -> place. ``buffers``: name -> the persistent buffer itself."""

    def __init__(self, arrays: Arrays, description: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        """``description``: ``start.describe_model`` of the model that the arrays are for."""
        self._arrays = arrays
        self.parameters = {
            name: Place(
                arrays=values_of(g, arrays.form, trainable=trainable),
                offset=offset,
                shape=torch.Size(shape),
                trainable=trainable,
            )
            for g, group in enumerate(description["groups"])
            for name, shape, offset, trainable in group["parameters"]
        }
        self.buffers = {name.removeprefix(_BUFFER): tensor for name, tensor in buffers.items()}

    def read(self, name: str, start: int, flat: torch.Tensor) -> None:
        """Fill ``flat``, 1-D and fp32, on the CPU, with the elements of a parameter from ``start`` on.

        Raises:
            StoreError: the drive failed, or what is there is damaged.
        """
        place = self.parameters[name]
        assert start + flat.numel() <= place.shape.numel()
        self._arrays.fetch(place.arrays, place.offset + start, flat)

    def parameter(self, name: str) -> torch.Tensor:
        """A parameter as a new fp32 tensor on the CPU. Raises as ``read``."""
        out = torch.empty(self.parameters[name].shape, dtype=torch.float32, device="cpu")
        self.read(name, 0, out.view(-1))
        return out


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The last commit of a store, or a snapshot. ``step``: its number. ``precision``: that of the run."""

    step: int
    precision: str
    values: Values


@contextmanager
def committed(stores: Sequence[Sequence[Path]]) -> Iterator[Committed]:
    """The values of the last commit of a run, without an engine and without its model.

    ``stores``: the directories of each rank's store, by rank.

    Raises:
        ConfigError: there is none yet.
        StoreError: a store is in use, damaged, of another run, or was stopped within a step.
    """
    with opened_parts(stores) as opened:
        last, *_ = [whole_commit(store, store.paths[0]) for store in opened]
        parts = Parts(opened)
        yield _committed(last["step"], opened[0].model, parts, parts.arrays[0].slots.read)


@contextmanager
def kept(snapshot: Path) -> Iterator[Committed]:
    """The state in a snapshot.

    Raises:
        StoreError: it is missing or damaged.
    """
    with opened_snapshot(snapshot) as readers:
        meta = readers[0].meta
        check_kept(meta, str(snapshot))
        yield _committed(meta["step"], meta["model"], arrays_in(readers, meta["model"]), readers[0].read)


def _committed(step: int, model: Mapping[str, Any], arrays: Arrays, read: Transfer) -> Committed:
    """``read``: the first rank's: buffers are the same on all, or its own are taken."""
    buffers = {name: _buffer(read, name, shape, dtype) for name, shape, dtype in model["buffers"]}
    return Committed(step=step, precision=model["precision"], values=Values(arrays, model, buffers))


def arrays_in(readers: Sequence[SnapshotReader], model: Mapping[str, Any]) -> WholeArrays:
    """The arrays of whole groups, out of a snapshot's parts, by rank."""

    def read(rank: int, names: Sequence[str], start: int, into: torch.Tensor) -> None:
        fetch([arrays.parts[name] for name in names], partial(read_elements, readers[rank]), start, into)

    arrays = WholeArrays(model, share_of(model, 0), read)
    return arrays


def read_elements(reader: SnapshotReader, name: str, start: int, out: torch.Tensor) -> None:
    """As ``StateArrays.read``."""
    reader.read(name, start * out.itemsize, numpy_bytes(out))


def _buffer(read: Transfer, name: str, shape: Sequence[int], kind: str) -> torch.Tensor:
    dtype = getattr(torch, kind.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    with HostSlab(page_up(nbytes)) as slab:
        read(name, 0, slab.bytes.numpy())
        return slab.bytes[:nbytes].clone().view(dtype).view(tuple(shape))
