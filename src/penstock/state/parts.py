"""The stores of all ranks of a run as one: what each is laid out for, and all arrays of whole groups out of them."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

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


class Elements(NamedTuple):
    """Elements of a whole group: ``numel`` from ``start`` on, none of its padding at the end."""

    start: int
    numel: int


def found_in(group: GroupSpec, own: GroupSpec, part: Part, rank: int, start: int, numel: int) -> Elements:
    """The place of elements of one rank's part ``own``, all trained or all frozen, in a ``group`` that was cut for
    another number of ranks. All that is trained is one range of elements, whoever has them, and so is all that is
    frozen. The rest is zeros. ``start``, ``numel``: the array's own."""
    if part.per > 1:
        at = rank * own.trainable + start * part.per
        return Elements(at, max(min(group.trainable - at, own.trainable - start * part.per, numel * part.per), 0))
    frozen = start >= part.trainable
    each, first = (part.numel - part.trainable, part.trainable) if frozen else (part.trainable, 0)
    at = rank * each + start - first
    left = (group.frozen if frozen else group.trainable) - at
    return Elements(at + (group.trainable if frozen else 0), max(min(left, numel), 0))


def cut(
    share: Share, group: GroupSpec, part: Part, offset: int, flat: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut ``flat``, which is to have an array's elements for those of its whole group from ``offset`` on, among the
    ranks that have them: (rank, first element of the rank's own part of the group, the stretch of ``flat``)."""
    per = part.per
    for piece in share.pieces(group, offset, flat.numel() * per):
        yield piece.rank, piece.start, flat[piece.first // per : (piece.first + piece.numel) // per]


class Parts:
    """All arrays of whole groups, out of the stores of all ranks, or of those that share what one of them has.

    ``groups``: by index. ``share``: how they are cut. ``arrays``: what each store has.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        """``stores``: by rank, each as of the same commit, or new: of all ranks, of one copy, or of one place in a
        pipeline, where the arrays of other places cannot be read. Of several copies the first is read."""
        model = stores[0].model
        self.form, dtype = form_of(model), DTYPES[model["precision"]]
        self.groups = {group.index: group for group in groups_of(model)}
        self.share, cpu = share_of(model), torch.device("cpu")
        self._first = self.share.place * self.share.size
        """the rank of the first store, as the share counts them"""
        self.parts: Mapping[str, Part] = {
            part.name: part for g in self.groups.values() for part in parts_of(g, self.form, dtype)
        }
        """every array, as it is whole"""
        self.arrays = [
            StateArrays(
                [share_of(store.model).part(group) for group in self.groups.values()],
                self.form,
                dtype,
                cpu,
                store,
                Slots(store),
                host_bytes=0,
            )
            for store in stores
        ]

    def fetch(self, names: Sequence[str], offset: int, flat: torch.Tensor) -> None:
        """As ``StateArrays.fetch``."""
        part = self.parts[names[0]]
        for rank, start, into in cut(self.share, self.groups[part.group], part, offset, flat):
            self.arrays[rank - self._first].fetch(names, start, into)
