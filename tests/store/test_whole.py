"""A folder that appears whole or not at all, whichever of its system calls fails or is the process's last."""

import ctypes
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StoreError
from penstock.store.snapshot import SnapshotReader, written_snapshot
from penstock.store.transfer import aligned_bytes
from penstock.store.whole import WholeFolder, remove_abandoned
from tests.faults import Nth, error, intercepted

KILLED = 9


@pytest.fixture(params=["swapped", "moved aside"])
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems that can swap two names at one instant, and those that cannot."""

    class OldKernel:
        def renameat2(self, *_: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    if request.param == "moved aside":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: OldKernel())


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(out: Path, text: str) -> None:
    with WholeFolder(out) as folder:
        (folder.partial / "part").mkdir()
        (folder.partial / "part" / "file").write_text(text)
        folder.finish()


def put(out: Path, before: str | None) -> dict[str, str]:
    if before is None:
        return {}
    write(out, before)
    return contents(out)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("before", [None, "old"])
def test_a_call_that_fails_leaves_what_was_there_or_puts_the_whole(before: str | None, tmp_path: Path) -> None:
    for number in itertools.count():
        place = tmp_path / str(number)
        place.mkdir()
        old = put(place / "out", before)
        fails, failed = Nth(number, error(errno.EIO)), False
        with intercepted(place, fails, names=True):
            try:
                write(place / "out", "new")
            except (StoreError, OSError):
                failed = True
        assert contents(place / "out") == (old if failed else {"part/file": "new"}), number
        if not fails.struck:
            assert not failed
            break
        write(place / "out", "newest")
        assert contents(place / "out") == {"part/file": "newest"}, number
        assert sorted(path.name for path in place.iterdir()) == ["out"], number
    assert number > 9


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("before", [None, "old"])
def test_a_process_that_is_killed_leaves_what_was_there_or_the_whole(before: str | None, tmp_path: Path) -> None:
    for number in itertools.count():
        place = tmp_path / str(number)
        place.mkdir()
        old = put(place / "out", before)
        child = os.fork()
        if not child:
            try:
                with intercepted(place, Nth(number, lambda call, go: os._exit(KILLED)), names=True):
                    write(place / "out", "new")
            finally:
                os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
        remove_abandoned(place, "ou*")
        assert contents(place / "out") in (old, {"part/file": "new"}), number
        assert {path.name for path in place.iterdir()} <= {"out"}, number
        if not killed:
            assert contents(place / "out") == {"part/file": "new"}
            break
    assert number > 9


def save(path: Path, value: int) -> None:
    buffer = aligned_bytes(8192)
    buffer[:] = value
    with written_snapshot(path, [("x", 8192)], {"value": value}, overwrite=True) as writer:
        writer.write("x", 0, buffer)


def saved(path: Path) -> int:
    buffer = aligned_bytes(8192)
    with SnapshotReader(path) as reader:
        reader.read("x", 0, buffer)
        assert set(buffer.tolist()) == {reader.meta["value"]}
        return int(reader.meta["value"])


@pytest.mark.usefixtures("names")
def test_a_call_that_fails_is_an_error_of_the_store_and_leaves_the_old_snapshot_or_the_new(tmp_path: Path) -> None:
    for number in itertools.count():
        place = tmp_path / str(number)
        place.mkdir()
        save(place / "out", 1)
        fails, failed = Nth(number, error(errno.EIO)), False
        with intercepted(place, fails, names=True):
            try:
                save(place / "out", 2)
            except StoreError:
                failed = True
        assert saved(place / "out") == (1 if failed else 2), number
        if not fails.struck:
            assert not failed
            break
        save(place / "out", 3)
        assert saved(place / "out") == 3
        assert [path.name for path in place.iterdir()] == ["out"], number
    assert number > 15


def test_what_is_under_way_is_not_taken_for_a_dead_ones(tmp_path: Path) -> None:
    with WholeFolder(tmp_path / "out") as folder:
        (folder.partial / "file").write_text("mine")
        remove_abandoned(tmp_path, "*")
        write(tmp_path / "out", "another's")
        assert contents(tmp_path / "out") == {"part/file": "another's"}
        folder.finish()
    assert contents(tmp_path / "out") == {"file": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def hide(path: Path, patched: pytest.MonkeyPatch) -> None:
    """The drive does not let a name be looked at."""
    for name in ("stat", "lstat"):
        look: Callable[..., Any] = getattr(os, name)

        def failing(which: Any, *args: Any, look: Callable[..., Any] = look, **how: Any) -> Any:
            if not isinstance(which, int) and Path(which) == path:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(which))
            return look(which, *args, **how)

        patched.setattr(os, name, failing)


def test_what_cannot_be_looked_at_is_not_taken_for_nothing(tmp_path: Path) -> None:
    """A snapshot that is there is not written over."""
    save(tmp_path / "out", 1)
    with WholeFolder(tmp_path / "new") as folder, pytest.MonkeyPatch.context() as patched:
        folder.path = tmp_path / "out"
        hide(tmp_path / "out", patched)
        with pytest.raises(StoreError, match=r"out cannot be looked at: Input/output error"):
            folder.finish()
    assert saved(tmp_path / "out") == 1


def test_the_old_folder_that_a_killed_process_moved_aside_stays_where_it_cannot_be_looked_at(tmp_path: Path) -> None:
    beside, aside = (tmp_path / f"out.partial-{'0' * 12}{end}" for end in ("", "-old"))
    beside.mkdir()
    write(aside, "old")
    with pytest.MonkeyPatch.context() as patched:
        hide(aside, patched)
        with pytest.raises(StoreError, match=r"-old cannot be looked at: Input/output error"):
            remove_abandoned(tmp_path, "*")
    remove_abandoned(tmp_path, "*")
    assert contents(tmp_path / "out") == {"part/file": "old"}
