"""Snapshots of a run: every array and buffer, streamed chunk by chunk between its home and the snapshot's file. Of
several ranks each has a file of its own, with its part, and all of them are one snapshot."""

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy import uint8
from numpy.typing import NDArray

from penstock.config.step import STRANDS, sharing
from penstock.documents.typed import shown
from penstock.errors import StoreError
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.place import page_up
from penstock.state.arrays import StateArrays
from penstock.state.buffers import FIRST_BUFFERS, Buffers, Transfer, write_all
from penstock.state.convert import Conversion, has_other_form, in_words, renumbered, without_form
from penstock.state.memory import numpy_bytes
from penstock.state.parts import buffers_of
from penstock.state.record import check_kept
from penstock.state.reshard import cut_anew, described
from penstock.state.splits import as_known, require_splits
from penstock.state.values import arrays_in, read_elements
from penstock.store.layout import Layout
from penstock.store.packed import refused
from penstock.store.parts import HOLDERS, OF_RANK, STAGES, of_rank
from penstock.store.snapshot import PartWriter, layout_of, size_of, written_snapshot
from penstock.store.snapshot_parts import PART_OF, SnapshotParts, part_folder, write_ranks
from penstock.store.snapshot_place import SnapshotPlace

log = logging.getLogger("penstock")

_APART = "buffers_of"
"""The key, in a snapshot's account of itself, of the number of ranks that each have buffers of their own in it; where
it is not there, all have the same."""


def _own(name: str, rank: int, parts: int) -> str:
    """The name, in a snapshot of so many parts, of a rank's own buffer. Where there are several copies of the state,
    a part is written by a rank of the first, and has the buffers of all ranks with the same part."""
    return name if rank < parts else f"rank-{rank}.{name}"


def save(
    path: Path,
    arrays: StateArrays,
    buffers: Buffers,
    meta: Mapping[str, Any],
    *,
    overwrite: bool,
    ranks: Ranks = ALONE,
    share: Share = WHOLE,
    apart: bool = False,
) -> None:
    """Write a snapshot; it appears under ``path`` whole or not at all. Needs 8 MiB of memory on each rank. Where each
    of the ``ranks`` has all of the state as its ``share``, the first writes it. ``apart``: each has buffers of its own;
    where there are several copies of the state, those of all are in memory at once.

    What is on disk is shared with the store's file where the file system can (reflink), and copied elsewhere. The
    snapshot's content is the same.

    Raises:
        StoreError: the path exists and may not be overwritten, or the disk is full or fails; of several ranks on all,
            and what was there before still is.
    """
    apart = apart and ranks.size > 1 and bool(buffers.tensors())
    parts = share.size if share.holders is None else ranks.size
    of_part = {**buffers.tensors(), **(_of_copies(buffers, ranks, share.rank, parts) if apart else {})}
    entries = [(name, page_up(part.nbytes)) for name, part in arrays.parts.items()]
    entries += [(name, page_up(tensor.nbytes)) for name, tensor in of_part.items()]
    grids = {name: part.grid for name, part in arrays.parts.items()}

    model = {key: value for key, value in meta["model"].items() if key not in OF_RANK}
    if share.holders is not None:
        model |= of_rank(ranks.rank, ranks.size, whole=False, holders=share.holders, stages=ranks.stages)
    elif share.size > 1:  # of several copies of the state, the first
        model |= of_rank(share.rank, share.size, whole=False)
    account = {**meta, "model": model} | ({_APART: ranks.size} if apart else {})

    def write() -> None:
        with written_snapshot(path, entries, account, overwrite=overwrite, grids=grids) as writer:
            _fill(writer, arrays, of_part)

    if share.is_whole:
        ranks.jointly("snapshot", write if ranks.rank == 0 else lambda: None)
        return
    layout = layout_of(entries, grids)
    with ExitStack() as undo:
        size = sum(ranks.gather_objects("size of the snapshot", size_of(layout))) // ranks.copies
        place = ranks.jointly("place of the snapshot", lambda: _place(path, size, undo, ranks, overwrite=overwrite))
        found = None if place is None else (place.partial, uuid.uuid4().hex)
        found = ranks.gather_objects("folder of the snapshot", found)[0]
        assert found is not None, "the first rank has made one"
        folder, name = found
        own = part_folder(folder, share.rank)

        def write_part() -> None:
            if ranks.rank < parts:
                _write_part(own, layout, {**account, PART_OF: name}, arrays, of_part)

        ranks.jointly("part of the snapshot", write_part)
        ranks.jointly("snapshot", lambda: None if place is None else _put(place, name, parts))


