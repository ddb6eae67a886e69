"""Facts about a store, without opening it: nothing is locked, made or written, and no file of data is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import StoreError
from penstock.store.directory import is_there
from penstock.store.manifest import DATA, Manifest
from penstock.store.owner import Owner
from penstock.store.records import CommitLog


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """``owner``: the run that the store belongs to. ``record``: the newest commit, None before the first. ``missing``:
    directories whose part is not there: their drives are not mounted, or the making of the store was interrupted.
    ``passing``: what is in it is needed for one step only.
    """

    owner: Owner | None
    record: dict[str, Any] | None
    missing: tuple[Path, ...]
    passing: bool

    @property
    def step(self) -> int | None:
        """The step that a run can go on from; None: nothing has been committed, or not all of a step."""
        whole = self.record is not None and self.record["whole"]
        return int(self.record["step"]) if self.record is not None and whole else None

    @property
    def untouched(self) -> bool:
        """True if no step has been taken, not even a part of one: all that the store can hold is the model as it came.

        The first commit is of the model as it came, as step 0. One that is not whole says that a step had begun.
        """
        return self.record is None or self.step == 0


def facts_of(paths: Sequence[Path]) -> StoreFacts | None:
    """Ask a store. None: there is none in any of the directories.

    Raises:
        StoreError: a directory may not be looked at, or what is there cannot be read.
    """
    there = [path for path in paths if is_there(path / DATA)]
    if not there:
        return None
    manifest = Manifest.read(there[0])
    if paths[0] not in there:
        raise StoreError(
            f"{paths[0]} lacks its part of the store in {there[0]}, the one with the commits: is the drive mounted?"
        )
    log = CommitLog(paths[0], manifest.store, writable=False)
    return StoreFacts(
        owner=manifest.owner,
        record=log.last,
        missing=tuple(path for path in paths if path not in there),
        passing=manifest.passing,
    )
