"""The stores of a run, converted to another form of moments (``state.convert``): made beside the old ones, and then in
their place.

All of them count from one instant on (``store.successor``): whatever that is broken off by, the old ones are whole or
the new ones are, and what does not count is removed by whoever opens the stores next. So there must be room for both.
Which group a parameter is in, and where, differs between forms. So each rank reads the old stores of those that share
its groups, which nobody writes meanwhile, and writes its own new one:

    ranks that share all state        those of all
    copies                            those of its own copy
    stage 0, and a pipeline           its own: it has all of the state, or all of its blocks
    pipelines beside each other       those of its place, which are its neighbours

These have to be within its reach. All others may be on other hosts.
"""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from penstock.config import format_size
from penstock.errors import RankError, StoreError
from penstock.ranks.group import ALONE, Ranks
from penstock.state.convert import Conversion, in_words, nbytes_of, renumbered
from penstock.state.parts import Parts, layout_of, share_of
from penstock.state.reshard import commit_first, copy_buffers
from penstock.state.slots import Slots
from penstock.store import successor
from penstock.store.directory import is_there
from penstock.store.manifest import MANIFEST, Manifest
from penstock.store.packed import store_error
from penstock.store.parts import COPIES, WHOLE, number_of_parts
from penstock.store.store import Store
from penstock.store.successor import Stores

log = logging.getLogger("penstock")

T = TypeVar("T")


def convert_stores(
    store: Store,
    stores: Stores,
    model: dict[str, Any],
    *,
    ranks: Ranks = ALONE,
) -> None:
    """Make the stores that take the place of those of all ranks, and let them count: ``settled`` puts them there when
    these are closed. All ranks come here, each with its own open. Needs 32 MiB of memory on each.

    ``store``: this rank's, one of ``stores``. ``model``: what it is to be made for, which differs in nothing but the
    form. Its last commit is whole; all ranks have that step's.

    Raises:
        StoreError: a drive fails or has no room for both, or a rank cannot read the stores that it needs; on all ranks.
            The old ones still count then, and are what they were.
    """
    last = store.last_commit()
    assert last is not None, "there is a step to go on from"
    record = renumbered(last, store.model, model, f"the last commit in {store.paths[0]}")
    if ranks.size > 1:
        model = {**model, "world": ranks.gather_objects("world of the converted state", uuid.uuid4().hex)[0]}
    found = ranks.gather_objects("stores of the state", _Lent(store.identity, store.commits.sequence))
    if ranks.rank == 0:
        _say(store, model, ranks.size)
    own_is_whole = False

    def fill() -> None:
        nonlocal own_is_whole
        _fill(made, old, store, record)
        successor.ready(store.paths)
        own_is_whole = True

    try:
        with ExitStack() as stack:
            reach = partial(_require_reachable, store, stores, found, model, ranks.rank)
            ranks.jointly("reach of the state", partial(_unchanged, reach))
            read = partial(_opened, store, stores, found, ranks, stack)
            old = ranks.jointly("state to convert", partial(_unchanged, read))
            make = partial(_made, store, model, stack)
            made = ranks.jointly("room for what is converted", partial(_unchanged, make))
            ranks.jointly("converted state", partial(_unchanged, fill))
        decide = partial(successor.decide, store.paths[0]) if ranks.rank == 0 else lambda: None
        ranks.jointly("state that counts", partial(_unchanged, decide))
    except BaseException as error:
        with suppress(OSError, RankError):  # what is left then goes when the store is opened
            if ranks.is_of_all(error):
                _clear_together(store, ranks)
            elif not own_is_whole:  # else the others may be letting all of them count
                successor.clear(store.paths, [store.paths])
        raise


def _clear_together(store: Store, ranks: Ranks) -> None:
    """Remove what all ranks have staged, unless it counts, which the first may have decided as its drive failed."""
    try:
        counts = successor.decided([store.paths]) is not None
    except StoreError:  # all come to the next line, and where it is not known nothing is removed
        counts = True
    if not any(ranks.gather_objects("stores that count after all", counts)):
        successor.clear(store.paths, [store.paths])


