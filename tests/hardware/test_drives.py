"""Drives that are not equally fast: their weights in a stripe, and what they do together."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hardware.drives import spread, stripe_weights, striped_room, together, weights_of
from penstock.hardware.machine import HEAVIEST, Sustained
from penstock.store.layout import ALIGN
from penstock.store.striping import Striping
from tests.machines import drive

RATES = st.floats(5e7, 2e10)


@given(st.lists(RATES, min_size=1, max_size=3))
def test_weights_are_nearly_as_fast_as_any_and_small(paces: list[float]) -> None:
    found = weights_of(paces)
    every = list(product(range(1, HEAVIEST + 1), repeat=len(paces)))
    best = max(spread(paces, weights) for weights in every)
    assert found in every
    if len(set(found)) == 1:
        assert found == (1,) * len(paces)
        assert spread(paces, found) >= 0.93 * best
    else:
        assert spread(paces, found) >= 0.97 * best
        assert spread(paces, (1,) * len(paces)) < 0.93 * best


@pytest.mark.parametrize(
    ("paces", "weights"),
    [
        ([3e9], (1,)),
        ([3e9, 3e9, 3e9], (1, 1, 1)),
        ([3.1e9, 2.9e9], (1, 1)),  # two measurements of one drive
        ([4e9, 2e9], (2, 1)),
        ([1e9, 3e9], (1, 3)),
        ([3e9, 2e9], (3, 2)),
        ([7e9, 3.5e9, 3.5e9], (2, 1, 1)),
        ([1e10, 1e8], (8, 1)),
    ],
)
def test_weights_that_anybody_would_give(paces: list[float], weights: tuple[int, ...]) -> None:
    assert weights_of(paces) == weights


@given(st.lists(st.tuples(RATES, st.integers(1, 8)), min_size=1, max_size=4))
def test_a_stripe_takes_as_long_as_the_drive_that_is_last(drives: list[tuple[float, int]]) -> None:
    """The rate of all together is that of the bytes that a store really puts on each."""
    paces, weights = [rate for rate, _ in drives], tuple(weight for _, weight in drives)
    striping = Striping(files=len(drives), stripe=ALIGN, weights=weights)
    nbytes = 100 * sum(weights) * ALIGN
    seconds = max(size / rate for size, rate in zip(striping.file_sizes(nbytes), paces, strict=True))
    assert nbytes / seconds == pytest.approx(spread(paces, weights), rel=0.02)


def test_a_faster_drive_has_more_and_both_are_as_fast_as_their_sum() -> None:
    fast, slow = drive(), replace(drive(), read=2.5e9, write=1.5e9, read_both=2e9, write_both=1.25e9)
    assert stripe_weights([fast, slow]) == (2, 1)
    assert together([fast, slow]).read == pytest.approx(7.5e9)
    assert together([fast, slow]).write_both == pytest.approx(3.75e9)
    assert together([fast, fast]).write == 2 * fast.write


def test_a_drive_that_slows_down_has_the_share_of_its_sustained_rate() -> None:
    left = Sustained(write=3e8, read_both=4e9, write_both=2.5e8, after=1 << 37)
    assert stripe_weights([drive(), drive(sustained=left)])[0] > 3


def test_the_weights_of_a_store_that_is_there_count() -> None:
    assert stripe_weights([drive(weight=1), drive(weight=5)]) == (1, 5)
    assert together([drive(weight=1), drive(weight=5)]).read == pytest.approx(6 * drive().read / 5)


def test_room_is_what_either_stripe_has() -> None:
    fast, slow = drive(), replace(drive(), read_both=2e9, write_both=1.25e9)
    assert striped_room([200, 100], [fast, slow]) == 300
    assert striped_room([100, 1000], [fast, slow]) == 200  # evenly
    assert striped_room([], []) == 0
