"""The parts of a snapshot: one file of data of one process, or a folder with a part of it for each of several ranks.

    of one process      snapshot.json  penstock.snapshot
    of several ranks    ranks.json  rank-0/  rank-1/ ...   each with the files of a snapshot of one process

All parts have the id of the snapshot that they belong to, so that none is taken for another's.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.config.step import STRANDS
from penstock.errors import StoreError
from penstock.store.records import read_as, write_document
from penstock.store.snapshot import SnapshotReader
from penstock.store.snapshot_place import MANIFEST, RANKS, is_snapshot

_KIND = "snapshot of ranks"
PART_OF = "part_of"
"""The key, in a part's own account of itself, of the id of the snapshot that it belongs to."""
_PUT_BACK = "put back what was there, or use another snapshot"


@dataclass(frozen=True, kw_only=True)
class _Written:
    """The contents of ``ranks.json``."""

    id: str
    ranks: int

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= STRANDS:
            raise ValueError(f"ranks={self.ranks} is no number of ranks that share a snapshot")


def part_folder(snapshot: Path, rank: int) -> Path:
    """The folder of one rank's part of a snapshot of several ranks."""
    return snapshot / f"rank-{rank}"


def write_ranks(snapshot: Path, id: str, ranks: int) -> None:  # noqa: A002 - it is called so in the file
    """Say who has a part of it: the last that is written.

    Raises:
        StoreError: the drive failed, or is full.
    """
    write_document(snapshot / RANKS, _KIND, asdict(_Written(id=id, ranks=ranks)))


@dataclass(frozen=True, kw_only=True)
class SnapshotParts:
    """A snapshot that is there. ``ranks``: how many parts it has. ``id``: that these name; None: there is one, which is
    the snapshot itself.
    """

    path: Path
    ranks: int
    id: str | None

    @staticmethod
    def of(path: Path) -> "SnapshotParts":
        """Raises:
        StoreError: there is no snapshot, or what says who has a part of it is damaged.
        """
        if not is_snapshot(path):
            raise StoreError(f"{path} is not a snapshot: give a folder that engine.save has written")
        if (path / MANIFEST).is_file():
            return SnapshotParts(path=path, ranks=1, id=None)
        found = read_as(path / RANKS, _KIND, _Written)
        return SnapshotParts(path=path, ranks=found.ranks, id=found.id)

    def open(self, rank: int) -> SnapshotReader:
        """One rank's part.

        Raises:
            StoreError: it is missing, damaged, another rank's or of another snapshot.
        """
        place = self.path if self.id is None else part_folder(self.path, rank)
        if self.id is not None and not (place / MANIFEST).is_file():
            raise StoreError(f"{self.path} lacks the part of rank {rank} of {self.ranks}, {place.name}: {_PUT_BACK}")
        reader = SnapshotReader(place)
        try:
            self._require_part(reader.meta, place, rank)
        except BaseException:
            reader.close()
            raise
        return reader

    def _require_part(self, meta: dict[str, Any], place: Path, rank: int) -> None:
        whose = meta.get(PART_OF)
        if whose == self.id and self.id is None:
            return
        if self.id is None:
            raise StoreError(f"{place} is one rank's part of a snapshot: give the folder that it is in")
        if whose != self.id:
            raise StoreError(f"{place} is not a part of the snapshot that it lies in: {_PUT_BACK}")
        model = meta.get("model")
        if not isinstance(model, Mapping):
            raise StoreError(f"{place} does not say whose part it is: {_PUT_BACK}")
        if (model.get("rank"), model.get("ranks")) != (rank, self.ranks):
            raise StoreError(f"{place} has the part of rank {model.get('rank')}, not of rank {rank}: {_PUT_BACK}")


@contextmanager
def opened_snapshot(path: Path) -> Iterator[tuple[SnapshotReader, ...]]:
    """All parts of a snapshot, by rank; that of one process is its only part. Raises as ``SnapshotParts``."""
    parts = SnapshotParts.of(path)
    with ExitStack() as stack:
        yield tuple(stack.enter_context(parts.open(rank)) for rank in range(parts.ranks))
