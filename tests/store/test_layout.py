"""Layout and striping: pure arithmetic, checked against the definition byte by byte."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.store.layout import ALIGN, Extent, Layout, Region, round_up
from penstock.store.striping import Striping

WHOLE = [[4096, 4096]]
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


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Extent, int, int]:
    """An extent cut in one to three regions, and a range of it."""
    counts = st.tuples(st.integers(1, 9), st.integers(1, 4))
    grid = tuple(Region(nbytes=n * ALIGN, block=b * ALIGN) for n, b in draw(st.lists(counts, min_size=1, max_size=3)))
    total = sum(region.nbytes for region in grid)
    first = draw(st.integers(0, total // ALIGN - 1)) * ALIGN
    nbytes = draw(st.integers(1, (total - first) // ALIGN)) * ALIGN
    return Layout.build([("a", total, 1)], {"a": grid})["a"], first, nbytes


@given(ranges())
def test_a_range_touches_the_blocks_that_it_has_bytes_of(case: tuple[Extent, int, int]) -> None:
    extent, first, nbytes = case
    every = list(extent.spans())
    assert [number for number, _ in every] == list(range(extent.blocks))
    assert [byte for _, span in every for byte in (span.start, span.stop)][1:-1:2] == [s.start for _, s in every[1:]]
    assert (every[0][1].start, every[-1][1].stop) == (0, extent.stride)
    touched = [(i, span) for i, span in every if span.start < first + nbytes and first < span.stop]
    assert list(extent.spans(first, nbytes)) == touched


@given(ranges(), st.integers(1, 6))
def test_an_extent_is_cut_into_ranges_of_whole_blocks(case: tuple[Extent, int, int], most: int) -> None:
    extent, *_ = case
    borders = {0} | {span.stop for _, span in extent.spans()}
    longest = {span.stop: len(span) for _, span in extent.spans()}
    position = 0
    for part in extent.ranges(most * ALIGN):
        assert part.start == position
        assert part.stop in borders
        assert len(part) <= max(most * ALIGN, longest[part.stop])
        position = part.stop
    assert position == extent.stride


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": 1, "extents": []}, "format 1, this version of penstock reads format 3"),
        ([], "format None"),
        ({"format": 3}, "damaged"),
        ({"format": 3, "extents": [["a", 0, 4096]]}, "damaged"),
        ({"format": 3, "extents": [["a", 0, 0, 1, []]]}, "empty"),
        ({"format": 3, "extents": [["a", 0, 1, 1, WHOLE], ["a", 4096, 1, 1, WHOLE]]}, "twice"),
        ({"format": 3, "extents": [["a", 4096, 1, 1, WHOLE]]}, "offsets"),
        ({"format": 3, "extents": [["a", 0, 1, 1, [[8192, 4096]]]]}, "a is cut into blocks that do not cover it"),
        ({"format": 3, "extents": [["a", 0, 1, 1, [[4096, 512]]]]}, "a is cut into blocks that do not cover it"),
    ],
)
def test_wrong_layouts_are_refused(data: object, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        Layout.from_json(data)


@st.composite
def striped_ranges(draw: st.DrawFn) -> tuple[Striping, int, int, int, int]:
    files = draw(st.integers(1, 4))
    weights = draw(st.sampled_from([(), tuple(draw(st.integers(1, 8)) for _ in range(files))]))
    striping = Striping(files=files, stripe=draw(st.integers(1, 5)) * ALIGN, weights=weights)
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
    dealt = _dealt(striping, (address + nbytes) // striping.stripe + 1)
    expected = []
    for block in range(address, address + nbytes, ALIGN):
        file, number = dealt[block // striping.stripe]
        expected.append((file, number * striping.stripe + block % striping.stripe))
    assert places == expected


def _dealt(striping: Striping, count: int) -> list[tuple[int, int]]:
    """(file, number in it) of so many stripes: dealt one by one to the file that is furthest behind its share, so that
    each has its weight of every round."""
    weights = striping.weights or (1,) * striping.files
    had = [0] * striping.files
    dealt = []
    for _ in range(count):
        file = min(range(striping.files), key=lambda i: (Fraction(2 * had[i] + 1, 2 * weights[i]), i))
        dealt.append((file, had[file]))
        had[file] += 1
    return dealt


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 60), st.integers(1, 5))
def test_every_byte_has_one_place_and_each_file_its_share(weights: list[int], blocks: int, stripe: int) -> None:
    striping = Striping(files=len(weights), stripe=stripe * ALIGN, weights=tuple(weights))
    taken = [0] * len(weights)
    places = set()
    for piece in striping.pieces(0, blocks * ALIGN, blocks * ALIGN):
        places |= {(piece.file, piece.offset + at) for at in range(0, piece.nbytes, ALIGN)}
        taken[piece.file] += piece.nbytes
    assert len(places) == blocks
    rounds = blocks // (sum(weights) * stripe)
    for weight, nbytes in zip(weights, taken, strict=True):
        assert rounds * weight <= nbytes / striping.stripe <= (rounds + 1) * weight


@given(striped_ranges())
def test_equal_weights_are_the_layout_without_any(case: tuple[Striping, int, int, int, int]) -> None:
    striping, total, address, nbytes, request = case
    even = replace(striping, weights=())
    ones = replace(striping, weights=(1,) * striping.files)
    assert ones.file_sizes(total) == even.file_sizes(total)
    assert [*ones.pieces(address, nbytes, request)] == [*even.pieces(address, nbytes, request)]
    stripe, files = striping.stripe, striping.files
    for piece in even.pieces(address, nbytes, request):
        number, within = divmod(address + piece.start, stripe)
        assert (piece.file, piece.offset) == (number % files, number // files * stripe + within)


def test_the_order_of_a_round_is_what_stores_that_are_there_have() -> None:
    striping = Striping(files=3, stripe=ALIGN, weights=(3, 2, 1))
    found = [(piece.file, piece.offset // ALIGN) for piece in striping.pieces(0, 8 * ALIGN, ALIGN)]
    assert found == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (0, 3), (1, 2)]


@given(striped_ranges())
def test_files_are_just_large_enough(case: tuple[Striping, int, int, int, int]) -> None:
    striping, total, *_ = case
    used = [ALIGN] * striping.files
    for piece in striping.pieces(0, total, total):
        used[piece.file] = max(used[piece.file], piece.offset + piece.nbytes)
    assert striping.file_sizes(round_up(total)) == tuple(used)


def test_an_array_that_a_changed_manifest_lacks_is_an_error_of_the_store() -> None:
    with pytest.raises(StoreError, match=r"no array 'weights\.0'"):
        Layout(extents=())["weights.0"]
