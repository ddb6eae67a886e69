"""The claim of a start to train in a run's folder, by what it finds there.

    start        finds                                       and
    new          nothing                                     begins
    overwrite    nothing, or a run and its own store         begins, in its place
    resume       nothing, or a run without a committed step  begins
                 a run whose store has committed a step      goes on with it

The folder is locked from the first moment of a start to its end. A store belongs to one run, by the id that both have
(``store.owner``), and no other run opens, replaces or removes it.
"""

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace as with_changes
from pathlib import Path

from penstock import files
from penstock.cli import removal
from penstock.cli.launch import how_to_start, in_words
from penstock.cli.located import is_plain_text
from penstock.cli.own_store import original_of, placed, require_no_copy
from penstock.cli.reach import Reach, Stores
from penstock.cli.run_folder import (
    RUN_LOCK,
    Start,
    ahead_folder,
    as_cut_before,
    has_steps,
    last_line,
    settings_of,
    settings_path,
    write_settings_text,
)
from penstock.cli.run_record import Pending, Replaced, RunRecord
from penstock.cli.run_snapshots import snapshots_of, step_kept
from penstock.cli.same_data import check_same_data
from penstock.cli.settings import dump
from penstock.config import TrainConfig
from penstock.config.budget import is_of_rank
from penstock.errors import ConfigError, RankError, StoreError
from penstock.store.directory import DirectoryLock, entries, in_the_way, is_there, require_parent
from penstock.store.facts import StoreFacts, facts_of_all
from penstock.store.making import require_settled
from penstock.store.manifest import DATA, Manifest
from penstock.store.owner import RUN_FILE, Owner, check_owner, owner_in
from penstock.store.successor import settle

log = logging.getLogger("penstock")

_TRIES = 20
_NUMBERS = "Or have the hosts got other numbers? Each has to be the one that it was (torchrun --node-rank). "
_REMEDY = "Give another folder (--run PATH), --resume to go on with that run, or --overwrite to replace it"


