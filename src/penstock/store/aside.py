"""Stores that are set aside while another begins in their place, in the same directories: put back where that fails.

    path/                                  the new one
    path/penstock.store.aside.partial/     the old one's part of this directory, as it is moved: the old one counts
    path/penstock.store.aside/             all of it, in every directory: the new one may begin
    path/penstock.store.aside.gone/        the new one counts: this is removed

Who has set a store aside has the lock of these folders until it is decided which of the two counts. Whatever that is
broken off by, ``settle`` finds folders that nobody has locked, and decides: where the new store has taken a step it is
the one that counts, and else the old one.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from penstock import files
from penstock.store.directory import DirectoryLock, check_directory, is_locked, is_there, locked, sync_directory
from penstock.store.facts import facts_of
from penstock.store.making import BESIDE, MOVED, remove_files, require_settled
from penstock.store.manifest import DATA, Manifest, require_all
from penstock.store.packed import free_bytes, reported

_ASIDE = "penstock.store.aside"
_GONE = f"{_ASIDE}.gone"
_SPACE = 2
"""Stores of the old one's size that there has to be room for beside it: the new one, and what its steps put there."""


def has_room(paths: Sequence[Path]) -> bool:
    """True if stores need not be removed for others to have room in their directories: those of all that are to be kept
    at once, as of each rank.

    Raises:
        StoreError: a directory cannot be looked at.
    """
    sizes: dict[int, int] = {}
    for path in paths:
        device = path.stat().st_dev
        sizes[device] = sizes.get(device, 0) + ((path / DATA).stat().st_size if is_there(path / DATA) else 0)
    return all(free_bytes(path) >= _SPACE * sizes[path.stat().st_dev] for path in paths)


class Aside:
    """A store that is set aside, until it is put back or removed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Set the store in these directories aside.

        Raises:
            StoreError: a directory is missing, not writable or in use, or a drive fails. The store is where it was, or
                is put back by the next ``settle``.
        """
        self._paths = [path.absolute() for path in paths]  # a program may go elsewhere
        with ExitStack() as undo, reported("setting a store aside"), ExitStack() as stack:
            for path in paths:
                check_directory(path)
                require_settled(path)
            locked(paths, stack)
            for path in self._paths:
                files.make_folder(path / MOVED)
                undo.callback(DirectoryLock(path / MOVED).release)
            for path in self._paths:
                for name in (DATA, *BESIDE):
                    if is_there(path / name):
                        os.rename(path / name, path / MOVED / name)
                sync_directory(path / MOVED)
            _rename(self._paths, MOVED, _ASIDE)
            self._held = undo.pop_all()

    def put_back(self) -> None:
        """The start has failed: what it has made goes, unless a step of it was committed. Nobody may have it open.
        Raises as ``settle``."""
        with self._held, reported(_PUTTING_BACK), ExitStack() as stack:
            locked(self._paths, stack)
            _decide(self._paths)

    def remove(self) -> None:
        """The new store has taken a step: it is the one that counts. Raises as ``settle``."""
        with self._held, reported("removing a store"):
            _remove(self._paths)


def settle(paths: Sequence[Path]) -> None:
    """Put back, or remove, a store that was set aside in these directories by a process that has ended. Does nothing
    where there is none; can be broken off anywhere and done again.

    Raises:
        StoreError: a directory is missing or in use, they are not all of the store's, what is there cannot be read, or
            a drive fails.
    """
    found = _folders(paths)
    if not found or any(is_locked(folder) for folder in found):
        return
    with reported(_PUTTING_BACK), ExitStack() as stack:
        for path in paths:
            check_directory(path)
        locked(paths, stack)
        if not any(is_locked(folder) for folder in _folders(paths)):  # who had the directories may have set it aside
            _decide(paths)


def is_undecided(paths: Sequence[Path]) -> bool:
    """True if a store is set aside in these directories: once they are settled, by a process that goes on.

    Raises:
        StoreError: a directory may not be looked at.
    """
    return bool(_folders(paths))


_PUTTING_BACK = "putting a store back that was set aside"


def _folders(paths: Sequence[Path]) -> list[Path]:
    return [path / name for path in paths for name in (MOVED, _ASIDE, _GONE) if is_there(path / name)]


def _decide(paths: Sequence[Path]) -> None:
    names = {folder.name for folder in _folders(paths)}
    if not names:  # it has been decided: what is there is what counts
        return
    if names == {_ASIDE}:  # all of its parts have to be known: none may go, or come, alone
        require_all(paths, [Manifest.read(path / _ASIDE) for path in paths])
    if _GONE in names or (names == {_ASIDE} and _has_stepped(paths)):
        _remove(paths)
    else:
        _put_back(paths)


def _has_stepped(paths: Sequence[Path]) -> bool:
    facts = facts_of(paths)
    return facts is not None and facts.record is not None and facts.record["step"] > 0


def _put_back(paths: Sequence[Path]) -> None:
    if not any(is_there(path / MOVED) for path in paths):  # else what is there is the old one's
        remove_files(paths)
    _rename(paths, _ASIDE, MOVED)
    for path in paths:
        moved = path / MOVED
        for name in (*BESIDE, DATA):
            if is_there(moved / name):
                os.rename(moved / name, path / name)
        if is_there(moved):
            sync_directory(path)  # before where they came from goes
            shutil.rmtree(moved)
            sync_directory(path)


def _remove(paths: Sequence[Path]) -> None:
    _rename(paths, _ASIDE, _GONE)
    for path in paths:
        if is_there(path / _GONE):
            shutil.rmtree(path / _GONE)
            sync_directory(path)


def _rename(paths: Sequence[Path], old: str, new: str) -> None:
    """Of all directories, before anything else: the first one decides."""
    for path in paths:
        if is_there(path / old):
            os.rename(path / old, path / new)
        sync_directory(path)
