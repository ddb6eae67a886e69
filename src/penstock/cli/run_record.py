"""``run.json`` in a run's folder: which run this is, and how far its beginning has got.

A run begins in one go as far as anybody can see: what is to be done is written down first (``Pending``), and whoever
starts the run after a kill does the rest before anything else.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.errors import StoreError
from penstock.store.owner import RUN_FILE, RUN_KIND, Owner
from penstock.store.records import read_as, write_document


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """The state of an earlier run, to be removed. ``id``: of the run. ``disk``: directories."""

    id: str
    disk: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A beginning under way. ``replaces``: what goes first. ``settings``: the text of the new run's settings."""

    replaces: tuple[Replaced, ...]
    settings: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """``has_state``: a store was made for the run, so that it is missed where it is not found. ``pending``: None: the
    run has begun.
    """

    owner: Owner
    has_state: bool = False
    pending: Pending | None = None

    @property
    def ids(self) -> set[str]:
        """Of the stores that are this run's, or are to be removed for it."""
        return {self.owner.id, *(one.id for one in (self.pending.replaces if self.pending else ()))}

    def write(self, folder: Path) -> None:
        """Raises:
        StoreError: it cannot be written; what was there still is.
        """
        body = {**self.owner.to_json(), "has_state": self.has_state}
        write_document(folder / RUN_FILE, RUN_KIND, body | {"pending": self.pending and asdict(self.pending)})

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
            found = read_as(folder / RUN_FILE, RUN_KIND, _Written)
        except StoreError as error:
            if error.errno is not None:
                raise
            raise StoreError(f"{error}. Put it back from a copy: it says which store is this run's") from error
        return RunRecord(
            owner=Owner(id=found.id, folder=found.folder), has_state=found.has_state, pending=found.pending
        )

    def begun(self) -> "RunRecord":
        return replace(self, pending=None)


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A record as JSON has it."""

    id: str
    folder: str
    has_state: bool
    pending: Pending | None
