"""Folders that appear under their name whole or not at all: written beside it, made durable, renamed into place."""

import ctypes
import errno
import glob
import os
import re
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.errors import StoreError
from penstock.store import directory
from penstock.store.directory import LOCK, DirectoryLock
from penstock.store.packed import store_error

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_PARTIAL = re.compile(r"\.partial-[0-9a-f]{12}\Z")
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL})


class WholeFolder:
    """A folder under way to ``path``; a context manager that removes what was written unless ``finish`` was called.

    ``path``: where it is to be, with no symbolic link in it: one that leads to an older folder goes on leading there.
    ``partial``: where it is until then. What earlier ones left behind whose process was killed is removed first.
    """

    def __init__(self, path: Path) -> None:
        """Raises:
        StoreError: the folder that it is to be in does not exist, or may not be written to.
        """
        self.path = path.resolve()
        if not self.path.parent.is_dir():
            raise StoreError(f"{self.path}: {self.path.parent} does not exist: create it first")
        remove_abandoned(self.path)
        self.partial = partial_of(self.path)
        try:
            self.partial.mkdir()
        except OSError as e:
            raise store_error(f"{self.path} cannot be created: {e.strerror}: give another folder", e) from e
        self._lock = DirectoryLock(self.partial)  # so that another one can tell a dead one's leftovers from ours
        self._open = True

    def finish(self) -> None:
        """Put the folder in its place; what was there before goes at the same instant.

        Raises:
            StoreError: it cannot be put there. What was there before still is.
        """
        replaces = os.path.lexists(self.path)
        directory.sync_directory(self.partial)
        try:
            if replaces:
                exchange(self.partial, self.path)
            else:
                self.partial.rename(self.path)
        except OSError as e:
            raise store_error(f"{self.path} cannot be put in place: {e.strerror}: is it a mount point?", e) from e
        self._open = False
        (self.path / LOCK).unlink()  # not before: without it another one would take this for a dead one's
        self._lock.release()
        directory.sync_directory(self.path.parent)
        if replaces:
            shutil.rmtree(self.partial)  # by now the old one

    def abort(self) -> None:
        """Remove what has been written. Does nothing after ``finish``."""
        if self._open:
            self._open = False
            self._lock.release()
            shutil.rmtree(self.partial)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def partial_of(path: Path) -> Path:
    """A new name beside ``path`` for what is on its way there."""
    return path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:12]}")


def remove_abandoned(path: Path) -> None:
    """Remove what was on its way to ``path`` when its process was killed: nobody holds its lock any more."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.partial-*"):
        if not _PARTIAL.search(partial.name) or partial.is_symlink() or not partial.is_dir():
            continue  # not a name of ``partial_of``: somebody's own
        try:
            lock = DirectoryLock(partial)
        except StoreError:
            continue
        shutil.rmtree(partial)
        lock.release()


def exchange(new: Path, old: Path) -> None:
    """Swap two names; in one step where the file system can (Linux renameat2), else in three."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
    if libc.renameat2(*arguments) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code))
    aside = new.with_name(f"{new.name}-old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
