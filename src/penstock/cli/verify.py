"""``penstock verify``: reads all that the last commit of a run names, and checks it."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from penstock.cli.kept_files import ADVICE, corpora, kept_of, vouched_by
from penstock.cli.own_store import require_own_stores
from penstock.cli.run_folder import settings_of
from penstock.cli.run_snapshots import record_in, require_newest
from penstock.cli.showing.display import fail
from penstock.cli.showing.progress import progress
from penstock.cli.words import Words
from penstock.config import format_size
from penstock.data.blocks import BlockArray
from penstock.data.identity import IDENTITY, identity_in
from penstock.data.token_files import open_tokens
from penstock.errors import ConfigError, StoreError
from penstock.state.slots import Slots, whole_commit
from penstock.store.directory import is_there
from penstock.store.layout import Extent
from penstock.store.manifest import DATA, MANIFEST
from penstock.store.owner import RUN_FILE
from penstock.store.parts import opened_parts
from penstock.store.snapshot_parts import opened_snapshot
from penstock.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Arguments(Words):
    """penstock verify: reads all of the last commit of a run, and checks every checksum; changes nothing

    Of a run without a disk, all of the last snapshot in its folder.

      penstock verify RUN            RUN is the folder that penstock train wrote: its store, and what it keeps beside it
      penstock verify DIR [DIR ...]  the directories of a store (budget.disk), in their order

    Names every damage that it finds. Exit code 0: whole. 1: damaged, or in use by a run. 2: there is nothing to check,
    or config.yaml is not as the run wrote it.
    """

    command: ClassVar[str] = "penstock verify"
    takes: ClassVar[str] = "a run's folder or the directories of a store"
    operands: ClassVar[tuple[str, ...]] = ("folders",)

    folders: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The state to check. ``stores``: the directories of each rank's store; empty: the run has a ``snapshot`` instead.
    ``run``: the folder of its run, if that was given; else there is one store, of whatever rank. ``prepared``: the
    folder of its prepared data. ``record``: the last commit, as it was when the command began."""

    stores: tuple[tuple[Path, ...], ...]
    snapshot: Path | None = None
    run: Path | None = None
    prepared: Path = Path()
    record: Mapping[str, Any] | None = None


def _to_check(folders: Sequence[Path]) -> Checked:
    """Raises ConfigError: a folder is neither a run's nor a store's, or is of a run without a store."""
    is_run = len(folders) == 1 and is_there(folders[0] / RUN_FILE)  # which may be where its store is, too
    if not is_run and all(is_there(folder / DATA) or is_there(folder / MANIFEST) for folder in folders):
        return Checked(stores=(tuple(folders),))
    if len(folders) > 1:
        found = " and ".join(map(str, folders))
        raise ConfigError(f"penstock verify takes one run's folder, and was given {found}. Try: penstock verify --help")
    config = settings_of(folders[0])
    prepared = config.data.prepared_in(folders[0])
    if not config.budget.disk_paths:
        snapshot = require_newest(folders[0])
        return Checked(stores=(), snapshot=snapshot, run=folders[0], prepared=prepared, record=record_in(snapshot))
    stores, facts = require_own_stores(folders[0], config.budget)
    return Checked(stores=stores, run=folders[0], prepared=prepared, record=facts.record)


