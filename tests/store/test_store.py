"""The store on real files with real processes: what is written is what is read, and one run at a time."""

import errno
import gc
import json
import os
import shutil
import signal
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.errors import StoreError
from penstock.store import ALIGN, Layout, Region, Store, aligned_bytes, digests, records
from penstock.store.directory import in_memory
from penstock.store.facts import facts_of, store_exists
from penstock.store.manifest import require_alike
from penstock.store.removal import delete_store
from penstock.store.striping import Striping
from tests import warm

GRIDS = {name: (Region(nbytes=blocks * ALIGN, block=ALIGN),) for name, blocks in (("weights", 300), ("state", 101))}
LAYOUT = Layout.build([("weights", 300 * ALIGN, 1), ("state", 100 * ALIGN + 5, 2)], GRIDS)
MODEL = {"groups": [{"name": "block", "shapes": [[2, 3], [4]]}], "dtype": "fp32"}
STRIPE = 4 * ALIGN


def random_bytes(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    buffer = aligned_bytes(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return buffer


def read(store: Store, name: str, offset: int = 0, nbytes: int | None = None, slot: int = 0) -> npt.NDArray[np.uint8]:
    buffer = aligned_bytes(store.layout[name].stride - offset if nbytes is None else nbytes)
    buffer[:] = 0xAA
    store.read(name, offset, buffer, slot)
    return buffer


def directories(root: Path, count: int) -> list[Path]:
    return [root / f"drive{i}" for i in range(count)]


@pytest.fixture(params=[1, 3])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return directories(tmp_path, request.param)


@pytest.fixture
def store(paths: list[Path]) -> Iterator[Store]:
    with Store.create(paths, LAYOUT, model=MODEL, stripe=STRIPE) as store:
        yield store


def test_a_new_store_has_nothing_to_read_but_what_was_made_zeros(store: Store) -> None:
    with pytest.raises(StoreError, match="weights was never written"):
        read(store, "weights")
    before = store.stats.bytes_written
    store.zero("weights")
    assert store.stats.bytes_written == before
    assert not read(store, "weights").any()
    assert store.last_commit() is None


def test_a_new_store_has_its_space_reserved(store: Store) -> None:
    files = [path / "penstock.store" for path in store.paths]
    assert sum(file.stat().st_blocks * 512 for file in files) >= LAYOUT.nbytes
    assert not any(path.with_name("penstock.store.partial").exists() for path in files)


def test_what_is_written_is_read_also_after_closing(paths: list[Path]) -> None:
    written = {("weights", 0): random_bytes(LAYOUT["weights"].stride, 1)}
    written |= {("state", slot): random_bytes(LAYOUT["state"].stride, 2 + slot) for slot in (0, 1)}
    with Store.create(paths, LAYOUT, model=MODEL, stripe=STRIPE) as store:
        for (name, slot), data in written.items():
            store.write(name, 0, data, slot)
        store.commit({})
        assert store.stats.bytes_written == LAYOUT.nbytes
    with Store.open(paths) as store:
        assert store.layout == LAYOUT
        assert store.model == MODEL
        for (name, slot), data in written.items():
            assert np.array_equal(read(store, name, slot=slot), data)
        assert store.stats.bytes_read == LAYOUT.nbytes


def test_parts_of_an_extent_are_where_they_were_put(store: Store) -> None:
    whole = random_bytes(LAYOUT["weights"].stride)
    order = np.random.default_rng(1).permutation(len(whole) // (7 * ALIGN))
    for i in order:
        part = slice(i * 7 * ALIGN, (i + 1) * 7 * ALIGN)
        store.write("weights", part.start, whole[part])
    end = len(order) * 7 * ALIGN
    assert np.array_equal(read(store, "weights", nbytes=end), whole[:end])
    assert np.array_equal(read(store, "weights", 5 * ALIGN, 11 * ALIGN), whole[5 * ALIGN : 16 * ALIGN])


def test_stripes_lie_in_the_files_as_documented(store: Store) -> None:
    data = random_bytes(LAYOUT["weights"].stride)
    store.write("weights", 0, data)
    store.flush()
    files = [np.fromfile(path / "penstock.store", np.uint8) for path in store.paths]
    for number in range(len(data) // STRIPE):
        place = number // len(files) * STRIPE
        stripe = files[number % len(files)][place : place + STRIPE]
        assert np.array_equal(stripe, data[number * STRIPE : (number + 1) * STRIPE])


def test_many_threads_at_once(paths: list[Path]) -> None:
    data = random_bytes(LAYOUT["weights"].stride)
    share = 30 * ALIGN

    def work(drives: Store, worker: int) -> None:
        mine = slice(worker * share, (worker + 1) * share)
        for _ in range(5):
            drives.write("weights", mine.start, data[mine])
            assert np.array_equal(read(drives, "weights", mine.start, share), data[mine])

    with (
        Store.create(paths, LAYOUT, model=MODEL, stripe=STRIPE) as drives,
        ThreadPoolExecutor(8) as pool,
    ):
        for run in [pool.submit(work, drives, worker) for worker in range(8)]:
            run.result()
        assert drives.stats.bytes_read == drives.stats.bytes_written == 8 * 5 * share


def test_a_request_larger_than_one_system_call(tmp_path: Path) -> None:
    data = random_bytes(20 << 20)
    with Store.create([tmp_path / "d"], Layout.build([("a", len(data), 1)]), model={}) as store:
        store.write("a", 0, data)
        assert np.array_equal(read(store, "a"), data)


def test_memoryviews_of_any_item_size_are_buffers(store: Store) -> None:
    data = random_bytes(ALIGN).view(np.float32)
    store.write("weights", 0, data.data)
    out = aligned_bytes(ALIGN)
    store.read("weights", 0, out.view(np.float64).data)
    assert np.array_equal(out, data.view(np.uint8))


def test_unaligned_buffers_are_refused(store: Store) -> None:
    buffer = aligned_bytes(3 * ALIGN)
    for wrong in (buffer[512 : 512 + ALIGN], buffer[:1000]):
        with pytest.raises(AssertionError, match="aligned"):
            store.read("weights", 0, wrong)
    with pytest.raises(AssertionError, match="aligned"):
        store.write("weights", 512, buffer[:ALIGN])


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o755)
    with Store.create([tmp_path / "new", empty], LAYOUT, model=MODEL) as store:
        for path in store.paths:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_delete_removes_the_stores_own_files_only(paths: list[Path]) -> None:
    Store.create(paths, LAYOUT, model=MODEL).close()
    (paths[0] / "thesis.txt").write_text("mine")
    assert store_exists(paths)
    delete_store(paths)
    assert not store_exists(paths)
    assert [file.name for path in paths for file in path.iterdir()] == ["thesis.txt"]


# ---- directories that cannot be used


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere/store does not exist and neither does .*nowhere"):
        Store.create([tmp_path / "nowhere" / "store"], LAYOUT, model=MODEL)
    with pytest.raises(StoreError, match="does not exist"):
        Store.open([tmp_path / "nowhere"])
    assert not any(tmp_path.iterdir())


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a directory"):
        Store.create([tmp_path / "file"], LAYOUT, model=MODEL)


def test_the_same_directory_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(StoreError, match="the same directory"):
        Store.create([tmp_path / "a", tmp_path / "link"], LAYOUT, model=MODEL)
    with pytest.raises(StoreError, match="none was given"):
        Store.create([], LAYOUT, model=MODEL)


def test_a_directory_whose_name_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"caf\\xe9' is not UTF-8"):
        Store.create([Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))], LAYOUT, model=MODEL)
    assert not any(tmp_path.iterdir())


