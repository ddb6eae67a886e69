"""Stores that take the place of others: these or those count, of all ranks, whichever call fails or is the last."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.files import sync_folder
from penstock.store import successor
from penstock.store.facts import facts_of, facts_of_all, store_exists
from penstock.store.layout import ALIGN, Layout
from penstock.store.making import remove_files
from penstock.store.parts import opened_parts, require_one_run
from penstock.store.removal import delete_store
from penstock.store.store import Store
from penstock.store.successor import Stores
from penstock.store.transfer import aligned_bytes
from tests.conftest import Campaign
from tests.faults import Nth, error, intercepted
from tests.folder_power import LOSSES, FlushLog
from tests.store.test_store import directories

SIZES = {1: 4, 2: 6}
"""pages of the old store, and of the new one"""
KILLED = 9
OF_A_STORE = {"commit.0", "commit.1", "lock", "manifest.json", "penstock.store"}


def make(at: Sequence[Path], value: int, names: Sequence[Path], rank: int = 0, ranks: int = 1) -> None:
    layout = Layout.build([("x", SIZES[value] * ALIGN, 1)])
    model = {"rank": rank, "ranks": ranks, "world": f"world {value}"}
    with Store.create(at, layout, model=model, stripe=ALIGN, names=names, direct=False) as store:
        buffer = aligned_bytes(SIZES[value] * ALIGN)
        buffer[:] = value
        store.write("x", 0, buffer)
        store.commit({"step": value, "whole": True})


def make_all(stores: Stores, value: int) -> None:
    for rank, paths in enumerate(stores):
        make(paths if value == 1 else successor.staged(paths), value, paths, rank, len(stores))


def decide(stores: Stores) -> None:
    """All ranks have made theirs, and the first lets them count."""
    require_one_run([(one.path, one.model) for one in map(successor.ready, stores)])
    successor.decide(stores[0][0])


def succeed(stores: Stores) -> None:
    """Successors are put in place as the ranks of a run do it together."""
    with ExitStack() as stack:
        for paths in stores:
            stack.enter_context(Store.open(paths, direct=False))
        try:
            make_all(stores, 2)
            decide(stores)
        except BaseException:
            with suppress(OSError):
                for paths in stores:
                    successor.clear(paths, stores)
            raise
    successor.settle(stores)


def decided(stores: Stores) -> bool:
    return any((path / "penstock.store.next").exists() for paths in stores for path in paths)


def found(stores: Stores) -> int:
    """The step of the stores that are there for whoever opens them to write, each whole; nothing else is left."""
    successor.settle(stores)
    steps = {found_of(paths, stores) for paths in stores}
    assert len(steps) == 1
    return steps.pop()


def found_of(paths: Sequence[Path], stores: Stores) -> int:
    with Store.open(paths, direct=False) as store:
        successor.clear(paths, stores)
        record = store.last_commit()
        assert record is not None
        buffer = aligned_bytes(SIZES[record["step"]] * ALIGN)
        store.read("x", 0, buffer)
        assert set(buffer.tolist()) == {record["step"]}
    for path, own in zip(paths, [OF_A_STORE, OF_A_STORE - {"commit.0", "commit.1"}], strict=False):
        assert {item.name for item in path.iterdir()} == own
    return int(record["step"])


def of_two_ranks(folder: Path) -> list[list[Path]]:
    """One rank's store is in two directories."""
    return [[folder / "a", folder / "b"], [folder / "c"]]


class Place:
    """The old stores of two ranks, as often as they are asked for."""

    def __init__(self, folder: Path, *, full: bool) -> None:
        self._folder = folder
        (folder / "old").mkdir()
        make_all(of_two_ranks(folder / "old"), 1)
        counted = Nth(-1, error(errno.EIO))
        with intercepted(self.folder(-1), counted, names=True):
            succeed(self.stores(-1))
        calls = counted.calls
        renames = {
            n + after
            for n, call in enumerate(calls)
            if call.name == "rename"
            for after in ((0, 1) if full else (n % 2,))
        }
        self.numbers = sorted({*range(0, len(calls), 1 if full else 53), *renames, len(calls)})
        """of system calls that are hit: all of them; or one beside each that gives something another name, and some"""

    def folder(self, number: int) -> Path:
        folder = self._folder / str(number)
        shutil.copytree(self._folder / "old", folder)
        return folder

    def stores(self, number: int) -> list[list[Path]]:
        return of_two_ranks(self._folder / str(number))


def test_a_call_that_fails_leaves_the_old_store_or_the_new(tmp_path: Path, campaign: Campaign) -> None:
    place, seen = Place(tmp_path, full=campaign.full), set()
    for number in place.numbers:
        fails, failed = Nth(number, error((errno.EIO, errno.ENOSPC)[number % 2])), False
        with intercepted(place.folder(number), fails, names=True):
            try:
                succeed(stores := place.stores(number))
            except StoreError:
                failed = True
        counts = decided(stores)
        step = found(stores)
        assert step == 2 or (failed and not counts), number
        seen.add((failed, counts, step))
        if step == 1 and number % 2:
            succeed(stores)
            assert found(stores) == 2
    assert seen >= {(True, False, 1), (True, True, 2), (False, False, 2)}
    campaign.found(f"{len(place.numbers)} calls of a store that takes the place of another failed: one of them stands")


