"""`Store`: the disk tier during training. One packed file per directory, a manifest in each, commits in the first."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.store import digests, directory
from penstock.store.checksums import UNWRITTEN, Numbers
from penstock.store.digests import Digests
from penstock.store.directory import DirectoryLock
from penstock.store.layout import Extent, Grid, Layout
from penstock.store.making import claim, file_sizes, fill, require_settled, striped
from penstock.store.manifest import DATA as DATA
from penstock.store.manifest import Manifest, read_manifests
from penstock.store.owner import Owner
from penstock.store.packed import PackedFile, reported
from penstock.store.records import CommitLog, Table
from penstock.store.transfer import Buffer, StripedFiles, aligned_bytes, byte_view

log = logging.getLogger("penstock")

STRIPE = 2 << 20  # bytes; a chunk of 8 MiB then keeps four drives busy

_VERIFIED = 8 << 20
_CHECK = "check the drive and the kernel's log (dmesg)"


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Bytes of extents that have been read and written since the store was opened."""

    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, kw_only=True)
class Lent:
    """A slot of an extent as a snapshot can take it over without reading it."""

    grid: Grid
    stretches: tuple[tuple[PackedFile, int, int], ...]
    """(file, offset, bytes), in order"""
    digests: Numbers
    """the checksum of each block"""


