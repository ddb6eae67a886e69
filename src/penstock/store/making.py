"""Makes and removes a store in its directories, so that at each moment there is a whole one or none."""

import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from penstock import files
from penstock.config import format_size
from penstock.errors import StoreError
from penstock.store import digests, directory, packed
from penstock.store.directory import DirectoryLock
from penstock.store.layout import Layout
from penstock.store.manifest import DATA, MANIFEST, PARTIAL, Manifest
from penstock.store.owner import Owner
from penstock.store.records import RESERVE, CommitLog, write_document
from penstock.store.striping import Striping

log = logging.getLogger("penstock")

BESIDE = ("commit.0", "commit.1", MANIFEST)
"""Names of the files that a store has beside its data."""
STAGED, NEXT = "penstock.store.staged", "penstock.store.next"
"""Names of a directory's part of the store that takes this one's place, before and after it counts."""


def require_settled(path: Path) -> None:
    """Raises:
    StoreError: another store is about to take the place of the one in this directory (``successor``).
    """
    if directory.is_there(path / NEXT):
        raise StoreError(
            f"{path}: penstock was stopped as it put the converted state in its place: go on with the run, with as "
            "many ranks as it has (penstock resume, or penstock.wrap), which finishes that"
        )


def claim(path: Path, undo: ExitStack) -> DirectoryLock:
    """Make and lock a directory that has no store, and clear what an interrupted creation left in it."""
    _check_name(path.resolve())
    if directory.make_directory(path):
        undo.callback(_remove_if_empty, path)
    lock = DirectoryLock(path)
    undo.callback(lock.forget)  # whatever fails before it is released, or as it is
    try:
        require_settled(path)
        if directory.is_there(path / DATA):
            raise StoreError(f"{path} holds a store already: open it, delete it, or give another directory")
        if directory.is_there(path / MANIFEST) and not directory.is_there(path / PARTIAL):
            raise StoreError(
                f"{path} holds a {MANIFEST} and no store: give another directory, or delete that if it is of a store "
                "whose data is gone"
            )
        remove_files([path])
    except BaseException:
        lock.release(remove=not any(directory.is_there(path / name) for name in (DATA, NEXT)))
        raise
    undo.callback(lock.release, remove=True)
    undo.callback(remove_files, [path])
    return lock


def _check_name(path: Path) -> None:
    """Refuses a path that no text has, and so no manifest."""
    name = os.fsencode(path)
    try:
        name.decode()
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{name!r} is not UTF-8, and a store keeps the names of its directories: give another directory"
        ) from error


def striped(
    paths: Sequence[Path], layout: Layout, stripe: int, weights: Sequence[int], *, replaces: bool = False
) -> Striping:
    """The striping of a store: by ``weights`` (none: evenly); evenly, too, where only that leaves room for it.
    ``replaces``: as of ``check_room``.

    Refuses before anything is written what has no room in either way.
    """
    even = Striping(files=len(paths), stripe=stripe)
    if len(set(weights)) > 1:
        asked = Striping(files=len(paths), stripe=stripe, weights=tuple(weights))
        try:
            check_room(paths, layout, asked, replaces=replaces)
            return asked
        except StoreError as error:
            check_room(paths, layout, even, replaces=replaces)
            log.warning("striping evenly over drives that are not equally fast, as only so there is room: %s", error)
    else:
        check_room(paths, layout, even, replaces=replaces)
    return even


SMALL = 2 * RESERVE
"""Bytes for the commits and manifests of the stores on a file system."""


def check_room(paths: Sequence[Path], layout: Layout, striping: Striping, *, replaces: bool = False) -> None:
    """Refuse before anything is written; directories on one file system share its room. ``replaces``: the store is made
    beside another one, whose place it takes, and whose slots it has: there is nothing to choose."""
    needed: dict[int, int] = {}
    for path, size in zip(paths, file_sizes(layout, striping), strict=True):
        device = path.stat().st_dev
        needed[device] = needed.get(device, SMALL) + size
    for path in paths:
        size, free = needed[path.stat().st_dev], packed.free_bytes(path)
        if size > free:
            if replaces:
                advice = "free some space (what is there stays until this is whole)"
            else:
                advice = "free some space, give another directory, or give several on different drives"
                if any(extent.slots == 2 for extent in layout.extents):
                    advice += ". With budget.slots=1 it takes half, and a kill within a step costs the run"
            raise StoreError(
                f"{path}: the store needs {format_size(size)} on this file system, {format_size(free)} are free: "
                f"{advice}"
            )


def fill(
    paths: Sequence[Path],
    layout: Layout,
    striping: Striping,
    model: dict[str, Any],
    *,
    passing: bool,
    owner: Owner | None,
    names: Sequence[Path],
) -> None:
    """Reserve the data, describe it, and give the data its name last: a store that has data is complete."""
    identity = uuid.uuid4().hex
    for path, size in zip(paths, file_sizes(layout, striping), strict=True):
        packed.allocate(path / PARTIAL, size)
    CommitLog.create(paths[0], identity)
    for index, path in enumerate(paths):
        manifest = Manifest(
            store=identity,
            index=index,
            directories=tuple(str(name.resolve()) for name in names),
            stripe=striping.stripe,
            weights=striping.weights,
            layout=layout,
            model=model,
            passing=passing,
            owner=owner,
        )
        write_document(path / MANIFEST, "store", manifest.to_json())
    for path in paths:
        os.rename(path / PARTIAL, path / DATA)
        directory.sync_directory(path)


def file_sizes(layout: Layout, striping: Striping) -> tuple[int, ...]:
    """Bytes of the file in each directory: the extents, and behind them the area of their checksums."""
    return striping.file_sizes(digests.area(layout, slots=2).end)


def remove_files(paths: Sequence[Path]) -> None:
    """Remove a store's own files. Whoever is interrupted here leaves a store, or what ``claim`` clears away.

    The data lose their name first, those beside the commits last: a part of a store has its manifest, and the commits
    of a store that is there can be read. What the data are called then goes after everything else.
    What was staged to take its place goes first.
    """
    for path in reversed(paths):
        if directory.is_there(path / STAGED):
            shutil.rmtree(path / STAGED)
    for path in reversed(paths):
        if directory.is_there(path / DATA):
            os.rename(path / DATA, path / PARTIAL)
    for path in reversed(paths):
        for file in (*files.left_of(path / MANIFEST), *(path / name for name in (*BESIDE, PARTIAL))):
            file.unlink(missing_ok=True)


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # an error on the way out must not hide the one that led here
        path.rmdir()