def test_a_directory_with_a_store_is_not_taken_again(store: Store, tmp_path: Path) -> None:
    store.close()
    with pytest.raises(StoreError, match="holds a store already"):
        Store.create([tmp_path / "other", *store.paths], LAYOUT, model=MODEL)
    assert not (tmp_path / "other").exists()
    Store.open(store.paths).close()


def test_opening_what_is_no_store_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        Store.open([tmp_path])
    assert not any(tmp_path.iterdir())


def test_a_file_system_in_memory_gets_a_warning() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or not in_memory(memory):
        pytest.skip("no tmpfs at /dev/shm")
    path = memory / f"penstock-test-{os.getpid()}"
    try:
        with pytest.warns(UserWarning, match="in memory"):
            store = Store.create([path], LAYOUT, model=MODEL)
        with store:
            data = random_bytes(ALIGN)
            store.write("state", 0, data)
            assert np.array_equal(read(store, "state", nbytes=ALIGN), data)
        with pytest.warns(UserWarning, match="in memory"):
            Store.open([path]).close()
    finally:
        delete_store([path])
        path.rmdir()


# ---- manifests


def test_directories_swapped_missing_or_of_another_store(tmp_path: Path) -> None:
    a, b, c = directories(tmp_path, 3)
    Store.create([a, b, c], LAYOUT, model=MODEL).close()
    with pytest.raises(StoreError, match=f"another order .* give {a}, {b}, {c}"):
        Store.open([c, a, b])
    with pytest.raises(StoreError, match=r"has 3 directories, missing here: number 2 \(made as .*drive1\)"):
        Store.open([a, c])
    other = tmp_path / "other"
    Store.create([other], LAYOUT, model=MODEL).close()
    with pytest.raises(StoreError, match="different stores"):
        Store.open([a, b, other])


