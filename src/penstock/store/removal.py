"""Removes stores that nobody has open: whole ones, one directory's part of one, and what a step has left beside one."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from penstock.store import directory
from penstock.store.facts import StoreFacts, facts_of
from penstock.store.making import remove_files, require_settled
from penstock.store.manifest import DATA, PARTIAL, Manifest
from penstock.store.packed import reported

SCRATCH = "scratch"
"""The folder, in each directory of a run's store, of what lives no longer than a step."""


def delete_store(paths: Sequence[Path], *, only: Callable[[StoreFacts], bool] | None = None) -> bool:
    """Remove a store's own files, and nothing else, from the directories. Returns whether they were removed.

    ``only``: asked of the store once nobody else can change it; where it says no, the store stays.

    Raises:
        StoreError: a directory is missing, not writable, or in use; or what ``only`` is to be asked of cannot be
            read.
    """
    paths = [Path(path) for path in paths]
    with reported("deleting a store"), ExitStack() as undo:
        for path in paths:
            directory.check_directory(path)
            require_settled(path)
        locks = directory.locked(paths, undo)
        if only is not None and (facts := facts_of(paths)) is not None and not only(facts):
            return False
        remove_files(paths)
        for lock in locks:
            lock.release(remove=True)
    return True


def delete_part(path: Path, *, only: Callable[[Manifest], bool]) -> bool:
    """Remove one directory's part of a store where ``only`` says so of its manifest; or what is left of one whose
    making or removal was interrupted; with its scratch. False: there is one that stays, or nothing of one. Raises as
    ``delete_store``."""
    there = directory.is_there(path / DATA)
    if there and not only(Manifest.read(path)):
        return False
    remove_scratch(path)  # first: who is interrupted here and comes again finds the store, and so this
    return (there or directory.is_there(path / PARTIAL)) and delete_store([path])


def remove_scratch(path: Path) -> None:
    """Remove what a run that was killed within a step has left in a directory of its store. Raises as
    ``delete_store``."""
    scratch = path / SCRATCH
    if directory.is_there(scratch) and delete_part(scratch, only=lambda found: found.passing):
        with suppress(OSError):  # something else is in it: not ours to remove
            scratch.rmdir()
