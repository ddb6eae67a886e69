"""`Store`: the disk tier during training. One packed file per directory, a manifest in each, commits in the first."""

import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.config import format_size
from penstock.errors import StoreError
from penstock.store import directory, packed
from penstock.store.directory import DirectoryLock
from penstock.store.layout import Layout
from penstock.store.packed import PackedFile, store_error
from penstock.store.records import RESERVE, CommitLog, read_document, write_document
from penstock.store.striping import Striping
from penstock.store.transfer import Buffer, StripedFiles, byte_view

DATA = "penstock.store"
PARTIAL = "penstock.store.partial"  # what DATA is called until everything else is there
MANIFEST = "manifest.json"
STRIPE = 2 << 20  # bytes; a chunk of 8 MiB then keeps four drives busy

_OWN_FILES = (MANIFEST, f"{MANIFEST}.partial", "commit.0", "commit.1", PARTIAL, DATA)


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Bytes that reads and writes have moved since the store was opened."""

    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """What is in the file ``manifest.json`` of the directory number ``index``."""

    store: str
    index: int
    directories: tuple[str, ...]
    stripe: int
    layout: Layout
    model: dict[str, Any]

    def to_json(self) -> dict[str, object]:
        return vars(self) | {"directories": list(self.directories), "layout": self.layout.to_json()}

    @staticmethod
    def read(path: Path) -> "_Manifest":
        body = read_document(path / MANIFEST, "store")
        try:
            layout = Layout.from_json(body["layout"])
            return _Manifest(**body | {"layout": layout, "directories": tuple(body["directories"])})
        except StoreError as e:
            raise StoreError(f"{path / MANIFEST}: {e}") from e
        except (KeyError, TypeError) as e:
            raise StoreError(f"{path / MANIFEST} is damaged: {e}") from e


class Store:
    """Named extents on disk. Made by ``Store.create`` or ``Store.open``; a context manager.

    ``read`` and ``write`` may be called from several threads at once, also on the same extent as long as the ranges
    differ. Nothing is cached: what ``write`` has taken is with the drive, and durable after ``flush`` or ``commit``.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        manifest: _Manifest,
        files: StripedFiles,
        commits: CommitLog,
        locks: Sequence[DirectoryLock],
    ) -> None:
        self.paths = tuple(paths)
        self.layout = manifest.layout
        self.model = manifest.model
        self._files = files
        self._commits = commits
        self._locks = tuple(locks)
        self._written = False
        self._lost: str | None = None
        self._closed = False

    @staticmethod
    def create(
        paths: Sequence[Path],
        layout: Layout,
        *,
        model: dict[str, Any],
        io_threads: int = 4,
        stripe: int = STRIPE,
        direct: bool | None = None,
    ) -> "Store":
        """Reserve the space for ``layout`` in ``paths`` and open it; every byte reads as zero.

        Args:
            paths: one directory per drive. The last component of a path is created if it is missing.
            model: what the store is made for, as JSON has it: parameter names, shapes, groups, offsets.
            io_threads: threads per directory that help the thread that asks.
            stripe: bytes that lie together in one directory, if there are several.
            direct: True insists on O_DIRECT, False does without, None prefers it and warns.

        Raises:
            StoreError: a directory is missing, not writable, full, in use, or has a store already; nothing is left.
        """
        paths = [Path(path) for path in paths]
        directory.check_distinct(paths)
        with _reported("creating a store"), ExitStack() as undo:
            locks = [_claim(path, undo) for path in paths]
            _check_room(paths, layout, stripe)
            _fill(paths, layout, stripe, model)
            store = _attach(paths, locks, io_threads=io_threads, direct=direct)
            undo.pop_all()
        return store

    @staticmethod
    def open(paths: Sequence[Path], *, io_threads: int = 4, direct: bool | None = None) -> "Store":
        """Open an existing store, given its directories in the order they were created in.

        Raises:
            StoreError: a directory is missing, swapped, not writable or in use; the store is incomplete, damaged or
                of an unknown format version.
        """
        paths = [Path(path) for path in paths]
        directory.check_distinct(paths)
        with _reported("opening a store"), ExitStack() as undo:
            for path in paths:
                directory.check_directory(path)
            _read_manifests(paths)  # before a lock file is put into a directory that is perhaps not a store at all
            locks = []
            for path in paths:
                locks.append(DirectoryLock(path))
                undo.callback(locks[-1].release)
            store = _attach(paths, locks, io_threads=io_threads, direct=direct)
            undo.pop_all()
        return store

    @staticmethod
    def exists(paths: Sequence[Path]) -> bool:
        """Whether any of the directories has a store, be it a whole one or not."""
        return any(os.path.exists(Path(path) / DATA) for path in paths)  # False where we may not even look

    @staticmethod
    def delete(paths: Sequence[Path]) -> None:
        """Remove a store's own files, and nothing else, from the directories.

        Raises:
            StoreError: a directory is missing, not writable, or in use.
        """
        paths = [Path(path) for path in paths]
        with _reported("deleting a store"), ExitStack() as undo:
            for path in paths:
                directory.check_directory(path)
            for path in paths:
                lock = DirectoryLock(path)
                undo.callback(lock.release, remove=True)
            for path in paths:
                _remove_files(path)

    @property
    def stats(self) -> StoreStats:
        return StoreStats(bytes_read=self._files.bytes_read, bytes_written=self._files.bytes_written)

    @property
    def direct(self) -> bool:
        """Whether all files are read and written past the page cache."""
        return all(file.direct for file in self._files.files)

    def read(self, name: str, offset: int, buffer: Buffer, slot: int = 0) -> None:
        """Fill ``buffer`` with the bytes of extent ``name`` from byte ``offset`` of ``slot``; blocks until it is full.

        The buffer's address, its length and ``offset`` are multiples of 4096; an extent is readable to its ``stride``.

        Raises:
            StoreError: the drive failed; names file, offset, bytes asked for and done. The buffer is then undefined.
        """
        view = byte_view(buffer)
        self._files.read(self.layout[name].address(offset, len(view), slot), view)

    def write(self, name: str, offset: int, buffer: Buffer, slot: int = 0) -> None:
        """Write ``buffer`` to extent ``name`` at byte ``offset`` of ``slot``; blocks until the drive has taken it.

        Raises:
            StoreError: the drive failed; names file, offset, bytes asked for and done. The range is then undefined.
        """
        self._written = True
        view = byte_view(buffer)
        self._files.write(self.layout[name].address(offset, len(view), slot), view)

    def flush(self) -> None:
        """Return when everything written is durable.

        Raises:
            StoreError: it could not be made so.
        """
        if self._lost is not None:
            raise StoreError(
                f"an earlier flush failed, and what it covered may be lost: {self._lost}. Go on in another directory, "
                "from a snapshot if there is one"
            )
        self._written = False  # before the flush: what is written during it is not covered by it
        try:
            self._files.flush()
        except BaseException as error:
            self._written = True
            if isinstance(
                error, StoreError
            ):  # the system reports a lost write once: a second flush would succeed, and lie
                self._lost = str(error)
            raise

    def commit(self, record: dict[str, Any]) -> None:
        """Replace the commit record, atomically and durably. What was written before it is made durable first.

        Raises:
            StoreError: the record could not be written; the one before still stands.
        """
        if self._written or self._lost is not None:
            self.flush()
        self._commits.append(record)

    def last_commit(self) -> dict[str, Any] | None:
        """The newest commit record, or None if there was none."""
        return self._commits.last

    def require_model(self, model: dict[str, Any]) -> None:
        """Raises:
        StoreError: the store was made for another model; names the first thing that differs.
        """
        difference = _difference(self.model, model, "")
        if difference is not None:
            where = ", ".join(map(str, self.paths))
            raise StoreError(f"{where}: the store was made for another model: {difference}: give another directory")

    def close(self) -> None:
        """Give files and locks back. No read or write may be under way."""
        if not self._closed:
            self._closed = True
            self._files.close()
            for lock in self._locks:
                lock.release()

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _reported(doing: str) -> Iterator[None]:
    """Whatever the system refuses on the way is a `StoreError` to the user."""
    try:
        yield
    except StoreError:
        raise
    except OSError as e:
        raise store_error(f"{doing} failed: {e}: check the directory's disk and permissions", e) from e


