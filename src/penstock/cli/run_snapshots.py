"""Snapshots of a run without a disk tier, in its own folder: what a kill does not cost.

``snapshot-STEP`` is written every few minutes and at the end of a run, and appears whole or not at all; the ones before
go when it is there. Which of them a run goes on from is asked of the folder alone. Several ranks write their parts of
each; the first of them says when, and looks after the folder.
"""

import errno
import logging
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.run_record import RunRecord
from penstock.config import INTERVAL, Budget, parse_duration
from penstock.config.step import STRANDS
from penstock.documents.typed import shown
from penstock.engine.due import Due
from penstock.errors import ConfigError, StoreError
from penstock.store.directory import entries
from penstock.store.snapshot_parts import opened_snapshot
from penstock.store.whole import remove_abandoned

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.ranks.group import Ranks

log = logging.getLogger("penstock")

_SECONDS = parse_duration(INTERVAL)
"""Seconds of training that a kill costs at most, unless a step and the writing of a snapshot take longer."""
_NAME = re.compile(r"snapshot-(\d{1,15})")


def snapshots_of(folder: Path) -> list[Path]:
    """The snapshots in a run's folder, the newest first.

    Raises:
        StoreError: the folder cannot be looked into.
    """
    found = [(int(match[1]), path) for path in entries(folder) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir() and not path.is_symlink()]


def remove_abandoned_snapshots(folder: Path) -> None:
    """Remove what a run has left in its folder that was killed while it wrote a snapshot."""
    remove_abandoned(folder, "snapshot-*")


def newest(folder: Path) -> Path | None:
    """The snapshot that the run in a folder goes on from; None: it has none.

    Raises:
        StoreError: it has some, and none can be opened; or the system does not let one be read.
    """
    failed: dict[Path, StoreError] = {}
    for path in snapshots_of(folder):
        try:
            with opened_snapshot(path):
                for other, error in failed.items():
                    log.warning("%s: passed over: %s", other, error)
                return path
        except StoreError as error:
            if error.errno not in (None, errno.ENOENT):  # it may be whole: who passed it over would remove it
                raise
            failed[path] = error
    if failed:
        said = "; ".join(f"{path}: {error}" for path, error in failed.items())
        raise StoreError(f"the state of this run is in a snapshot that cannot be opened. {said}")
    return None


def require_newest(folder: Path) -> Path:
    """The newest snapshot of the run in a folder that can be opened, for a command that needs one.

    Raises: as ``RunRecord.begun_in`` and ``newest``, and
        ConfigError: there is none.
    """
    RunRecord.begun_in(folder)
    path = newest(folder)
    if path is None:
        raise ConfigError(
            f"{folder} keeps its state neither on disk (budget.disk) nor in a snapshot: there is nothing to read. A "
            "run without a disk has a snapshot after some minutes, and at its end, unless budget.durability is none"
        )
    return path


def record_kept(folder: Path) -> dict[str, Any] | None:
    """The newest snapshot's record of its step, of the form of a commit's; None: there is no snapshot.

    Raises:
        StoreError: as ``newest``, or the snapshot is damaged.
    """
    path = newest(folder)
    return None if path is None else record_in(path)


def record_in(path: Path) -> dict[str, Any]:
    """A snapshot's record of its step, of the form of a commit's.

    Raises:
        StoreError: the snapshot is missing or damaged.
    """
    with opened_snapshot(path) as parts:
        return parts[0].meta


def step_kept(folder: Path) -> int | None:
    """The step after which the run in a folder can go on from a snapshot; None: there is none."""
    record = record_kept(folder)
    return None if record is None else int(record["step"])


def strands_kept(folder: Path) -> int | None:
    """The number of strands that gradients were summed in up to the newest snapshot; None: there is none.

    Raises:
        StoreError: it does not say.
    """
    from penstock.state.record import check_kept

    record = record_kept(folder)
    if record is None:
        return None
    check_kept(record, f"the snapshot in {folder}")
    found = record["model"].get("strands", 1)
    if not isinstance(found, int) or not 1 <= found <= STRANDS:
        raise StoreError(f"the snapshot in {folder} is damaged: it says strands={shown(found)}")
    return found


class RunSnapshots:
    """Writes the snapshots of one run."""

    def __init__(
        self,
        folder: Path,
        ranks: "Ranks",
        *,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ranks``: who train the run."""
        self._folder = folder
        self._ranks = ranks
        self._due = Due(steps=None, seconds=seconds, clock=clock)

    @staticmethod
    def of(budget: Budget, folder: Path, ranks: "Ranks") -> "RunSnapshots | None":
        """None: the run keeps its state on disk, or says that it may end with nothing."""
        return None if budget.disk_paths or budget.durability == "none" else RunSnapshots(folder, ranks)

    def after(self, engine: "Engine") -> None:
        """A step has been done: write a snapshot where one is due. One that cannot be written is said, and due again
        after the next interval."""
        if not self._ranks.once("snapshot that is due", lambda: self._due.after(engine.step_count)):
            return
        self._due.began()
        try:
            self.write(engine)
        except StoreError as error:
            log.warning("a snapshot of the run could not be written, and training goes on without: %s", error)
        self._due.committed()

    def last(self, engine: "Engine") -> None:
        """The run ends here.

        Raises:
            StoreError: what it has trained could not be written.
        """
        self.write(engine)

    def write(self, engine: "Engine") -> None:
        if self._ranks.rank == 0:
            remove_abandoned_snapshots(self._folder)
        path = self._folder / f"snapshot-{engine.step_count}"
        engine.save(path, overwrite=True)
        if self._ranks.rank == 0:
            with suppress(StoreError):  # they do no harm
                for old in snapshots_of(self._folder):
                    if old != path:
                        shutil.rmtree(old, ignore_errors=True)
