"""The stores of a run, converted to another form of moments (``state.convert``): made beside the old ones, and then in
their place.

All of them count from one instant on (``store.successor``): whatever that is broken off by, the old ones are whole or
the new ones are, and what does not count is removed by whoever opens the stores next. So there must be room for both.
Which group a parameter is in, and where, differs between forms: each rank reads what it needs of the old stores of all,
which nobody writes meanwhile, and writes its own new one.
"""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.config import format_size
from penstock.errors import StoreError
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.share import WHOLE, Share
from penstock.state.convert import Conversion, in_words, nbytes_of, renumbered
from penstock.state.layout import Part
from penstock.state.parts import Parts, layout_of
from penstock.state.reshard import commit_first, copy_buffers
from penstock.store import successor
from penstock.store.packed import store_error
from penstock.store.parts import number_of_parts
from penstock.store.store import Store
from penstock.store.successor import Stores

log = logging.getLogger("penstock")

T = TypeVar("T")


def convert_stores(
    store: Store,
    stores: Stores,
    model: dict[str, Any],
    record: Mapping[str, Any],
    *,
    io_threads: int,
    ranks: Ranks = ALONE,
) -> None:
    """Make the stores that take the place of those of all ranks, and let them count: ``successor.settle`` puts them
    there when these are closed. All ranks come here, each with its own open. Needs 32 MiB of memory on each.

    ``store``: this rank's, one of ``stores``. ``model``: what it is to be made for, which differs in nothing but the
    form. ``record``: its last commit, which is whole; all ranks have that step's.

    Raises:
        StoreError: a drive fails or has no room for both, or a rank cannot read the others' stores; on all ranks. The
            old ones still count then, and are what they were.
    """
    record = renumbered(record, store.model, model, f"the last commit in {store.paths[0]}")
    if ranks.size > 1:
        model = {**model, "world": ranks.gather_objects("world of the converted state", uuid.uuid4().hex)[0]}
    identities = ranks.gather_objects("directories of the state", [_identity(path) for path in store.paths])
    commits = ranks.gather_objects("last commits of the state", store.commits.sequence)
    if ranks.rank == 0:
        _say(store, model, ranks.size)
    own_is_whole = False

    def fill() -> None:
        nonlocal own_is_whole
        _fill(made, _Watched(old, ranks), store.model, record)
        own_is_whole = True

    try:
        with ExitStack() as stack:
            reach = partial(_require_reachable, store, stores, identities, model, ranks.rank)
            ranks.jointly("reach of the state", partial(_unchanged, reach))
            read = partial(_opened, store, stores, commits, ranks, io_threads, stack)
            old = ranks.jointly("state to convert", partial(_unchanged, read))
            make = partial(_made, store, model, io_threads, stack)
            made = ranks.jointly("room for what is converted", partial(_unchanged, make))
            ranks.jointly("converted state", partial(_unchanged, fill))
        decide = partial(successor.decide, stores) if ranks.rank == 0 else lambda: None
        ranks.jointly("state that counts", partial(_unchanged, decide))
    except BaseException as error:
        if not own_is_whole or ranks.is_of_all(error):  # else the others may be letting all of them count
            with suppress(OSError):  # what is left then goes when the store is opened
                successor.clear(store.paths, stores)
        raise


def _say(store: Store, model: Mapping[str, Any], ranks: int) -> None:
    """Once, for all ranks."""
    where, size, words = str(store.paths[0]), format_size(nbytes_of(model, ("",))), in_words(store.model, model)
    each = ""
    if ranks > 1:
        where = f"stores of {ranks} ranks ({where} and so on)"
        each = " by each" if number_of_parts(model) == 1 else ""
    log.warning("%s: moments are converted %s: %s are written anew%s", where, words, size, each)


def _unchanged(work: Callable[[], T]) -> T:
    """The result of work that is done before any new store counts: an error of it says that the state is as it was."""
    try:
        return work()
    except StoreError as error:
        raise store_error(f"moments are not converted, and the state is as it was: {error}", error) from error


def _identity(path: Path) -> tuple[int, int] | None:
    """The identity of a directory, the same for all processes on its machine; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _require_reachable(
    store: Store, stores: Stores, identities: Sequence[Sequence[object]], model: Mapping[str, Any], own: int
) -> None:
    """Raises:
    StoreError: a directory of another rank is not there for rank ``own``. ``identities``: as each rank has found its
        directories.
    """
    had, asked = (each.get("moments", "fp32") for each in (store.model, model))
    for rank, (paths, found) in enumerate(zip(stores, identities, strict=True)):
        for path, identity in zip(paths, found, strict=True):
            if _identity(path) != identity:
                raise StoreError(
                    f"they are kept in {had}, optimizer.moments={asked!r} asks for another form, and rank {own} "
                    f"does not find the state of rank {rank}, {path}: start all ranks where each has the "
                    f"directories of the others; or go on with moments={had!r}; or load a snapshot into new stores"
                )


def _opened(
    store: Store, stores: Stores, commits: Sequence[int], ranks: Ranks, io_threads: int, stack: ExitStack
) -> Parts:
    """All arrays of whole groups, out of this rank's ``store`` if it has all of the state, else out of those of all.
    ``commits``: the number of each rank's last one.

    Raises:
        StoreError: a rank's store cannot be read, or not as of its last commit.
    """
    if number_of_parts(store.model) == 1:
        return Parts([store])
    found = []
    for rank, paths in enumerate(stores):
        if rank == ranks.rank:
            found.append(store)
            continue
        found.append(stack.enter_context(Store.open(paths, io_threads=io_threads, writable=False, lent=True)))
        if (seen := found[-1].commits.sequence) != commits[rank]:  # what cannot be read of it is passed over
            raise StoreError(
                f"rank {ranks.rank} finds commit {seen} in {paths[0]}, and rank {rank}, whose it is, {commits[rank]}: "
                "see that the drive can be read, and that both have the same directory there, and start again"
            )
    return Parts(found)


def _made(store: Store, model: dict[str, Any], io_threads: int, stack: ExitStack) -> Store:
    """The store that is to take this one's place, with the space that it needs, and nothing in it."""
    made = Store.create(
        successor.staged(store.paths),
        layout_of(model, max(extent.slots for extent in store.layout.extents)),
        model=model,
        io_threads=io_threads,
        owner=store.owner,
        names=store.paths,
        weights=store.weights,
    )
    stack.callback(made.close)
    return made


class _Watched:
    """Arrays of whole groups, which are read as long as no other rank has failed."""

    def __init__(self, parts: Parts, ranks: Ranks) -> None:
        self.all = parts
        self._ranks = ranks

    @property
    def parts(self) -> Mapping[str, Part]:
        return self.all.parts

    def fetch(self, names: tuple[str, ...], offset: int, flat: torch.Tensor) -> None:
        """Raises:
        RankError: another rank has failed.
        """
        self._ranks.check()
        self.all.fetch(names, offset, flat)


def _fill(made: Store, old: _Watched, had: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Make a new store whole and durable. ``had``: what the old ones are made for."""
    count = number_of_parts(made.model)
    share = Share(rank=made.model["rank"], size=count) if count > 1 else WHOLE
    (target,) = Parts([made]).arrays
    Conversion(old, had, made.model).fill(target, share)
    copy_buffers(old.all, target.slots, made.model)
    commit_first(made, record, target.slots)
    made.close()
