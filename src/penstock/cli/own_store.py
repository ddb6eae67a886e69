"""The stores of a run, for the commands that only read them."""

from pathlib import Path

from penstock.cli.run_record import RunRecord
from penstock.config import Budget
from penstock.errors import ConfigError, StoreError
from penstock.store.facts import StoreFacts, facts_of_all
from penstock.store.owner import RUN_FILE, check_owner


def require_own_stores(run: Path, budget: Budget) -> tuple[tuple[tuple[Path, ...], ...], StoreFacts]:
    """The directories of each rank's store of the run in a folder, and what they say. ``budget``: as its settings have
    it.

    Raises:
        ConfigError: it is the folder of no run, or there is no store.
        StoreError: they are another run's, or may not be looked at; or a reshard was interrupted.
    """
    record = RunRecord.read(run)
    if record is None:
        raise ConfigError(f"{run} is not the folder of a run: it has no {RUN_FILE}, which penstock train writes")
    record.require_settled(run)
    stores = budget.stores(record.ranks, record.hosts)
    facts = facts_of_all(stores)
    if record.hosts > 1 and (facts is None or facts.missing):
        raise StoreError(
            f"{stores[0][0] if facts is None else facts.missing[0]} is not here: the run trains on {record.hosts} "
            "hosts, each with the stores of its own ranks. Copy the folders rank-N of all hosts into the same "
            "directories here, and ask again"
        )
    if facts is None:
        raise ConfigError(f"{stores[0][0]} holds no store: the run has not begun, or it was removed")
    check_owner(facts.owner, record.owner, str(stores[0][0]))
    return stores, facts