def _place(path: Path, size: int, undo: ExitStack, ranks: Ranks, *, overwrite: bool) -> SnapshotPlace | None:
    """The place of a snapshot of several ranks, of so many bytes in all; the first of them has it."""
    if ranks.rank:
        return None
    place = SnapshotPlace(path, size, overwrite=overwrite)
    undo.callback(place.abort)
    return place


def _put(place: SnapshotPlace, name: str, ranks: int) -> None:
    """Put a snapshot in its place: all its parts are there, and durable."""
    write_ranks(place.partial, name, ranks)
    place.finish()


def _of_copies(buffers: Buffers, ranks: Ranks, rank: int, parts: int) -> dict[str, torch.Tensor]:
    """The buffers of the ranks of further copies of the state that have the same part as ``rank``, of the first. All
    ranks come here."""
    others = range(rank + parts, ranks.size, parts)
    found = buffers.of_all(ranks) if ranks.size > parts else {}
    return {_own(name, other, parts): values[other] for other in others for name, values in found.items()}


def _write_part(
    folder: Path, layout: Layout, meta: Mapping[str, Any], arrays: StateArrays, buffers: Mapping[str, torch.Tensor]
) -> None:
    with refused(f"{folder} cannot be created", "check the drive"):
        folder.mkdir(mode=0o700)
    with PartWriter(folder, layout, meta) as writer:
        _fill(writer, arrays, buffers)
        writer.seal()


def _fill(writer: PartWriter, arrays: StateArrays, buffers: Mapping[str, torch.Tensor]) -> None:
    with arrays.bounce() as bounce:
        for name in arrays.parts:
            if not _adopted(writer, name, arrays):
                for start, piece in arrays.pieces(name, bounce):
                    arrays.read(name, start, piece)
                    writer.write(name, start * piece.itemsize, numpy_bytes(piece))
        write_all(buffers, writer.write)


def _adopted(writer: PartWriter, name: str, arrays: StateArrays) -> bool:
    """True if the snapshot has taken an array over by reference: it is on disk, and the file system can."""
    if arrays.store is None or arrays.tier_of(name) != "disk":
        return False
    return writer.adopt(name, arrays.store.lend(name, arrays.slots.current(name)))


@dataclass(frozen=True, kw_only=True)
class Saved:
    """All that one rank takes over from a snapshot. ``meta``: how far the run had got. ``fill``: overwrites all
    arrays."""

    meta: Mapping[str, Any]
    fill: Callable[[StateArrays], None]
    read_buffer: Transfer


@contextmanager
def opened(
    path: Path,
    description: Mapping[str, Any],
    ranks: Ranks = ALONE,
    share: Share = WHOLE,
    *,
    apart: bool = False,
) -> Iterator[Saved]:
    """This rank's ``share`` of a snapshot that is whole, and made for what ``description`` describes. It may be of
    another number of ranks: what is trained is cut anew for these. Moments in another form are converted. ``apart``:
    each rank is to have buffers of its own: those that it had, where as many ranks have saved theirs. Else all have the
    first rank's.

    Raises:
        StoreError: it is missing, damaged, or made for another model, precision, optimizer or number of strands; of
            several ranks on all.
    """
    with ExitStack() as stack:

        def saved() -> Saved:
            parts = SnapshotParts.of(path)
            meta, fill = _opened(parts, description, ranks, share, stack)
            had = meta.get(_APART, 1)
            keep = apart and had == ranks.size
            if had != 1 and not keep and ranks.rank == 0:
                log.warning("%s: %s", path, FIRST_BUFFERS)
            return Saved(meta=meta, fill=fill, read_buffer=_buffers_of(ranks.rank if keep else 0, parts, stack))

        yield ranks.jointly("snapshot to load", saved)


