"""What reads of a store's extents return is what counts, whatever was written of them, in which order, or dropped."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import StoreError
from penstock.state.slots import Slots
from penstock.store import ALIGN, Layout, Region, Store, aligned_bytes

NAMES = ("a", "b")
GRID = (Region(nbytes=5 * ALIGN, block=2 * ALIGN), Region(nbytes=2 * ALIGN, block=ALIGN))
"""as a group has it: a trainable part, which ends in a shorter block, and a frozen part"""
SPANS = [range(2), range(2, 4), range(4, 5), range(5, 6), range(6, 7)]
"""its blocks, in pages"""
BLOCKS = st.sampled_from(range(len(SPANS)))
TRAINED = 3
LATE = st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(range(TRAINED))), min_size=1, max_size=2)
Contents = dict[str, list[int]]
"""the number that fills each block of each extent"""


def made(path: Path, slots: int = 2) -> Store:
    layout = Layout.build([(name, 7 * ALIGN, slots) for name in NAMES], dict.fromkeys(NAMES, GRID))
    return Store.create([path], layout, model={}, direct=False)


def page_bytes(block: int, value: int) -> npt.NDArray[np.uint8]:
    out = aligned_bytes(len(SPANS[block]) * ALIGN)
    out[:] = value
    return out


def write(slots: Slots, name: str, block: int, value: int) -> None:
    slots.write(name, SPANS[block].start * ALIGN, page_bytes(block, value))


def read(slots: Slots, name: str, block: int, **how: Any) -> int:
    out = aligned_bytes(len(SPANS[block]) * ALIGN)
    slots.read(name, SPANS[block].start * ALIGN, out, **how)
    assert (out == out[0]).all()
    return int(out[0])


def contents(slots: Slots) -> Contents:
    return {name: [read(slots, name, block) for block in range(len(SPANS))] for name in NAMES}


class Steps(RuleBasedStateMachine):
    """Steps that write what they like, in a store that is killed now and then; ``counts`` is what must be read."""

    @initialize()
    def begin(self) -> None:
        self.folder = TemporaryDirectory()
        self.store = made(Path(self.folder.name) / "store")
        self.slots = Slots(self.store)
        self.number = 0
        for name in NAMES:
            self.slots.zero(name)
        self.slots.flip(NAMES)
        self.counts: Contents = {name: [0] * len(SPANS) for name in NAMES}
        self.owed: set[tuple[str, int]] = set()
        self.step: dict[tuple[str, int], int] = {}
        self.in_place: set[str] = set()
        self.commit()

    def commit(self) -> None:
        self.store.commit({"slots": self.slots.record()})
        self.slots.committed()
        self.committed = {name: list(values) for name, values in self.counts.items()}
        self.in_place.clear()

    @precondition(lambda self: not self.owed)  # the step before is completed first
    @rule(name=st.sampled_from(NAMES), block=BLOCKS)
    def write_some(self, name: str, block: int) -> None:
        self.number = self.number % 200 + 1
        write(self.slots, name, block, self.number)
        if name in self.in_place:
            self.counts[name][block] = self.number
        else:
            self.step[name, block] = self.number

    @rule()
    def drop(self) -> None:
        """The step is to be another one."""
        self.slots.drop(NAMES)
        self.step.clear()

    @precondition(lambda self: not self.owed)
    @rule(late=st.just(set()) | LATE, commit=st.booleans())
    def count(self, late: set[tuple[str, int]], commit: bool) -> None:
        """The step counts, but for what it leaves to the next one; an extent that it has not touched stays. What has
        flipped and is not committed is overwritten in place by the next step.
        """
        late = {(name, block) for name, block in late - self.step.keys() if name not in self.in_place}
        bounce = aligned_bytes(3 * ALIGN)
        later = {n: [_bytes(b) for m, b in sorted(late) if m == n] for n in NAMES}
        flipped = [name for name in NAMES if any(n == name for n, _ in (*self.step, *late))]
        assert all(self.slots.is_touched(name) == any(n == name for n, _ in self.step) for name in flipped)
        for name in flipped:
            self.slots.complete(name, bounce, later[name])
        self.slots.flip(flipped, later)
        for (name, block), value in self.step.items():
            self.counts[name][block] = value
        self.step.clear()
        self.in_place.update(flipped)
        self.owed = late
        assert self.slots.owes == bool(late)
        if self.owed:
            with pytest.raises(StoreError, match="owed"):
                self.slots.record()
        elif commit:
            self.commit()

    @precondition(lambda self: self.owed)
    @rule(commit=st.booleans())
    def pay(self, commit: bool) -> None:
        """The next step writes what is owed, from what was there before."""
        for name, block in sorted(self.owed):
            with pytest.raises(StoreError, match="read before they are written"):
                read(self.slots, name, block)
            assert read(self.slots, name, block, before=True) == self.counts[name][block]
            self.number = self.number % 200 + 1
            write(self.slots, name, block, self.number)
            self.counts[name][block] = self.number
        self.owed = set()
        self.slots.complete_owed()
        if commit:
            self.commit()

    @rule()
    def kill(self) -> None:
        """What was committed is there, and is all that is known."""
        self.store.close()
        self.store = Store.open(self.store.paths, direct=False)
        self.slots = Slots(self.store)
        self.counts = {name: list(values) for name, values in self.committed.items()}
        self.owed = set()
        self.step.clear()
        self.in_place.clear()

    @invariant()
    def reads_are_what_counts(self) -> None:
        if not self.owed:
            assert contents(self.slots) == self.counts
        current = {name: self.slots.current(name) for name in NAMES}
        assert self.owed or not [text for _, damage in self.store.verify(current) for text in damage]

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


def _bytes(block: int) -> range:
    return range(SPANS[block].start * ALIGN, SPANS[block].stop * ALIGN)


Steps.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestWhateverStepsWriteReadsAreWhatCounts = Steps.TestCase


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    slots = Slots(made(tmp_path / "store"))
    for name in NAMES:
        slots.zero(name)
    slots.flip(NAMES)
    slots.committed()
    return slots


@pytest.mark.parametrize("block", range(len(SPANS)))
def test_an_extent_with_one_block_missing_does_not_turn(slots: Slots, block: int) -> None:
    """Nor do the others; what is read is what was read before."""
    for other in set(range(len(SPANS))) - {block}:
        write(slots, "a", other, 1)
    for other in range(len(SPANS)):
        write(slots, "b", other, 1)
    where = f"a: bytes {SPANS[block].start * ALIGN} to {SPANS[block].stop * ALIGN} were to count"
    with pytest.raises(StoreError, match=where):
        slots.flip(NAMES)
    assert contents(slots) == {name: [0] * len(SPANS) for name in NAMES}
    write(slots, "a", block, 1)
    slots.flip(NAMES)
    assert contents(slots) == {name: [1] * len(SPANS) for name in NAMES}


def test_what_a_dropped_step_has_written_does_not_count_for_the_next_one(slots: Slots) -> None:
    write(slots, "a", 0, 1)
    slots.drop(NAMES)
    assert not slots.is_touched("a")
    write(slots, "a", 1, 2)
    slots.complete("a", aligned_bytes(2 * ALIGN))
    slots.flip(["a"])
    assert contents(slots)["a"] == [0, 2, 0, 0, 0]


def test_a_store_of_which_not_all_was_written_is_not_committed(tmp_path: Path) -> None:
    slots = Slots(made(tmp_path / "store"))
    slots.zero("a")
    slots.flip(["a"])
    with pytest.raises(StoreError, match="b cannot be committed: not all of slot 0 has been written"):
        slots.record()


def test_with_one_slot_a_step_writes_in_place(tmp_path: Path) -> None:
    slots = Slots(made(tmp_path / "store", slots=1))
    for name in NAMES:
        slots.zero(name)
    write(slots, "a", 1, 3)
    slots.flip(["a"])
    slots.record()
    assert contents(slots)["a"] == [0, 3, 0, 0, 0]
