"""The stores of all ranks of a run as one: what each is laid out for, and all arrays of whole groups out of them."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from penstock.optim.precision import DTYPES
from penstock.ranks.share import Share
from penstock.schedule.place import Format, page_up
from penstock.schedule.program import GroupSpec, Whole
from penstock.state.arrays import StateArrays
from penstock.state.layout import Part, parts_of
from penstock.state.slots import Slots
from penstock.store.layout import Layout
from penstock.store.parts import HOLDERS, number_of_parts
from penstock.store.store import Store


def form_of(model: Mapping[str, Any]) -> Format:
    """The format of the arrays that a store or a snapshot has. ``model``: ``engine.start.describe_model``, here as
    elsewhere."""
    return Format.of(model["precision"], len(model["optimizer"]) - 1, model.get("moments", "fp32"))


def groups_of(model: Mapping[str, Any]) -> list[GroupSpec]:
    """The groups, each of them whole. What a step of matrices takes is not known here."""
    return [
        GroupSpec(
            index=g,
            name=group["name"],
            trainable=group["trainable"],
            frozen=group["frozen"],
            compact=group.get("compact", False),
            whole=Whole(flop=0, scratch=0) if group.get("whole") else None,
        )
        for g, group in enumerate(model["groups"])
    ]


def buffers_of(model: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(name, bytes in whole pages) of each of the model's buffers."""
    return [(name, page_up(prod(shape) * getattr(torch, kind[6:]).itemsize)) for name, shape, kind in model["buffers"]]


def layout_of(model: Mapping[str, Any], slots: int) -> Layout:
    """The layout of the store of one rank, which ``model`` names, with ``slots`` slots of every array."""
    share = share_of(model)
    form, dtype = form_of(model), DTYPES[model["precision"]]
    parts = [part for group in groups_of(model) for part in parts_of(share.part(group), form, dtype)]
    sizes = [(part.name, part.nbytes) for part in parts] + buffers_of(model)
    return Layout.build([(*size, slots) for size in sizes], {part.name: part.grid for part in parts})


def share_of(model: Mapping[str, Any], rank: int | None = None) -> Share:
    """The share of one rank, which ``model`` names, or of another ``rank`` of the same run."""
    count, holders = number_of_parts(model), model.get(HOLDERS)
    own = model.get("rank", 0) if rank is None else rank
    if holders is not None:
        return Share(rank=own, size=count, holders=tuple(holders))
    return Share(rank=own if count > 1 else 0, size=count)


class WholeArrays:
    """All arrays of whole groups, of which each rank has a share.

    ``groups``: by index. ``share``: how they are cut. ``parts``: every array, by name, as a rank has it that holds it.
    """

    def __init__(
        self, model: Mapping[str, Any], share: Share, read: Callable[[int, Sequence[str], int, torch.Tensor], None]
    ) -> None:
        """``read``: as ``StateArrays.fetch``, of a rank's own part, by its number."""
        self.form, dtype = form_of(model), DTYPES[model["precision"]]
        self.groups = {group.index: group for group in groups_of(model)}
        self.share = share
        own = [share.part_of(group) for group in self.groups.values()]
        self.parts: Mapping[str, Part] = {part.name: part for g in own for part in parts_of(g, self.form, dtype)}
        self._read = read

    def fetch(self, names: Sequence[str], offset: int, flat: torch.Tensor) -> None:
        """As ``StateArrays.fetch``."""
        part = self.parts[names[0]]
        for piece in self.share.pieces(self.groups[part.group], offset, flat.numel() * part.per):
            into = flat[piece.first // part.per : (piece.first + piece.numel) // part.per]
            self._read(piece.rank, names, piece.start, into)


class Parts(WholeArrays):
    """All arrays of whole groups, out of the stores of all ranks, or of those that share what one of them has.

    ``arrays``: what each store has.
    """

    def __init__(self, stores: Sequence[Store], check: Callable[[], None] = lambda: None) -> None:
        """``stores``: by rank, each as of the same commit, or new: of all ranks, of one copy, or of one place in a
        pipeline, where the arrays of other places cannot be read. Of several copies the first is read. ``check``:
        raises where no more is to be read."""
        model = stores[0].model
        super().__init__(model, share_of(model), self._of_rank)
        self._check, dtype = check, DTYPES[model["precision"]]
        self.arrays = [
            StateArrays(
                [share_of(store.model).part(group) for group in self.groups.values()],
                self.form,
                dtype,
                torch.device("cpu"),
                store,
                Slots(store),
                host_bytes=0,
            )
            for store in stores
        ]

    def _of_rank(self, rank: int, names: Sequence[str], start: int, into: torch.Tensor) -> None:
        self._check()
        first = self.share.place * self.share.size  # the rank of the first store, as the share counts them
        self.arrays[rank - first].fetch(names, start, into)
