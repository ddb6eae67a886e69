"""The home of a run's state: the residence of its arrays, the store below it, and the record of how far it got."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config import Budget, format_size
from penstock.errors import BudgetError, StoreError
from penstock.run.buffers import Buffers
from penstock.run.residence import Residence, parts_of
from penstock.run.slots import Slots
from penstock.schedule.place import Format
from penstock.schedule.program import GroupSpec
from penstock.store.layout import Layout
from penstock.store.store import Store

Progress = Mapping[str, Any]


class Home:
    """Opens or makes the store, and says at each moment whether it is whole.

    A store is *whole* when its last commit names one step's state. With two slots and all state on disk every step ends
    with a commit and touches nothing that the one before names, so the store is always whole. Otherwise it is whole
    only between steps, if all state lives on disk then. Only a whole store is continued.
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
            sizes = [(p.name, p.nbytes) for p in parts] + buffers.sizes()
            entries = [(name, nbytes, budget.slots) for name, nbytes in sizes]
            layout = Layout.build(entries, {p.name: p.grid for p in parts})
            self.store = self._open(layout, model, io_threads)
        elif (need := sum(p.nbytes for p in parts)) > (have := budget.host_bytes + budget.device_bytes):
            raise BudgetError(
                f"weights and optimizer state take {format_size(need)}, and the budget gives {format_size(have)} of "
                "memory: give budget.disk a directory, or raise budget.host"
            )
        self.slots = Slots.none() if self.store is None else Slots.of(self.store)
        self.residence = Residence(groups, form, dtype, device, self.store, self.slots, host_bytes=budget.host_bytes)

    def _open(self, layout: Layout, model: dict[str, Any], io_threads: int) -> Store:
        paths = self._budget.disk_paths
        if not Store.exists(paths):
            return Store.create(paths, layout, model=model, io_threads=io_threads)
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

    @property
    def always_whole(self) -> bool:
        """Whether the last commit stands whatever happens in a step."""
        return self.store is not None and self.slots.two and self._all_on_disk()

    def _all_on_disk(self) -> bool:
        return all(self.residence.tier_of(name) == "disk" for name in self.residence.parts)

    def note(self, progress: Callable[[], Progress], *, between_steps: bool) -> None:
        """Record how far the state has got, or that it is in pieces; writes only where that has changed."""
        if self.store is None or (self.always_whole and not between_steps):
            return
        whole = between_steps and self._all_on_disk()
        last = self.store.last_commit()
        if whole or last is None or last["whole"]:
            if whole:
                self._buffers.write_changed(self._write_buffer)
            self._commit(progress, whole=whole)

    def _commit(self, progress: Callable[[], Progress], *, whole: bool) -> None:
        assert self.store is not None
        self.store.commit({**progress(), "whole": whole, "slots": self.slots.record()})
        self.slots.committed()

    def read_buffer(self, name: str, offset: int, pages: NDArray[np.uint8]) -> None:
        """Fill ``pages`` with those of a model's buffer."""
        assert self.store is not None
        self.store.read(name, offset, pages, self.slots.current(name))

    def _write_buffer(self, name: str, offset: int, pages: NDArray[np.uint8]) -> None:
        """Write a model's buffer: all of it at once."""
        assert self.store is not None
        assert offset == 0
        self.store.write(name, 0, pages, self.slots.target(name))
        self.slots.turn((name,))

    def close(self, progress: Callable[[], Progress] | None) -> None:
        """Bring what is in memory to disk and record it; with None the state is not fit to be continued."""
        try:
            if self.store is not None and progress is not None:
                self.residence.to_disk()
                self._buffers.write_changed(self._write_buffer)
                self._commit(progress, whole=True)
        finally:
            if self.store is not None:
                self.store.close()
            self.residence.close()