def _claim(path: Path, undo: ExitStack) -> DirectoryLock:
    """Make and lock a directory that has no store, and clear what an interrupted creation left in it."""
    if directory.make_directory(path):
        undo.callback(_remove_if_empty, path)
    lock = DirectoryLock(path)
    try:
        if (path / DATA).exists():
            raise StoreError(f"{path} holds a store already: open it, delete it, or give another directory")
        if (path / MANIFEST).exists() and not (path / PARTIAL).exists():
            raise StoreError(
                f"{path} holds the manifest of a store whose data is gone: delete it, or give another directory"
            )
    except BaseException:
        lock.release()
        raise
    _remove_files(path)
    undo.callback(lock.release, remove=True)
    undo.callback(_remove_files, path)
    return lock


def _check_room(paths: Sequence[Path], layout: Layout, stripe: int) -> None:
    """Refuse before anything is written; directories on one file system share its room."""
    needed: dict[int, int] = {}
    sizes = Striping(files=len(paths), stripe=stripe).file_sizes(layout.nbytes)
    small = 2 * RESERVE  # room for the commits and manifests
    for path, size in zip(paths, sizes, strict=True):
        device = path.stat().st_dev
        needed[device] = needed.get(device, small) + size
    for path in paths:
        size, free = needed[path.stat().st_dev], packed.free_bytes(path)
        if size > free:
            raise StoreError(
                f"{path}: the store needs {format_size(size)} on this file system, {format_size(free)} are free: "
                "free some space, give another directory, or give several on different drives"
            )