def test_directories_that_are_not_those_of_one_store_are_told_without_opening_it(tmp_path: Path) -> None:
    a, b, c = directories(tmp_path, 3)
    Store.create([a, b], LAYOUT, model=MODEL).close()
    with pytest.raises(StoreError, match=f"another order .* give {a}, {b}"):
        facts_of([b, a])
    assert "in 2 of the 3 directories that are given: leave out the others" in str(facts_of([a, b, c]).unfit)
    assert "missing here: number 2" in str(facts_of([a]).unfit)
    assert facts_of([a, b]).unfit is None
    with pytest.raises(StoreError, match=f"part number 2 of a store, and the first one, .* made as {a}"):
        facts_of([b, c])
    shutil.copytree(b, c)
    assert f"{b} and {c} have the same part of one store" in str(facts_of([a, b, c]).unfit)
    with pytest.raises(StoreError, match=f"{b} and {c} have the same part of one store"):
        Store.open([a, b, c])


def edit_manifest(path: Path, change: str) -> None:
    file = path / "manifest.json"
    text = file.read_text()
    document = json.loads(text)
    if change == "truncated":
        file.write_text(text[: len(text) // 2])
    elif change == "bit":
        file.write_text(text.replace("fp32", "fp16"))
    elif change == "version":
        file.write_text(json.dumps(document | {"format": 99}))
    elif change == "foreign":
        file.write_text(json.dumps({"name": "something else"}))
    elif change == "gone":
        file.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("truncated", "damaged"),
        ("bit", "checksum does not match"),
        ("version", "format 99, this version of penstock reads format 1"),
        ("foreign", "not a store of penstock's"),
        ("gone", "cannot be read"),
    ],
)
def test_wrong_manifests_are_refused(store: Store, change: str, message: str) -> None:
    store.close()
    edit_manifest(store.paths[-1], change)
    with pytest.raises(StoreError, match=message):
        Store.open(store.paths)
    with pytest.raises(StoreError, match="holds a store already"):
        Store.create(store.paths, LAYOUT, model=MODEL)


