"""A snapshot: a folder with one packed file and its manifest, written by streaming and complete or not there at all.

Every block of an extent has a checksum (xxh3), which is checked whenever any of it is read. All of them lie behind the
extents.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from penstock.errors import StoreError
from penstock.store import digests, packed
from penstock.store.checksums import Numbers, settled
from penstock.store.digests import Digests
from penstock.store.layout import ALIGN, Extent, Grid, Layout
from penstock.store.packed import PackedFile
from penstock.store.records import read_as, write_document
from penstock.store.snapshot_place import MANIFEST, SnapshotPlace
from penstock.store.store import Lent
from penstock.store.transfer import Buffer, StripedFiles, aligned_bytes, byte_view

DATA = "penstock.snapshot"

_VERIFIED = 8 << 20


@dataclass(kw_only=True)
class _Progress:
    """The progress of an extent: the bytes written, and the hash of what there is of the block there."""

    done: int = 0
    block: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def take(self, view: memoryview, extent: Extent, numbers: Numbers) -> None:
        first, self.done = self.done, self.done + len(view)
        for number, span in extent.spans(first, len(view)):
            self.block.update(view[max(span.start - first, 0) : span.stop - first])
            if span.stop <= self.done:
                numbers[number] = settled(self.block.intdigest())
                self.block.reset()


def layout_of(entries: Iterable[tuple[str, int]], grids: Mapping[str, Grid] | None = None) -> Layout:
    """The layout of a snapshot, or of one rank's part of it, with these extents (name, bytes).

    ``grids``: how they are cut into blocks with a checksum each; those without are cut at each MiB.
    """
    return Layout.build(((name, nbytes, 1) for name, nbytes in entries), grids)


def size_of(layout: Layout) -> int:
    """Bytes of its file of data."""
    return digests.area(layout, slots=1).end


class PartWriter:
    """Writes the two files of a snapshot, or of one rank's part of it, into a folder that others put in place.

    Each extent is written front to back, or adopted; different extents may be written by different threads at once. Its
    space is reserved at the start, also for what is adopted: the store takes new blocks for that as it goes on.
    """

    def __init__(self, folder: Path, layout: Layout, meta: Mapping[str, Any]) -> None:
        """Reserve the space; ``meta`` is anything that JSON has.

        Raises:
            StoreError: the disk has no room, or fails.
        """
        self.layout = layout
        self._place = folder
        self._meta = dict(meta)
        self._area = digests.area(layout, slots=1)
        self._digests = Digests(layout)
        self._progress = {e.name: _Progress() for e in layout.extents}
        packed.allocate(folder / DATA, self._area.end)
        self._files = StripedFiles([PackedFile(folder / DATA)], stripe=ALIGN)
        self._sharing = True  # until the file system has refused

    def write(self, name: str, offset: int, buffer: Buffer) -> None:
        """Write the next bytes of extent ``name``; ``offset`` is where the last write to it ended.

        Raises:
            StoreError: the drive failed.
        """
        view = byte_view(buffer)
        extent, progress = self.layout[name], self._progress[name]
        address = extent.address(offset, len(view), 0)
        assert offset == progress.done, f"{name}: written to {progress.done}, next write at {offset}"
        progress.take(view, extent, self._digests.of(extent, 0))
        self._files.write(address, view)

    def adopt(self, name: str, lent: Lent) -> bool:
        """Take over all of extent ``name`` from a store by reference: no byte of it is read or written, its blocks on
        the drive and their checksums are shared until the store writes them the next time.

        False where the file system cannot (most but XFS and Btrfs, and other drives than the store's); it is to be
        written then. What the store's drive has damaged is found when the snapshot is read.

        Raises:
            StoreError: the drive failed, or is full.
        """
        extent, progress = self.layout[name], self._progress[name]
        assert progress.done == 0, f"{name}: {progress.done} bytes of it have been written"
        assert lent.grid == extent.grid, f"{name}: {lent.grid} in the store, {extent.grid} in the snapshot"
        (target,), offset = self._files.files, extent.offset
        for file, start, nbytes in lent.stretches:
            self._sharing = self._sharing and target.share(offset, file, start, nbytes)
            if not self._sharing:
                return False
            offset += nbytes
        self._digests.of(extent, 0)[:] = lent.digests
        progress.done = extent.stride
        return True

    def seal(self) -> None:
        """Make everything durable, and say what it is.

        Raises:
            StoreError: the drive failed.
        """
        for extent in self.layout.extents:
            done = self._progress[extent.name].done
            assert done == extent.stride, f"{extent.name}: {done} of {extent.stride} bytes were written"
        digest = self._digests.write(self._files, self._area.offset)
        self._files.flush()
        body = {"meta": self._meta, "layout": self.layout.to_json(), "digests": digest}
        write_document(self._place / MANIFEST, "snapshot", body)

    def close(self) -> None:
        """Close the files, which stay."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def written_snapshot(
    path: Path,
    entries: Iterable[tuple[str, int]],
    meta: Mapping[str, Any],
    *,
    overwrite: bool = False,
    grids: Mapping[str, Grid] | None = None,
) -> Iterator[PartWriter]:
    """Inside, a snapshot is written next to where it will be; then it is made durable, and put there, unless an error
    is raised. ``entries``: (name, bytes); ``grids``: as ``layout_of``.

    Raises:
        StoreError: ``path`` exists (and is no snapshot that may be overwritten), or something else has taken the place
            meanwhile; or the disk has no room, or fails. What was at the path before is still there.
    """
    layout = layout_of(entries, grids)
    with SnapshotPlace(path, size_of(layout), overwrite=overwrite) as place:
        with PartWriter(place.partial, layout, meta) as writer:
            yield writer
            writer.seal()
        place.finish()


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A snapshot's manifest as JSON has it."""

    meta: dict[str, Any]
    layout: dict[str, Any]
    digests: str


