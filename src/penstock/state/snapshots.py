"""Snapshots of a run: every array and buffer, streamed chunk by chunk between its home and the snapshot's file. Of
several ranks each has a file of its own, with its part, and all of them are one snapshot."""

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy import uint8
from numpy.typing import NDArray

from penstock.config.step import STRANDS, sharing
from penstock.documents.typed import shown
from penstock.errors import StoreError
from penstock.optim.precision import DTYPES
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.place import page_up
from penstock.state.arrays import StateArrays
from penstock.state.buffers import Buffers
from penstock.state.convert import Conversion, has_other_form, in_words, renumbered, without_form
from penstock.state.layout import parts_of
from penstock.state.memory import numpy_bytes
from penstock.state.parts import form_of, found_in, groups_of
from penstock.state.record import check_kept
from penstock.state.reshard import described
from penstock.state.splits import as_known, require_splits
from penstock.state.values import SnapshotArrays
from penstock.store.layout import Layout
from penstock.store.packed import refused
from penstock.store.parts import HOLDERS, OF_RANK, STAGES, of_rank
from penstock.store.snapshot import PartWriter, SnapshotReader, SnapshotWriter, layout_of, size_of
from penstock.store.snapshot_parts import PART_OF, SnapshotParts, part_folder, write_ranks
from penstock.store.snapshot_place import SnapshotPlace

log = logging.getLogger("penstock")


def save(
    path: Path,
    arrays: StateArrays,
    buffers: Buffers,
    meta: Mapping[str, Any],
    *,
    overwrite: bool,
    ranks: Ranks = ALONE,
    share: Share = WHOLE,
) -> None:
    """Write a snapshot; it appears under ``path`` whole or not at all. Needs 8 MiB of memory on each rank. Where each
    of the ``ranks`` has all of the state as its ``share``, the first writes it.

    What is on disk is shared with the store's file where the file system can (reflink), and copied elsewhere. The
    snapshot's content is the same.

    Raises:
        StoreError: the path exists and may not be overwritten, or the disk is full or fails; of several ranks on all,
            and what was there before still is.
    """
    entries = [(name, page_up(part.nbytes)) for name, part in arrays.parts.items()] + buffers.sizes()
    grids = {name: part.grid for name, part in arrays.parts.items()}

    model = {key: value for key, value in meta["model"].items() if key not in OF_RANK}
    if share.holders is not None:
        model |= of_rank(ranks.rank, ranks.size, whole=False, holders=share.holders, stages=ranks.stages)
    elif share.size > 1:  # of several copies of the state, the first
        model |= of_rank(share.rank, share.size, whole=False)
    account = {**meta, "model": model}

    def write() -> None:
        with SnapshotWriter(path, entries, account, overwrite=overwrite, grids=grids) as writer:
            _fill(writer, arrays, buffers)
            writer.finish()

    if share.is_whole:
        ranks.jointly("snapshot", write if ranks.rank == 0 else lambda: None)
        return
    layout = layout_of(entries, grids)
    parts = share.size if share.holders is None else ranks.size
    with ExitStack() as undo:
        size = sum(ranks.gather_objects("size of the snapshot", size_of(layout))) // ranks.copies
        place = ranks.jointly("place of the snapshot", lambda: _place(path, size, undo, ranks, overwrite=overwrite))
        found = None if place is None else (place.partial, uuid.uuid4().hex)
        found = ranks.gather_objects("folder of the snapshot", found)[0]
        assert found is not None, "the first rank has made one"
        folder, name = found
        own = part_folder(folder, share.rank)
        of_part = {**account, PART_OF: name}

        def write_part() -> None:
            if ranks.rank < parts:
                _write_part(own, layout, of_part, arrays, buffers)

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


def _write_part(folder: Path, layout: Layout, meta: Mapping[str, Any], arrays: StateArrays, buffers: Buffers) -> None:
    with refused(f"{folder} cannot be created", "check the drive"):
        folder.mkdir(mode=0o700)
    with PartWriter(folder, layout, meta) as writer:
        _fill(writer, arrays, buffers)
        writer.seal()


def _fill(writer: PartWriter, arrays: StateArrays, buffers: Buffers) -> None:
    with arrays.bounce() as bounce:
        for name in arrays.parts:
            if not _adopted(writer, name, arrays):
                for start, piece in arrays.pieces(name, bounce):
                    arrays.read(name, start, piece)
                    writer.write(name, start * piece.itemsize, numpy_bytes(piece))
        buffers.write(writer.write)


def _adopted(writer: PartWriter, name: str, arrays: StateArrays) -> bool:
    """True if the snapshot has taken an array over by reference: it is on disk, and the file system can."""
    if arrays.store is None or arrays.tier_of(name) != "disk":
        return False
    return writer.adopt(name, arrays.store.lend(name, arrays.slots.current(name)))


class Saved(Protocol):
    """The part of a snapshot that one rank takes over. ``meta``: how far the run had got."""

    @property
    def meta(self) -> Mapping[str, Any]: ...

    def read(self, name: str, offset: int, buffer: NDArray[uint8]) -> None:
        """As ``SnapshotReader.read``, of this rank's part."""


