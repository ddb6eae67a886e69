"""The stores of all ranks of a run, each with its part of the state. One rank has one store, with all of it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.errors import StoreError
from penstock.store.store import Store


@contextmanager
def opened_parts(stores: Sequence[Sequence[Path]]) -> Iterator[tuple[Store, ...]]:
    """All ranks' stores, to be read alone, each as of the newest commit that all of them have.

    ``stores``: the directories of each, by rank.

    Raises:
        StoreError: one cannot be opened, is not that rank's, or is of another run than the others.
    """
    with ExitStack() as stack:
        found = tuple(stack.enter_context(Store.open(paths, writable=False)) for paths in stores)
        for rank, store in enumerate(found):
            require_part(store, rank, len(found))
            if store.model.get("world") != found[0].model.get("world"):
                raise StoreError(
                    f"{found[0].paths[0]} and {store.paths[0]} have parts of two runs: put back what was there"
                )
        newest = min(store.commits.sequence for store in found)
        for store in found:
            if store.commits.sequence > newest:
                store.take_back(newest)
        yield found


def require_part(store: Store, rank: int, ranks: int) -> None:
    """Raises:
    StoreError: the store has another rank's part of the state, or one of another number of ranks.
    """
    had = store.model.get("rank", 0), store.model.get("ranks", 1)
    if had != (rank, ranks):
        raise StoreError(
            f"{store.paths[0]} has the part of rank {had[0]} of {had[1]}, and this is rank {rank} of {ranks}: "
            "go on with as many ranks as the run began with, on the same directories in the same order"
        )
