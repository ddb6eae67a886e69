"""Every byte of the disk tier has a checksum: what is read is what was written, or an error that names it."""

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.planner import fit
from penstock.state.slots import Slots
from penstock.store import ALIGN, Layout, Region, Store, aligned_bytes, digests
from penstock.store.removal import delete_store
from penstock.store.striping import Striping
from tests.faults import failing
from tests.models import MODELS, PLAIN
from tests.store.test_store import random_bytes
from tests.training import assert_same_state, budget, run_steps, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = (Region(nbytes=50 * ALIGN, block=4 * ALIGN), Region(nbytes=11 * ALIGN, block=3 * ALIGN))
"""as a group has it: a trainable and a frozen part; both end in a shorter block"""
LAYOUT = Layout.build([("weights", 61 * ALIGN, 2), ("moment", 50 * ALIGN, 2), ("other", 5, 1)], {"weights": GRID})
STRIPE = 5 * ALIGN
BORDERS = sorted({0} | {span.stop for _, span in LAYOUT["weights"].spans()})
CASE = PLAIN
STEPS = steps_of(CASE, 3)


def read(store: Store, name: str, slot: int = 0, *, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
    buffer = aligned_bytes((store.layout[name].stride if stop is None else stop) - start)
    store.read(name, start, buffer, slot)
    return buffer


def place_of(store: Store, address: int) -> tuple[Path, int]:
    """The file and the offset in it of a byte of a store's address space."""
    striping = Striping(files=len(store.paths), stripe=STRIPE)
    (piece,) = striping.pieces(address, 1, 1)
    return store.paths[piece.file] / "penstock.store", piece.offset


def flip(path: Path, offset: int, bit: int = 3) -> None:
    """Turn one bit of a file around."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def flip_extent(store: Store, name: str, slot: int, byte: int) -> tuple[Path, int]:
    """Turn a bit of an extent around; its file, and the offset in it of the page that it is in."""
    page = byte // ALIGN * ALIGN
    path, offset = place_of(store, store.layout[name].address(page, ALIGN, slot))
    flip(path, offset + byte - page)
    return path, offset


@pytest.fixture(params=[1, 3])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return [tmp_path / f"drive{i}" for i in range(request.param)]


@pytest.fixture
def store(paths: list[Path]) -> Iterator[Store]:
    with Store.create(paths, LAYOUT, model={}, stripe=STRIPE) as made:
        yield made


def fill(store: Store, seed: int = 0) -> dict[tuple[str, int], npt.NDArray[np.uint8]]:
    """Write other noise to each slot of each extent; what was written."""
    written = {}
    for extent in store.layout.extents:
        for slot in range(extent.slots):
            written[extent.name, slot] = random_bytes(extent.stride, seed + len(written))
            store.write(extent.name, 0, written[extent.name, slot], slot)
    return written


# ---- blocks


@pytest.mark.sampled(6)
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(("name", "slot"), [("weights", 0), ("weights", 1), ("moment", 1), ("other", 0)])
def test_one_flipped_bit_is_found_and_named(store: Store, name: str, slot: int, reopened: bool) -> None:
    """A bit flips at the first and last byte of each block; all other blocks can be read; and the damage is gone when
    the bit is back."""
    written = fill(store)
    store.commit({})
    if reopened:
        store.close()
        store = Store.open(store.paths)
    with store:
        spans = list(store.layout[name].spans())
        for number, span in spans:
            byte = span.start if number % 2 else span.stop - 1
            path, _ = flip_extent(store, name, slot, byte)
            first, start = place_of(store, store.layout[name].address(span.start, len(span), slot))
            message = (
                rf"{first} at offset {start}\b.*: {name} is damaged in bytes {span.start} to {span.stop} of slot "
                rf"{slot}: .* check the drive and the kernel's log .* a snapshot"
            )
            with pytest.raises(StoreError, match=message) as caught:
                read(store, name, slot)
            assert str(path) in str(caught.value)
            for _, other in spans:
                if other != span:
                    found = read(store, name, slot, start=other.start, stop=other.stop)
                    assert np.array_equal(found, written[name, slot][other.start : other.stop])
            flip_extent(store, name, slot, byte)
        assert np.array_equal(read(store, name, slot), written[name, slot])


@pytest.mark.parametrize("reopened", [False, True])
def test_what_was_never_written_cannot_be_read_and_is_no_whole_store(store: Store, reopened: bool) -> None:
    """Block by block, before and after a commit; a slot that was made zeros is zeros and nothing else."""
    store.write("weights", 4 * ALIGN, random_bytes(4 * ALIGN), 1)
    store.zero("weights", 0)
    store.commit({})
    if reopened:
        store.close()
        store = Store.open(store.paths)
    with store:
        assert len(read(store, "weights", 1, start=4 * ALIGN, stop=8 * ALIGN)) == 4 * ALIGN
        for start, stop in ((0, 4 * ALIGN), (8 * ALIGN, 61 * ALIGN)):
            with pytest.raises(StoreError, match=f"weights was never written in bytes {start} to {stop} of slot 1"):
                read(store, "weights", 1, start=start, stop=stop)
        damage = [text for _, damage in store.verify({"weights": 1, "moment": 0}) for text in damage]
        assert [("never written" in text, text.split(": ")[1].split()[0]) for text in damage] == [
            (True, "weights"),
            (True, "weights"),
            (True, "weights"),
            (True, "moment"),
        ]
        assert [store.is_written(name, slot) for name, slot in (("weights", 0), ("weights", 1))] == [True, False]
        assert not read(store, "weights", 0).any()
        flip_extent(store, "weights", 0, 60 * ALIGN)
        with pytest.raises(StoreError, match=f"weights is damaged in bytes {59 * ALIGN} to {61 * ALIGN} of slot 0"):
            read(store, "weights", 0)


def test_a_write_that_fails_leaves_nothing_to_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the drive has made of it; blocks beside it, and what is written there again, can be read."""
    written = fill(store)
    with failing("pwritev", errno.EIO, monkeypatch), pytest.raises(StoreError):
        store.write("weights", 4 * ALIGN, random_bytes(4 * ALIGN, 9), 1)
    with pytest.raises(StoreError, match=f"never written in bytes {4 * ALIGN} to {8 * ALIGN} of slot 1, or not to its"):
        read(store, "weights", 1)
    assert np.array_equal(read(store, "weights", 1, stop=4 * ALIGN), written["weights", 1][: 4 * ALIGN])
    store.write("weights", 4 * ALIGN, random_bytes(4 * ALIGN, 9), 1)
    assert np.array_equal(read(store, "weights", 1, start=4 * ALIGN, stop=8 * ALIGN), random_bytes(4 * ALIGN, 9))


def test_zeros_are_written_where_a_file_may_have_something_else(store: Store) -> None:
    """Over what was written before, and in a store that another process may have written to before its first commit."""
    fill(store)
    store.zero("moment", 1)
    assert not read(store, "moment", 1).any()
    store.close()
    with Store.open(store.paths) as again:
        again.zero("weights", 0)
        assert again.stats.bytes_written == again.layout["weights"].stride
        assert not read(again, "weights", 0).any()


def test_what_is_there_but_belongs_elsewhere_is_damage(store: Store) -> None:
    """A drive that writes to the wrong place: both the place that it missed and the one that it hit are found."""
    fill(store)
    old, new = (place_of(store, LAYOUT["moment"].address(0, ALIGN, slot)) for slot in (0, 1))
    page = old[0].read_bytes()[old[1] : old[1] + ALIGN]
    with new[0].open("r+b") as file:
        file.seek(new[1])
        file.write(page)
    read(store, "moment", 0)
    with pytest.raises(StoreError, match="moment is damaged"):
        read(store, "moment", 1)


@settings(max_examples=25, deadline=None)
@given(
    writes=st.sets(st.sampled_from(BORDERS[1:-1])),
    reads=st.sets(st.sampled_from(BORDERS[1:-1])),
    order=st.randoms(use_true_random=False),
)
def test_ranges_that_are_cut_elsewhere_agree(
    writes: set[int], reads: set[int], order: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whole blocks in any grouping and order: plans of other chunk sizes share a store."""
    data = random_bytes(LAYOUT["weights"].stride, 1)
    path = tmp_path_factory.mktemp("stores") / "d"
    with Store.create([path], LAYOUT, model={}, direct=False) as store:
        parts = list(itertools.pairwise([0, *sorted(writes), len(data)]))
        order.shuffle(parts)
        for start, stop in parts:
            store.write("weights", start, data[start:stop], 1)
        store.commit({})
    with Store.open([path], direct=False) as store:
        for start, stop in itertools.pairwise([0, *sorted(reads), len(data)]):
            assert np.array_equal(read(store, "weights", 1, start=start, stop=stop), data[start:stop])
    delete_store([path])


@pytest.mark.parametrize(("start", "stop"), [(ALIGN, 4 * ALIGN), (0, 3 * ALIGN), (48 * ALIGN, 51 * ALIGN)])
def test_a_range_that_cuts_a_block_is_our_mistake(store: Store, start: int, stop: int) -> None:
    for move in (store.read, store.write):
        with pytest.raises(AssertionError, match="cuts the block"):
            move("weights", start, aligned_bytes(stop - start))


def test_many_threads_keep_their_blocks_apart(store: Store) -> None:
    data = random_bytes(LAYOUT["weights"].stride)
    parts = list(itertools.pairwise(BORDERS))

    def work(worker: int) -> None:
        for turn in range(20):
            start, stop = parts[worker]
            mine = np.roll(data[start:stop], turn)
            buffer = aligned_bytes(len(mine))
            buffer[:] = mine
            store.write("weights", start, buffer)
            assert np.array_equal(read(store, "weights", start=start, stop=stop), mine)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(len(parts))))
    store.commit({})
    before = read(store, "weights")
    store.close()
    with Store.open(store.paths) as again:
        assert np.array_equal(read(again, "weights"), before)


# ---- commits


def test_what_was_not_committed_is_damage_after_reopening(store: Store) -> None:
    written = fill(store)
    store.commit({})
    store.write("weights", 4 * ALIGN, random_bytes(4 * ALIGN, 9), 1)
    store.close()
    with Store.open(store.paths) as again:
        assert np.array_equal(read(again, "weights", 0), written["weights", 0])
        with pytest.raises(StoreError, match=f"weights is damaged in bytes {4 * ALIGN} to {8 * ALIGN} of slot 1"):
            read(again, "weights", 1)


def area_of(store: Store, slot: int) -> tuple[Path, int]:
    return place_of(store, digests.area(store.layout, 2).address(0, ALIGN, slot))


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_flipped_bit_in_the_checksums_is_found_when_the_store_is_opened(store: Store, commits: int) -> None:
    for number in range(commits):
        fill(store, number)
        store.commit({"step": number})
    store.close()
    newest, other = (commits - 1) % 2, commits % 2
    flip(*area_of(store, other))
    Store.open(store.paths).close()  # what no commit vouches for does not matter
    path, offset = area_of(store, newest)
    flip(path, offset + ALIGN - 1)
    with pytest.raises(
        StoreError, match=rf"{path} at offset {offset}.* the checksums of the last commit .*are damaged"
    ):
        Store.open(store.paths)
    flip(path, offset + ALIGN - 1)
    Store.open(store.paths).close()


def test_a_commit_that_changes_no_data_writes_no_checksums(store: Store) -> None:
    fill(store)
    store.commit({"step": 1})
    before = [path.joinpath("penstock.store").read_bytes() for path in store.paths]
    for step in (2, 3, 4):
        store.commit({"step": step})
    assert [path.joinpath("penstock.store").read_bytes() for path in store.paths] == before
    store.close()
    with Store.open(store.paths) as again:
        read(again, "weights")


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_commit_that_fails_leaves_the_checksums_of_the_one_before(
    store: Store, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the table cannot be written, as if the flush fails, what the last commit vouches for can be read."""
    written = fill(store)
    store.commit({"step": 1})
    store.write("weights", 0, random_bytes(LAYOUT["weights"].stride, 9), 1)
    with failing(call, errno.EIO, monkeypatch), pytest.raises(StoreError):
        store.commit({"step": 2})
    store.close()
    with Store.open(store.paths) as again:
        assert again.last_commit() == {"step": 1}
        assert np.array_equal(read(again, "weights", 0), written["weights", 0])


def test_a_commit_can_be_repeated_when_the_cause_is_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written = fill(store)
    with failing("pwritev", errno.EIO, monkeypatch), pytest.raises(StoreError):
        store.commit({"step": 1})
    store.commit({"step": 1})
    store.close()
    with Store.open(store.paths) as again:
        assert np.array_equal(read(again, "moment", 1), written["moment", 1])


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_flipped_bit_in_the_newest_commit_record(
    store: Store, overwritten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before is taken, and said; what a later step had overwritten meanwhile is never taken for its data."""
    old, new = (random_bytes(LAYOUT["weights"].stride, seed) for seed in (1, 2))
    store.write("weights", 0, old, 0)
    store.commit({"step": 1, "slot": 0})
    store.write("weights", 0, new, 1)
    store.commit({"step": 2, "slot": 1})
    if overwritten:
        store.write("weights", 0, random_bytes(4 * ALIGN, 3), 0)  # the third step has begun
    store.close()
    newest = store.paths[0] / "commit.0"
    flip(newest, newest.read_bytes().index(b'"slot": 1') + 8, bit=0)
    with caplog.at_level(logging.WARNING, "penstock"), Store.open(store.paths) as again:
        assert again.last_commit() == {"step": 1, "slot": 0}
        assert f"{newest} is damaged" in caplog.text
        assert f"the other commit record, {store.paths[0] / 'commit.1'}" in caplog.text
        if overwritten:
            with pytest.raises(StoreError, match=f"weights is damaged in bytes 0 to {4 * ALIGN} of slot 0"):
                read(again, "weights", 0)
        else:
            assert np.array_equal(read(again, "weights", 0), old)


def test_a_blank_commit_record_is_nothing_to_warn_of(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.close()
    Store.open(store.paths).close()
    assert not caplog.records


def test_any_flipped_bit_of_a_manifest_is_found_and_named(store: Store) -> None:
    store.close()
    manifest = store.paths[-1] / "manifest.json"
    for offset in range(0, manifest.stat().st_size, 7):
        flip(manifest, offset)
        with pytest.raises(StoreError, match=r"manifest\.json"):
            Store.open(store.paths)
        flip(manifest, offset)
    Store.open(store.paths).close()


# ---- verification


def test_verification_reads_what_counts_and_names_all_damage(store: Store) -> None:
    fill(store)
    slots = {"weights": 1, "moment": 0, "other": 0}
    of_each = [50, 11, 50, 1]  # weights, in two parts, moment and other
    assert list(store.verify(slots)) == [(pages * ALIGN, []) for pages in of_each]
    for name, slot, page in (("weights", 1, 0), ("weights", 1, 5), ("weights", 1, 60), ("other", 0, 0)):
        flip_extent(store, name, slot, page * ALIGN)
    flip_extent(store, "moment", 1, 0)  # nobody's any more
    damage = [text for _, damage in store.verify(slots) for text in damage]
    assert len(damage) == 3
    for text, where in zip(
        damage,
        (
            f"weights is damaged in bytes 0 to {8 * ALIGN} of slot 1",
            f"weights is damaged in bytes {59 * ALIGN} to {61 * ALIGN} of slot 1",
            f"other is damaged in bytes 0 to {ALIGN} of slot 0",
        ),
        strict=True,
    ):
        assert where in text


def test_verification_goes_on_after_what_cannot_be_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    flip_extent(store, "other", 0, 0)
    real, calls = os.preadv, itertools.count()

    def fail(*args: Any) -> int:
        if next(calls) == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(os, "preadv", fail)
    damage = [text for _, damage in store.verify({"weights": 0, "moment": 0, "other": 0}) for text in damage]
    assert len(damage) == 2
    assert "weights cannot be read" in damage[0]
    assert "penstock.store: read of" in damage[0]
    assert "other is damaged" in damage[1]


# ---- in training


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store after two steps."""
    path = tmp_path_factory.mktemp("stores") / "d"
    train(CASE, budget(path), STEPS[:2], precision="bf16")
    return path


@pytest.mark.parametrize("name", ["weights.0", "weights.2", "low.1", "moment0.2", "moment1.0"])
def test_a_flipped_bit_is_never_trained_on(name: str, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "d")
    with Store.open([tmp_path / "d"]) as found:
        slot = Slots(found).current(name)
        flip_extent(found, name, slot, 5000)
    with (
        wrap(CASE, budget(tmp_path / "d"), precision="bf16") as engine,
        pytest.raises(StoreError, match=rf"penstock\.store at offset \d+: {name} is damaged in bytes"),
    ):
        engine.step(STEPS[2])


def test_a_flipped_bit_in_a_models_buffer_is_found_at_the_start(tmp_path: Path) -> None:
    case = MODELS["skips"]
    train(case, budget(tmp_path / "d"), steps_of(case, 2))
    with Store.open([tmp_path / "d"]) as found:
        name = next(e.name for e in found.layout.extents if e.name.startswith("buffer."))
        flip_extent(found, name, Slots(found).current(name), 0)
    with pytest.raises(StoreError, match=rf"{name} is damaged in bytes"):
        wrap(case, budget(tmp_path / "d"))


def flipping(call: Callable[..., int], folder: str, at: int) -> Callable[..., int]:
    """``os.pwritev`` on a drive that keeps one bit wrong of the ``at``-th write to a folder."""
    count = itertools.count()

    def write(fd: int, views: list[memoryview], offset: int) -> int:
        moved = call(fd, views, offset)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.parent.name == folder and next(count) == at:
            flip(path, offset)
        return moved

    return write


@pytest.mark.parametrize("kind", ["gradient", "activation"])
def test_a_flipped_bit_in_what_waits_on_disk_costs_only_that_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is on disk in two slots: the step is repeated, and nothing is different."""
    places = {"gradients": "disk"} if kind == "gradient" else {"activations": "disk"}
    wanted = train(CASE, budget(tmp_path / "wanted", **places), STEPS, clip_grad_norm=1.0)
    with wrap(CASE, budget(tmp_path / "d", **places), clip_grad_norm=1.0) as engine:
        first = run_steps(engine, STEPS[:2])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", flipping(os.pwritev, "scratch", 2))
            with pytest.raises(
                StoreError, match=rf"scratch/penstock\.store at .*{kind}\..* is damaged .*repeat the step"
            ):
                engine.step(STEPS[2])
        rest = run_steps(engine, STEPS[2:])
    assert first.losses + rest.losses == wanted.losses
    assert_same_state(rest.state, wanted.state)


def test_plans_of_other_chunk_sizes_go_on_from_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(CASE, budget(tmp_path / "wanted"), STEPS)
    for count, chunk in enumerate((4096, 16384, 1 << 21)):
        monkeypatch.setattr(fit, "CHUNKS", (chunk,))
        found = train(CASE, budget(tmp_path / "d"), STEPS[count : count + 1])
    assert found.losses == wanted.losses[-1:]
    assert_same_state(found.state, wanted.state)
