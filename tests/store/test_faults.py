"""What goes wrong with disks: full, failing, read-only, without direct I/O; on real file systems, made by root."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import StoreError
from penstock.store import ALIGN, Layout, Region, Store, aligned_bytes, directory, packed, written_snapshot
from penstock.store.directory import DirectoryLock, in_memory
from penstock.store.facts import store_exists
from penstock.store.manifest import DATA
from penstock.store.removal import delete_store
from tests import faults, warm
from tests.faults import Hook, Nth, error, failing, fill, intercepted
from tests.store.test_store import random_bytes

LAYOUT = Layout.build([("a", 64 * ALIGN, 1)], {"a": (Region(nbytes=64 * ALIGN, block=ALIGN),)})
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create([tmp_path / "d"], LAYOUT, model={}) as store:
        yield store


# ---- full disks


def test_a_full_disk_is_an_error_before_anything_is_written(small_disk: Path) -> None:
    before = set(small_disk.iterdir())
    with pytest.raises(
        StoreError, match=r"needs 64.5 MiB on this file system, 1\d\.?\d* MiB are free: free some space"
    ):
        Store.create([small_disk / "d"], Layout.build([("a", 64 * MIB, 1)]), model={})
    assert set(small_disk.iterdir()) == before


def test_two_directories_on_one_disk_share_its_room(small_disk: Path) -> None:
    paths = [small_disk / "a", small_disk / "b"]
    with pytest.raises(StoreError, match=r"needs 20\.5 MiB on this file system"):
        Store.create(paths, Layout.build([("a", 20 * MIB, 1)]), model={})
    Store.create(paths, Layout.build([("a", 8 * MIB, 1)]), model={}).close()


def test_a_disk_that_fills_up_during_creation(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What statvfs says can be out of date: the reservation itself is what counts."""
    monkeypatch.setattr(packed, "free_bytes", lambda _: 1 << 40)
    before = set(small_disk.iterdir())
    with pytest.raises(StoreError, match="64 MiB are needed") as caught:
        Store.create([small_disk / "d"], Layout.build([("a", 64 * MIB, 1)]), model={})
    assert caught.value.errno == errno.ENOSPC
    assert set(small_disk.iterdir()) == before


def test_a_disk_that_has_room_for_the_data_only(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(small_disk.iterdir())
    stat = os.statvfs(small_disk)
    layout = Layout.build([("a", stat.f_bavail * stat.f_frsize - 40 * ALIGN, 1)])
    with pytest.raises(StoreError, match="are free"):
        Store.create([small_disk / "d"], layout, model={})
    assert set(small_disk.iterdir()) == before
    monkeypatch.setattr(packed, "free_bytes", lambda _: 1 << 40)
    with pytest.raises(StoreError, match=r"d/commit\.\d cannot be written: No space left"):
        Store.create([small_disk / "d"], layout, model={})
    assert set(small_disk.iterdir()) == before


def test_a_store_keeps_working_on_a_disk_that_others_fill(small_disk: Path) -> None:
    data = random_bytes(4 * MIB)
    with Store.create([small_disk / "d"], Layout.build([("a", len(data), 1)]), model={}) as store:
        fill(small_disk / "hog")
        store.write("a", 0, data)
        for step in range(4):
            store.commit({"step": step, "state": "x" * 10_000})
    with Store.open([small_disk / "d"]) as store:
        out = aligned_bytes(len(data))
        store.read("a", 0, out)
        assert np.array_equal(out, data)
        assert store.last_commit() == {"step": 3, "state": "x" * 10_000}


def test_a_snapshot_on_a_full_disk_leaves_nothing(small_disk: Path) -> None:
    before = set(small_disk.iterdir())
    with (
        pytest.raises(StoreError, match=r"the snapshot needs 64 MiB, .* are free"),
        written_snapshot(small_disk / "s", [("a", 64 * MIB)], {}),
    ):
        pass
    assert set(small_disk.iterdir()) == before


LIMITED = """
import resource, sys
from pathlib import Path
from penstock.errors import StoreError
from penstock.store import Layout, Store
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    Store.create([Path(sys.argv[1])], Layout.build([("a", 4 << 20, 1)]), model={})
except StoreError as e:
    print(e)
"""


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    path = tmp_path / "d"
    run = warm.run(["-c", LIMITED, path])
    assert "4.01 MiB are needed" in run.stdout
    assert "a limit on the size of files" in run.stdout
    assert not path.exists()


def test_a_file_system_that_cannot_preallocate_gets_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        failing("posix_fallocate", errno.EOPNOTSUPP, monkeypatch),
        Store.create([tmp_path / "d"], Layout.build([("a", 5 * MIB + ALIGN, 1)]), model={}) as store,
    ):
        file = tmp_path / "d" / "penstock.store"
        assert file.stat().st_blocks * 512 >= 5 * MIB + ALIGN
        out = aligned_bytes(5 * MIB + ALIGN)
        out[:] = 1
        store.zero("a")
        store.read("a", 0, out)
        assert not out.any()