def test_a_kill_leaves_the_old_store_or_the_new_which_nobody_else_touches(tmp_path: Path, campaign: Campaign) -> None:
    place, seen = Place(tmp_path, full=campaign.full), set()
    for number in place.numbers:
        folder, stores = place.folder(number), place.stores(number)
        killed = _killed(lambda: succeed(stores), folder, number)  # noqa: B023 - called at once
        if counts := decided(stores):
            refuse_all(stores)
            if number % 3 == 0:
                _killed(lambda: successor.settle(stores), folder, number % 7)  # noqa: B023
        else:
            with opened_parts(stores) as opened:  # which looks at whether they are of one run, in one form
                assert len({store.model["world"] for store in opened}) == 1
        step = found(stores)
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
    for look in (Store.open, delete_store, facts_of):
        with pytest.raises(StoreError, match="go on with the run"):
            look(paths)
    with pytest.raises(StoreError, match=r"go on with the run|holds a store already"):
        Store.create(paths, Layout.build([("x", 1, 1)]), model={})
    assert store_exists(paths)
    assert sorted(path for folder in paths for path in folder.rglob("*")) == before


def refuse_all(stores: Stores) -> None:
    """The same of who reads or removes the stores of all ranks, and of who looks at the one that says it."""
    with pytest.raises(StoreError, match="go on with the run"), opened_parts(stores):
        pass
    with pytest.raises(StoreError, match="go on with the run"):
        facts_of_all(stores)
    refuse(next(paths for paths in stores if decided([paths])))


def placed(folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    paths = directories(folder, count)
    make(paths, 1, paths)
    return paths


def test_what_a_power_cut_leaves_is_the_old_store_or_the_new(tmp_path: Path) -> None:
    """Power fails at each flush, with what was flushed, with the names without what is behind them, or with some
    sectors of it."""
    folder, rng = tmp_path / "drives", random.Random(0)
    seen: dict[str, list[int]] = {loss: [] for loss in LOSSES}
    log = FlushLog(folder)

    def cut() -> None:
        for loss in LOSSES:
            image = tmp_path / "image"
            assert log.image(loss, rng, image)
            seen[loss].append(found(of_two_ranks(image)))
            shutil.rmtree(image)

    with log.recording():
        folder.mkdir()
        make_all(of_two_ranks(folder), 1)
        for path in (folder, tmp_path):
            sync_folder(path)
    with log.recording(cut):
        succeed(of_two_ranks(folder))
    log.close()
    for steps in seen.values():
        assert steps == sorted(steps)
        assert set(steps) == {1, 2}


def test_directories_that_are_not_all_there_or_in_another_order_are_refused(tmp_path: Path) -> None:
    paths = placed(tmp_path / "drives", 2)
    with Store.open(paths, direct=False):
        make(successor.staged(paths), 2, paths)
        decide([paths])
    for wrong, said in ((paths[::-1], "another order"), (paths[:1], "missing here: number 2")):
        with pytest.raises(StoreError, match=said):
            successor.settle([wrong])
    successor.clear(paths, [paths])
    successor.settle([paths[1:]])  # where nothing says that anything is decided, nothing is touched
    assert found([paths]) == 2


def test_stores_that_are_not_those_of_all_ranks_or_of_two_runs_are_refused(tmp_path: Path) -> None:
    """As long as not all are there, none is moved."""
    first, second = stores = of_two_ranks(tmp_path)
    make_all(stores, 1)
    make_all(stores, 2)
    decide(stores)
    (other := tmp_path / "other").mkdir()
    make_all(of_two_ranks(other), 1)
    for wrong, said in (
        ([first], "has the part of rank 0 of 2, and what is asked for is all of the state"),
        ([second, first], "go on with as many ranks"),
        ([first, of_two_ranks(other)[1]], "have parts of two runs"),
        ([first, second, [tmp_path / "d"]], "d does not exist"),
    ):
        with pytest.raises(StoreError, match=said):
            successor.settle(wrong)
    for paths in stores:
        successor.clear(paths, stores)
    assert found(stores) == 2


def test_new_stores_do_not_count_before_all_of_them_are_found(tmp_path: Path) -> None:
    first, second = stores = of_two_ranks(tmp_path)
    make_all(stores, 1)
    make_all(stores, 2)
    (other := tmp_path / "other").mkdir()
    make_all(strange := of_two_ranks(other), 1)
    make_all(strange, 2)
    shutil.rmtree(strange[0][0])
    for wrong, said in (
        ([first], "go on with as many ranks|all of the state"),
        ([first[:1], second], "the store has 2 directories, missing here"),
        ([first, strange[0][1:]], "missing here|have parts of|as many ranks"),
        ([first, [tmp_path / "d"]], "d/penstock.store.staged"),
    ):
        with pytest.raises(StoreError, match=said):
            decide(wrong)
        assert not decided(stores)
    decide(stores)
    assert found(stores) == 2


def test_a_store_of_which_nothing_is_in_its_place_is_there(tmp_path: Path) -> None:
    paths = placed(tmp_path / "drives", 1)
    with Store.open(paths, direct=False):
        make(successor.staged(paths), 2, paths)
        decide([paths])
    remove_files(paths)
    refuse(paths)
    assert found([paths]) == 2


def test_what_is_staged_goes_with_the_store(tmp_path: Path) -> None:
    paths = placed(tmp_path / "drives", 2)
    with Store.open(paths, direct=False):
        make(successor.staged(paths), 2, paths)
    delete_store(paths)
    assert not [item for path in paths for item in path.iterdir()]


@pytest.mark.parametrize("name", [successor.STAGED, successor.NEXT])
def test_a_file_in_the_place_of_a_new_store_is_named(tmp_path: Path, name: str) -> None:
    make([tmp_path], 1, [tmp_path])
    (tmp_path / name).write_bytes(b"a file")
    with pytest.raises(StoreError, match=f"failed: {tmp_path / name}.*: Not a directory: check"):
        successor.clear([tmp_path], [[tmp_path]]) if name == successor.STAGED else successor.settle([[tmp_path]])