class Store(AbstractContextManager["Store"]):
    """Named extents on disk. Made by ``Store.create`` or ``Store.open``; a context manager.

    ``read`` and ``write`` may be called from several threads at once, also on the same extent as long as the ranges
    differ. Nothing is cached: what ``write`` has taken is with the drive, and durable after ``flush`` or ``commit``.

    Each block of the layout's grid has a checksum, in memory; ``read`` checks every block that it returns, so reads and
    writes begin and end at blocks' borders. A commit writes all checksums with it. So after a reopening what was
    written since the last commit counts as damaged. What was never written, or not to its end, cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        manifest: Manifest,
        files: StripedFiles,
        commits: CommitLog,
        locks: Sequence[DirectoryLock],
        *,
        made: bool,
    ) -> None:
        """``made``: its files are new, and all zeros.

        Raises:
        StoreError: the checksums of the last commit cannot be read, or are damaged.
        """
        self.paths = tuple(paths)
        self.identity = manifest.store
        """The store's own id, which no other has, unless it is a copy."""
        self.layout = manifest.layout
        self.model = manifest.model
        self.weights = manifest.weights or (1,) * len(self.paths)
        """The weights of the directories, by which the store is striped over them."""
        self.owner = manifest.owner
        """The run that the store belongs to; None if it belongs to none."""
        self._advice = f"{_CHECK}, and " + (
            "repeat the step" if manifest.passing else "go on from a snapshot in another directory"
        )
        self.files = files
        """The store's address space, on drives."""
        self.commits = commits
        self.before_record: Callable[[], None] = lambda: None
        """Called in a commit once all that it names is durable."""
        self._locks = tuple(locks)
        self._made = made
        self._process = os.getpid()
        self._area = digests.area(self.layout, slots=2)
        self._digests = Digests(self.layout)
        self._beside = StoreStats(bytes_read=0, bytes_written=0)  # what the checksums themselves have moved
        if commits.table is not None:
            self._load_digests(commits.table)
        self._changed = False  # whether the checksums are others than the last commit's
        self._written = False
        self._lost: str | None = None
        self._closed = False

    @staticmethod
    def create(
        paths: Sequence[Path],
        layout: Layout,
        *,
        model: dict[str, Any],
        stripe: int = STRIPE,
        direct: bool | None = None,
        passing: bool = False,
        owner: Owner | None = None,
        names: Sequence[Path] | None = None,
        weights: Sequence[int] = (),
    ) -> "Store":
        """Reserve the space for ``layout`` in ``paths`` and open it; nothing of it can be read before it is written.

        Args:
            paths: one directory per drive. The last component of a path is created if it is missing.
            model: what the store is made for, as JSON has it: parameter names, shapes, groups, offsets.
            stripe: bytes that lie together in one directory, if there are several.
            direct: True insists on O_DIRECT, False does without, None prefers it and warns.
            passing: what is stored is needed for one step only; says what to do where it is damaged.
            owner: the run that the store is to belong to.
            names: what the directories will be called, if they are moved once it is whole.
            weights: how many stripes of a round each directory has, for ever; none: one each.

        Raises:
            StoreError: a directory is missing, not writable, full, in use, or has a store already; nothing is left.
        """
        paths = [Path(path) for path in paths]
        directory.check_distinct(paths)
        with reported("creating a store"), ExitStack() as undo:
            locks = [claim(path, undo) for path in paths]
            striping = striped(paths, layout, stripe, weights, replaces=names is not None)
            fill(paths, layout, striping, model, passing=passing, owner=owner, names=names or paths)
            store = _attach(paths, locks, direct=direct, made=True)
            undo.pop_all()
        return store

    @staticmethod
    def open(
        paths: Sequence[Path],
        *,
        direct: bool | None = None,
        writable: bool = True,
        lent: bool = False,
    ) -> "Store":
        """Open an existing store, given its directories in the order they were created in.

        ``writable``: False: to read alone, which others may do at the same time. It changes nothing at all, so that
        the drive may be one that takes no writes. ``lent``: nor is it locked, as who may write does not, for now.

        Raises:
            StoreError: a directory is missing, swapped, not writable or in use; the store is incomplete, damaged or
                of an unknown format version.
        """
        paths = [Path(path) for path in paths]
        directory.check_distinct(paths)
        with reported("opening a store"), ExitStack() as undo:
            for path in paths:
                directory.check_directory(path, writable=writable)
                require_settled(path)
            read_manifests(paths)  # before a lock file is put into a directory that is perhaps not a store at all
            locks = [] if lent else directory.locked(paths, undo, writes=writable)
            store = _attach(paths, locks, direct=direct, made=False, writable=writable)
            undo.pop_all()
        return store

    @property
    def stats(self) -> StoreStats:
        return StoreStats(
            bytes_read=self.files.bytes_read - self._beside.bytes_read,
            bytes_written=self.files.bytes_written - self._beside.bytes_written,
        )

    @property
    def written(self) -> int:
        """Bytes written in all, checksums included, by which drives wear."""
        return self.files.bytes_written

    @property
    def direct(self) -> bool:
        """True if all files are read and written past the page cache."""
        return all(file.direct for file in self.files.files)

    def read(self, name: str, offset: int, buffer: Buffer, slot: int = 0) -> None:
        """Fill ``buffer`` with the bytes of extent ``name`` from byte ``offset`` of ``slot``; blocks until it is full.

        The buffer's address, its length and ``offset`` are multiples of 4096; an extent is readable to its ``stride``.

        Raises:
            StoreError: the drive failed, what it gave is not what was written, or nothing was written there; names file
                and offset. The buffer is then undefined.
        """
        self._check_process()
        damage = self._read_damage(self.layout[name], offset, byte_view(buffer), slot)
        if damage:
            raise StoreError(f"{damage[0]}: {self._advice}")

    def _read_damage(self, extent: Extent, offset: int, view: memoryview, slot: int) -> list[str]:
        """Read, and name each run of blocks that was not written, or is not what was."""
        address = extent.address(offset, len(view), slot)
        first, borders = digests.blocks_of(extent, offset, len(view))
        found = self.files.read(address, view, borders)
        wanted, runs = self._digests.of(extent, slot)[first : first + len(found)], list[tuple[range, bool]]()
        if found.tobytes() == wanted.tobytes():
            return []
        for number in np.flatnonzero(found != wanted):
            (start, stop), written = borders[number : number + 2].tolist(), bool(wanted[number] != UNWRITTEN)
            if runs and runs[-1] == (range(runs[-1][0].start, start), written):
                start = runs.pop()[0].start
            runs.append((range(start, stop), written))
        return [self._damaged(extent, run, slot, written=written) for run, written in runs]

    def _damaged(self, extent: Extent, run: range, slot: int, *, written: bool) -> str:
        where = "; ".join(self.files.places(extent.address(run.start, len(run), slot), len(run)))
        place = f"in bytes {run.start} to {run.stop} of slot {slot}"
        if not written:
            return f"{where}: {extent.name} was never written {place}, or not to its end: there is nothing to read"
        return f"{where}: {extent.name} is damaged {place}: their checksum is not that of what was written there"

    def write(self, name: str, offset: int, buffer: Buffer, slot: int = 0) -> None:
        """Write ``buffer`` to extent ``name`` at byte ``offset`` of ``slot``; blocks until the drive has taken it.

        Raises:
            StoreError: the drive failed; names file, offset, bytes asked for and done. The range cannot be read then.
        """
        assert self.commits.writable, "opened to be read alone"
        self._check_process()
        view, extent = byte_view(buffer), self.layout[name]
        address = extent.address(offset, len(view), slot)
        if self.commits.doubtful:
            self.commits.settle()
        first, borders = digests.blocks_of(extent, offset, len(view))
        numbers = self._digests.of(extent, slot)[first : first + len(borders) - 1]
        numbers[:] = UNWRITTEN  # until all of it is there
        self._written = True
        try:
            numbers[:] = self.files.write(address, view, borders)
        finally:
            self._changed = True

    def zero(self, name: str, slot: int = 0) -> None:
        """Make all of a slot zeros. Nothing is written where a new file has them already.

        Raises:
            StoreError: the drive failed.
        """
        extent = self.layout[name]
        if self._made and not self._digests.of(extent, slot).any():
            self._digests.zero(extent, slot)
            self._changed = True
            return
        for part in extent.ranges(_VERIFIED):
            self.write(name, part.start, aligned_bytes(len(part)), slot)

    def is_written(self, name: str, slot: int) -> bool:
        """True if all of a slot can be read: it was written, or made zeros."""
        return bool((self._digests.of(self.layout[name], slot) != UNWRITTEN).all())

    def verify(self, slots: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
        """Read all of the given slot of each extent, 8 MiB at a time, and check it against its checksums; yields the
        bytes of each part, and what is damaged in it: file, offset and extent of each run of blocks, in words. What a
        drive cannot read at all counts as damage too.

        ``slots``: extent name to the slot that counts, as ``Slots(store).current(name)`` has it.
        """
        buffer = aligned_bytes(_VERIFIED)
        for name, slot in slots.items():
            extent = self.layout[name]
            for part in extent.ranges(_VERIFIED):
                if len(part) > len(buffer):
                    buffer = aligned_bytes(len(part))
                try:
                    damage = self._read_damage(extent, part.start, buffer[: len(part)].data, slot)
                except StoreError as error:
                    damage = [f"{name} cannot be read in bytes {part.start} to {part.stop} of slot {slot}: {error}"]
                yield len(part), damage

    def lend(self, name: str, slot: int) -> Lent:
        """A slot as it is now: where it lies and its checksums. It must not be written while a snapshot takes it."""
        extent = self.layout[name]
        where = self.files.stretches(extent.address(0, extent.stride, slot), extent.stride)
        return Lent(grid=extent.grid, stretches=tuple(where), digests=self._digests.of(extent, slot).copy())

    def flush(self) -> None:
        """Return when everything written is durable.

        Raises:
            StoreError: it could not be made so.
        """
        self._check_process()
        if self._lost is not None:
            raise StoreError(
                f"an earlier flush failed, and what it covered may be lost: {self._lost}. Go on in another directory, "
                "from a snapshot if there is one"
            )
        self._written = False  # before the flush: what is written during it is not covered by it
        try:
            self.files.flush()
        except BaseException as error:
            self._written = True
            if isinstance(
                error, StoreError
            ):  # the system reports a lost write once: a second flush would succeed, and lie
                self._lost = str(error)
            raise

    def commit(self, record: dict[str, Any]) -> None:
        """Replace the commit record, atomically and durably. What was written before it is made durable first; then
        ``before_record`` is called: what it raises is raised, and nothing is committed.

        Raises:
            StoreError: the record could not be written, or a directory was moved; the one before still stands.
        """
        self._check_process()
        for lock in self._locks:  # else the record would be written into what is there now
            lock.require_in_place()
        self.commits.settle()
        table, changed = self.commits.table, self._changed
        self._changed = False  # before the copy: what is written during the commit is not covered by it
        try:
            if changed:
                table = self._write_digests()
            if self._written or self._lost is not None:
                self.flush()
            self.before_record()
            self.commits.append(record, table)
        except BaseException:
            self._changed = changed or self._changed
            raise

    def _write_digests(self) -> Table:
        """Write the checksums to the slot of their area that the last commit does not name."""
        last = self.commits.table
        slot, nbytes = 0 if last is None else 1 - last.slot, self._area.stride
        self._written = True
        digest = self._digests.write(self.files, self._area.address(0, nbytes, slot))
        self._beside = replace(self._beside, bytes_written=self._beside.bytes_written + nbytes)
        return Table(slot=slot, digest=digest)

    def _load_digests(self, table: Table) -> None:
        nbytes = self._area.stride
        address = self._area.address(0, nbytes, table.slot)
        self._beside = replace(self._beside, bytes_read=self._beside.bytes_read + nbytes)
        if not self._digests.read(self.files, address, table.digest):
            raise StoreError(
                f"{'; '.join(self.files.places(address, nbytes))}: the checksums of the last commit "
                f"({self.commits.path}) are damaged: {self._advice}"
            )

    def take_back(self, sequence: int) -> None:
        """Go back to the commit before the last one, which has this number: nothing may have been written since. What
        is opened to be read alone stays as it is, and is read as of that commit.

        Raises:
            StoreError: it cannot be read, or the last one cannot be taken back.
        """
        self.commits.take_back(sequence)
        self._digests = Digests(self.layout)
        if self.commits.table is not None:
            self._load_digests(self.commits.table)

    def last_commit(self) -> dict[str, Any] | None:
        """The newest commit record, or None if there was none."""
        return self.commits.last

    def close(self) -> None:
        """Give files and locks back. No read or write may be under way. In a forked child nothing happens: its files,
        threads and locks are the parent's."""
        if not self._closed and self._process == os.getpid():
            self._closed = True
            with ExitStack() as all_of_it:  # last in, first out; each happens whatever the others raise
                for lock in self._locks:
                    all_of_it.callback(lock.release)
                all_of_it.callback(self.files.close)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                f"{self.paths[0]}: this store was opened by process {self._process}, and this is process "
                f"{os.getpid()}, forked from it: only the one that opened it may use it"
            )

    def __exit__(self, *_: object) -> None:
        self.close()