# ---- interrupted creation

KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.store import Layout, Store
rename, left = os.rename, int(sys.argv[1])
def die_later(*names):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    rename(*names)
os.rename = die_later
Store.create([Path(p) for p in sys.argv[2:]], Layout.build([("a", 4096, 1)]), model={})
"""


@pytest.mark.parametrize("done", [0, 1])
def test_a_creation_that_was_killed_can_be_repeated(tmp_path: Path, done: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    run = warm.run(["-c", KILLED, str(done), *paths])
    assert run.returncode == -signal.SIGKILL
    with pytest.raises(StoreError, match="creation was interrupted, delete the store"):
        Store.open(paths)
    assert store_exists(paths) == (done > 0)
    if done:
        delete_store(paths)
    Store.create(paths, LAYOUT, model={}).close()
    Store.open(paths).close()


def test_a_creation_that_was_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Store.create([tmp_path / "a", tmp_path / "b"], LAYOUT, model={})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("lasting", [False, True])
def test_after_any_call_that_fails_as_a_store_is_made_the_same_process_can_make_it(
    lasting: bool, tmp_path: Path
) -> None:
    """No lock is kept: not where what an interrupted creation has left cannot be removed, either. ``lasting``: all
    calls after it fail, too, those that remove the lock's file among them."""
    counted = Nth(-1, error(errno.EIO))
    with intercepted(tmp_path / "counted", counted, names=True):
        Store.create([tmp_path / "counted"], LAYOUT, model={}).close()
    refused = 0
    for number in range(len(counted.calls)):
        path, hook = tmp_path / str(number), Nth(number, error(errno.EIO))
        try:
            with intercepted(path, _lasting(hook) if lasting else hook, names=True):
                Store.create([path], LAYOUT, model={}).close()
        except StoreError:
            refused += 1
            if store_exists([path]):  # it was whole, and could not be removed
                delete_store([path])
            Store.create([path], LAYOUT, model={}).close()
        shutil.rmtree(path)
    assert refused > len(counted.calls) // 2


def _lasting(hook: Nth) -> Hook:
    return lambda call, go: error(errno.EIO)(call, go) if hook.struck else hook(call, go)


def test_a_directory_that_cannot_be_looked_at_is_not_kept_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == DATA:
            raise OSError(errno.EIO, "a fault")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", lstat)
        with pytest.raises(StoreError, match="cannot be looked at"):
            Store.create([tmp_path / "d"], LAYOUT, model={})
    Store.create([tmp_path / "d"], LAYOUT, model={}).close()


# ---- read-only


