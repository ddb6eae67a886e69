"""Stores that count, put in the places of those that they replace, by the ranks whose they are.

Each rank sees to its own directories, which may be within reach of its host alone. Where there are copies of the
state, a rank that has lost its store has nothing to put in its place: it takes over what another one has
(``state.take_over``).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.errors import StoreError
from penstock.ranks.group import Ranks
from penstock.state.take_over import Found, drives_of, givers, require_drives
from penstock.store import successor
from penstock.store.directory import is_there
from penstock.store.making import NEXT, STAGED
from penstock.store.manifest import DATA
from penstock.store.parts import require_one_run


def settle_together(ranks: Ranks, paths: Sequence[Path], parts: int) -> None:
    """Put stores that count where those were that they replace. All ranks come here, with theirs closed; does nothing
    where there are none, and can be broken off anywhere and done again.

    ``paths``: of this rank's store. ``parts``: that a copy of the state is cut into.

    Raises:
        StoreError: on all ranks: as ``successor.settle``; or a part of the state is lost.
    """
    # Each looks at its own: those of the others need not be within reach.
    counts = ranks.jointly("look at the stores", partial(successor.decided, [paths])) is not None
    if not any(ranks.gather_objects("stores that count", counts)):
        return
    own = [] if _is_lost(ranks, paths, parts) else [paths]
    found = ranks.jointly("stores to be put in their place", partial(successor.find, own))
    told = ranks.gather_objects("whose stores count", next(iter(found), None))
    of_all = [None if one is None else (one.path, one.model) for one in told]
    ranks.jointly("stores of one run", partial(require_one_run, of_all))
    ranks.jointly("stores that say so", partial(successor.call_next, own, found))
    ranks.jointly("stores in their place", partial(successor.move_in, own))


def _is_lost(ranks: Ranks, paths: Sequence[Path], parts: int) -> bool:
    """True if this rank has lost its store, and another one has the same part of the state.

    Raises:
        StoreError: on all ranks: no other has; or it is not sure that it is lost.
    """
    there = ranks.jointly("what is left of the stores", partial(_any_left, paths))
    told = ranks.gather_objects("stores that are lost", there)
    takers = givers([Found(sequence=1 if one else -1, untouched=not one) for one in told], parts)
    drives = ranks.gather_objects("drives", drives_of(paths))

    def look() -> None:
        if not there and takers is None:
            raise StoreError(f"{paths[0]} holds no store, and other ranks have theirs: is the drive mounted?")
        if not there:
            giver = (takers or {})[ranks.rank]
            require_drives(paths, ranks.rank, giver, drives[giver])

    ranks.jointly("lost stores", look)
    return not there


def _any_left(paths: Sequence[Path]) -> bool:
    return any(is_there(path / name) for path in paths for name in (DATA, NEXT, STAGED))
