"""Opens the stores of a run's ranks, or makes them: each rank does what all have decided (``state.survey``)."""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import StoreError
from penstock.ranks.group import Ranks
from penstock.state.converted_stores import convert_stores
from penstock.state.parts import layout_of
from penstock.state.record import check_stored
from penstock.state.settled import settle_together
from penstock.state.survey import Asked, Survey, decided, survey
from penstock.state.take_over import take_over
from penstock.store import successor
from penstock.store.directory import make_directory
from penstock.store.removal import delete_store
from penstock.store.store import Store


def open_store(asked: Asked, ranks: Ranks) -> tuple[Store, Mapping[str, Any] | None]:
    """This rank's store, and what it goes on from: the last commit that all ranks have; None: the run begins. All ranks
    come here. ``asked.model`` then says what the store does besides: its run, and its strands.

    Raises:
        StoreError, ConfigError: as ``survey`` and ``decided``; or a drive fails.
    """
    while True:
        settle_together(ranks, asked.paths, asked.parts)
        table = ranks.by_rank("stores", partial(survey, asked, ranks))
        decision = ranks.alike(partial(decided, table, asked.parts))
        own, giver = table[ranks.rank], decision.givers.get(ranks.rank)
        if decision.commit is not None:
            asked.model.update(asked.kept((own if giver is None else table[giver]).of_ranks))
        elif ranks.size > 1:
            asked.model["world"] = ranks.once("world", lambda: uuid.uuid4().hex)
        with ExitStack() as closing:
            commit = None if giver is not None else decision.commit
            store = ranks.jointly("open stores", partial(_opened, asked, own, commit, closing))
            if decision.commit and decision.givers:
                take_over(decision.givers, ranks, store, decision.commit)
            elif decision.commit and own.converts:
                stores: list[Sequence[Path]] = [one.paths for one in table]
                stores[ranks.rank] = asked.paths  # as they were given
                convert_stores(store, stores, asked.model, ranks=ranks)
            elif decision.commit != 0:
                closing.pop_all()
                return store, store.last_commit()


def _opened(asked: Asked, found: Survey, commit: int | None, closing: ExitStack) -> Store:
    """The store that was ``found``, as of a commit; None: a new one, in its place."""
    paths = asked.paths
    if commit is None:
        if found.facts is not None:
            delete_store(paths, only=lambda facts: facts.untouched)
        for path in paths if asked.place.ranks > 1 else ():  # each rank has a folder in what the budget names
            make_directory(path.parent)
        layout, weights = layout_of(asked.model, asked.slots), asked.weights(paths)
        made = Store.create(paths, layout, model=asked.model, owner=asked.owner, weights=weights)
        return closing.enter_context(made)
    store = closing.enter_context(Store.open(paths))
    if (store.identity, store.commits.sequence) != (found.store, found.newest):
        raise StoreError(f"{paths[0]}: another process has changed the store meanwhile: start again")
    if found.newest > commit:
        store.take_back(commit)
    if (record := store.last_commit()) is not None:
        check_stored(record, f"the last commit in {paths[0]}")
    successor.clear(paths, [paths])  # none counts, of any rank: those would be in their place
    return store
