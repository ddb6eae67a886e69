"""Stores that count, put in the places of those that they replace, by the ranks whose they are.

Each rank sees to its own directories, which may be within reach of its host alone. Where there are copies of the
state, a rank that has lost its store has nothing to put in its place: it takes over what another one has
(``state.take_over``).
"""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from penstock.ranks.group import Ranks
from penstock.state.take_over import Drive, drives_of, givers, no_store
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
    if not any(ranks.by_rank("stores that count", lambda: successor.decided([paths]) is not None)):
        return
    left = ranks.by_rank("what is left of the stores", lambda: (_any_left(paths), drives_of(paths)))
    own = [] if ranks.rank in ranks.alike(partial(_takers, left, parts)) else [paths]
    found = ranks.by_rank("stores to be put in their place", partial(successor.find, own))
    ranks.alike(partial(require_one_run, [(one[0].path, one[0].model) if one else None for one in found]))
    ranks.jointly("stores that say so", partial(successor.call_next, own, found[ranks.rank]))
    ranks.jointly("stores in their place", partial(successor.move_in, own))


def _takers(left: Sequence[tuple[bool, Sequence[Drive]]], parts: int) -> Collection[int]:
    """The ranks that have lost their store, where another one has the same part of the state. ``left``: of each rank
    whether anything is, and its drives.

    Raises:
        StoreError: no other has; or it is not sure that it is lost.
    """
    lost = [rank for rank, (there, _) in enumerate(left) if not there]
    takers = givers(lost, [drives for _, drives in left], parts)
    for rank in lost:
        if rank not in takers:
            raise no_store(left[rank][1][0].path)
    return takers


def _any_left(paths: Sequence[Path]) -> bool:
    return any(is_there(path / name) for path in paths for name in (DATA, NEXT, STAGED))