def _fill(paths: Sequence[Path], layout: Layout, stripe: int, model: dict[str, Any]) -> None:
    """Reserve the data, describe it, and give the data its name last: a store that has data is complete."""
    identity = uuid.uuid4().hex
    names = tuple(str(path.resolve()) for path in paths)
    sizes = Striping(files=len(paths), stripe=stripe).file_sizes(layout.nbytes)
    for path, size in zip(paths, sizes, strict=True):
        packed.allocate(path / PARTIAL, size)
    CommitLog.create(paths[0], identity)
    for index, path in enumerate(paths):
        manifest = _Manifest(store=identity, index=index, directories=names, stripe=stripe, layout=layout, model=model)
        write_document(path / MANIFEST, "store", manifest.to_json())
    for path in paths:
        os.rename(path / PARTIAL, path / DATA)
        directory.sync_directory(path)


def _read_manifests(paths: Sequence[Path]) -> _Manifest:
    """The manifest of the first directory, when all of them agree and are given in their order."""
    for path in paths:
        if not (path / DATA).exists() and not (path / MANIFEST).exists():
            raise StoreError(f"{path} holds no store: create one, or give the directory of one")
    found = [_Manifest.read(path) for path in paths]
    first = found[0]
    for path, manifest in zip(paths, found, strict=True):
        if manifest.store != first.store:
            raise StoreError(f"{paths[0]} and {path} belong to different stores: give the directories of one")
    missing = [
        f"number {i + 1} (made as {first.directories[i]})"
        for i in range(len(first.directories))
        if i not in {m.index for m in found}
    ]
    if missing:
        raise StoreError(f"the store has {len(first.directories)} directories, missing here: {', '.join(missing)}")
    order = sorted(range(len(found)), key=lambda i: found[i].index)
    if order != list(range(len(found))):
        right = ", ".join(str(paths[i]) for i in order)
        raise StoreError(f"the store's directories are given in another order than they were made in: give {right}")
    for path in paths:
        if not (path / DATA).exists():
            raise StoreError(f"{path / DATA} is missing: if the store's creation was interrupted, delete the store")
    return first


def _attach(paths: Sequence[Path], locks: Sequence[DirectoryLock], *, io_threads: int, direct: bool | None) -> Store:
    """Open the files of a complete store whose directories are locked."""
    manifest = _read_manifests(paths)
    sizes = Striping(files=len(paths), stripe=manifest.stripe).file_sizes(manifest.layout.nbytes)
    commits = CommitLog(paths[0], manifest.store)
    with ExitStack() as undo:
        files = []
        for path, size in zip(paths, sizes, strict=True):
            memory = directory.in_memory(path)
            if memory:
                warnings.warn(f"{path} is in memory, not on a drive: what is stored there takes memory", stacklevel=3)
            files.append(PackedFile(path / DATA, direct=False if memory and direct is None else direct))
            undo.callback(files[-1].close)
            if files[-1].nbytes != size:
                raise StoreError(f"{path / DATA} is damaged: it has {files[-1].nbytes} bytes, its manifest says {size}")
        striped = StripedFiles(files, stripe=manifest.stripe, io_threads=io_threads)
        undo.pop_all()
    return Store(paths, manifest, striped, commits, locks)


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # an error on the way out must not hide the one that led here
        path.rmdir()


def _remove_files(path: Path) -> None:
    for name in _OWN_FILES:
        (path / name).unlink(missing_ok=True)


def _difference(ours: object, theirs: object, where: str) -> str | None:
    """The first place where two JSON values differ, in words; None if they are equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            place = f"{where}.{key}" if where else str(key)
            if key not in ours or key not in theirs:
                return f"{place} is only in {'this model' if key in theirs else 'the store'}"
            found = _difference(ours[key], theirs[key], place)
            if found is not None:
                return found
        return None
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = (_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
        return next((found for found in pairs if found is not None), None)
    return None if ours == theirs else f"{where} is {ours!r} in the store and {theirs!r} in this model"
