"""``run.json`` in a run's folder: which run this is, and how far its beginning has got.

A run begins in one go as far as anybody can see: what is to be done is written down first (``Pending``), and whoever
starts the run after a kill does the rest before anything else.
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.config.step import STRANDS
from penstock.errors import ConfigError, StoreError
from penstock.store.owner import RUN_FILE, RUN_KIND, Owner
from penstock.store.records import read_as, write_document


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """The state of an earlier run, to be removed. ``id``: of the run. ``disk``: directories, of all ranks; those in the
    run's own folder are written from there, as the folder may be moved, or copied, before they are removed."""

    id: str
    disk: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A beginning under way. ``replaces``: what goes first. ``settings``: the text of the new run's settings."""

    replaces: tuple[Replaced, ...]
    settings: str

    def written(self, folder: Path) -> "Pending":
        """As it is written into a run's ``folder``."""
        return self._placed(lambda path: path.relative_to(folder) if path.is_relative_to(folder) else path)

    def found(self, folder: Path) -> "Pending":
        """As it was ``written``, where the folder is now."""
        return self._placed(lambda path: folder / path)

    def _placed(self, place: Callable[[Path], Path]) -> "Pending":
        moved = (replace(one, disk=tuple(str(place(Path(path))) for path in one.disk)) for one in self.replaces)
        return replace(self, replaces=tuple(moved))


@dataclass(frozen=True, kw_only=True)
class Resharding:
    """A reshard under way, to so many ``ranks`` and ``strands``; ``pipeline``: the ranks are one. ``cp``: so many share
    each sequence; None: as many as did. ``replaces``: the ids of the stores that go, as the new ones are whole; empty:
    they are not yet."""

    ranks: int
    strands: int
    replaces: tuple[str, ...]
    pipeline: bool = False
    cp: int | None = None

    @property
    def options(self) -> str:
        """The options of the command that does it."""
        more = "" if self.cp is None else f" --cp {self.cp}"
        return f"--ranks {self.ranks}{more} --strands {self.strands}" + (" --pipeline" if self.pipeline else "")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run, as JSON has it. ``id``, ``folder``: its owner's. ``ranks``: how many train it, on so many
    ``hosts``; each has a store. ``has_state``: these were made, so that they are missed where they are not found.
    ``pending``: None: the run has begun. ``resharding``: None: its stores are those of ``ranks``.
    """

    id: str
    folder: str
    ranks: int
    hosts: int = 1
    has_state: bool
    pending: Pending | None
    resharding: Resharding | None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= STRANDS:
            raise ValueError(f"ranks={self.ranks} is no number of ranks")
        if self.hosts < 1 or self.ranks % self.hosts:
            raise ValueError(f"hosts={self.hosts} is no number of hosts of {self.ranks} ranks")

    @staticmethod
    def of(owner: Owner, *, ranks: int = 1, hosts: int = 1, pending: Pending | None = None) -> "RunRecord":
        """The record of a run that has made no store yet."""
        return RunRecord(**owner.to_json(), ranks=ranks, hosts=hosts, has_state=False, pending=pending, resharding=None)

    @property
    def owner(self) -> Owner:
        return Owner(id=self.id, folder=self.folder)

    @property
    def ids(self) -> set[str]:
        """The ids of the runs whose stores are this one's, or are to be removed for it."""
        return {self.id, *(one.id for one in (self.pending.replaces if self.pending else ()))}

    def write(self, folder: Path) -> None:
        """Raises StoreError: it cannot be written; what was there still is."""
        there = self.pending and self.pending.written(folder.absolute())
        write_document(folder / RUN_FILE, RUN_KIND, asdict(replace(self, pending=there)))

    def require_settled(self, folder: Path) -> None:
        """Raises StoreError: a reshard of the run in ``folder`` was interrupted."""
        if self.resharding is None:
            return
        again = f"penstock reshard {shlex.quote(str(folder))}"
        undo = "" if self.resharding.replaces else f", or leave it as it was: {again} --undo"
        raise StoreError(
            f"{folder}: penstock reshard was interrupted. Finish it: {again} {self.resharding.options}{undo}"
        )

    @staticmethod
    def read(folder: Path) -> "RunRecord | None":
        """None: the folder is of no run.

        Raises:
            StoreError: it is there, and cannot be read.
        """
        try:
            (folder / RUN_FILE).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            pass  # reading it says why
        try:
            found = read_as(folder / RUN_FILE, RUN_KIND, RunRecord)
        except StoreError as error:
            if error.errno is not None:
                raise
            raise StoreError(f"{error}. Put it back from a copy: it says which store is this run's") from error
        return replace(found, pending=found.pending and found.pending.found(folder.absolute()))

    @staticmethod
    def begun_in(folder: Path) -> "RunRecord":
        """The record of a run whose state is its own: that of the run before, if there was one, is gone.

        Raises:
            ConfigError: the folder is of no run, or of one that has not begun.
            StoreError: a reshard was interrupted; or the record cannot be read.
        """
        record = RunRecord.read(folder)
        if record is None:
            raise ConfigError(f"{folder} is not the folder of a run: it has no {RUN_FILE}, which penstock train writes")
        record.require_settled(folder)
        if record.pending is not None:
            raise ConfigError(
                f"{folder}: a start was stopped before the run had begun, and the next one goes on with that: penstock "
                f"resume {shlex.quote(str(folder))}"
            )
        return record

    def begun(self) -> "RunRecord":
        return replace(self, pending=None)
