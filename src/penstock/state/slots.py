"""The copy of each extent that counts: with two slots, a step never writes what the last commit names.

    durable   the slots of the last commit record: what a run that is killed now goes on from; never written
    current   what reads return: the durable slot, or the other one once all of it is there
    target    where writes go: the slot that is not durable

A commit makes what is current durable. With one slot all three are the same, and a step writes in place.

Nothing is assumed about what a step writes: every write to a target is noted, block by block, and an extent flips (its
target becomes current) only when each block of it is accounted for:

    written   since the last ``flip`` or ``drop``
    alike     copied from the current slot by ``complete``, and written in neither slot since
    owed      a delayed chunk's: the next step writes it, before anybody reads it and before the next commit

An extent that was written where reads find it (with one slot, twice since a commit, or what was owed) cannot be what it
was before: ``in_place`` has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.documents.typed import shown
from penstock.errors import ConfigError, StoreError
from penstock.state.record import check_stored
from penstock.store.layout import Extent
from penstock.store.store import Store

Flags = NDArray[np.bool_]
"""One boolean for each block of an extent."""


@dataclass(frozen=True, kw_only=True)
class _Owed:
    """The rest still to be written of an extent that has flipped. ``before``: the slot that has it until then."""

    before: int
    blocks: Flags


class Slots:
    """The extents of a store, each in the slot that counts. Threads may read and write different blocks at once."""

    def __init__(self, store: Store | None) -> None:
        """``store``: as its last commit has it; None: there is none, and there are no extents."""
        self._store = store
        self._extents: Mapping[str, Extent] = {e.name: e for e in store.layout.extents} if store is not None else {}
        last = None if store is None else store.last_commit()
        self._durable = dict.fromkeys(self._extents, 0) if last is None else self._parse(str(last["slots"]))
        self._current = dict(self._durable)
        self._written = {name: np.zeros(extent.blocks, np.bool_) for name, extent in self._extents.items()}
        self._alike = {name: np.zeros(extent.blocks, np.bool_) for name, extent in self._extents.items()}
        self._owed: dict[str, _Owed] = {}
        self._in_place: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._extents

    @property
    def two(self) -> bool:
        """True if every extent has a slot to write beside the one that counts."""
        return all(extent.slots > 1 for extent in self._extents.values())

    def current(self, name: str) -> int:
        return self._current[name]

    def target(self, name: str) -> int:
        return self._durable[name] if self._extents[name].slots == 1 else 1 - self._durable[name]

    @property
    def all_durable(self) -> bool:
        """True if what reads return is what counts: the other slots are free to be written."""
        return self._current == self._durable

    # ---- bytes

    def read(self, name: str, offset: int, buffer: NDArray[np.uint8], *, before: bool = False) -> None:
        """Fill ``buffer`` with the bytes of an extent from ``offset`` on.

        ``before``: what is owed, from where it was before the last ``flip``.

        Raises:
            StoreError: the drive failed, what is there is damaged, or it is owed.
        """
        assert self._store is not None
        if name not in self._current:
            raise StoreError(f"the store has no array {name!r}: its manifest is not that of this model")
        owed, slot = self._owed.get(name), self._current[name]
        if owed is not None and before:
            slot = owed.before
        elif owed is not None and owed.blocks[self._blocks(name, offset, buffer.nbytes)].any():
            raise StoreError(f"{name}: bytes {offset} to {offset + buffer.nbytes} are read before they are written")
        self._store.read(name, offset, buffer, slot)

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes of an extent, with two slots beside what ``read`` gives, until ``flip``.

        Raises:
            StoreError: the drive failed; the range then counts as not written.
        """
        assert self._store is not None
        blocks, owed = self._blocks(name, offset, data.nbytes), self._owed.get(name)
        self._alike[name][blocks] = False
        self._written[name][blocks] = False
        if self._current[name] == self.target(name):
            self._in_place.add(name)
        self._store.write(name, offset, data, self.target(name))
        if owed is None:
            self._written[name][blocks] = True
        else:
            owed.blocks[blocks] = False

    def zero(self, name: str) -> None:
        """Make an extent zeros, with two slots beside what ``read`` gives, until ``flip``."""
        assert self._store is not None
        self._alike[name][:] = False
        self._store.zero(name, self.target(name))
        self._written[name][:] = True

    def complete(self, name: str, bounce: NDArray[np.uint8], later: Sequence[range] = ()) -> None:
        """Copy what was not written of an extent beside what was, so that ``flip`` may follow, through ``bounce``.

        ``later``: bytes that are left out, since they will be owed.

        Raises:
            StoreError: the drive failed. What is read is what was read before.
        """
        assert self._store is not None
        lacking = self._lacking(name) & ~self._flags(name, later)
        for span in self._spans(name, lacking, bounce.nbytes):
            piece = bounce[: len(span)]
            self._store.read(name, span.start, piece, self._current[name])
            self._store.write(name, span.start, piece, self.target(name))
            self._alike[name][self._blocks(name, span.start, len(span))] = True

    # ---- what counts

    def is_touched(self, name: str) -> bool:
        """True if any of an extent's target has been written since the last ``flip`` or ``drop``."""
        return bool(self._written[name].any())

    def in_place(self, names: Iterable[str]) -> bool:
        """True if any of these has been written where reads find it since the last ``drop``."""
        return not self._in_place.isdisjoint(names)

    def drop(self, names: Iterable[str]) -> None:
        """Drop what has been written to these beside what counts."""
        for name in names:
            self._written[name][:] = False
            self._in_place.discard(name)

    def lacks(self, name: str, later: Sequence[range] = ()) -> bool:
        """True if ``flip`` needs a ``complete`` before it."""
        return bool((self._lacking(name) & ~self._flags(name, later)).any())

    def flip(self, names: Iterable[str], later: Mapping[str, Sequence[range]] | None = None) -> None:
        """From now on, have reads return what has been written of these extents, which is all of them.

        ``later``: bytes of some of them that are owed from now on, where they have not been written.

        Raises:
            StoreError: something is missing; nothing has flipped.
        """
        names = tuple(names)
        lacking = {name: self._lacking(name) for name in names if self._current[name] != self.target(name)}
        late = {name: self._flags(name, (later or {}).get(name, ())) & ~self._written[name] for name in lacking}
        for name, blocks in lacking.items():
            missing = blocks & ~late[name]
            for span in self._spans(name, missing, self._extents[name].stride):
                raise StoreError(f"{name}: bytes {span.start} to {span.stop} were to count, and have not been written")
        for name in names:
            self._written[name][:] = False
        for name, blocks in late.items():
            self._owed.pop(name, None)
            if blocks.any():
                self._owed[name] = _Owed(before=self._current[name], blocks=blocks)
            self._current[name] = self.target(name)

    def settle(self, names: Iterable[str]) -> None:
        """Make what has been written of these in place part of what counts; from here on writes are noted anew."""
        for name in self._in_place.intersection(names):
            self._written[name][:] = False
            self._in_place.discard(name)

    def complete_owed(self) -> None:
        """Clear what is owed: all of it has been written.

        Raises:
            StoreError: something still is.
        """
        for name, owed in self._owed.items():
            for span in self._spans(name, owed.blocks, self._extents[name].stride):
                raise StoreError(f"{name}: bytes {span.start} to {span.stop} are owed, and have not been written")
        self._in_place.difference_update(self._owed)
        self._owed.clear()

    @property
    def owes(self) -> bool:
        """True if anything is owed, or was until it was written, and ``complete_owed`` has not been called since."""
        return bool(self._owed)

    def record(self) -> str:
        """The slots as a commit keeps them: a digit for each extent, in the order of their names.

        Raises:
            StoreError: not all of what it would name has been written.
        """
        assert self._store is not None
        self.complete_owed()
        for name, slot in self._current.items():
            if not self._store.is_written(name, slot):
                raise StoreError(f"{name} cannot be committed: not all of slot {slot} has been written")
        return "".join(str(self._current[name]) for name in sorted(self._current))

    def committed(self) -> None:
        """The commit record with ``record()`` is durable, or nothing is: what is current is what counts now."""
        self.complete_owed()
        for name, slot in self._current.items():
            if slot != self._durable[name]:  # what has been written in place is there: the target is the other slot now
                self._written[name][:] = False
        self._durable = dict(self._current)

    # ---- blocks

    def _parse(self, text: str) -> dict[str, int]:
        slots = [self._extents[name].slots for name in sorted(self._extents)]
        whole = len(text) == len(slots) and text.isascii() and (text.isdecimal() or not text)
        if not whole or any(int(digit) >= count for digit, count in zip(text, slots, strict=True)):
            raise StoreError(
                f"the last commit names slots that the store does not have ({shown(text)} of {len(slots)} extents): it "
                "is of another store. Go on from a snapshot"
            )
        return {name: int(digit) for name, digit in zip(sorted(self._extents), text, strict=True)}

    def _blocks(self, name: str, offset: int, nbytes: int) -> slice:
        first, borders = self._extents[name].touched(offset, nbytes)
        return slice(first, first + len(borders) - 1)

    def _flags(self, name: str, ranges: Sequence[range]) -> Flags:
        flags = np.zeros(self._extents[name].blocks, np.bool_)
        for part in ranges:
            flags[self._blocks(name, part.start, len(part))] = True
        return flags

    def _lacking(self, name: str) -> Flags:
        """Blocks of which the target does not have what is to count; none where that is written in place."""
        lacking: Flags = ~(self._written[name] | self._alike[name])
        return lacking & (self._current[name] != self.target(name))

    def _spans(self, name: str, blocks: Flags, most: int) -> Iterator[range]:
        """The bytes of the given blocks, neighbours together up to ``most`` bytes."""
        if not blocks.any():
            return
        run = range(0)
        for number, span in self._extents[name].spans():
            if blocks[number]:
                if run and run.stop == span.start and span.stop - run.start <= most:
                    run = range(run.start, span.stop)
                else:
                    if run:
                        yield run
                    run = span
        yield run


def whole_commit(store: Store, path: Path) -> dict[str, Any]:
    """The last commit of a store, which is all of one step's state. ``path``: of the store, for what is said.

    Raises:
        ConfigError: there is none yet.
        StoreError: the run was stopped within a step, and what is on disk is not one step's.
    """
    last = store.last_commit()
    if last is None:
        raise ConfigError(
            f"{path}: nothing has been committed yet: the run has to take its first step (penstock resume)"
        )
    check_stored(last, f"the last commit in {path}")
    if not last["whole"]:
        raise StoreError(
            f"{path}: the run was stopped in or before step {last['step'] + 1} with state in memory: what is on disk "
            "is not one step's state. Go on from a snapshot, or start over"
        )
    return last
