"""The place of a snapshot: a folder that is written beside it, and put there when it is whole."""

import os
from pathlib import Path

from penstock import files
from penstock.config import format_size
from penstock.errors import StoreError
from penstock.store import directory, packed
from penstock.store.making import NEXT
from penstock.store.manifest import DATA
from penstock.store.owner import RUN_FILE
from penstock.store.records import is_foreign
from penstock.store.whole import WholeFolder

MANIFEST = "snapshot.json"
RANKS = "ranks.json"
"""The file of a snapshot of several ranks that says how many have a part of it. The manifest of each is in the part's
own folder."""


def is_snapshot(path: Path) -> bool:
    """True if a folder is one that ``engine.save`` has written, of one process or of several ranks."""
    return (path / MANIFEST).is_file() or (path / RANKS).is_file()


def state_in(folder: Path, *, snapshots: bool) -> Path | None:
    """The first file, at any depth, that says that there is a run or a store in a folder that is to be replaced, or
    with ``snapshots`` a snapshot. Others have JSON files of such names, too.

    Raises:
        StoreError: a folder in it cannot be looked into, or a file that may say so cannot be read.
    """
    documents = {RUN_FILE} | ({MANIFEST, RANKS} if snapshots else set())
    with packed.reported(f"looking for what is kept in {folder}"):
        for at, below, here in os.walk(folder, onerror=files.refuse):
            for name in (*below, *here):
                path = Path(at) / name
                if name in (DATA, NEXT) or (name in documents and not is_foreign(path)):
                    return path
    return None


class SnapshotPlace(WholeFolder):
    """The place that a snapshot will have, and the folder in which it is written until then."""

    def __init__(self, path: Path, nbytes: int, *, overwrite: bool) -> None:
        """``nbytes``: that all of it takes.

        Raises:
            StoreError: ``path`` exists (and is no snapshot that may be overwritten), or the disk has no room.
        """
        self._overwrite = overwrite
        super().__init__(Path(path), private=True, check=self._check_target)
        try:
            if nbytes > (free := packed.free_bytes(self.partial)):
                raise StoreError(
                    f"{self.path}: the snapshot needs {format_size(nbytes)}, {format_size(free)} are free: "
                    "free some space, or give another path"
                )
        except BaseException:
            self.abort()
            raise

    def _check_target(self) -> None:
        if not directory.is_there(self.path):
            return
        if not self._overwrite:
            raise StoreError(f"{self.path} exists: give another path, remove it, or say overwrite=True")
        if not is_snapshot(self.path):
            raise StoreError(
                f"{self.path} is not a snapshot, so it is not overwritten: give another path, or remove it"
            )
        if (state := state_in(self.path, snapshots=False)) is not None:
            raise StoreError(f"{self.path} is not overwritten, as {state} would go with it: give another path")
