"""Checksums beside the drive's work: blocks are hashed before anybody gets them, and no buffer is looked at later."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.store import ALIGN, Layout, Store, checked, digests
from penstock.store.checked import CheckedFiles
from penstock.store.packed import PackedFile
from tests.store.test_digests import GRID, flip, noise, read

LAYOUT = Layout.build([("weights", 61 * ALIGN, 2)], {"weights": GRID})
BLOCKS = [span for _, span in LAYOUT["weights"].spans()]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """One whose requests are cut into parts and hashed beside, as large ones are."""
    monkeypatch.setattr(checked, "LAST", 8 * ALIGN)
    monkeypatch.setattr(checked, "AT_ONCE", 0)
    (tmp_path / "drive").mkdir()
    with Store.create([tmp_path / "drive"], LAYOUT, model={}) as made:
        yield made


@given(st.data())
def test_parts_are_all_blocks_in_order_and_the_last_is_small(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=80))
    last = data.draw(st.integers(1, 200)) << 12
    starts = [sum(sizes[:i]) << 12 for i in range(len(sizes) + 1)]
    blocks = [range(a, b) for a, b in itertools.pairwise(starts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "LAST", last)
        parts = [*checked.halves(blocks)]
    assert [block for part in parts for block in part] == blocks
    assert all(parts)
    assert len(parts[-1]) == 1 or parts[-1][-1].stop - parts[-1][0].start <= last


def test_damage_in_any_part_of_a_request_is_found_and_named(store: Store) -> None:
    store.write("weights", 0, noise(61 * ALIGN))
    assert (read(store, "weights") == noise(61 * ALIGN)).all()
    assert len([*checked.halves(BLOCKS)]) > 2
    (path,) = store.paths
    for block in BLOCKS:
        flip(path / "penstock.store", block.stop - 1)
        with pytest.raises(StoreError, match=f"weights is damaged in bytes {block.start} to {block.stop} of slot 0"):
            read(store, "weights")
        flip(path / "penstock.store", block.stop - 1)
    assert (read(store, "weights") == noise(61 * ALIGN)).all()


def test_what_a_write_is_read_by_is_the_checksum_of_each_block(store: Store) -> None:
    content = noise(61 * ALIGN)
    store.write("weights", 0, content)
    wanted = [digests.checksum(content[block.start : block.stop].data) for block in BLOCKS]
    assert store.lend("weights", 0).digests.tolist() == wanted


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_error_of_the_drive_comes_when_nobody_looks_at_the_buffer_any_more(
    store: Store, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    store.write("weights", 0, noise(61 * ALIGN))
    begun, looks = threading.Event(), list[bool]()

    def slowly(view: memoryview, blocks: Any) -> list[int]:
        begun.set()
        looks.append(True)
        threading.Event().wait(0.1)
        looks.pop()
        return digests.checksums(view, blocks)

    moved = getattr(PackedFile, verb)
    requests = 0

    def fails(self: PackedFile, offset: int, view: memoryview) -> None:
        nonlocal requests
        requests += 1
        if verb == "write" or requests == 2:
            assert begun.wait(10)
            raise StoreError("the drive failed")
        moved(self, offset, view)

    monkeypatch.setattr(checked, "checksums", slowly)
    monkeypatch.setattr(PackedFile, verb, fails)
    with pytest.raises(StoreError, match="the drive failed"):
        getattr(store, verb)("weights", 0, noise(61 * ALIGN))
    assert not looks
    monkeypatch.undo()
    if verb == "write":
        with pytest.raises(StoreError, match="weights was never written"):
            read(store, "weights")


def test_a_write_does_not_wait_for_a_thread_that_hashes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are busy leave it to the thread that asks."""

    class Busy:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def submit(self, *_: Any) -> Future[list[int]]:
            return Future()  # never begun

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(checked, "ThreadPoolExecutor", Busy)
    files = CheckedFiles(store.files)
    content = noise(61 * ALIGN)
    found = files.write(LAYOUT["weights"], BLOCKS, content.data.cast("B"), 0)
    assert found == digests.checksums(content.data.cast("B"), BLOCKS)
