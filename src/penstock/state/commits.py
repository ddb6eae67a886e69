"""The commits of a run: its arrays, the store below them, and the record of how far it got."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config import Budget, format_size
from penstock.errors import BudgetError
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.place import Format
from penstock.schedule.program import GroupSpec
from penstock.state.arrays import StateArrays
from penstock.state.buffers import Buffers
from penstock.state.layout import parts_of
from penstock.state.opening import open_store
from penstock.state.slots import Slots
from penstock.state.survey import Asked
from penstock.store.owner import Owner
from penstock.store.parts import Place
from penstock.store.store import Store

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
        self.ranks = ranks
        """the ranks that commit together"""
        self._beside = ranks.beside() if budget.durability == "interval" else ranks
        """the same, for the thread that writes in the background"""
        store, resumed = None, None
        parts = [part for group in groups for part in parts_of(group, form, dtype)]
        if budget.disk_paths:
            asked = Asked(
                paths=budget.disk_paths,
                slots=budget.slots,
                model=model,
                owner=owner,
                place=Place(
                    rank=ranks.rank,
                    ranks=ranks.size,
                    whole=share.is_whole and ranks.size > 1,
                    copies=ranks.copies,
                    stages=ranks.stages,
                ),
                parts=ranks.size if ranks.are_pipeline else share.size,  # there, nobody has another's blocks
                any_strands=any_strands,
                weights=weights,
            )
            with ranks.together("wrap"):
                store, resumed = open_store(asked, ranks)
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