class _Lent(NamedTuple):
    """A rank's store as others may read it: its id, and the number of its last commit."""

    store: str
    sequence: int


def _say(store: Store, model: Mapping[str, Any], ranks: int) -> None:
    """Once, for all ranks."""
    where, size, words = str(store.paths[0]), format_size(nbytes_of(model, ("",))), in_words(store.model, model)
    each = ""
    if ranks > 1:
        where = f"stores of {ranks} ranks ({where} and so on)"
        if COPIES in model:
            each = f" for each of {model[COPIES]} copies"
        elif WHOLE in model:
            each = " by each"
    log.warning("%s: moments are converted %s: %s are written anew%s", where, words, size, each)


def _unchanged(work: Callable[[], T]) -> T:
    """The result of work that is done before any new store counts: an error of it says that the state is as it was."""
    try:
        return work()
    except StoreError as error:
        raise store_error(f"moments are not converted, and the state is as it was: {error}", error) from error


def _sharing(model: Mapping[str, Any], rank: int) -> range:
    """The ranks that have parts of the same groups as a rank, of one copy: what is converted comes out of theirs."""
    parts = number_of_parts(model)
    first = rank - rank % parts
    return range(first, first + parts)


def _require_reachable(
    store: Store, stores: Stores, found: Sequence[_Lent], model: Mapping[str, Any], own: int
) -> None:
    """Refuses that rank ``own`` does not find the store of another one with which it shares the state. ``found``: each
    rank's own."""
    had, asked = (each.get("moments", "fp32") for each in (store.model, model))
    for rank in _sharing(store.model, own):
        for path in stores[rank] if rank != own else ():
            if not is_there(path / MANIFEST) or Manifest.read(path).store != found[rank].store:
                raise StoreError(
                    f"they are kept in {had}, optimizer.moments={asked!r} asks for another form, and rank {own} "
                    f"does not find the state of rank {rank}, {path}, of which it needs its part: start ranks that "
                    f"share the state where each has the directories of the others; or go on with moments={had!r}; or "
                    "load a snapshot into new stores"
                )


def _opened(store: Store, stores: Stores, found: Sequence[_Lent], ranks: Ranks, stack: ExitStack) -> Parts:
    """All arrays of the groups of which this rank has some, out of its ``store`` and those of the ranks that share
    them, each as of its last commit."""
    opened, own = [], ranks.rank
    for rank in _sharing(store.model, own):
        if rank == own:
            opened.append(store)
            continue
        paths = stores[rank]
        opened.append(stack.enter_context(Store.open(paths, writable=False, lent=True)))
        if (seen := opened[-1].commits.sequence) != found[rank].sequence:  # a torn record is passed over
            raise StoreError(
                f"rank {own} finds commit {seen} in {paths[0]}, and rank {rank}, whose it is, {found[rank].sequence}: "
                "see that the drive can be read, and that both have the same directory there, and start again"
            )
    return Parts(opened, ranks.check)  # as long as no other has failed


def _made(store: Store, model: dict[str, Any], stack: ExitStack) -> Store:
    """The store that is to take this one's place, with the space that it needs, and nothing in it."""
    made = Store.create(
        successor.staged(store.paths),
        layout_of(model, max(extent.slots for extent in store.layout.extents)),
        model=model,
        owner=store.owner,
        names=store.paths,
        weights=store.weights,
    )
    stack.callback(made.close)
    return made


def _fill(made: Store, old: Parts, store: Store, record: Mapping[str, Any]) -> None:
    """Make a new store whole and durable. ``store``: the one whose place it takes."""
    (target,) = Parts([made]).arrays
    Conversion(old, store.model, made.model).fill(target, share_of(made.model))
    copy_buffers(Slots(store), target.slots, made.model)
    commit_first(made, record, target.slots)
    made.close()
