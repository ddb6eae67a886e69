"""The home of a run's state: the residence of its arrays, the store below it, and the record of how far it got."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.config import Budget, format_size
from penstock.errors import BudgetError, StoreError
from penstock.run.buffers import Buffers
from penstock.run.residence import Residence, parts_of
from penstock.schedule.place import Format
from penstock.schedule.program import GroupSpec
from penstock.store.layout import Layout
from penstock.store.store import Store

Progress = Mapping[str, Any]


class Home:
    """Opens or makes the store, and says at each moment whether it is whole.

    A store is *whole* when all state lives on disk and no step is under way. Only a whole store is continued.
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
        io_threads: int,
    ) -> None:
        """Raises:
        BudgetError: there is no disk, and memory cannot hold the state.
        StoreError: the disk cannot be used, or holds a store of another model or of a run stopped within a step.
        """
        self.resumed: Progress | None = None
        """Where the store that was found had got to; None for a fresh one."""
        self.store: Store | None = None
        self._budget = budget
        self._buffers = buffers
        parts = [part for group in groups for part in parts_of(group, form, dtype)]
        if budget.disk_paths:
            entries = [(p.name, p.nbytes, 1) for p in parts] + [(name, n, 1) for name, n in buffers.sizes()]
            self.store = self._open(entries, model, io_threads)
        elif (need := sum(p.nbytes for p in parts)) > (have := budget.host_bytes + budget.device_bytes):
            raise BudgetError(
                f"weights and optimizer state take {format_size(need)}, and the budget gives {format_size(have)} of "
                "memory: give budget.disk a directory, or raise budget.host"
            )
        self.residence = Residence(groups, form, dtype, device, self.store, host_bytes=budget.host_bytes)

    def _open(self, entries: Sequence[tuple[str, int, int]], model: dict[str, Any], io_threads: int) -> Store:
        paths = self._budget.disk_paths
        if not Store.exists(paths):
            return Store.create(paths, Layout.build(entries), model=model, io_threads=io_threads)
        store = Store.open(paths, io_threads=io_threads)
        try:
            store.require_model(model)
            record = store.last_commit()
            if record is not None and not record["whole"]:
                raise StoreError(
                    f"{paths[0]}: the run that used this store was stopped in or before step {record['step'] + 1}, and "
                    "what is on disk is not one step's state. Remove the directory to start over (and load a snapshot "
                    "if there is one)"
                )
            self.resumed = record
        except BaseException:
            store.close()
            raise
        return store

    def note(self, progress: Callable[[], Progress], *, between_steps: bool) -> None:
        """Record whether the store is whole; writes only when that, or what it is whole with, has changed."""
        if self.store is None:
            return
        on_disk = all(self.residence.tier_of(name) == "disk" for name in self.residence.parts)
        whole = between_steps and on_disk
        last = self.store.last_commit()
        if whole or last is None or last["whole"]:
            if whole:
                self._buffers.write_changed(self.store.write)
            self.store.commit({**progress(), "whole": whole})

    def close(self, progress: Callable[[], Progress] | None) -> None:
        """Bring what is in memory to disk and record it; with None the state is not fit to be continued."""
        try:
            if self.store is not None and progress is not None:
                self.residence.to_disk()
                self._buffers.write_changed(self.store.write)
                self.store.commit({**progress(), "whole": True})
        finally:
            if self.store is not None:
                self.store.close()
            self.residence.close()
