"""Folders that appear under their name whole or not at all: written beside it, made durable, renamed into place."""

import ctypes
import errno
import glob
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from penstock import files
from penstock.errors import StoreError
from penstock.store import directory
from penstock.store.directory import DirectoryLock
from penstock.store.packed import refused

log = logging.getLogger("penstock")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_PARTIAL = re.compile(r"\.partial-[0-9a-f]{12}\Z")
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL})


class WholeFolder(AbstractContextManager["WholeFolder"]):
    """A folder under way to ``path``; a context manager that removes what was written unless ``finish`` was called.

    ``path``: where it is to be, with no symbolic link in it: one that leads to an older folder goes on leading there.
    ``partial``: where it is until then: in a folder beside ``path`` that is locked, so that another process can tell a
    dead one's leftovers from ours. What earlier ones left behind whose process was killed is removed first.
    """

    def __init__(self, path: Path, *, private: bool = False, check: Callable[[], None] = lambda: None) -> None:
        """``check``: raises where ``path`` may not be taken. It is asked again in ``finish``: writing takes long, and
        something may be there by then.

        Raises:
            StoreError: the folder that it is to be in does not exist, or may not be written to.
        """
        self.path, self._check = path.resolve(), check
        check()
        above = self.path.parent
        if not above.is_dir():
            advice = "give another place" if above.exists() else "create it first"
            raise StoreError(f"{self.path}: {above} {files.no_folder(above)}: {advice}")
        remove_abandoned(self.path.parent, glob.escape(self.path.name))
        self._beside = self.path.with_name(f"{self.path.name}.partial-{uuid.uuid4().hex[:12]}")
        self._aside = _aside(self._beside)
        self.partial = self._beside / self.path.name
        with ExitStack() as undo:
            with refused(f"{self.path} cannot be created", "give another folder"):
                self._beside.mkdir(mode=0o700)
                undo.callback(shutil.rmtree, self._beside, ignore_errors=True)
                self.partial.mkdir(mode=0o700 if private else 0o777)
            self._lock = DirectoryLock(self._beside)
            undo.pop_all()
        self._open = True

    def finish(self) -> None:
        """Put the folder in its place; what was there before goes at the same instant.

        Raises: as ``check``, and
            StoreError: it cannot be put there so that it outlasts a power cut. What was there before still is.
        """
        self._check()
        replaces = directory.is_there(self.path)
        directory.sync_directory(self.partial)
        with refused(f"{self.path} cannot be put in place", "is it a mount point?"):
            self._swap() if replaces else self.partial.rename(self.path)
        try:
            directory.sync_directory(self.path.parent)
        except BaseException:
            self._open = False  # should it not go back, nothing is removed
            self._swap() if replaces else self.path.rename(self.partial)
            self._open = True
            raise
        self.abort()  # what is there by now is what was in the place before

    def _swap(self) -> None:
        """``partial`` and ``path`` change places: in one step where the file system can, else in three, of which one
        that fails is taken back."""
        if _exchanged(self.partial, self.path):
            return
        self.path.rename(self._aside)
        try:
            self.partial.rename(self.path)
            try:
                self._aside.rename(self.partial)
            except BaseException:
                self.path.rename(self.partial)
                raise
        except BaseException:
            self._aside.rename(self.path)
            raise

    def abort(self) -> None:
        """Remove what has been written. Does nothing after ``finish``."""
        if self._open:
            self._open = False
            _remove(self._beside)
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.abort()


def remove_abandoned(parent: Path, pattern: str) -> None:
    """Remove what was on its way to names of a pattern (``glob``) in ``parent`` when its process was killed: nobody
    holds its lock any more. What that had moved aside, where names cannot be swapped, goes back into its place."""
    for beside in parent.glob(f"{pattern}.partial-*"):
        if not _PARTIAL.search(beside.name) or beside.is_symlink() or not beside.is_dir():
            continue  # not a name that we give: somebody's own
        try:
            lock = DirectoryLock(beside)
        except StoreError:
            continue
        try:
            aside, place = _aside(beside), parent / _PARTIAL.sub("", beside.name)
            if directory.is_there(aside):
                _remove(aside) if directory.is_there(place) else aside.rename(place)
            _remove(beside)
        finally:
            lock.release()


def _aside(beside: Path) -> Path:
    """The name that the old folder has for a moment, where names cannot be swapped; no name of one being written."""
    return beside.with_name(f"{beside.name}-old")


def _remove(folder: Path) -> None:
    """Remove a folder that nobody needs any more; it does no harm where it cannot be."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if folder.exists():
            log.warning("%s is of no use any more, but cannot be removed (%s): remove it", folder, error)


def _exchanged(a: Path, b: Path) -> bool:
    """Swap two names of one file system in one step (Linux renameat2); False where it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code))
    return False