@contextmanager
def opened(path: Path, description: Mapping[str, Any], ranks: Ranks = ALONE, share: Share = WHOLE) -> Iterator[Saved]:
    """This rank's ``share`` of a snapshot that is whole, and made for what ``description`` describes. It may be of
    another number of ranks: what is trained is cut anew for these. Moments in another form are converted.

    Raises:
        StoreError: it is missing, damaged, or made for another model, precision, optimizer or number of strands; of
            several ranks on all.
    """
    with ExitStack() as stack:
        yield ranks.jointly("snapshot to load", lambda: _opened(path, description, ranks, share, stack))


def _opened(path: Path, description: Mapping[str, Any], ranks: Ranks, share: Share, stack: ExitStack) -> Saved:
    parts = SnapshotParts.of(path)
    if parts.ranks == (share.size if share.holders is None else ranks.size):
        own = stack.enter_context(parts.open(share.rank))
        check_kept(own.meta, str(path))
        as_here = all(own.meta["model"].get(key) == description.get(key) for key in (HOLDERS, STAGES))
        if as_here and not has_other_form(own.meta["model"], description, str(path)):
            require_like(own.meta["model"], description, path, ranks.sharing.size)
            own.verify()
            return own
    readers = [stack.enter_context(parts.open(rank)) for rank in range(parts.ranks)]
    check_kept(readers[0].meta, str(path))
    model = readers[0].meta["model"]
    converts = has_other_form(model, description, str(path))
    if converts:
        require_like(without_form(model), without_form(description), path, ranks.sharing.size)
    else:
        made_for = described(model, share.size, model.get("strands", 1))[share.number]
        require_like(made_for, description, path, ranks.sharing.size)
    for reader in readers[ranks.rank :: ranks.size]:  # all of them have been read by some rank when all have done this
        reader.verify()
    if not converts:
        return _CutAnew(readers, share)
    if ranks.rank == 0:
        log.warning("%s: moments are converted %s", path, in_words(model, description))
    return _Converted(readers, description, share, renumbered(readers[0].meta, model, description, str(path)))


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


class _CutAnew:
    """A snapshot of another number of ranks, as one of these has it."""

    def __init__(self, readers: Sequence[SnapshotReader], share: Share) -> None:
        """``readers``: of its parts, by rank. ``share``: what is to be read."""
        self.meta = readers[0].meta
        self._read_buffer = readers[0].read
        self._rank = share.number
        model = self.meta["model"]
        form, dtype = form_of(model), DTYPES[model["precision"]]
        self._groups = {group.index: group for group in groups_of(model)}
        self._own = [share.part(group) for group in groups_of(described(model, share.size, 1)[self._rank])]
        self._parts = {part.name: part for group in self._own for part in parts_of(group, form, dtype)}
        self._saved = SnapshotArrays(readers, model)

    def read(self, name: str, offset: int, buffer: NDArray[uint8]) -> None:
        part = self._parts.get(name)
        if part is None:  # a buffer, which is the same on all
            self._read_buffer(name, offset, buffer)
            return
        size, group, per = part.dtype.itemsize, self._groups[part.group], part.per
        found = found_in(group, self._own[part.group], part, self._rank, offset // size, buffer.size // size)
        buffer[found.numel // per * size :] = 0
        self._saved.fetch((name,), found.start, torch.from_numpy(buffer).view(part.dtype)[: found.numel // per])


class _Converted:
    """A snapshot of any number of ranks whose moments have another form, as one rank has it."""

    def __init__(
        self, readers: Sequence[SnapshotReader], description: Mapping[str, Any], share: Share, meta: Mapping[str, Any]
    ) -> None:
        """``readers``: of its parts, by rank. ``share``: what is to be read. ``meta``: of what ``description`` says."""
        self.meta = meta
        self.read = readers[0].read
        """reads buffers, which are the same on all"""
        self._share = share
        had = readers[0].meta["model"]
        self._conversion = Conversion(SnapshotArrays(readers, had), had, description)

    def fill(self, arrays: StateArrays) -> None:
        """Overwrite all arrays."""
        self._conversion.fill(arrays, self._share)


def restore(snapshot: Saved, arrays: StateArrays, buffers: Buffers) -> None:
    """Overwrite all arrays, wherever they are at home, and the buffers.

    Raises:
        StoreError: a drive failed. Part of the state is then the snapshot's, and part what it was before.
    """
    if isinstance(snapshot, _Converted):
        snapshot.fill(arrays)
    else:
        _copy(snapshot, arrays)
    buffers.read(snapshot.read)
    arrays.renew_copies()


def _copy(snapshot: Saved, arrays: StateArrays) -> None:
    with arrays.bounce() as bounce:
        for name in arrays.parts:
            arrays.begin(name)
            for start, piece in arrays.pieces(name, bounce):
                snapshot.read(name, start * piece.itemsize, numpy_bytes(piece))
                arrays.write(name, start, piece)
            if arrays.tier_of(name) == "disk":
                arrays.flip(name)