def run(arguments: Arguments) -> int:
    """Check a store, and what its run keeps beside it, and say what was found; returns the exit code.

    Raises:
        ConfigError: a folder is neither a run's nor a store's, or nothing has been committed yet.
        StoreError: the store is in use, cannot be opened, or was stopped within a step.
    """
    asked, records = _to_check(arguments.folders), list[str]()
    if asked.snapshot is not None:
        damage = _snapshot(asked.snapshot)
    elif asked.run is None:
        with Store.open(asked.stores[0], writable=False) as store:
            damage, records = _store(store), _records(store)
    else:
        with opened_parts(asked.stores) as stores:
            damage = [found for store in stores for found in _store(store)]
            records = [found for store in stores for found in _records(store)]
    beside = [] if asked.run is None else list(_beside(asked.run, asked.prepared, asked.record))
    if not damage and not records and not beside:
        print("Every checksum is right.")
        return 0
    for found in (*damage, *records, *beside):
        print(f"damaged: {found}")
    sys.stdout.flush()
    if damage:
        remedy = "check the drive, and go on from a snapshot"
        if asked.snapshot is not None:
            remedy = "check the drive, and put the snapshot back from a copy"
        fail(f"{_places(damage)} damaged, and this state cannot be trained on: {remedy}")
    if records:
        fail(
            f"{_places(records)} damaged where a commit's record should be, as a power cut may leave one: a run goes "
            "on from the other one, and writes it anew (remove it first where it is no file)"
        )
    if beside:
        fail(f"{_places(beside)} damaged beside the store: {ADVICE[0].lower()}{ADVICE[1:]}")
    return 1


def _store(store: Store) -> list[str]:
    """Read a store; returns what is damaged."""
    last, slots = whole_commit(store, store.paths[0]), Slots(store)
    current = {extent.name: slots.current(extent.name) for extent in store.layout.extents}
    places = ", ".join(map(str, store.paths))
    return _read(places, store.verify(current), store.layout.extents, f"step {last['step']}, the last commit")


def _records(store: Store) -> list[str]:
    """Commit files of a store in which no record can be read."""
    return [str(fault) for fault in store.commits.faults]


def _snapshot(path: Path) -> list[str]:
    """Read a snapshot; returns what is damaged."""
    with opened_snapshot(path) as parts:
        extents = [extent for part in parts for extent in part.layout.extents]
        found = chain.from_iterable(part.parts() for part in parts)
        return _read(path, found, extents, f"step {parts[0].meta['step']}, the last snapshot")


def _read(
    what: object, parts: Iterable[tuple[int, Sequence[object]]], extents: Sequence[Extent], state: str
) -> list[str]:
    """Read ``parts`` of so many bytes; returns what is damaged in them."""
    began, damage, done = time.perf_counter(), list[str](), 0
    total = sum(extent.stride for extent in extents)
    with progress("read") as show:
        for nbytes, found in parts:
            done += nbytes
            damage += map(str, found)
            show(done, total)
    seconds = time.perf_counter() - began
    rate = f"{done / max(seconds, 1e-9) / 1e9:.2g} GB/s"
    print(f"{what}: read {format_size(done)} in {len(extents)} extents of {state}, in {seconds:.1f} s ({rate})")
    return damage


def _places(damage: Sequence[str]) -> str:
    return "1 place is" if len(damage) == 1 else f"{len(damage)} places are"


def _identity(run: Path, record: Mapping[str, Any] | None) -> Iterator[str]:
    """Check the identity of a run's data, by its checksum and by the fingerprint in the last commit."""
    try:
        known = identity_in(run)
    except ConfigError as error:
        yield str(error)
        return
    position = None if record is None else record.get("position")
    if position is None or "data" not in position:
        return
    if known is None:
        yield f"{run / IDENTITY} is gone, which says on which data the run was: it is made again as the run goes on"
    elif known.fingerprint != position["data"]:
        yield f"{run / IDENTITY} is of other data than the last commit: it is made again as the run goes on"


def _beside(run: Path, prepared: Path, record: Mapping[str, Any] | None) -> Iterator[str]:
    """Check what a run keeps beside its store; yields what is damaged, in words. Says what it has read."""
    yield from _identity(run, record)
    try:
        kept = kept_of(run, vouched_by(record))
    except StoreError as error:
        yield str(error)
        return
    done = sum(file.nbytes for file in kept.files)
    yield from kept.damage(run, prepared)
    for corpus in corpora(kept, run, prepared):
        try:
            found = open_tokens(corpus)
            for array in filter(None, (found.ids, found.answers)):
                assert isinstance(array, BlockArray)
                for nbytes, damage in array.damage():
                    done += nbytes
                    if damage is not None:
                        yield damage
        except (ConfigError, StoreError) as error:
            yield str(error)
    print(f"{run}: read {format_size(done)} in {len(kept.files)} files, and the token ids that they are for")
