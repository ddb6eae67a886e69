"""A store that takes the place of another: one of the two counts, whichever system call fails or is the last."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.files import sync_folder
from penstock.store import successor
from penstock.store.facts import facts_of
from penstock.store.layout import ALIGN, Layout
from penstock.store.making import remove_files
from penstock.store.store import Store
from penstock.store.transfer import aligned_bytes
from tests.conftest import Campaign
from tests.faults import Nth, error, intercepted
from tests.folder_power import LOSSES, FlushLog
from tests.store.test_store import directories

SIZES = {1: 4, 2: 6}
"""pages of the old store, and of the new one"""
KILLED = 9
OF_A_STORE = {"commit.0", "commit.1", "lock", "manifest.json", "penstock.store"}


def make(at: Sequence[Path], value: int, names: Sequence[Path]) -> None:
    layout = Layout.build([("x", SIZES[value] * ALIGN, 1)])
    with Store.create(at, layout, model={}, stripe=ALIGN, names=names, direct=False) as store:
        buffer = aligned_bytes(SIZES[value] * ALIGN)
        buffer[:] = value
        store.write("x", 0, buffer)
        store.commit({"step": value, "whole": True})


def succeed(paths: Sequence[Path]) -> None:
    with Store.open(paths, direct=False):
        try:
            make(successor.staged(paths), 2, paths)
            successor.decide(paths)
        except BaseException:
            with suppress(OSError):
                successor.clear(paths)
            raise
    successor.settle(paths)


def decided(paths: Sequence[Path]) -> bool:
    return (paths[0] / "penstock.store.next").exists()


def found(paths: Sequence[Path]) -> int:
    """The store that is there for whoever opens it to write; nothing else is left."""
    successor.settle(paths)
    with Store.open(paths, direct=False) as store:
        successor.clear(paths)
        record = store.last_commit()
        assert record is not None
        buffer = aligned_bytes(SIZES[record["step"]] * ALIGN)
        store.read("x", 0, buffer)
        assert set(buffer.tolist()) == {record["step"]}
    for path, own in zip(paths, [OF_A_STORE, OF_A_STORE - {"commit.0", "commit.1"}], strict=False):
        assert {item.name for item in path.iterdir()} == own
    return int(record["step"])


class Place:
    """Two directories with the old store, as often as they are asked for."""

    def __init__(self, folder: Path, *, full: bool) -> None:
        self._folder = folder
        (folder / "old").mkdir()
        make(paths := directories(folder / "old", 2), 1, paths)
        counted = Nth(-1, error(errno.EIO))
        with intercepted(self.folder(-1), counted, names=True):
            succeed(self.paths(-1))
        calls = counted.calls
        last = next(n for n, call in enumerate(calls) if call.name == "rename" and call.path.endswith("staged"))
        self.numbers = [*range(0, last - 3, 1 if full else 9), *range(last - 3, len(calls) + 1)]
        """of system calls that are hit: of those that make the new store perhaps some, and all that put it there"""

    def folder(self, number: int) -> Path:
        folder = self._folder / str(number)
        shutil.copytree(self._folder / "old", folder)
        return folder

    def paths(self, number: int) -> list[Path]:
        return [self._folder / str(number) / f"drive{i}" for i in range(2)]


def test_a_call_that_fails_leaves_the_old_store_or_the_new(tmp_path: Path, campaign: Campaign) -> None:
    place, seen = Place(tmp_path, full=campaign.full), set()
    for number in place.numbers:
        fails, failed = Nth(number, error((errno.EIO, errno.ENOSPC)[number % 2])), False
        with intercepted(place.folder(number), fails, names=True):
            try:
                succeed(paths := place.paths(number))
            except StoreError:
                failed = True
        counts = decided(paths)
        step = found(paths)
        assert step == 2 or (failed and not counts), number
        seen.add((failed, counts, step))
        if step == 1 and number % 2:
            succeed(paths)
            assert found(paths) == 2
    assert seen >= {(True, False, 1), (True, True, 2), (False, False, 2)}
    campaign.found(f"{len(place.numbers)} calls of a store that takes the place of another failed: one of them stands")


def test_a_kill_leaves_the_old_store_or_the_new_which_nobody_else_touches(tmp_path: Path, campaign: Campaign) -> None:
    place, seen = Place(tmp_path, full=campaign.full), set()
    for number in place.numbers:
        folder, paths = place.folder(number), place.paths(number)
        killed = _killed(lambda: succeed(paths), folder, number)  # noqa: B023 - called at once
        if counts := decided(paths):
            refuse(paths)
            if number % 3 == 0:
                _killed(lambda: successor.settle(paths), folder, number % 7)  # noqa: B023
        step = found(paths)
        assert step == 2 or (killed and not counts), number
        seen.add((counts, step))
    assert not killed
    assert seen == {(False, 1), (True, 2), (False, 2)}
    campaign.found(f"{len(place.numbers)} kills of a process that puts a store in the place of another: one stands")


def _killed(what: Callable[[], None], folder: Path, number: int) -> bool:
    """True if a process that does this has been killed at a system call of this number."""
    child = os.fork()
    if not child:
        try:
            with intercepted(folder, Nth(number, lambda call, go: os._exit(KILLED)), names=True):
                what()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def refuse(paths: Sequence[Path]) -> None:
    """Whoever does not put the new store in its place says what does, and changes nothing."""
    before = sorted(path for folder in paths for path in folder.rglob("*"))
    for look in (Store.open, Store.delete, facts_of, lambda p: Store.create(p, Layout.build([("x", 1, 1)]), model={})):
        with pytest.raises(StoreError, match="go on with the run"):
            look(paths)
    assert Store.exists(paths)
    assert sorted(path for folder in paths for path in folder.rglob("*")) == before


def placed(folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    paths = directories(folder, count)
    make(paths, 1, paths)
    return paths


def test_what_a_power_cut_leaves_is_the_old_store_or_the_new(tmp_path: Path) -> None:
    """At each flush: what was flushed, the names without what is behind them, or some sectors of it."""
    folder, rng = tmp_path / "drives", random.Random(0)
    seen: dict[str, list[int]] = {loss: [] for loss in LOSSES}
    log = FlushLog(folder)

    def cut() -> None:
        for loss in LOSSES:
            image = tmp_path / "image"
            assert log.image(loss, rng, image)
            seen[loss].append(found([image / path.name for path in paths]))
            shutil.rmtree(image)

    with log.recording():
        paths = placed(folder, 2)
        for path in (folder, tmp_path):
            sync_folder(path)
    with log.recording(cut):
        succeed(paths)
    log.close()
    for steps in seen.values():
        assert steps == sorted(steps)
        assert set(steps) == {1, 2}


def test_directories_that_are_not_all_there_or_in_another_order_are_refused(tmp_path: Path) -> None:
    paths = placed(tmp_path / "drives", 2)
    with Store.open(paths, direct=False):
        make(successor.staged(paths), 2, paths)
        successor.decide(paths)
    for wrong, said in ((paths[::-1], "another order"), (paths[:1], "missing here: number 2")):
        with pytest.raises(StoreError, match=said):
            successor.settle(wrong)
    successor.clear(paths)
    successor.settle(paths[1:])  # where nothing says that anything is decided, nothing is touched
    assert found(paths) == 2


def test_a_store_of_which_nothing_is_in_its_place_is_there(tmp_path: Path) -> None:
    paths = placed(tmp_path / "drives", 1)
    with Store.open(paths, direct=False):
        make(successor.staged(paths), 2, paths)
        successor.decide(paths)
    remove_files(paths)
    refuse(paths)
    assert found(paths) == 2


def test_what_is_staged_goes_with_the_store(tmp_path: Path) -> None:
    paths = placed(tmp_path / "drives", 2)
    with Store.open(paths, direct=False):
        make(successor.staged(paths), 2, paths)
    Store.delete(paths)
    assert not [item for path in paths for item in path.iterdir()]