class Claim:
    """A run's folder, for the time of one start. Made by ``claimed``.

    ``step``: the step that the run goes on after; None: it begins. ``steps``: of the whole run; None: they follow from
    epochs.
    """

    def __init__(self, config: TrainConfig, start: Start, ranks: int, reach: Reach) -> None:
        """Look, and change nothing; but a state that is being converted is put in its place. ``ranks``: that are to
        train it; ``reach``: their hosts.

        Raises:
            ConfigError: what is there is not what ``start`` wants.
            StoreError: the store is of another run, in use, or cannot be read.
        """
        self.folder = Path(config.run)
        self._ranks = ranks
        self._disks = config.budget.disk_paths
        self._reach = reach
        self._stores = config.budget.stores(ranks, reach.hosts)
        self._record = RunRecord.read(self.folder)
        if self._record is not None:
            self._record.require_settled(self.folder)
            if start != "new" and self._record.hosts == 1:  # its own ranks have done it (cli.joint)
                settle(config.budget.stores(self._record.ranks))
        self._began: RunRecord | None = None
        self._replaces: tuple[Replaced, ...] = ()
        self._takes_place = start == "overwrite" and self._record is not None
        self._ahead = False
        self.step: int | None = None
        self.steps = config.steps
        if self._record is None:
            self._require_nothing(f"It is not the folder of a run ({RUN_FILE} is missing): give another (--run PATH)")
        elif start == "new":
            self._require_nothing(_REMEDY)
        elif start == "overwrite":
            self._replaces = self._to_replace(self._record, self._settings(config))
        else:
            reach.require_one_folder(self.folder, self._record.owner)
            self.step = self._to_go_on(config, self._record, self._settings(config))

    def _settings(self, config: TrainConfig) -> TrainConfig:
        """The settings of the run that is there; where they are gone, the ones that are given and will be written."""
        assert self._record is not None, "there is a run"
        if self._record.pending is None and not settings_path(self.folder).exists():
            return config
        return settings_of(self.folder)

    # ---- what is there

    def _require_nothing(self, remedy: str) -> None:
        left = {self.folder / RUN_LOCK, *files.left_of(self.folder / RUN_FILE)}  # by a start that was killed
        present = sorted(item.name for item in self.folder.iterdir() if item not in left)
        if present:
            raise ConfigError(f"run={str(self.folder)!r}: the folder already holds {_some(present)}. {remedy}")
        self._require_no_others()

    def _require_no_others(self) -> None:
        """No other run, of however many ranks, has state in the directories where this one is to begin.

        Raises:
            ConfigError: one has.
        """
        self._reach.on_each(_require_no_others, self._disks, {one.id for one in self._replaces})

    def _to_replace(self, record: RunRecord, before: TrainConfig) -> tuple[Replaced, ...]:
        """The state of the run that is there: where the new settings want theirs, and where it was kept so far."""
        found = list(record.pending.replaces if record.pending else ())
        for stores in dict.fromkeys((self._stores, before.budget.stores(record.ranks, record.hosts))):
            facts = self._reach.facts(stores)
            if facts is None:
                continue
            if stores == self._stores or self._is_ours(facts, stores):
                self._require_ours(facts, stores)
                if not facts.untouched:
                    _require_whole(facts, stores)
                found.append(_replaced(facts, stores))
        return tuple(found)

    def _to_go_on(self, config: TrainConfig, record: RunRecord, before: TrainConfig) -> int | None:
        """The step to go on after; None: the run begins, with what its earlier beginning left to be replaced."""
        others = (record.ranks, before.pipeline) != (self._ranks, config.pipeline)
        if record.pending is None and others and before.budget.disk_paths:
            self._begin_with_others(config, record, before)
            return None
        facts = self._reach.facts(self._stores)
        if facts is not None:
            self._require_ours(facts, self._stores)
        if record.pending is not None:
            self._replaces = record.pending.replaces
            return None
        if self._stores and (facts is None or not facts.step):
            self._require_no_snapshot()
        if facts is None:
            self._require_not_missing(record, before)
            if not self._stores and (kept := step_kept(self.folder)) is not None:
                check_same_data(as_cut_before(config), before)
                return kept
            if not self._stores and (done := int(last_line(self.folder).get("step", 0))):
                return self._without_disk(config, before, done)
            return None
        if facts.untouched or facts.step is None:
            if not facts.untouched:
                log.warning(
                    "the state of this run was not whole on disk when it was stopped after step %d, and is lost: it "
                    "begins again (budget.durability and budget.slots say what a kill may cost)",
                    facts.record["step"] if facts.record else 0,
                )
            elif has_steps(self.folder):
                log.warning(
                    "no step of this run was committed before it was stopped, so that what it did is lost: it begins "
                    "again (budget.durability says what a kill may cost)"
                )
            self._replaces = (_replaced(facts, self._stores),)
            return None
        if facts.unfit is not None:
            raise StoreError(facts.unfit)
        if not self._has_another_copy(config, facts):
            _require_whole(facts, self._stores)
        check_same_data(as_cut_before(config), before)
        return facts.step

    def _has_another_copy(self, config: TrainConfig, facts: StoreFacts) -> bool:
        """True if of each store that is missing another one has the same part of the state."""
        parts = config.parts(self._ranks // config.copies)
        lost = {rank for rank, paths in enumerate(self._stores) if not set(facts.missing).isdisjoint(paths)}
        return all(set(range(rank % parts, self._ranks, parts)) - lost for rank in lost)

    def _begin_with_others(self, config: TrainConfig, record: RunRecord, before: TrainConfig) -> None:
        """A run that another number of ranks has begun, or ranks of another kind: it begins anew, if it has no step.

        Raises:
            ConfigError: it has.
            StoreError: it has a store, and that is not where the settings say.
        """
        stores = before.budget.stores(record.ranks, record.hosts)
        facts = self._reach.facts(stores)
        if facts is None:
            self._require_not_missing(record, before)
        if (facts is not None and not facts.untouched) or snapshots_of(self.folder):
            raise ConfigError(self._of_others(config, record, before))
        if facts is not None:
            self._require_ours(facts, stores)
            self._replaces = (_replaced(facts, stores),)

    def _of_others(self, config: TrainConfig, record: RunRecord, before: TrainConfig) -> str:
        """The message for a run whose state other ranks have than those that are to go on with it."""
        run, (had, hosts), ranks = shlex.quote(str(self.folder)), (record.ranks, record.hosts), self._ranks
        as_it_began = f"{how_to_start(had, hosts)} resume {run}"
        if before.pipeline != config.pipeline:
            as_it_began += f" --pipeline {before.pipeline}"
        said = (
            f"run={str(self.folder)!r} has the state of {in_words(had, hosts, before.pipeline)}: this is "
            f"{in_words(ranks, self._reach.hosts, config.pipeline)}. Go on as it began: {as_it_began}"
        )
        if 1 < config.pipeline < ranks or max(before.copies, config.copies) > 1:
            return said  # stores are cut for one pipeline, and from one copy of the state for one
        pipeline = " --pipeline" if config.pipeline > 1 else ""
        return f"{said}, or cut it for these: penstock reshard {run} --ranks {ranks}{pipeline}"

    def _require_no_snapshot(self) -> None:
        """A run that begins removes what is there, and a store takes over no snapshot.

        Raises:
            ConfigError: the run has one.
        """
        for snapshot in snapshots_of(self.folder)[:1]:
            raise ConfigError(
                f"run={str(self.folder)!r} has its state in {snapshot}, as it began without a disk, and budget.disk "
                f"names {self._stores[0][0]}, which has no step of it: go on without (--budget.disk null), or "
                "--overwrite to begin again"
            )

    def _without_disk(self, config: TrainConfig, before: TrainConfig, done: int) -> int | None:
        """A run without state: complete if it was to keep none, else it begins again. ``before`` knows what epochs come
        to."""
        self.steps = before.steps if config.steps is None else config.steps
        if before.budget.durability == "none" and self.steps is not None and done >= self.steps:
            return done
        log.warning(
            "run=%r has no snapshot to go on from: what its %d steps did is lost, and it begins again", config.run, done
        )
        return None

    def _require_not_missing(self, record: RunRecord, before: TrainConfig) -> None:
        """Raises StoreError: the run has a store, and it is not where the settings say."""
        there = before.budget.stores(record.ranks, record.hosts)
        facts = self._reach.facts(there) if there != self._stores else None
        if facts is not None and self._is_ours(facts, there) and not facts.untouched:
            raise StoreError(
                f"run={str(self.folder)!r} has its state in {there[0][0]}, and budget.disk names "
                f"{self._stores[0][0] if self._stores else 'nothing'}: put the setting back, or move the state there"
            )
        if record.has_state:
            raise StoreError(
                f"run={str(self.folder)!r}: its state is not in {placed((there or self._stores)[0][0])} any more: is "
                "the drive mounted? If the state was moved, say where to: --budget.disk DIR. "
                + (_NUMBERS if record.hosts > 1 else "")
                + "If it is gone for good, penstock train CONFIG --overwrite begins again"
            )

    # ---- whose it is

    def _is_ours(self, facts: StoreFacts, stores: Stores) -> bool:
        if facts.owner is None or self._record is None or facts.owner.id not in self._record.ids:
            return False
        return original_of(self.folder, self._owners(facts.owner), stores) is None

    def _require_ours(self, facts: StoreFacts, stores: Stores) -> None:
        """Raises StoreError: the store belongs to another run; names it."""
        if self._is_ours(facts, stores):
            return
        if facts.owner is not None:
            require_no_copy(self.folder, self._owners(facts.owner), stores)
        assert self._record is not None, "where there is no run there is to be no store either"
        check_owner(facts.owner, self._record.owner, str(stores[0][0]))
        raise AssertionError("a store that is not ours is refused")

    def _owners(self, owner: Owner) -> list[Owner]:
        return [owner, *([self._record.owner] if self._record else [])]

    # ---- what a start does

    def look_ahead(self, look: Callable[[Path], object]) -> None:
        """Have ``look`` refuse what can be, and make what can be of a run that is to begin in the place of another one,
        while that is there: in a folder that is handed on by ``begin``. Where there is none, nothing.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if not self._takes_place:
            return
        made = ahead_folder(self.folder)
        try:
            removal.remove_ahead(self.folder)
            files.make_folder(made)
        except OSError as error:
            raise ConfigError(f"run={str(self.folder)!r}: cannot use this folder: {error.strerror}") from error
        self._ahead = True
        look(made)

    def begin(self, config: TrainConfig) -> None:
        """Make the folder that of a new run; what it replaces goes.

        Raises:
            ConfigError, StoreError: that cannot be done. The rest is done by whoever starts the run next.
        """
        self._require_no_others()
        beside = [path for path in self._disks if not path.is_relative_to(self.folder)]  # the folder is made here
        self._reach.on_each(_require_parents, beside)
        self._reach.on_each(removal.check_free, self._replaces)
        pending = Pending(replaces=self._replaces, settings=dump(config))
        self._record = self._began = RunRecord.of(
            Owner.new(self.folder), ranks=self._ranks, hosts=self._reach.hosts, pending=pending
        )
        try:
            self._record.write(self.folder)
            self._reach.require_one_folder(self.folder, self._record.owner)
            self._reach.on_each(removal.remove_stores, pending.replaces)
            removal.remove_files(self.folder, ahead=self._ahead)
            write_settings_text(self.folder, pending.settings)
            self._record = self._record.begun()
            self._record.write(self.folder)
        except StoreError:
            raise
        except OSError as error:
            raise ConfigError(f"run={config.run!r}: cannot use this folder: {error.strerror}") from error

    def state_made(self) -> None:
        """Note that the run has a store, and that this is its folder.

        Raises:
            StoreError: it cannot be written.
        """
        assert self._record is not None, "the run has begun"
        there = owner_in(self.folder)
        if there is None or there.id != self._record.id:
            raise StoreError(f"{self.folder} is another folder than it was a moment ago: leave it where it is")
        here = Owner(id=self._record.id, folder=str(self.folder.resolve()))
        of_these = RunRecord.of(here, ranks=self._ranks, hosts=self._reach.hosts)
        now = with_changes(of_these, has_state=bool(self._stores))
        if now != self._record:
            now.write(self.folder)
            self._record = now

    @property
    def replaced(self) -> tuple[Path, ...]:
        """The directories of the stores that go as the run begins."""
        return tuple(Path(place) for one in self._replaces for place in one.disk)

    @property
    def began(self) -> Owner | None:
        """The run, if this start has begun it."""
        return None if self._began is None else self._began.owner

    @property
    def has_steps(self) -> bool:
        """True if there is a step to go on from, as far as the store says; also where it cannot say."""
        if self.step is not None:
            return True
        try:
            facts = facts_of_all(self._reach.of_host(self._stores))  # asked as all may have failed
            return (facts is not None and not facts.untouched) or bool(snapshots_of(self.folder))
        except (OSError, StoreError):
            return True

    def take_back(self) -> None:
        """Remove what this start has made, if it has begun the run and no step of it is committed, or has not begun."""
        if self._ahead and self._began is None:
            removal.take_back_ahead(self.folder)
        if self._began is not None:
            removal.take_back(self.folder, self._began, self._reach.of_host(self._stores))


@contextmanager
def claimed(config: TrainConfig, start: Start, ranks: int = 1, reach: Reach | None = None) -> Iterator[Claim]:
    """The folder of a run, locked. Who leaves with an error takes back what the start has made. ``ranks``: that are to
    train it; ``reach``: their hosts; None: this one.

    Raises:
        ConfigError: the folder cannot be used, or what is there is not what ``start`` wants.
        StoreError: the run is under way, or its store is of another run or cannot be read; or the folder went away.
    """
    _check_names(config)
    folder = Path(config.run)
    lock, ours = _locked(folder)
    try:
        claim = Claim(config, start, ranks, reach or Reach())
        try:
            yield claim
            _require_in_place(folder, lock)
        except BaseException as error:
            if lock.in_place:  # else the folder has been renamed, and what is there now is not ours
                claim.take_back()
            ours = ours or claim.began is not None
            if isinstance(error, OSError | RankError):  # whatever it was that missed the folder, or its store in it
                _require_in_place(folder, lock)
            raise
    finally:
        _leave(folder, lock, ours=ours)


def _check_names(config: TrainConfig) -> None:
    """Raises ConfigError: a place is called something that the run's files, which name it, cannot hold."""
    places = [("run", config.run, Path(config.run).resolve())]
    places += [("budget.disk", str(path), path.absolute()) for path in config.budget.disk_paths]
    for key, given, place in places:
        if not is_plain_text(str(place)):
            raise ConfigError(f"{key}={given!r}: its place, {str(place)!a}, has bytes that are not UTF-8: give another")


def _locked(folder: Path) -> tuple[DirectoryLock, bool]:
    """The lock of a folder, which is made where it is missing; and whether it was."""
    for _ in range(_TRIES):
        made = not folder.exists()
        try:
            files.make_folder(folder)
            return DirectoryLock(folder, name=RUN_LOCK), made
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise  # else another start has taken its folder away again in this moment
        except OSError as error:
            said = in_the_way(folder, error)
            raise ConfigError(f"run={str(folder)!r}: cannot use this folder: {said}") from error
    raise StoreError(f"run={str(folder)!r}: other starts make and remove this folder all the time: stop them")


def _require_in_place(folder: Path, lock: DirectoryLock) -> None:
    """Raises StoreError: the folder of the run is no longer where it was."""
    if (said := lock.away) is not None:
        raise StoreError(
            f"run={str(folder)!r}: {said}, and go on from the last step that is kept there: penstock resume "
            f"{shlex.quote(str(folder))}"
        )


def _leave(folder: Path, lock: DirectoryLock, *, ours: bool) -> None:
    """Give the lock back. Its file stays in the folder of a run alone; an empty folder goes, if it is this start's
    (``ours``)."""
    with suppress(OSError):
        there = {item.name for item in folder.iterdir()} if lock.in_place else {RUN_FILE}
        lock.release(remove=RUN_FILE not in there)
        if ours and there == {RUN_LOCK}:
            folder.rmdir()
    lock.release()


def is_complete(config: TrainConfig, done: int, ranks: int, hosts: int = 1) -> str:
    """The message for a run that has no step left to do. ``ranks``: the number that have trained it, on ``hosts``."""
    asked = "" if config.steps is None else f" and steps is {config.steps}"
    said = f"run={config.run!r} is complete: {done} steps are done{asked}."
    again = f" To go on, raise it: {how_to_start(ranks, hosts)} resume {shlex.quote(config.run)} --steps {2 * done}"
    kept = config.budget.disk_paths or config.budget.durability != "none"
    return said + (again if kept else "")


def _replaced(facts: StoreFacts, stores: Stores) -> Replaced:
    assert facts.owner is not None, "what is replaced is ours"
    return Replaced(id=facts.owner.id, disk=tuple(str(path.absolute()) for paths in stores for path in paths))


def _require_parents(disks: Sequence[Path]) -> None:
    for path in disks:
        require_parent(path)


def _require_no_others(disks: Sequence[Path], ours: set[str]) -> None:
    """Raises ConfigError: a directory has a store whose id is none of ``ours``."""
    for path in disks:
        for place in (path, *filter(is_of_rank, entries(path))):
            require_settled(place)
            if not is_there(place / DATA):
                continue
            owner = Manifest.read(place).owner
            if owner is None or owner.id not in ours:
                whose = "a store of penstock.wrap" if owner is None else f"a run, which began in {owner.folder}"
                raise ConfigError(
                    f"budget.disk={str(path)!r} already holds the state of {whose}: give each run a directory of its "
                    "own"
                )


def _require_whole(facts: StoreFacts, stores: Stores) -> None:
    """Raises StoreError: a part of a store is missing."""
    if facts.missing:
        raise StoreError(
            f"{facts.missing[0]} lacks its part of the store in {stores[0][0]}: is the drive mounted? If it is gone "
            "for good, remove what is left of the store to start over"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
