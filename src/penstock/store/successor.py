"""A store that takes the place of another, in the same directories, so that at each instant one of the two counts.

    path/                          the old one
    path/penstock.store.staged/    the new one's part of this directory, while it is made
    path/penstock.store.next/      the same, once it counts

The new one is made whole, and durable, before anything of the old one is touched. It counts from the instant at which
the first directory's part is called ``next``: one rename, whatever the number of directories. From then on the old one
is removed and the new one moved to where it was, directory by directory. Whatever that is broken off by, ``settle``
goes on with it, and until it has nobody reads, replaces or removes either.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from penstock.store.directory import DirectoryLock, check_directory, is_there, sync_directory
from penstock.store.making import BESIDE, NEXT, STAGED, remove_files
from penstock.store.manifest import DATA, MANIFEST, PARTIAL, Manifest, require_all
from penstock.store.packed import reported


def staged(paths: Sequence[Path]) -> list[Path]:
    """Where the new store is made. ``paths``: the directories of the old one, which is open, here as elsewhere."""
    return [path / STAGED for path in paths]


def clear(paths: Sequence[Path]) -> None:
    """Remove what was staged and does not count.

    Raises:
        StoreError: it cannot be removed.
    """
    if not _any_decided(paths):
        with reported("removing what was staged"):
            for path in staged(paths):
                if is_there(path):
                    shutil.rmtree(path)


def decide(paths: Sequence[Path]) -> None:
    """From here on the new store counts, which is whole, durable and closed.

    Raises:
        StoreError: it does not.
    """
    with reported("putting a store in the place of another"):
        os.rename(paths[0] / STAGED, paths[0] / NEXT)


def settle(paths: Sequence[Path]) -> None:
    """Put a store that counts where the one was that it replaces. Does nothing where there is none; can be broken off
    anywhere and done again.

    Raises:
        StoreError: it is in use; the directories are not all of a store's, in their order; or a drive fails.
    """
    if not _any_decided(paths):
        return
    with reported("putting a store in the place of another"), ExitStack() as stack:
        for path in paths:
            check_directory(path)
        for path in paths:
            stack.callback(DirectoryLock(path).release)
        if not _any_decided(paths):  # another process has been faster
            return
        require_all(paths, [Manifest.read(_place(path)) for path in paths])
        for path in paths:
            if is_there(path / STAGED):
                os.rename(path / STAGED, path / NEXT)
            sync_directory(path)  # the first one's, too: what counts does so for good, before anything is removed
        for path in paths:
            _move_in(path)


def _any_decided(paths: Sequence[Path]) -> bool:
    return any(is_there(path / NEXT) for path in paths)


def _place(path: Path) -> Path:
    """Where a directory's part of the new store, or its manifest, is."""
    return next((place for place in (path / NEXT, path / STAGED) if is_there(place / MANIFEST)), path)


def _move_in(path: Path) -> None:
    """Remove a directory's part of the old store, and put the new one's in its place. Its data go last: as long as they
    are here, there are no data there but the old ones, and when they are there, all is."""
    new = path / NEXT
    if is_there(new / DATA):
        if is_there(path / DATA) or is_there(path / PARTIAL):
            remove_files([path])
            sync_directory(path)  # before it has any name of the new one: whichever order a file system keeps them in
        for name in (*BESIDE, DATA):
            if is_there(new / name):
                os.rename(new / name, path / name)
        sync_directory(path)  # before where they came from goes
    if is_there(new):
        shutil.rmtree(new)
        sync_directory(path)
