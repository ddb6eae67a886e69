"""The state of a run, cut for another number of ranks: copied into new stores, every byte checked as it is read.

Every group's trained and frozen part is one range of elements, padded for each rank. What differs with the number of
ranks is the padding, which is zeros, and who has which elements: whoever trains goes on with the same bits.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from penstock.config import Family
from penstock.schedule.dealt import holders_of, names_of_blocks
from penstock.schedule.mesh import Mesh
from penstock.schedule.program import VIEW_ALIGN, round_up
from penstock.state.arrays import StateArrays
from penstock.state.layout import Read
from penstock.state.memory import HostSlab, numpy_bytes
from penstock.state.parts import Parts, WholeArrays, buffers_of, groups_of, layout_of
from penstock.state.slots import Slots, whole_commit
from penstock.store.parts import OF_RANK, of_rank, opened_parts
from penstock.store.store import Store


def reshard(
    old: Sequence[Sequence[Path]],
    new: Sequence[Sequence[Path]],
    *,
    names: Sequence[Sequence[Path]],
    strands: int,
    weights: Sequence[Sequence[int]] | None = None,
    whole: bool = False,
    pipeline: bool = False,
    family: Family = "vertical",
    show: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write what the last commit of a run names into new stores, for as many ranks as these are.

    ``old``, ``new``: the directories of each rank's store, by rank; the new ones have none yet. ``names``: what these
    will be called. ``strands``: that the new ones say. ``weights``: by which each of them is striped over its
    directories; None: evenly. ``whole``: each has all of the state, and not a part of it; ``pipeline``: each has the
    blocks that are dealt out to it, as ranks have them in the order ``family``. ``show``: told the bytes that are
    written, of so many in all. Needs 16 MiB of memory.

    Raises:
        ConfigError: nothing has been committed; or there are too few blocks for such a pipeline.
        StoreError: a store is in use, damaged, or was stopped within a step; or a drive is full or fails.
    """
    with opened_parts(old) as opened, ExitStack() as stack:
        record, *_ = [whole_commit(store, store.paths[0]) for store in opened]
        slots = max(extent.slots for extent in opened[0].layout.extents)
        made = []
        models = described(opened[0].model, len(new), strands, whole=whole, pipeline=pipeline, family=family)
        for paths, called, model, own in zip(new, names, models, weights or ((),) * len(new), strict=True):
            layout = layout_of(model, slots)
            made.append(Store.create(paths, layout, model=model, owner=opened[0].owner, names=called, weights=own))
            stack.callback(made[-1].close)
        source, target = Parts(opened), Parts(made)
        total = sum(part.nbytes for arrays in target.arrays for part in arrays.parts.values())
        done = 0

        def shown(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            show(done, total)

        for rank, (arrays, store) in enumerate(zip(target.arrays, made, strict=True)):
            arrays.fill(cut_anew(source, arrays, rank % target.share.size), shown)
            whose = rank if len(opened) == len(made) and not pipeline else 0  # where they differ, each keeps its own
            copy_buffers(source.arrays[whose].slots, arrays.slots, store.model)
            commit_first(store, record, arrays.slots)


def commit_first(store: Store, record: Mapping[str, Any], slots: Slots) -> None:
    """Commit the state that a new store goes on from, in both places of its log: were one record not to be read, the
    store would seem to have no step, and whoever trains would begin again."""
    for _ in range(2):
        store.commit({**record, "slots": slots.record()})


def described(
    model: Mapping[str, Any],
    ranks: int,
    strands: int,
    *,
    whole: bool = False,
    pipeline: bool = False,
    family: Family = "vertical",
) -> list[dict[str, Any]]:
    """Descriptions of the state that the stores of so many ranks are made for, by rank. ``model``: the one that a store
    of another number of ranks is made for. ``whole``, ``pipeline``, ``family``: as of ``reshard``."""
    padded = Mesh(data=1 if whole or pipeline else ranks).everyone().padded
    groups = []
    for group in model["groups"]:
        before, ends = group["trainable"], {True: 0, False: group["trainable"]}
        for _, shape, offset, trainable in group["parameters"]:
            ends[trainable] = max(ends[trainable], offset + round_up(prod(shape), VIEW_ALIGN))
        trained, frozen = padded(ends[True]), padded(ends[False] - before)
        places = [
            [name, shape, offset if trainable else offset - before + trained, trainable]
            for name, shape, offset, trainable in group["parameters"]
        ]
        groups.append({**group, "trainable": trained, "frozen": frozen, "parameters": places})
    kept = {key: value for key, value in model.items() if key != "strands" and key not in OF_RANK}
    made = {**kept, "groups": groups} | ({"strands": strands} if strands > 1 else {})
    if ranks == 1:
        return [made]
    world, holders = uuid.uuid4().hex, None
    if pipeline:
        specs = groups_of(made)
        holders = holders_of(specs, names_of_blocks(specs), ranks, None, family)[1]
    return [{**made, **of_rank(rank, ranks, whole=whole, holders=holders), "world": world} for rank in range(ranks)]


def cut_anew(source: WholeArrays, arrays: StateArrays, number: int) -> Read:
    """The function that reads elements of ``arrays``, the part of this ``number`` of every group, out of a ``source``
    that is cut for another number of ranks. What no rank had, padding, is made zeros.

    All that is trained is one range of elements, whoever has them, and so is all that is frozen."""

    def read(name: str, start: int, piece: torch.Tensor) -> None:
        part = arrays.parts[name]
        group, own = source.groups[part.group], arrays.groups[part.group]
        if part.per > 1:
            at = number * own.trainable + start * part.per
            left = min(group.trainable - at, own.trainable - start * part.per)
        else:
            frozen = start >= part.trainable
            each, first = (part.numel - part.trainable, part.trainable) if frozen else (part.trainable, 0)
            at = number * each + start - first
            left = (group.frozen if frozen else group.trainable) - at
            at += group.trainable if frozen else 0
        piece.zero_()
        source.fetch((name,), at, piece[: max(left, 0) // part.per])

    return read


def copy_buffers(source: Slots, into: Slots, model: Mapping[str, Any]) -> None:
    """Copy the model's buffers."""
    for name, nbytes in buffers_of(model):
        with HostSlab(nbytes) as slab:
            pages = numpy_bytes(slab.bytes[:nbytes])
            source.read(name, 0, pages)
            into.write(name, 0, pages)
            into.flip((name,))