def _buffers_of(rank: int, parts: SnapshotParts, stack: ExitStack) -> Transfer:
    """The function that reads the buffers of a rank."""
    reader = stack.enter_context(parts.open(rank % parts.ranks))
    for name, _ in buffers_of(reader.meta["model"]) if rank >= parts.ranks else ():
        reader.layout[_own(name, rank, parts.ranks)]  # now: what lacks one is refused before anything changes

    def read(name: str, offset: int, buffer: NDArray[uint8]) -> None:
        reader.read(_own(name, rank, parts.ranks), offset, buffer)

    return read


def _opened(
    parts: SnapshotParts, description: Mapping[str, Any], ranks: Ranks, share: Share, stack: ExitStack
) -> tuple[Mapping[str, Any], Callable[[StateArrays], None]]:
    """``meta`` and ``fill`` of what is ``Saved``."""
    path = parts.path
    if parts.ranks == (share.size if share.holders is None else ranks.size):
        own = stack.enter_context(parts.open(share.rank))
        check_kept(own.meta, str(path))
        as_here = all(own.meta["model"].get(key) == description.get(key) for key in (HOLDERS, STAGES))
        if as_here and not has_other_form(own.meta["model"], description, str(path)):
            require_like(own.meta["model"], description, path, ranks.sharing.size)
            own.verify()
            return own.meta, lambda arrays: arrays.fill(partial(read_elements, own))
    readers = [stack.enter_context(parts.open(rank)) for rank in range(parts.ranks)]
    meta = readers[0].meta
    check_kept(meta, str(path))
    model = meta["model"]
    converts = has_other_form(model, description, str(path))
    if converts:
        require_like(without_form(model), without_form(description), path, ranks.sharing.size)
    else:
        made_for = described(model, share.size, model.get("strands", 1))[share.number]
        require_like(made_for, description, path, ranks.sharing.size)
    for reader in readers[ranks.rank :: ranks.size]:  # all of them have been read by some rank when all have done this
        reader.verify()
    source = arrays_in(readers, model)
    if not converts:
        return meta, lambda arrays: arrays.fill(cut_anew(source, arrays, share.number))
    if ranks.rank == 0:
        log.warning("%s: moments are converted %s", path, in_words(model, description))
    conversion = Conversion(source, model, description)
    return renumbered(meta, model, description, str(path)), partial(conversion.fill, share=share)


def require_like(saved: Mapping[str, Any], description: Mapping[str, Any], path: Path, ranks: int) -> None:
    """Check what a snapshot is of against ``description``, or a part of one, of an engine of so many ``ranks``.

    Raises:
        StoreError: it was made for another model, precision, optimizer or number of strands.
    """
    require_splits(saved, description, str(path))
    for key, mine in {"strands": 1, **as_known(description, saved)}.items():
        found = saved.get(key, 1 if key == "strands" else None)
        if key in OF_RANK or found == mine:  # whose part it is was looked at as it was opened
            continue
        if key == "strands":
            able = sharing(found) if isinstance(found, int) and 1 <= found <= STRANDS else ()
            if ranks in able:
                advice = f"give strands={found} to go on with the same numbers"
            else:
                others = " or ".join(map(str, able)) or "none"
                advice = f"{ranks} ranks cannot go on with the same numbers, {others} can (a pipeline counts as one)"
            raise StoreError(
                f"{path}: the snapshot's gradients were summed in {shown(found)} strands, and this engine's are in "
                f"{mine}: {advice}"
            )
        raise StoreError(
            f"{path}: the snapshot was made with another {key} than this engine: load it with the model, "
            "precision and optimizer that it was saved with"
        )


def restore(snapshot: Saved, arrays: StateArrays, buffers: Buffers) -> None:
    """Overwrite all arrays, wherever they are at home, and the buffers.

    Raises:
        StoreError: a drive failed. Part of the state is then the snapshot's, and part what it was before.
    """
    snapshot.fill(arrays)
    buffers.read(snapshot.read_buffer)
    arrays.renew_copies()
