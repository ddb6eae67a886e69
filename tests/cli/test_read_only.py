"""A drive that takes no writes any more can be rescued from: verify and export read it, and change nothing."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import StoreError
from penstock.store.directory import DirectoryLock
from penstock.store.layout import Layout
from penstock.store.records import RESERVE
from penstock.store.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUT = Layout.build([("a", 4096, 2)])


def _state(folder: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """Bytes, times and modes of all that is there, and of the folders themselves."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        stat = path.stat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (data, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_mode)
    return found


def _reads(run: Path, out: Path) -> list[list[str]]:
    return [["verify", str(run)], ["verify", str(run / "store")], ["export", str(run), str(out), "--overwrite"]]


def test_who_only_reads_changes_nothing(a_run: Path, tmp_path: Path) -> None:
    """Nor what SIGTERM does to the process."""
    before, ended_by = _state(a_run), signal.getsignal(signal.SIGTERM)
    for words in _reads(a_run, tmp_path / "out"):
        assert main(words) == 0, words
        assert _state(a_run) == before, words
        assert signal.getsignal(signal.SIGTERM) is ended_by, words


@pytest.fixture
def read_only_disk(finished_run: Path, small_disk: Path) -> Iterator[Path]:
    """A run on a file system that is mounted to be read only."""
    run = shutil.copytree(finished_run, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        (run / "store" / "lock").touch()
    return run


def test_a_drive_that_takes_no_writes_is_read(read_only_disk: Path, tmp_path: Path) -> None:
    before = _state(read_only_disk)
    for words in _reads(read_only_disk, tmp_path / "out"):
        assert main(words) == 0, words
    assert _state(read_only_disk) == before
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_run_on_a_drive_that_takes_no_writes_is_not_gone_on_with(
    read_only_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _state(read_only_disk)
    assert main(["resume", str(read_only_disk), "--steps", "4"]) in (1, 2)
    assert "Read-only file system" in capsys.readouterr().err
    assert _state(read_only_disk) == before


def _as_nobody(act: Callable[[], None]) -> None:
    """Carry out something in a child that may not do what root may."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - it is the child's last word
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("lock", [True, False])
def test_a_folder_that_one_may_not_write_to_is_read(lock: bool, finished_run: Path, for_all: Path) -> None:
    """``lock``: whether the store has its lock's file, as it has but for one that was copied without."""
    a_run = shutil.copytree(finished_run, for_all / "run")
    for path in (a_run / "store" / "lock", a_run / "run.lock"):
        if not lock:
            path.unlink(missing_ok=True)
    for path in (a_run, *a_run.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = _state(a_run)

    def read() -> None:
        assert not os.access(a_run / "store", os.W_OK)
        assert main(["verify", str(a_run)]) == 0
        assert main(["verify", str(a_run / "store")]) == 0

    _as_nobody(read)
    assert _state(a_run) == before
    for path in (a_run, *a_run.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_who_reads_shares_the_lock_and_who_writes_has_it_alone(tmp_path: Path) -> None:
    Store.create([tmp_path / "s"], LAYOUT, model={}).close()
    with Store.open([tmp_path / "s"], writable=False), Store.open([tmp_path / "s"], writable=False):
        with pytest.raises(StoreError, match="in use by a process that only reads it") as refused:
            Store.open([tmp_path / "s"])
        assert refused.value.errno in (errno.EAGAIN, errno.EWOULDBLOCK)
    with Store.open([tmp_path / "s"]), pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        Store.open([tmp_path / "s"], writable=False)


def test_a_lock_whose_file_is_gone_is_said_by_who_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = DirectoryLock(tmp_path, writes=False)
    assert "nothing would keep a run from writing" in caplog.text
    assert not list(tmp_path.iterdir())
    lock.release()


def test_a_store_that_is_opened_to_be_read_takes_no_writes(tmp_path: Path) -> None:
    Store.create([tmp_path / "s"], LAYOUT, model={}).close()
    with (
        Store.open([tmp_path / "s"], writable=False) as store,
        pytest.raises(AssertionError, match="opened to be read alone"),
    ):
        store.commit({"step": 1})


@pytest.mark.parametrize("gone", ["commit.0", "commit.1"])
def test_a_commit_file_that_is_gone_is_made_again_by_who_writes(
    gone: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not by who reads. The record that was in the other file counts, and commits go on by turns."""
    with Store.create([tmp_path / "s"], LAYOUT, model={}) as store:
        for step in (1, 2):
            store.commit({"step": step})
    found = {"commit.0": 1, "commit.1": 2}  # records 1 and 2 are in files 1 and 0
    left = found[gone]
    (tmp_path / "s" / gone).unlink()
    with Store.open([tmp_path / "s"], writable=False) as store:
        assert store.last_commit() == {"step": left}
    assert not (tmp_path / "s" / gone).exists()
    with Store.open([tmp_path / "s"]) as store:
        assert f"{gone} is made again" in caplog.text
        assert (tmp_path / "s" / gone).stat().st_size == RESERVE
        assert store.last_commit() == {"step": left}
        for step in (left + 1, left + 2):
            store.commit({"step": step})
    with Store.open([tmp_path / "s"]) as store:
        assert store.last_commit() == {"step": left + 2}


@pytest.mark.parametrize("writes", [True, False])
def test_a_lock_that_is_given_back_while_it_is_looked_for_who_has_it_is_taken(
    writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused once in a while, in the name of a process that only reads, of which there was none."""
    held, flock = DirectoryLock(tmp_path), fcntl.flock
    refused = 0

    def given_back_then(fd: int, how: int) -> None:
        nonlocal refused
        if refused and how & fcntl.LOCK_SH:
            held.release()
        try:
            flock(fd, how)
        except BlockingIOError:
            refused += 1
            raise

    monkeypatch.setattr(fcntl, "flock", given_back_then)
    DirectoryLock(tmp_path, writes=writes).release()
    assert refused
