"""Facts about a store, without opening it: nothing is locked, made or written, and no file of data is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.documents.typed import fits
from penstock.errors import StoreError
from penstock.store.directory import is_there
from penstock.store.making import NEXT, require_settled
from penstock.store.manifest import DATA, Manifest, require_all
from penstock.store.owner import Owner
from penstock.store.records import CommitLog


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """Facts of one store. ``owner``: the run that the store belongs to. ``records``: the commits that it has, by
    number: the newest and, if it can be read, the one before; None is what there was before the first. ``missing``:
    directories whose part is not there: their drives are not mounted, or the making of the store was interrupted.
    ``passing``: what is in it is needed for one step only. ``unfit``: the reason that it cannot be opened in these
    directories, which are not those that it was made in, in their order; None: they are.
    """

    owner: Owner | None
    records: Mapping[int, dict[str, Any] | None]
    missing: tuple[Path, ...]
    passing: bool
    unfit: str | None = None

    @property
    def record(self) -> dict[str, Any] | None:
        """The newest commit; None before the first."""
        return self.records[max(self.records)]

    @property
    def step(self) -> int | None:
        """The step that a run can go on from; None: nothing has been committed, or not all of a step."""
        whole = self.record is not None and self.record["whole"]
        return int(self.record["step"]) if self.record is not None and whole else None

    @property
    def untouched(self) -> bool:
        """True if no step has been taken, not even a part of one: all that the store can hold is the model as it came.

        The first commit is of the model as it came, as step 0. One that is not whole says that a step had begun.
        """
        return self.record is None or self.step == 0


def in_words(record: Mapping[str, Any] | None) -> str:
    """The step that a commit is of, with what all ranks have found alike in it: numbers as text, which NaN equals, too.
    The record need not have been checked."""
    if record is None:
        return "no step"
    last = record.get("last")
    figures = last if isinstance(last, Mapping) else {}
    return f"step {record.get('step')} with loss {figures.get('loss')} and norm {figures.get('grad_norm')}"


def store_exists(paths: Sequence[Path]) -> bool:
    """True if any of the directories has a store, be it a whole one or not.

    Raises:
        StoreError: a directory may not be looked at.
    """
    return any(is_there(Path(path) / name) for path in paths for name in (DATA, NEXT))


def facts_of(paths: Sequence[Path]) -> StoreFacts | None:
    """Ask a store. None: there is none in any of the directories.

    Raises:
        StoreError: a directory may not be looked at, or what is there cannot be read, as where the first has not the
            commits; or another store is about to take its place.
    """
    for path in paths:
        require_settled(path)
    there = [path for path in paths if is_there(path / DATA)]
    if not there:
        return None
    manifests = [Manifest.read(path) for path in there]
    manifest = manifests[0]
    if paths[0] not in there:
        raise StoreError(
            f"{paths[0]} lacks its part of the store in {there[0]}, the one with the commits: is the drive mounted?"
        )
    unfit = _unfit(paths, there, manifests)
    try:
        log = CommitLog(paths[0], manifest.store, writable=False)
    except StoreError:
        if unfit is not None:
            raise StoreError(unfit) from None
        raise
    for record in log.records.values():
        if record is not None and not (fits(record.get("step"), int) and fits(record.get("whole"), bool)):
            raise StoreError(
                f"{paths[0]}: a commit does not say which step it is of. It is damaged, or another program's: start "
                "from a snapshot"
            )
    return StoreFacts(
        owner=manifest.owner,
        records=log.records,
        missing=tuple(path for path in paths if path not in there),
        passing=manifest.passing,
        unfit=unfit,
    )


def _unfit(paths: Sequence[Path], there: Sequence[Path], manifests: Sequence[Manifest]) -> str | None:
    first = manifests[0]
    if len(there) == len(paths):
        try:
            require_all(paths, manifests)
        except StoreError as error:
            return str(error)
        return None
    if len(paths) > len(first.directories):
        return (
            f"the store in {there[0]} was made in {len(first.directories)} of the {len(paths)} directories that are "
            "given: leave out the others, as a store keeps the drives that it was made on"
        )
    if first.index:
        return (
            f"{paths[0]} has part number {first.index + 1} of a store, and the first one, with the commits, was made "
            f"as {first.directories[0]}: give the directories in the order that they were made in"
        )
    return None


def facts_of_all(
    stores: Sequence[Sequence[Path]], look: Callable[[], Sequence[StoreFacts | None]] | None = None
) -> StoreFacts | None:
    """Ask the stores of all ranks of a run, of which each has its part of every step. None: there is none at all.

    A commit counts if all have it. Stores that are not there are ``missing``. ``look``: how each is asked, where that
    is not done here.

    Raises:
        StoreError: as ``facts_of``; or they are not of one run, or have no commit in common.
    """
    for _ in range(_LOOKS):
        each = [facts_of(paths) for paths in stores] if look is None else look()
        found = [(paths, facts) for paths, facts in zip(stores, each, strict=True) if facts is not None]
        if not found:
            return None
        numbers = set[int].intersection(*(set(facts.records) for _, facts in found))
        if numbers:
            break
    (first, facts), *others = found
    absent = [paths[0] for paths, facts in zip(stores, each, strict=True) if facts is None]
    for paths, other in others:
        if other.owner != facts.owner:
            raise StoreError(f"{first[0]} and {paths[0]} have parts of two runs: put back what was there")
    if not numbers:
        newest = max(max(one.records) for _, one in found)
        raise StoreError(left_behind([(paths[0], max(one.records)) for paths, one in found], newest))
    return StoreFacts(
        owner=facts.owner,
        records={number: facts.records[number] for number in numbers},
        missing=(*(path for _, one in found for path in one.missing), *absent),
        passing=facts.passing,
        unfit=next((one.unfit for _, one in found if one.unfit is not None), None),
    )


def left_behind(stores: Sequence[tuple[Path, int]], newest: int) -> str:
    """The message where stores of a run have no commit in common. ``stores``: a directory of each, and the number of
    its last commit; ``newest``: the highest of all."""
    behind = [(path, number) for path, number in stores if number < newest - 1] or list(stores)
    named = " and ".join(f"{path} is at commit {number}" for path, number in behind[:3])
    return (
        f"the stores of all ranks have no commit in common: {named}, and others are at {newest}. Put back what was "
        "there; or if it is what a host has left whose place another one has taken since, and other ranks have the "
        "same part of the state (copies, or stage 0), remove it: it is taken over from them"
    )


_LOOKS = 3
"""Times that stores are looked at which have no commit in common: one after the other, while their run may commit."""
