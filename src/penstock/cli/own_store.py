"""The stores of a run, and whether they are its own."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.cli.reach import Stores
from penstock.cli.run_folder import settings_of, started_in
from penstock.cli.run_record import RunRecord
from penstock.config import Budget
from penstock.errors import ConfigError, StoreError
from penstock.store.facts import StoreFacts, facts_of_all
from penstock.store.owner import Owner, check_owner


def original_of(folder: Path, owners: Sequence[Owner], stores: Stores) -> Path | None:
    """The folder that a run's is a copy of, if it is there still and its settings name the same directories.
    ``owners``: of one id, as the run and its stores say."""
    for place in sorted({owner.folder for owner in owners}) if stores else ():
        original = Path(place)
        with suppress(OSError, ConfigError):
            found = RunRecord.read(original)
            if found is None or owners[0].id not in found.ids or original.samefile(folder):
                continue
            theirs = settings_of(original).budget.stores(found.ranks, found.hosts)
            if _real(theirs, started_in(original)) == _real(stores, Path()):
                return original
    return None


def require_no_copy(folder: Path, owners: Sequence[Owner], stores: Stores) -> None:
    """Raises StoreError: the folder is a copy of a run's, whose stores these are."""
    original = original_of(folder, owners, stores)
    if original is not None:
        raise StoreError(
            f"run={str(folder)!r} is a copy of the run in {original}, and {stores[0][0]} is the state of that one: "
            f"copy the state as well and give its place (--budget.disk), or go on with {original}"
        )


def placed(path: Path) -> str:
    """A directory as settings name it, and from where, if that depends on where the command runs."""
    return str(path) if path.is_absolute() else f"{path} (relative to {Path.cwd()})"


def _real(stores: Stores, base: Path) -> list[list[Path]]:
    return [[(base / path).resolve() for path in paths] for paths in stores]


def require_own_stores(run: Path, budget: Budget) -> tuple[tuple[tuple[Path, ...], ...], StoreFacts]:
    """The directories of each rank's store of the run in a folder, and what they say. ``budget``: as its settings have
    it.

    Raises: as ``RunRecord.begun_in``, and
        ConfigError: there is no store.
        StoreError: they are another run's, or may not be looked at.
    """
    record = RunRecord.begun_in(run)
    stores = budget.stores(record.ranks, record.hosts)
    facts = facts_of_all(stores)
    if record.hosts > 1 and (facts is None or facts.missing):
        raise StoreError(
            f"{stores[0][0] if facts is None else facts.missing[0]} is not here: the run trains on {record.hosts} "
            "hosts, each with the stores of its own ranks. Copy the folders rank-N of all hosts into the same "
            "directories here, and ask again"
        )
    if facts is None:
        why = "is the drive mounted? If not, it was moved or removed" if record.has_state else "the run has not begun"
        raise ConfigError(f"{placed(stores[0][0])} holds no store: {why}")
    check_owner(facts.owner, record.owner, str(stores[0][0]))
    return stores, facts