def test_a_file_that_may_not_be_read_or_grow_says_what_to_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(number: int) -> Callable[..., None]:
        def call(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    store.commit({"step": 1})
    store.close()
    with monkeypatch.context() as patched:
        patched.setattr(records.files, "update", refused(errno.EFBIG))
        with pytest.raises(StoreError, match=r"File too large: raise the limit on the size of files \(ulimit -f\)"):
            Store.open(store.paths)
    monkeypatch.setattr(records, "read_bounded", refused(errno.EACCES))
    with pytest.raises(
        StoreError, match=r"Permission denied \(EACCES\): .*manifest.json belongs to user .* with mode 600"
    ):
        Store.open(store.paths)


def test_a_data_file_of_the_wrong_size_is_refused(store: Store) -> None:
    store.close()
    os.truncate(store.paths[-1] / "penstock.store", ALIGN)
    with pytest.raises(StoreError, match="has 4096 bytes, its manifest says"):
        Store.open(store.paths)


def test_another_model_is_told_by_what_differs(store: Store) -> None:
    require_alike(store.model, json.loads(json.dumps(MODEL)), "here")
    other = json.loads(json.dumps(MODEL))
    other["groups"][0]["shapes"][0][1] = 7
    with pytest.raises(StoreError, match=r"groups\[0\].shapes\[0\]\[1\] is 3 in the store and 7 in this model"):
        require_alike(store.model, other, "here")
    with pytest.raises(StoreError, match=r"tied is only in this model: put back .*, or give another directory"):
        require_alike(store.model, MODEL | {"tied": True}, "here")


# ---- one run at a time

HOLDER = """
import sys, time, os
from pathlib import Path
from penstock.store import Store
store = Store.open([Path(p) for p in sys.argv[2:]])
if sys.argv[1] == "plain" or os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["plain", "fork"])
def test_a_second_process_is_kept_out_until_the_first_dies(paths: list[Path], kind: str) -> None:
    Store.create(paths, LAYOUT, model=MODEL).close()
    with warm.start(["-c", HOLDER, kind, *paths]) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(StoreError, match=f"in use by process {holder.pid}"):
                Store.open(paths)
            with pytest.raises(StoreError, match="in use"):
                delete_store(paths)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            Store.open(paths).close()  # also when a forked child of the dead process lives on
        finally:
            if kind == "fork":
                os.kill(child, signal.SIGKILL)
            holder.kill()


READER = """
import sys, time
from pathlib import Path
from penstock.store import Store
with Store.open([Path(p) for p in sys.argv[1:]], writable=False):
    print("reads", flush=True)
    time.sleep(60)
"""


def test_who_writes_waits_for_who_only_reads_to_end(paths: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """Another process, as ``penstock verify`` is: in the same one it would wait for itself. The wait is said, once."""
    Store.create(paths, LAYOUT, model=MODEL).close()
    with warm.start(["-c", READER, *paths]) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        end = threading.Timer(0.5, reader.kill)
        end.start()
        Store.open(paths).close()
        assert not end.is_alive(), "it has waited"
    said = [message for message in caplog.messages if "waiting for it to end" in message]
    assert len(said) == 1
    assert said[0].startswith(f"{paths[0].absolute()} is in use by a process that only reads it")


def test_a_second_store_in_the_same_process_is_kept_out(store: Store) -> None:
    with pytest.raises(StoreError, match=rf"in use by process {os.getpid()}, which is this one: close what"):
        Store.open(store.paths)
    store.close()
    Store.open(store.paths).close()


# ---- commits


def test_the_last_commit_is_found_again(paths: list[Path]) -> None:
    with Store.create(paths, LAYOUT, model=MODEL) as store:
        for step in range(5):
            store.commit({"step": step, "state": "x" * step * 100_000})
            assert store.last_commit() == {"step": step, "state": "x" * step * 100_000}
    with Store.open(paths) as store:
        assert store.last_commit() == {"step": 4, "state": "x" * 400_000}
        store.commit({"step": 5})
    with Store.open(paths) as store:
        assert store.last_commit() == {"step": 5}


def test_a_torn_commit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "d"
    with Store.create([path], LAYOUT, model=MODEL) as store:
        store.commit({"step": 1})
        store.commit({"step": 2})
        before = (path / "commit.1").read_bytes()
        store.commit({"step": 3})
    after = (path / "commit.1").read_bytes()
    assert (path / "commit.0").read_bytes() != after != before
    end = len(after.rstrip())
    for cut in [*range(0, end, 13), end - 1]:
        torn = after[:cut] + before[cut:]
        (path / "commit.1").write_bytes(torn)
        with Store.open([path]) as store:
            assert store.last_commit() == {"step": 3 if torn == after else 2}
    (path / "commit.1").write_bytes(after)
    with Store.open([path]) as store:
        assert store.last_commit() == {"step": 3}


@pytest.mark.parametrize("taken_over", [6, 7])
def test_a_torn_first_commit_of_a_store_that_takes_over_leaves_it_without_one(tmp_path: Path, taken_over: int) -> None:
    path = tmp_path / "d"
    with Store.create([path], LAYOUT, model=MODEL) as store:
        store.commits.count_from(taken_over - 1)
        store.commit({"step": 3})
    file = path / f"commit.{taken_over % 2}"
    with Store.open([path]) as store:
        assert (store.commits.sequence, store.commits.path, store.last_commit()) == (taken_over, file, {"step": 3})
    file.write_bytes(file.read_bytes()[: records.RESERVE // 2] + b"torn".ljust(records.RESERVE // 2))
    with Store.open([path]) as store:
        assert (store.commits.sequence, store.last_commit()) == (0, None)


@pytest.mark.parametrize("last", [b"\v", b"\f", b"\0", b"}"])
def test_a_commit_file_that_is_filled_up_with_anything_but_blanks_is_damaged(last: bytes, tmp_path: Path) -> None:
    path = tmp_path / "d"
    with Store.create([path], LAYOUT, model=MODEL) as store:
        for step in (1, 2):
            store.commit({"step": step})
        file = store.commits.path
    file.write_bytes(file.read_bytes()[:-1] + last)
    with Store.open([path]) as store:
        assert store.last_commit() == {"step": 1}


def test_a_store_that_is_closed_is_gone_at_once(tmp_path: Path) -> None:
    """Nothing that was caught leads back to who has made or opened it: one of its commit files is blank."""
    gc.disable()
    try:
        for make in (partial(Store.create, layout=LAYOUT, model=MODEL), Store.open):
            opened = make([tmp_path / "d"])
            opened.close()
            gone = weakref.ref(opened)
            del opened
            assert gone() is None
    finally:
        gc.enable()


def test_two_damaged_commits_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "d"
    Store.create([path], LAYOUT, model=MODEL).close()
    (path / "commit.0").write_text("{}")
    with pytest.raises(StoreError, match=r"no commit record can be read: .*commit\.0 .*commit\.1"):
        Store.open([path])


def test_the_commit_of_another_store_is_not_taken(tmp_path: Path) -> None:
    a, b = directories(tmp_path, 2)
    for path, steps in ((a, 2), (b, 8)):
        with Store.create([path], LAYOUT, model=MODEL) as store:
            for step in range(steps):
                store.commit({"step": step})
    (a / "commit.1").write_bytes((b / "commit.1").read_bytes())
    with Store.open([a]) as store:
        assert store.last_commit() == {"step": 1}


def test_data_is_durable_before_the_commit_that_vouches_for_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    store.write("weights", 0, random_bytes(ALIGN))
    store.commit({"step": 1})
    assert synced == ["penstock.store"] * len(store.paths) + ["commit.1"]


COMMITTER = """
import sys
from pathlib import Path
from penstock.store import Store, aligned_bytes
store = Store.open([Path(p) for p in sys.argv[1:]])
buffer = aligned_bytes(store.layout["state"].stride)
for step in range(1, 100_000):
    buffer[:] = step % 251
    store.write("state", 0, buffer, step % 2)
    store.commit({"step": step, "slot": step % 2})
    print(step, flush=True)
"""


def test_a_killed_process_loses_no_acknowledged_commit(paths: list[Path]) -> None:
    Store.create(paths, LAYOUT, model=MODEL).close()
    for delay in (0.0, 0.03, 0.11):
        with warm.start(["-c", COMMITTER, *paths]) as process:
            assert process.stdout is not None
            acknowledged = int(process.stdout.readline())
            time.sleep(delay)
            process.kill()
            acknowledged = max([acknowledged, *map(int, process.stdout.read().split()[:-1])])
        with Store.open(paths) as store:
            record = store.last_commit()
            assert record is not None
            assert record["step"] >= acknowledged
            assert (read(store, "state", slot=record["slot"]) == record["step"] % 251).all()


def test_striping_is_recorded_not_assumed(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    with Store.create(paths, LAYOUT, model=MODEL, stripe=ALIGN) as store:
        data = random_bytes(LAYOUT["weights"].stride)
        store.write("weights", 0, data)
        store.commit({})
    sizes = tuple((path / "penstock.store").stat().st_size for path in paths)
    assert sizes == Striping(files=2, stripe=ALIGN).file_sizes(digests.area(LAYOUT, 2).end)
    with Store.open(paths) as store:
        assert np.array_equal(read(store, "weights"), data)


def test_a_manifest_of_another_program_is_left(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match=r"holds a manifest.json and no store: give another directory"):
        Store.create([tmp_path], LAYOUT, model=MODEL)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("becomes", ["moved", "removed", "a copy of it"])
def test_no_commit_is_written_into_what_is_now_where_a_directory_was(becomes: str, tmp_path: Path) -> None:
    """The record would be in one directory, and what it names in the other."""
    paths = directories(tmp_path, 2)
    with Store.create(paths, LAYOUT, model=MODEL, stripe=STRIPE) as store:
        store.write("weights", 0, random_bytes(LAYOUT["weights"].stride, 1))
        store.commit({"step": 1})
        away = tmp_path / "away"
        paths[1].rename(away)
        if becomes == "removed":
            shutil.rmtree(away)
        if becomes == "a copy of it":
            shutil.copytree(away, paths[1])
        store.write("weights", 0, random_bytes(LAYOUT["weights"].stride, 2))
        said = "it was removed: put it back" if becomes == "removed" else f"it is {away} now: move it back"
        with pytest.raises(StoreError, match=f"drive1 is no longer where it was .*: {said}"):
            store.commit({"step": 2})
    if becomes != "removed":
        shutil.rmtree(paths[1], ignore_errors=True)
        away.rename(paths[1])
        with Store.open(paths) as store:
            assert store.last_commit() == {"step": 1}
