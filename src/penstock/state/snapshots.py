"""Snapshots of a run: every array and buffer, streamed chunk by chunk between its home and the snapshot's file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import StoreError
from penstock.schedule.place import page_up
from penstock.state.arrays import StateArrays, numpy_bytes
from penstock.state.buffers import Buffers
from penstock.state.memory import BOUNCE, HostSlab
from penstock.store.snapshot import SnapshotReader, SnapshotWriter


def save(path: Path, arrays: StateArrays, buffers: Buffers, meta: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write a snapshot; it appears under ``path`` whole or not at all. Needs 8 MiB of memory.

    What is on disk is shared with the store's file where the file system can (reflink), and copied elsewhere. The
    snapshot's content is the same.

    Raises:
        StoreError: the path exists and may not be overwritten, or the disk is full or fails.
    """
    entries = [(name, page_up(part.nbytes)) for name, part in arrays.parts.items()] + buffers.sizes()
    grids = {name: part.grid for name, part in arrays.parts.items()}
    bounce = HostSlab(BOUNCE)
    try:
        with SnapshotWriter(path, entries, dict(meta), overwrite=overwrite, grids=grids) as writer:
            for name in arrays.parts:
                if not _adopted(writer, name, arrays):
                    for start, piece in arrays.pieces(name, bounce):
                        arrays.read(name, start, piece)
                        writer.write(name, start * piece.itemsize, numpy_bytes(piece))
            buffers.write(writer.write)
            writer.finish()
    finally:
        bounce.close()


def _adopted(writer: SnapshotWriter, name: str, arrays: StateArrays) -> bool:
    """True if the snapshot has taken an array over by reference: it is on disk, and the file system can."""
    if arrays.store is None or arrays.tier_of(name) != "disk":
        return False
    return writer.adopt(name, arrays.store.lend(name, arrays.slots.current(name)))


@contextmanager
def opened(path: Path, description: Mapping[str, Any]) -> Iterator[SnapshotReader]:
    """A snapshot that is whole, and made for what ``description`` describes.

    Raises:
        StoreError: it is missing, damaged, or made for another model, precision or optimizer.
    """
    with SnapshotReader(path) as reader:
        for key, mine in description.items():
            saved = reader.meta.get("model")
            if not isinstance(saved, Mapping) or saved.get(key) != mine:
                raise StoreError(
                    f"{path}: the snapshot was made with another {key} than this engine: load it with the model, "
                    "precision and optimizer that it was saved with"
                )
        reader.verify()
        yield reader


def restore(snapshot: SnapshotReader, arrays: StateArrays, buffers: Buffers) -> None:
    """Overwrite all arrays, wherever they are at home, and the buffers.

    Raises:
        StoreError: a drive failed. Part of the state is then the snapshot's, and part what it was before.
    """
    bounce = HostSlab(BOUNCE)
    try:
        for name in arrays.parts:
            arrays.begin(name)
            for start, piece in arrays.pieces(name, bounce):
                snapshot.read(name, start * piece.itemsize, numpy_bytes(piece))
                arrays.write(name, start, piece)
            if arrays.tier_of(name) == "disk":
                arrays.flip(name)
        buffers.read(snapshot.read)
    finally:
        bounce.close()
