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
that one of them says so until the last is in its place. Each rank may see to its own directories, which need not be
within another one's reach (``state.settled``): what it has to know of the others' is that they have come as far.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock.store.directory import check_directory, is_there, locked, sync_directory
from penstock.store.making import BESIDE, NEXT, STAGED, remove_files
from penstock.store.manifest import DATA, MANIFEST, PARTIAL, Manifest, require_all
from penstock.store.packed import reported
from penstock.store.parts import OF_RANK, require_one_run

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


class Successor(NamedTuple):
    """A rank's store that takes the place of another: its first directory, its id, and whose it is (``OF_RANK``)."""

    path: Path
    store: str
    model: Mapping[str, Any]


def ready(paths: Sequence[Path]) -> Successor:
    """The new store, which is whole, durable and closed, and does not count yet.

    Raises:
        StoreError: it is not whole.
    """
    return _successor(paths, staged(paths))


def decide(first: Path) -> None:
    """From here on the new stores count, all of which are ``ready``, and of one run. ``first``: the first directory of
    the first rank's.

    Raises:
        StoreError: they may not.
    """
    with reported(_PUTTING):
        os.rename(first / STAGED, first / NEXT)


def settle(stores: Stores) -> None:
    """Put stores that count where those were that they replace, all of which are within reach. Does nothing where there
    are none; can be broken off anywhere and done again.

    Raises:
        StoreError: one is in use; the directories are not all of a store's, in their order, or the stores not all of a
            run's; or a drive fails.
    """
    if decided(stores) is None:
        return
    found = find(stores)
    require_one_run([(one.path, one.model) for one in found])
    call_next(stores, found)
    move_in(stores)


def find(stores: Stores) -> list[Successor]:
    """Of each store the one that takes its place, or has already: the first step of ``settle``, which each rank can do
    with its own. Each step raises as ``settle`` does."""
    with _held(stores):
        return [_successor(paths, [_place(path) for path in paths]) for paths in stores]


def call_next(stores: Stores, found: Sequence[Successor]) -> None:
    """The second step, once it is known that some count, and that those that were ``found`` are all of a run's: from
    here on every directory says that they do."""
    with _held(stores):
        for paths, one in zip(stores, found, strict=True):
            for path in paths:
                # What another process has staged since, if it has been faster, is another store.
                if is_there(path / STAGED) and Manifest.read(path / STAGED).store == one.store:
                    os.rename(path / STAGED, path / NEXT)
                sync_directory(path)  # the first one's, too: what counts does so for good, before anything is removed


def move_in(stores: Stores) -> None:
    """The last step, once all directories of all ranks say that the new stores count: the old ones go."""
    with _held(stores):
        for paths in stores:
            for path in paths:
                _move_in(path)


@contextmanager
def _held(stores: Stores) -> Iterator[None]:
    """No other process has them open."""
    paths = [path for store in stores for path in store]
    with reported(_PUTTING), ExitStack() as stack:
        for path in paths:
            check_directory(path)
        locked(paths, stack)
        yield


_PUTTING = "putting a store in the place of another"


def _successor(paths: Sequence[Path], places: Sequence[Path]) -> Successor:
    with reported(_PUTTING):
        found = [Manifest.read(place) for place in places]
        require_all(paths, found)
    model = found[0].model
    return Successor(paths[0], found[0].store, {key: model[key] for key in OF_RANK if key in model})


def manifest_of(path: Path) -> Manifest | None:
    """The manifest of the store that counts in a directory; None: there is none.

    Raises:
        StoreError: it cannot be read.
    """
    if is_there(path / NEXT):
        return Manifest.read(_place(path))
    return Manifest.read(path) if is_there(path / DATA) else None


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
