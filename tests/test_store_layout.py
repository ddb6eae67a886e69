"""Layout and striping: pure arithmetic, checked against the definition byte by byte."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.store.layout import ALIGN, Layout, round_up
from penstock.store.striping import Striping

sizes = st.lists(st.tuples(st.integers(1, 5 * ALIGN), st.integers(1, 3)), min_size=1, max_size=6)


def build(entries: list[tuple[int, int]]) -> Layout:
    return Layout.build((f"extent{i}", nbytes, slots) for i, (nbytes, slots) in enumerate(entries))


@given(sizes)
def test_slots_are_aligned_large_enough_and_do_not_overlap(entries: list[tuple[int, int]]) -> None:
    layout = build(entries)
    taken: list[range] = []
    for extent, (nbytes, slots) in zip(layout.extents, entries, strict=True):
        for slot in range(slots):
            start = extent.address(0, extent.stride, slot)
            assert start % ALIGN == 0
            assert extent.stride >= nbytes
            taken.append(range(start, start + extent.stride))
    assert all(a.stop == b.start for a, b in pairwise(taken))
    assert (taken[0].start, taken[-1].stop) == (0, layout.nbytes)


@given(sizes)
def test_layout_survives_json(entries: list[tuple[int, int]]) -> None:
    layout = build(entries)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_ranges_outside_of_a_slot_are_refused() -> None:
    extent = Layout.build([("a", 3 * ALIGN, 2)])["a"]
    for offset, nbytes, slot in [
        (0, 4 * ALIGN, 0),
        (3 * ALIGN, ALIGN, 0),
        (-ALIGN, ALIGN, 0),
        (0, ALIGN, 2),
        (512, ALIGN, 0),
    ]:
        with pytest.raises(AssertionError):
            extent.address(offset, nbytes, slot)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": 2, "extents": []}, "format 2"),
        ([], "format None"),
        ({"format": 1}, "damaged"),
        ({"format": 1, "extents": [["a", 0, 4096]]}, "damaged"),
        ({"format": 1, "extents": [["a", 0, 0, 1]]}, "empty"),
        ({"format": 1, "extents": [["a", 0, 1, 1], ["a", 4096, 1, 1]]}, "twice"),
        ({"format": 1, "extents": [["a", 4096, 1, 1]]}, "offsets"),
    ],
)
def test_wrong_layouts_are_refused(data: object, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        Layout.from_json(data)


@st.composite
def striped_ranges(draw: st.DrawFn) -> tuple[Striping, int, int, int, int]:
    striping = Striping(files=draw(st.integers(1, 4)), stripe=draw(st.integers(1, 5)) * ALIGN)
    total = draw(st.integers(1, 60))
    first = draw(st.integers(0, total - 1))
    count = draw(st.integers(1, total - first))
    return striping, total * ALIGN, first * ALIGN, count * ALIGN, draw(st.integers(1, 8)) * ALIGN


@given(striped_ranges())
def test_pieces_are_the_bytes_that_striping_says(case: tuple[Striping, int, int, int, int]) -> None:
    striping, total, address, nbytes, request = case
    places: list[tuple[int, int]] = []
    for piece in striping.pieces(address, nbytes, request):
        assert piece.nbytes <= request
        assert piece.offset + piece.nbytes <= striping.file_sizes(total)[piece.file]
        assert piece.start == len(places) * ALIGN
        places += [(piece.file, piece.offset + done) for done in range(0, piece.nbytes, ALIGN)]
    expected = []
    for block in range(address, address + nbytes, ALIGN):
        stripe = block // striping.stripe
        expected.append((stripe % striping.files, stripe // striping.files * striping.stripe + block % striping.stripe))
    assert places == expected


@given(striped_ranges())
def test_files_are_just_large_enough(case: tuple[Striping, int, int, int, int]) -> None:
    striping, total, *_ = case
    used = [ALIGN] * striping.files
    for piece in striping.pieces(0, total, total):
        used[piece.file] = max(used[piece.file], piece.offset + piece.nbytes)
    assert striping.file_sizes(round_up(total)) == tuple(used)
