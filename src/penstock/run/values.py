"""A model's values by name, read piece by piece out of wherever its state lives: of an engine, or of a store alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.run.memory import HostSlab
from penstock.run.precision import DTYPES, format_of
from penstock.run.residence import Residence
from penstock.run.slots import Slots, whole_commit
from penstock.schedule.place import page_up
from penstock.schedule.program import GroupSpec
from penstock.store.store import Store

_BUFFER = "buffer."


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter lies: the array that holds its master copy (its only one, if it is frozen), and its first
    element there.
    """

    array: str
    offset: int
    shape: torch.Size
    trainable: bool


class Values:
    """``parameters``: name -> place. ``buffers``: name -> the persistent buffer itself."""

    def __init__(
        self, residence: Residence, description: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """``description``: ``start.describe_model`` of the model that the residence is for."""
        self._residence = residence
        self.parameters = {
            name: Place(
                array=f"master.{g}" if trainable and residence.form.split else f"weights.{g}",
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
        self._residence.fetch(place.array, place.offset + start, flat)

    def parameter(self, name: str) -> torch.Tensor:
        """A parameter as a new fp32 tensor on the CPU.

        Raises: as ``read``.
        """
        out = torch.empty(self.parameters[name].shape)
        self.read(name, 0, out.view(-1))
        return out


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The last commit of a store. ``step``: that it is of. ``precision``: of the run."""

    step: int
    precision: str
    values: Values


@contextmanager
def committed(paths: Sequence[Path]) -> Iterator[Committed]:
    """The values of a store's last commit, without an engine and without its model.

    Raises:
        ConfigError: there is none yet.
        StoreError: the store is in use, damaged, or was stopped within a step.
    """
    with Store.open(paths, writable=False) as store:
        last = whole_commit(store, paths[0])
        model, slots = store.model, Slots.of(store)
        groups = [
            GroupSpec(index=g, name=group["name"], trainable=group["trainable"], frozen=group["frozen"])
            for g, group in enumerate(model["groups"])
        ]
        form, dtype = format_of(model["precision"], len(model["optimizer"]) - 1), DTYPES[model["precision"]]
        residence = Residence(groups, form, dtype, torch.device("cpu"), store, slots, host_bytes=0)
        try:
            buffers = {name: _buffer(slots, name, shape, dtype) for name, shape, dtype in model["buffers"]}
            yield Committed(
                step=int(last["step"]), precision=model["precision"], values=Values(residence, model, buffers)
            )
        finally:
            residence.close()


def _buffer(slots: Slots, name: str, shape: Sequence[int], kind: str) -> torch.Tensor:
    dtype = getattr(torch, kind.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    slab = HostSlab(page_up(nbytes))
    try:
        slots.read(name, 0, slab.bytes.numpy())
        return slab.bytes[:nbytes].clone().view(dtype).view(tuple(shape))
    finally:
        slab.close()
