"""The store of a run, for the commands that only read it."""

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.store.facts import StoreFacts, facts_of
from penstock.store.owner import RUN_FILE, check_owner, owner_in


def require_own_store(run: Path, paths: Sequence[Path]) -> StoreFacts:
    """``run``: the folder of a run. ``paths``: the directories that its settings name. Returns what its store says.

    Raises:
        ConfigError: there is no store.
        StoreError: it is another run's, or may not be looked at.
    """
    facts = facts_of(paths)
    if facts is None:
        raise ConfigError(f"{paths[0]} holds no store: the run has not begun, or it was removed")
    owner = owner_in(run)
    if owner is None:
        raise ConfigError(f"{run} is not the folder of a run: it has no {RUN_FILE}, which penstock train writes")
    check_owner(facts.owner, owner, str(paths[0]))
    return facts
