"""The commits of a run: its arrays, the store below them, and the record of how far it got."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config import Budget, format_size
from penstock.config.budget import folder_of_rank, is_of_rank
from penstock.errors import BudgetError, ConfigError, StoreError
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.place import Format
from penstock.schedule.program import GroupSpec
from penstock.state.arrays import StateArrays
from penstock.state.buffers import Buffers
from penstock.state.convert import has_other_form, require_like_but_for_form
from penstock.state.converted_stores import convert_stores
from penstock.state.layout import parts_of
from penstock.state.parts import layout_of
from penstock.state.record import check_stored
from penstock.state.settled import settle_together
from penstock.state.slots import Slots
from penstock.state.splits import as_known, require_splits
from penstock.state.take_over import Found, drives_of, givers, require_drives, take_over
from penstock.store import successor
from penstock.store.directory import entries, make_directory
from penstock.store.facts import StoreFacts, facts_of, in_words, left_behind, store_exists
from penstock.store.layout import Layout
from penstock.store.owner import Owner, check_owner
from penstock.store.parts import Place
from penstock.store.removal import delete_store
from penstock.store.store import Store
from penstock.store.successor import Stores

Progress = Mapping[str, Any]


class Commits:
    """Opens or makes the store, and says at each moment whether it is whole.

    A store is *whole* when its last commit names one step's state, and only a whole store is continued. What is
    promised (``budget.durability``):

    | | state on disk in two slots | in one slot | state in memory |
    |---|---|---|---|
    | ``step``, None | every step is a commit | whole between steps | whole when it is closed |
    | ``interval`` | the last commit stands | | the last commit stands |
    | ``none`` | whole when it is closed | the same | the same |

    Copies of weights in memory make no difference: what is at home on disk is whole.
    """

    def __init__(
        self,
        budget: Budget,
        groups: Sequence[GroupSpec],
        form: Format,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
        *,
        model: dict[str, Any],
        owner: Owner | None = None,
        ranks: Ranks = ALONE,
        share: Share = WHOLE,
        any_strands: bool = False,
        weights: Callable[[Sequence[Path]], Sequence[int]] = lambda paths: (),
    ) -> None:
        """``owner``: the run that the store is to belong to; None: to none. ``ranks``: who commits together; each has a
        store of its own, with its ``share`` of the state. ``any_strands``: a store that is there says how many, and so
        does ``model`` from then on. ``weights``: by which a new store is striped over its directories,
        asked when it is made.

        Raises:
            BudgetError: there is no disk, and memory cannot hold the state.
            StoreError: the disk cannot be used, or holds a store of another run or model, or of a run that was
                stopped within a step.
        """
        self._budget = budget
        self._buffers = buffers
        self._owner = owner
        self.ranks = ranks
        """the ranks that commit together"""
        self._beside = ranks.beside() if budget.durability == "interval" else ranks
        """the same, for the thread that writes in the background"""
        self._share = share
        self._any_strands = any_strands
        self._weights = weights
        store, resumed = None, None
        parts = [part for group in groups for part in parts_of(group, form, dtype)]
        if budget.disk_paths:
            store, resumed = self._open(layout_of(model, budget.slots), model)
        elif (need := sum(p.nbytes for p in parts)) > (have := budget.host_bytes + budget.device_bytes):
            raise BudgetError(
                f"weights and optimizer state take {format_size(need)}, and the budget gives {format_size(have)} of "
                "memory: give budget.disk a directory, or raise budget.host"
            )
        self.resumed: Progress | None = resumed
        """The record of the store that was found; None for a fresh one."""
        self.store: Store | None = store
        self._started = False
        try:
            self.slots = Slots(store)
            self.arrays = StateArrays(groups, form, dtype, device, store, self.slots, host_bytes=budget.host_bytes)
        except BaseException:
            if store is not None:
                store.close()
            raise

    def _open(self, layout: Layout, model: dict[str, Any]) -> tuple[Store, Progress | None]:
        with self.ranks.together("wrap"):
            paths, stores = self._budget.disk_paths, self._settled()
            facts = facts_of(paths) if store_exists(paths) else None
            if facts is not None and facts.unfit is not None:
                raise StoreError(facts.unfit)
            givers = self._givers(facts)
            if givers:
                self._take_over(givers, facts, model)
                return self._found(model, stores)
            found = self.ranks.gather_objects("store", (_kind(facts), facts is None or facts.untouched))
            kinds, untouched = {kind for kind, _ in found}, all(untouched for _, untouched in found)
            # What has no commit holds nothing: a start came to nothing, perhaps of another model.
            anew = untouched and ("none" in kinds or ("empty" in kinds and "in part" not in kinds))
            if not anew and "none" not in kinds:
                return self._found(model, stores)
            if facts is None and not anew:
                raise StoreError(f"{paths[0]} holds no store, and other ranks have theirs: give each its own again")
            self.ranks.agree("way to begin", anew)
            self._require_same_hosts()
            self.ranks.jointly("stores of another number of ranks", self._require_same_number)
            if facts is not None:
                check_owner(facts.owner, self._owner, str(paths[0]))
                delete_store(paths, only=lambda facts: facts.untouched)
            if self.ranks.size > 1:
                model["world"] = self.ranks.gather_objects("world", uuid.uuid4().hex)[0]
                for path in paths:  # what the budget names, in which each rank has a folder
                    make_directory(path.parent)
            return self._made(layout, model), None

    def _require_same_hosts(self) -> None:
        """Before ranks of several hosts begin: refuses, on all of them, a host that has the state of ranks that are
        another one's now."""
        if self.ranks.hosts == 1:
            return
        each, folder = self.ranks.size // self.ranks.hosts, self._budget.disk_paths[0].parent
        others = set(range(self.ranks.size)) - set(range(self.ranks.host * each, (self.ranks.host + 1) * each))
        places = [folder_of_rank(folder, rank) for rank in sorted(others)]
        stores = (place for place in places if (facts := facts_of([place])) is not None and not facts.untouched)
        told = self.ranks.gather_objects("stores of other hosts' ranks", str(next(stores, "")))
        if first := next(filter(None, told), None):
            raise self.ranks.of_all(
                StoreError(
                    f"{first} is the state of a rank that is on another host now: torchrun has given the hosts other "
                    "numbers. Start each with the number that it had (--node-rank with --master-addr), or move it away"
                )
            )

    def _require_same_number(self) -> None:
        """Before a run begins: refuses state that one process has left where ranks have their folders, and that of
        ranks where one process has its own."""
        alone, parts = self.ranks.size == 1, dict[str, list[tuple[int, Path]]]()
        for path in self._budget.disk_paths:
            for place in filter(is_of_rank, entries(path)) if alone else [path.parent]:
                if (found := successor.manifest_of(place)) is not None:
                    parts.setdefault(found.store, []).append((found.index, place))
        for found_parts in parts.values():  # all directories of a store: the first has the commits
            places = [place for _, place in sorted(found_parts)]
            if (facts := facts_of(places)) is not None and not facts.untouched:
                whose = "a rank of several" if alone else "one process"
                raise StoreError(
                    f"{places[0]} has the state of {whose}, and this run, of {self.ranks.size}, would begin anew: go "
                    "on with as many as there were, or give another directory"
                )

    def _givers(self, facts: StoreFacts | None) -> Mapping[int, int] | None:
        """By rank that has lost its state the one that it is taken over from; nothing where that cannot be, or need
        not. ``facts``: of this rank's store."""
        return givers(self.ranks.gather_objects("newest commit", Found.of(facts)), self._parts)

    def _take_over(self, givers: Mapping[int, int], facts: StoreFacts | None, model: dict[str, Any]) -> None:
        """Give ranks that have lost their state that of others. ``facts``: of this rank's store."""
        paths, lost = self._budget.disk_paths, self.ranks.rank in givers

        def make(giver: Mapping[str, Any]) -> Store:
            if facts is not None:  # a start has come to nothing before all was taken over
                check_owner(facts.owner, self._owner, str(paths[0]))
                delete_store(paths, only=lambda facts: facts.untouched)
            for path in paths:
                make_directory(path.parent)
            same = {key: giver[key] for key in ("world", "strands") if key in giver}
            return self._made(layout_of(model, self._budget.slots), model | same)

        own = None if lost else Store.open(paths)
        try:
            self._require_fits(own, model, givers)
            told = self.ranks.gather_objects("commit to take over", None if own is None else own.commits.sequence)
            newest = min(number for number in told if number is not None)
            if own is not None and own.commits.sequence > newest:
                own.take_back(newest)
            self._require_one_commit(own)
            take_over(givers, self.ranks, own, make)
        finally:
            if own is not None:
                own.close()

    def _require_fits(self, own: Store | None, model: dict[str, Any], givers: Mapping[int, int]) -> None:
        """Check that what stores have is what the lost ones are to be made for, and that these are lost, before any is
        made or taken back; on all ranks, all of which come here. ``own``: this rank's store; None: it is lost."""
        paths, rank = self._budget.disk_paths, self.ranks.rank
        drives = self.ranks.gather_objects("drives", drives_of(paths))

        def look() -> None:
            if own is None:
                require_drives(paths, rank, givers[rank], drives[givers[rank]])
                return
            own.require_owner(self._owner)
            self._require_part(own)
            self._require_slots(own)
            if has_other_form(own.model, model, str(own.paths[0])):
                raise ConfigError(
                    f"optimizer.moments: {own.paths[0]} has another form of moments, and another rank has lost its "
                    "state, which it can take over as it is: put the setting back"
                )
            kept = ("world", "strands") if self._any_strands else ("world",)
            require_splits(own.model, model, str(own.paths[0]))
            own.require_model(as_known(model, own.model) | {key: own.model[key] for key in kept if key in own.model})

        self.ranks.jointly("state to take over", look)
        self._require_alike("run to take over", None if own is None else own.model.get("world"), "are of two runs")

    def _require_one_commit(self, own: Store | None) -> None:
        """Refuses, on all ranks, all of which come here, commits of one number that are not of the same step. ``own``:
        this rank's store, as of the newest commit that all have; None: it is lost."""
        said = None if own is None else in_words(own.last_commit())
        self._require_alike("commit to go on from", said, "have come to {}, and to {}")

    def _require_alike(self, what: str, own: str | None, differ: str) -> None:
        """Refuses, on all ranks, that those that have ``own`` have not the same. None: this one has none. ``differ``:
        what is said of two that differ."""
        there = {rank: one for rank, one in enumerate(self.ranks.gather_objects(what, own)) if one is not None}
        first = min(there, default=0)
        for rank, one in there.items():
            if one != there[first]:
                said = differ.format(there[first], one)
                raise self.ranks.of_all(
                    StoreError(f"the stores of rank {first} and rank {rank} {said}: put back what was there")
                )

    def _require_part(self, store: Store) -> None:
        """Refuses a store that is not this rank's, or of another number of ranks or copies, or kind of ranks."""
        ranks, whole = self.ranks, self._share.is_whole and self.ranks.size > 1
        place = Place(rank=ranks.rank, ranks=ranks.size, whole=whole, copies=ranks.copies, stages=ranks.stages)
        place.require(store.paths[0], store.model)

    def _require_slots(self, store: Store) -> None:
        """Refuses a store of another number of slots than is asked for: with one, a step overwrites what counts, and
        nothing that is promised of two holds."""
        asked = self._budget.slots
        had = max((extent.slots for extent in store.layout.extents), default=asked)
        if had != asked:
            raise ConfigError(
                f"budget.slots={asked}: the store in {store.paths[0]} was made with slots={had}, and keeps them: give "
                "that, or load a snapshot into a new directory"
            )

    def _made(self, layout: Layout, model: dict[str, Any]) -> Store:
        paths = self._budget.disk_paths
        weights = self._weights(paths)
        return Store.create(paths, layout, model=model, owner=self._owner, weights=weights)

    def _settled(self) -> Stores:
        """The directories of each rank's store, once stores that count are in the place of those that they replace.
        All ranks come here, with theirs closed."""
        paths = self._budget.disk_paths
        settle_together(self.ranks, paths, self._parts)
        gathered = self.ranks.gather_objects("directories of the stores", tuple(path.resolve() for path in paths))
        stores: list[Sequence[Path]] = list(gathered)
        stores[self.ranks.rank] = paths  # as they were given
        return stores

    @property
    def _parts(self) -> int:
        """The number of parts that a copy of the state is cut into, of which ranks have one each."""
        return self.ranks.size if self.ranks.are_pipeline else self._share.size  # there, nobody has another's blocks

    def _found(self, model: dict[str, Any], stores: Stores) -> tuple[Store, Progress | None]:
        """The store that is there, and what it goes on from: the last commit that all ranks have."""
        paths = self._budget.disk_paths
        store = Store.open(paths)
        try:
            store.require_owner(self._owner)
            self._require_part(store)
            if self.ranks.size > 1:
                model["world"] = store.model.get("world")
                self.ranks.agree("run, whose parts their stores have", model["world"])
            if self._any_strands and "strands" in store.model:
                model["strands"] = store.model["strands"]
            require_splits(store.model, model, str(paths[0]))
            converts = has_other_form(store.model, model, str(paths[0]))
            if converts:
                require_like_but_for_form(store, as_known(model, store.model))
            else:
                store.require_model(as_known(model, store.model))
            last = self.ranks.gather_objects("last commit", (paths[0], store.commits.sequence))
            newest = [number for _, number in last]
            if max(newest) > min(newest) + 1:
                raise self.ranks.of_all(StoreError(left_behind(last, max(newest))))
            if store.commits.sequence > min(newest):
                store.take_back(min(newest))
            record = store.last_commit()
            if record is not None:
                check_stored(record, f"the last commit in {paths[0]}")
            self._require_one_commit(store)
            if record is not None and not record["whole"]:
                raise StoreError(
                    f"{paths[0]}: the run that used this store was stopped in or before step {record['step'] + 1}, and "
                    "what is on disk is not one step's state. Remove the directory to start over (and load a snapshot "
                    "if there is one)"
                )
            self._require_slots(store)
            successor.clear(paths, [paths])  # none counts, of any rank: those would be in their place
            if record is not None:  # else a start that came to nothing may have made some of them anew
                self.ranks.agree("form of moments in their stores", store.model.get("moments", "fp32"))
            if converts and record is not None:
                convert_stores(store, stores, model, record, ranks=self.ranks)
        except BaseException:
            store.close()
            raise
        if not converts:
            return store, record
        store.close()
        if record is None:  # nothing but the making of it has been done
            delete_store(paths, only=lambda facts: facts.untouched)
            return self._made(layout_of(model, self._budget.slots), model), None
        return self._found(model, self._settled())

    @property
    def written(self) -> int:
        """Bytes written to the store so far."""
        return 0 if self.store is None else self.store.written

    @property
    def every_step(self) -> bool:
        """True if every step is a commit, and the last one stands whatever happens in a step."""
        beside = self.store is not None and self.slots.two and self._budget.durability not in ("interval", "none")
        return beside and self.arrays.state_on_disk()

    @property
    def _interval(self) -> bool:
        return self._budget.durability == "interval"

    def mark(self, progress: Progress) -> None:
        """A step is about to change the state: say so in the store, where it will not be whole until that is done."""
        if self.store is None:
            return
        self._started = True
        if self.every_step:
            last = self.store.last_commit()
            # What counts is not committed yet: arrays have moved to disk since, of any rank of a pipeline, or a commit
            # has failed, perhaps that of a step that has changed no array.
            owed = not self.slots.all_durable or last is None or last["step"] != progress["step"]
            if any(self.ranks.gather_objects("commit before a step", owed)):
                self.commit(progress)
        elif not self._interval:
            last = self.store.last_commit()
            if last is None or last["whole"]:
                self._commit(progress, whole=False)
            self.slots.committed()

    def mark_pending(self) -> None:
        """A step begins while the one before has delayed chunks to step. If all of them are in memory, what is on disk
        is that step's already, and this one writes beside it; otherwise it does so once they are written: ``complete``.
        """
        if self.store is not None and not self.slots.owes and not self._interval:
            assert not self.every_step, "all state is on disk, and nothing of what is delayed is"
            self.slots.committed()

    def complete(self, progress: Progress, buffers: Mapping[str, torch.Tensor]) -> None:
        """Within a step, the one before is complete: commit it where every step is a commit.

        ``progress``, ``buffers``: as they were at its end. Nothing of the step under way may have been written yet.
        """
        if self.every_step:
            self.commit(progress, buffers)
        elif self.store is not None and not self._interval:
            self.slots.committed()

    def commit(self, progress: Progress, buffers: Mapping[str, torch.Tensor] | None = None) -> None:
        """The state is that of one step: record it where that is promised. ``buffers``: the model's, as they were at
        the end of the step; None: as they are.
        """
        if self.store is None:
            return
        between_steps = self._budget.durability is None or not self._started
        if self.every_step or (between_steps and self.arrays.state_on_disk()):
            self.arrays.keep_frozen()
            self._buffers.write_changed(self._write_buffer, buffers)
            self._commit(progress, whole=True)
        elif not self._interval:
            self.slots.committed()  # no commit promises anything: a step may overwrite what the one before it had read

    def _commit(self, progress: Progress, *, whole: bool) -> None:
        with self.ranks.together("commit"):
            self._record(progress, self.ranks, whole=whole)

    def _record(self, progress: Progress, ranks: Ranks, *, whole: bool) -> None:
        assert self.store is not None
        record = {**progress, "whole": whole, "slots": self.slots.record()}
        self.store.before_record = partial(ranks.agree, "step to commit", (progress["step"], whole))
        self.store.commit(record)
        ranks.agree("commit", self.store.commits.sequence)  # before anything is written over the one before
        self.slots.committed()

    def write_buffers(self) -> None:
        """Write the model's buffers that have changed; the next commit names them."""
        self._buffers.write_changed(self._write_buffer)

    def commit_beside(self, progress: Progress) -> None:
        """Commit a step all of whose state has been written, in a thread of its own, while steps go on. What fails is
        for whoever waits for it to raise: all ranks wait at the same places, and there it ends the others."""
        self._record(progress, self._beside, whole=True)

    def read_buffer(self, name: str, offset: int, pages: NDArray[np.uint8]) -> None:
        """Fill ``pages`` with those of a model's buffer."""
        self.slots.read(name, offset, pages)

    def _write_buffer(self, name: str, offset: int, pages: NDArray[np.uint8]) -> None:
        """Write a model's buffer: all of it at once."""
        assert offset == 0
        self.slots.drop((name,))
        self.slots.write(name, 0, pages)
        self.slots.flip((name,))

    def settle(self, progress: Progress) -> None:
        """Bring what is in memory to disk, and commit it; of several ranks of which one has failed, nothing."""
        if self.store is not None and self.ranks.failure is None:
            with self.ranks.together("close"):
                self.arrays.to_disk()
                self.write_buffers()
                self._commit(progress, whole=True)

    def close(self) -> None:
        """Give memory and the store back, whose last commit stands."""
        try:
            if self.store is not None:
                self.store.close()
        finally:
            self.arrays.close()


def _kind(facts: StoreFacts | None) -> Literal["none", "in part", "empty", "begun"]:
    """The store that a rank has: none, one of which a directory lacks its part, one without a commit, or one with."""
    if facts is None:
        return "none"
    return "in part" if facts.missing else "empty" if facts.record is None else "begun"
