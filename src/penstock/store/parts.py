"""The stores of all ranks of a run, each with its part of the state, or all of it. One rank has one store."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.errors import StoreError
from penstock.store.store import Store


@contextmanager
def opened_parts(stores: Sequence[Sequence[Path]]) -> Iterator[tuple[Store, ...]]:
    """All ranks' stores, to be read alone, each as of the newest commit that all of them have. All have the same number
    of parts (``parts_of``): as many as there are stores, or one.

    ``stores``: the directories of each, by rank.

    Raises:
        StoreError: one cannot be opened, is not that rank's, or is of another run than the others.
    """
    with ExitStack() as stack:
        found = tuple(stack.enter_context(Store.open(paths, writable=False)) for paths in stores)
        whole = number_of_parts(found[0]) == 1
        for rank, store in enumerate(found):
            require_part(store, 0 if whole else rank, 1 if whole else len(found))
            if store.model.get("world") != found[0].model.get("world"):
                raise StoreError(
                    f"{found[0].paths[0]} and {store.paths[0]} have parts of two runs: put back what was there"
                )
        newest = min(store.commits.sequence for store in found)
        for store in found:
            if store.commits.sequence > newest:
                store.take_back(newest)
        yield found


def number_of_parts(store: Store) -> int:
    """Into how many parts the state is cut of which a store has one; 1: it has all of it."""
    return int(store.model.get("ranks", 1))


def require_part(store: Store, rank: int, parts: int) -> None:
    """Raises:
    StoreError: the store has another rank's part of the state, or one of another number of parts.
    """
    had, wanted = (store.model.get("rank", 0), number_of_parts(store)), (rank, parts)
    if had != wanted:
        raise StoreError(
            f"{store.paths[0]} has {_told(*had)}, and what is asked for is {_told(*wanted)}: go on with as many ranks "
            "as the run began with, with stage=0 if it had that and else without, on the same directories in the same "
            "order"
        )


def _told(rank: int, parts: int) -> str:
    return "all of the state" if parts == 1 else f"the part of rank {rank} of {parts}"