def test_a_read_only_file_system_is_refused(small_disk: Path) -> None:
    Store.create([small_disk / "d"], LAYOUT, model={}).close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for act in (Store.open, delete_store):
        with pytest.raises(StoreError, match="not writable: its file system is mounted read-only"):
            act([small_disk / "d"])
    with pytest.raises(StoreError, match=r"not writable|cannot be created"):
        Store.create([small_disk / "new"], LAYOUT, model={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="not writable"):
        Store.create([path], LAYOUT, model={})


# ---- failing drives


def test_a_drive_that_fails(small_disk: Path) -> None:
    """The image under the file system is cut short: the kernel itself reports EIO."""
    with Store.create([small_disk / "d"], Layout.build([("a", 8 * MIB, 1)]), model={}) as store:
        store.write("a", 0, random_bytes(8 * MIB))
        store.flush()
        os.truncate(small_disk.with_name("disk.img"), ALIGN)
        with pytest.raises(
            StoreError, match=r"penstock\.store: read of 8388608 bytes at offset 0 stopped after 0"
        ) as caught:
            store.read("a", 0, aligned_bytes(8 * MIB))
        assert caught.value.errno == errno.EIO


Call = Callable[[int, list[memoryview], int], int]


def inject(
    monkeypatch: pytest.MonkeyPatch, verb: str, fault: Callable[[Call, int, list[memoryview], int], int]
) -> None:
    real: Call = getattr(os, verb)
    monkeypatch.setattr(os, verb, lambda fd, views, offset: fault(real, fd, views, offset))


@pytest.mark.parametrize(
    ("direct", "most"), [(None, 3 * ALIGN), (None, 3 * ALIGN + 17), (False, 1), (False, 3000), (False, 3 * ALIGN + 17)]
)
def test_short_transfers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool | None, most: int) -> None:
    """Direct I/O goes on from a block's start, buffered I/O from the very byte."""
    data = random_bytes(64 * ALIGN if most > 1 else 2 * ALIGN)
    with Store.create([tmp_path / "d"], LAYOUT, model={}, direct=direct) as store:

        def short(real: Call, fd: int, views: list[memoryview], offset: int) -> int:
            if store.direct:
                return min(most, real(fd, [views[0][: -(-most // ALIGN) * ALIGN]], offset))
            return real(fd, [views[0][:most]], offset)

        inject(monkeypatch, "pwritev", short)
        inject(monkeypatch, "preadv", short)
        store.write("a", 0, data)
        out = aligned_bytes(len(data))
        store.read("a", 0, out)
        assert np.array_equal(out, data)


@pytest.mark.parametrize(("verb", "number"), [("write", errno.EIO), ("write", errno.ENOSPC), ("read", errno.EIO)])
def test_errors_name_file_offset_and_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch, verb: str, number: int
) -> None:
    def fail_later(real: Call, fd: int, views: list[memoryview], offset: int) -> int:
        if offset >= 10 * ALIGN:
            raise OSError(number, os.strerror(number))
        return real(fd, [views[0][: 10 * ALIGN - offset]], offset)

    inject(monkeypatch, {"write": "pwritev", "read": "preadv"}[verb], fail_later)
    message = (
        rf"d/penstock\.store: {verb} of 65536 bytes at offset 32768 stopped after 8192 bytes: {os.strerror(number)}: "
    )
    with pytest.raises(StoreError, match=message) as caught:
        getattr(store, verb)("a", 8 * ALIGN, aligned_bytes(16 * ALIGN))
    assert caught.value.errno == number


def test_a_file_that_ends_early(store: Store) -> None:
    os.truncate(store.paths[0] / "penstock.store", 20 * ALIGN)
    with pytest.raises(StoreError, match="read of 262144 bytes at offset 0 stopped after 81920 bytes: the file ended"):
        store.read("a", 0, aligned_bytes(64 * ALIGN))


def test_a_failed_flush_fails_the_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit({"step": 1})
    store.write("a", 0, random_bytes(ALIGN))
    with failing("fdatasync", errno.EIO, monkeypatch):
        for _ in range(2):
            with pytest.raises(StoreError, match="flush failed"):
                store.commit({"step": 2})
    assert store.last_commit() == {"step": 1}


def test_after_an_error_no_thread_touches_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"d{i}" for i in range(4)]
    started, busy = threading.Barrier(2), 0

    def fault(real: Call, fd: int, views: list[memoryview], offset: int) -> int:
        nonlocal busy
        if "d0" in os.readlink(f"/proc/self/fd/{fd}"):
            started.wait()  # another piece is under way by now
            raise OSError(errno.EIO, "injected")
        busy += 1
        if busy == 1:
            started.wait()
        time.sleep(0.05)
        busy -= 1
        return real(fd, views, offset)

    with Store.create(paths, LAYOUT, model={}, stripe=16 * ALIGN) as store:
        inject(monkeypatch, "preadv", fault)
        with pytest.raises(StoreError, match="injected"):
            store.read("a", 0, aligned_bytes(64 * ALIGN))
        assert busy == 0


# ---- file systems without direct I/O


def refuse_direct_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opener(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", opener)


def refuse_direct_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(real: Call, fd: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, views, offset)

    inject(monkeypatch, "preadv", fault)


@pytest.mark.parametrize("commits", [1, 2, 3])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_commit_that_cannot_be_read_once_is_not_passed_over(tmp_path: Path, number: int, commits: int) -> None:
    """Whichever call fails: who opens the store finds its last commit, or an error; and the commit stays."""
    path = tmp_path / "d"
    with Store.create([path], LAYOUT, model={}) as store:
        for step in range(commits):
            store.commit({"step": step})
    counted = Nth(-1, error(number), of_a_commit)
    with intercepted(path, counted, names=True):
        Store.open([path]).close()
    refused = list[str]()
    for at in range(len(counted.calls)):
        with intercepted(path, Nth(at, error(number), of_a_commit), names=True):
            try:
                with Store.open([path]) as store:
                    assert store.last_commit() == {"step": commits - 1}
            except StoreError as failed:
                refused.append(str(failed))
        with Store.open([path]) as store:
            assert store.last_commit() == {"step": commits - 1}
    assert len(refused) > 2
    assert all("commit." in said for said in refused)


def of_a_commit(call: faults.Call) -> bool:
    return Path(call.path).name.startswith("commit.")


def test_what_helps_is_said_of_a_commit_that_cannot_be_read(tmp_path: Path) -> None:
    """Not to remove it: a step that was under way has written over what the commit before names."""
    path = tmp_path / "d"
    with Store.create([path], LAYOUT, model={}) as store:
        store.commit({"step": 1})
        store.commit({"step": 2})
    of_the_last = Nth(0, error(errno.EIO), lambda call: call.path.endswith("commit.0"))
    with (
        intercepted(path, of_the_last, names=True),
        pytest.raises(StoreError, match=r"commit\.0 cannot be read: .* so try again; if it stays so, go on from a"),
    ):
        Store.open([path])


@pytest.mark.parametrize("refuse", [refuse_direct_open, refuse_direct_read])
def test_without_direct_io_it_works_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], None]
) -> None:
    refuse(monkeypatch)
    data = random_bytes(64 * ALIGN)
    with pytest.warns(UserWarning, match="O_DIRECT"):
        store = Store.create([tmp_path / "d"], LAYOUT, model={})
    with store:
        assert not store.direct
        store.write("a", 0, data)
        store.flush()
        out = aligned_bytes(len(data))
        store.read("a", 0, out)
        assert np.array_equal(out, data)
    with pytest.raises(StoreError, match="does not do direct I/O"):
        Store.create([tmp_path / "e"], LAYOUT, model={}, direct=True)
    assert not (tmp_path / "e").exists()


@pytest.mark.filterwarnings("error")
def test_a_pipe_in_the_place_of_a_stores_file_says_nothing_of_its_file_system(tmp_path: Path) -> None:
    Store.create([tmp_path], LAYOUT, model={}).close()
    (tmp_path / DATA).unlink()
    os.mkfifo(tmp_path / DATA)
    with pytest.raises(StoreError, match=f"{DATA} cannot be opened: is not a regular file"):
        Store.open([tmp_path])


def test_buffered_io_can_be_asked_for(tmp_path: Path) -> None:
    with Store.create([tmp_path / "d"], LAYOUT, model={}, direct=False) as store:
        assert not store.direct


def test_a_drive_without_room_for_the_lock_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.build([("weights", 4096, 1)])
    with (
        failing("pwrite", errno.ENOSPC, monkeypatch),
        pytest.raises(StoreError, match="cannot be locked: No space left on device: free some space"),
    ):
        Store.create([tmp_path / "store"], layout, model={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EACCES, "change its owner or mode"),
        (errno.EMFILE, "raise the limit of open files"),
        (errno.ENOSPC, "free some space"),
        (errno.ENOLCK, "use a local file system"),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value],
)
def test_a_lock_that_cannot_be_had_says_what_helps(
    code: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory.files, "descriptor", fails)
    with pytest.raises(StoreError, match=rf"lock cannot be locked: {os.strerror(code)}.*: .*{advice}"):
        DirectoryLock(tmp_path)


def test_a_mount_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes the bytes as they are."""
    (mounts := tmp_path / "mountinfo").write_bytes(b"1 2 0:0 / /media/M\xfcsli rw - ext4 /dev/sdb rw\n")
    monkeypatch.setattr(directory, "Path", lambda _: mounts)
    assert not in_memory(tmp_path)