class SnapshotReader(AbstractContextManager["SnapshotReader"]):
    """Reads a snapshot, checking each byte against its checksum. Thread-safe; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open the snapshot at ``path``.

        Raises:
            StoreError: there is none, or it is incomplete, damaged, or of an unknown format version.
        """
        self._path = Path(path)
        if not (self._path / MANIFEST).is_file():
            raise StoreError(f"{path} is not a snapshot: give a folder that engine.save has written")
        body = read_as(self._path / MANIFEST, "snapshot", _Written)
        self.meta = body.meta
        try:
            self.layout = Layout.from_json(body.layout)
        except StoreError as e:
            raise StoreError(f"{self._path / MANIFEST}: {e}") from e
        area = digests.area(self.layout, slots=1)
        file = PackedFile(self._path / DATA, writable=False)
        self._files = StripedFiles([file], stripe=ALIGN)
        try:
            if file.nbytes < area.end:
                raise StoreError(f"{path} is damaged: {DATA} has {file.nbytes} bytes, its manifest says {area.end}")
            self._digests = Digests(self.layout)
            if not self._digests.read(self._files, area.offset, body.digests):
                raise StoreError(
                    f"{path} is damaged: the checksums in {DATA} at offset {area.offset} have changed: check the "
                    "drive, and use another snapshot"
                )
        except BaseException:
            self._files.close()
            raise

    def read(self, name: str, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer`` from byte ``offset`` of extent ``name``.

        Raises:
            StoreError: the drive failed, or what it gave is not what was written.
        """
        view = byte_view(buffer)
        extent = self.layout[name]
        first, borders = extent.touched(offset, len(view))
        start, nbytes = int(borders[0]), int(borders[-1] - borders[0])
        # A checksum is of a whole block: where the range cuts one, its part is taken from what was checked.
        blocks = view if (start, nbytes) == (offset, len(view)) else byte_view(aligned_bytes(nbytes))
        found = self._files.read(extent.address(start, nbytes, 0), blocks, borders)
        wrong = np.flatnonzero(found != self._digests.of(extent, 0)[first : first + len(found)])
        if len(wrong):
            block = borders[wrong[0] : wrong[0] + 2]
            raise StoreError(
                f"{self._path}: {name} is damaged in bytes {block[0]} to {block[1]}: its checksum "
                "does not match: check the drive, and use another snapshot"
            )
        if blocks is not view:
            view[:] = blocks[offset - start : offset - start + len(view)]

    def verify(self) -> None:
        """Read everything and check it.

        Raises:
            StoreError: the first damage found.
        """
        for error in (error for _, damage in self.parts() for error in damage):
            raise error

    def parts(self) -> Iterator[tuple[int, list[StoreError]]]:
        """Read everything and check it; yields the bytes of each part, and what is damaged in it."""
        buffer = aligned_bytes(max(max((r.block for e in self.layout.extents for r in e.grid), default=0), _VERIFIED))
        for extent in self.layout.extents:
            for part in extent.ranges(_VERIFIED):
                damage = list[StoreError]()
                try:
                    self.read(extent.name, part.start, buffer[: len(part)])
                except StoreError as error:
                    damage.append(error)
                yield len(part), damage

    def close(self) -> None:
        self._files.close()

    def __exit__(self, *_: object) -> None:
        self.close()