def _attach(
    paths: Sequence[Path],
    locks: Sequence[DirectoryLock],
    *,
    direct: bool | None,
    made: bool,
    writable: bool = True,
) -> Store:
    """Open the files of a complete store whose directories are locked."""
    manifest = read_manifests(paths)
    sizes = file_sizes(manifest.layout, manifest.striping)
    commits = CommitLog(paths[0], manifest.store, writable=writable)
    for fault in commits.faults:
        log.warning("%s. Going on from the other commit record, %s", fault, commits.path)
    with ExitStack() as closing:
        files = []
        for path, size in zip(paths, sizes, strict=True):
            memory = directory.in_memory(path)
            if memory:
                warnings.warn(f"{path} is in memory, not on a drive: what is stored there takes memory", stacklevel=3)
            how = False if memory and direct is None else direct
            files.append(PackedFile(path / DATA, direct=how, writable=writable))
            closing.callback(files[-1].close)
            if files[-1].nbytes != size:
                raise StoreError(f"{path / DATA} is damaged: it has {files[-1].nbytes} bytes, its manifest says {size}")
        closing.pop_all()
    striped = StripedFiles(files, stripe=manifest.stripe, weights=manifest.weights)
    try:
        return Store(paths, manifest, striped, commits, locks, made=made)
    except BaseException:
        striped.close()
        raise
