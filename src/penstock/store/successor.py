"""Stores that take the place of others, in the same directories, so that at each instant one or the other count.

    path/                          the old one
    path/penstock.store.staged/    the new one's part of this directory, while it is made
    path/penstock.store.next/      the same, once it counts

The new one is made whole, and durable, before anything of the old one is touched. It counts from the instant at which
the first directory's part is called ``next``: one rename, whatever the number of directories. From then on the old one
is removed and the new one moved to where it was, directory by directory. Whatever that is broken off by, ``settle``
goes on with it, and until it has nobody reads, replaces or removes either.

The stores of all ranks of a run take the place of theirs together: all new ones are whole, and durable, before the
first directory of the first rank's says that they count. All parts are called ``next`` before anything is removed, so
that one of them says so until the last is in its place.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from penstock.store.directory import check_directory, is_there, locked, sync_directory
from penstock.store.making import BESIDE, NEXT, STAGED, remove_files
from penstock.store.manifest import DATA, MANIFEST, PARTIAL, Manifest, require_all
from penstock.store.packed import reported
from penstock.store.parts import require_one_run

Stores = Sequence[Sequence[Path]]
"""The directories of each rank's store, by rank; one process has one store."""


def staged(paths: Sequence[Path]) -> list[Path]:
    """The directories of the new store until it counts. ``paths``: of the old one, which is open, here as elsewhere."""
    return [path / STAGED for path in paths]


def clear(paths: Sequence[Path], stores: Stores) -> None:
    """Remove what was staged of one of the ``stores`` and does not count. Nobody may be about to let them count.

    Raises:
        StoreError: it cannot be removed.
    """
    there = [path for path in staged(paths) if is_there(path)]
    if there and decided(stores) is None:
        with reported("removing what was staged"):
            for path in there:
                shutil.rmtree(path)


def decide(stores: Stores) -> None:
    """From here on the new stores count, all of which are whole, durable and closed.

    Raises:
        StoreError: they do not; or one of them is not to be found where the others are.
    """
    first = stores[0][0]
    with reported("putting a store in the place of another"):
        _require_whole(stores, [[Manifest.read(path) for path in staged(paths)] for paths in stores])
        os.rename(first / STAGED, first / NEXT)


def settle(stores: Stores) -> None:
    """Put stores that count where those were that they replace. Does nothing where there are none; can be broken off
    anywhere and done again.

    Raises:
        StoreError: one is in use; the directories are not all of a store's, in their order, or the stores not all of a
            run's; or a drive fails.
    """
    if decided(stores) is None:
        return
    paths = [path for store in stores for path in store]
    with reported("putting a store in the place of another"), ExitStack() as stack:
        for path in paths:
            check_directory(path)
        locked(paths, stack)
        if decided(stores) is None:  # another process has been faster
            return
        found = [[Manifest.read(_place(path)) for path in store] for store in stores]
        _require_whole(stores, found)
        for path in paths:
            if is_there(path / STAGED):
                os.rename(path / STAGED, path / NEXT)
            sync_directory(path)  # the first one's, too: what counts does so for good, before anything is removed
        for path in paths:
            _move_in(path)


def _require_whole(stores: Stores, found: Sequence[Sequence[Manifest]]) -> None:
    """``found``: of each rank's new store, those of its directories.

    Raises:
        StoreError: they are not all of a store's, or the stores not all of a run's.
    """
    for store, manifests in zip(stores, found, strict=True):
        require_all(store, manifests)
    require_one_run([(store[0], manifests[0].model) for store, manifests in zip(stores, found, strict=True)])


def decided(stores: Stores) -> Path | None:
    """A directory that says that the new stores count."""
    return next((path for store in stores for path in store if is_there(path / NEXT)), None)


def _place(path: Path) -> Path:
    """The folder of a directory's part of the new store: within it, or, once the part is moved in, itself."""
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
