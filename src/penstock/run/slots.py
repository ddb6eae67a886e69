"""Which copy of each extent counts: with two slots, a step never writes what the last commit names.

    durable   the slots of the last commit record: what a run that is killed now goes on from; never written
    current   what reads return: the durable slot, or the other one once all of it has been written
    target    where writes go: the slot that is not durable

A commit makes what is current durable. With one slot all three are the same, and a step writes in place.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, StoreError
from penstock.store.store import Store


class Slots:
    """The slots of a store's extents, by name."""

    def __init__(self, counts: Mapping[str, int], durable: str | None) -> None:
        """``counts``: slots of each extent. ``durable``: ``record()`` of the last commit; None: there was none."""
        self._counts = dict(counts)
        self._durable = dict.fromkeys(counts, 0) if durable is None else _parse(counts, durable)
        self._current = dict(self._durable)
        self._before = dict(self._durable)

    @staticmethod
    def of(store: Store) -> "Slots":
        """Those of a store, as its last commit has them."""
        last = store.last_commit()
        counts = {extent.name: extent.slots for extent in store.layout.extents}
        return Slots(counts, None if last is None else str(last["slots"]))

    @staticmethod
    def none() -> "Slots":
        """Where there is no store."""
        return Slots({}, None)

    def __contains__(self, name: object) -> bool:
        return name in self._counts

    @property
    def two(self) -> bool:
        """Whether every extent has a slot to write beside the one that counts."""
        return all(count > 1 for count in self._counts.values())

    def current(self, name: str) -> int:
        return self._current[name]

    def before(self, name: str) -> int:
        """Where what a step has left to the next one still is: what reads returned before ``turn``."""
        return self._before[name]

    @property
    def all_durable(self) -> bool:
        """Whether what reads return is what counts: the other slots are free to be written."""
        return self._current == self._durable

    def target(self, name: str) -> int:
        return self._durable[name] if self._counts[name] == 1 else 1 - self._durable[name]

    def turn(self, names: Iterable[str]) -> None:
        """All of these extents has been written: reads return it from now on."""
        for name in names:
            self._before[name], self._current[name] = self._current[name], self.target(name)

    def record(self) -> str:
        """What a commit keeps: a digit for each extent, in the order of their names."""
        return "".join(str(self._current[name]) for name in sorted(self._current))

    def committed(self) -> None:
        """The commit record with ``record()`` is durable, or nothing is: what is current is what counts now."""
        self._durable = dict(self._current)


def whole_commit(store: Store, path: Path) -> dict[str, Any]:
    """The last commit of a store, which is all of one step's state. ``path``: of the store, for what is said.

    Raises:
        ConfigError: there is none yet.
        StoreError: the run was stopped within a step, and what is on disk is not one step's.
    """
    last = store.last_commit()
    if last is None:
        raise ConfigError(f"{path}: nothing has been committed yet")
    if not last["whole"]:
        raise StoreError(
            f"{path}: the run was stopped in or before step {last['step'] + 1} with state in memory: what is on disk "
            "is not one step's state. Go on from a snapshot, or start over"
        )
    return last


def _parse(counts: Mapping[str, int], text: str) -> dict[str, int]:
    assert len(text) == len(counts), "a commit record is of another store"
    return {name: int(digit) for name, digit in zip(sorted(counts), text, strict=True)}
