"""The stores of several ranks as they are opened: what each finds on its drives, and what all do then. Ranks are
threads here (``tests/state/test_converted_stores.py``); all decisions are in ``tests/state/test_survey.py``.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config.optimizer import Moments
from penstock.store.manifest import MANIFEST, Manifest
from penstock.store.records import CommitLog, write_document
from tests.state.test_converted_stores import KINDS, begun, check_nothing_else, contents, cut, of_all, opened

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The stores of ranks of each kind, with the state of two steps. They are shared: copy them."""
    folder = tmp_path_factory.mktemp("made")

    def make(name: str) -> Path:
        if not (place := folder / name).exists():
            place.mkdir()
            begun(place, "fp32")
            cut(place / "store", place / "ranks", KINDS[name])
        return place / "ranks"

    return make


@pytest.fixture
def stores(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made(name), tmp_path / "ranks"))


def log_of(folder: Path, rank: int) -> CommitLog:
    """A rank's commits, to be changed."""
    directory = folder / f"rank-{rank}"
    return CommitLog(directory, Manifest.read(directory).store)


def commits_again(folder: Path, rank: int, sequence: int | None, **other: Any) -> None:
    """A rank's last commit has another number; or there has been none. ``other``: what else it says."""
    log, directory = log_of(folder, rank), folder / f"rank-{rank}"
    record, table = log.last, log.table
    assert record is not None
    for name in ("commit.0", "commit.1"):
        (directory / name).unlink()
    CommitLog.create(directory, Manifest.read(directory).store)
    if sequence is not None:
        log = log_of(folder, rank)
        log.count_from(sequence - 1)
        log.append(record | other, table)


@pytest.mark.parametrize("name", ["stage 0", "copies"])
def test_what_is_lost_is_taken_over_with_every_byte(name: str, stores: Callable[[str], Path]) -> None:
    folder, kind = stores(name), KINDS[name]
    before = contents(of_all(folder, kind))
    for rank in range(kind.ranks // 2, kind.ranks):
        shutil.rmtree(folder / f"rank-{rank}")
    assert opened(folder, "fp32", kind) == [2] * kind.ranks
    assert contents(of_all(folder, kind)) == before
    check_nothing_else(of_all(folder, kind))


def test_the_only_commit_is_not_given_up_for_a_store_that_a_start_has_just_made(
    stores: Callable[[str], Path],
) -> None:
    """It was about to be filled. So is one that has not come to the first commit when another one had."""
    folder, kind = stores("stage 0"), KINDS["stage 0"]
    before = contents(of_all(folder, kind))
    commits_again(folder, 0, 1)
    commits_again(folder, 1, None)
    assert opened(folder, "fp32", kind) == [2, 2]
    assert contents(of_all(folder, kind)) == before


def test_ranks_without_copies_begin_again_where_not_all_have_come_to_the_first_commit(
    stores: Callable[[str], Path],
) -> None:
    folder = stores("shared")
    commits_again(folder, 0, 1)
    commits_again(folder, 1, None)
    assert opened(folder, "fp32", KINDS["shared"]) == [None, None]


def test_a_commit_that_not_all_ranks_have_is_taken_back(stores: Callable[[str], Path]) -> None:
    folder, kind = stores("shared"), KINDS["shared"]
    before = contents(of_all(folder, kind))
    log = log_of(folder, 1)
    assert log.last is not None
    log.append(log.last | {"step": 3}, log.table)
    assert opened(folder, "fp32", kind) == [2, 2]
    assert contents(of_all(folder, kind)) == before


def another_figure(folder: Path) -> None:
    commits_again(folder, 1, log_of(folder, 0).sequence, last={"grad_norm": 0.5})


def left_behind(folder: Path) -> None:
    """Its host comes back after another one has taken its place; another one's is new."""
    commits_again(folder, 3, log_of(folder, 1).sequence + 3)
    commits_again(folder, 1, log_of(folder, 1).sequence + 3)
    shutil.rmtree(folder / "rank-2")


def exchanged(folder: Path) -> None:
    for a, b in ((0, "aside"), (1, 0), ("aside", 1)):
        (folder / f"rank-{a}").rename(folder / f"rank-{b}")


def of_another_run(folder: Path) -> None:
    path = folder / "rank-1"
    manifest = Manifest.read(path)
    write_document(path / MANIFEST, "store", manifest.to_json() | {"model": {**manifest.model, "world": "another"}})


def emptied(folder: Path) -> None:
    for file in (folder / "rank-1").iterdir():
        file.unlink()


def lost(folder: Path) -> None:
    shutil.rmtree(folder / "rank-1")


@pytest.mark.parametrize(
    ("name", "change", "form", "said"),
    [
        ("stage 0", another_figure, "fp32", "rank-0 has come to step 2 with loss None and norm None, and .* norm 0.5"),
        ("copies", left_behind, "fp32", "no commit in common: .*rank-0 is at commit ., and others are at .*remove it"),
        ("shared", exchanged, "fp32", "rank 0: .*/rank-0 has the part of rank 1 of 2, and what is asked for is the"),
        ("shared", of_another_run, "fp32", "rank-0 and .*rank-1 have parts of two runs: put back what was there"),
        ("shared", emptied, "fp32", "rank-1 holds no store, and other ranks have theirs: is the drive mounted"),
        ("pipeline", lost, "fp32", "rank-1 holds no store, and other ranks have theirs: is the drive mounted"),
        ("stage 0", lost, "int8", "ConfigError: .* has another form of moments, and another rank has lost its state"),
    ],
)
def test_what_is_found_is_refused_in_the_same_words_on_all_ranks_and_nothing_is_changed(
    name: str, change: Callable[[Path], None], form: Moments, said: str, stores: Callable[[str], Path]
) -> None:
    change(folder := stores(name))
    before = sorted(folder.rglob("*"))
    (found,) = {f"{type(outcome).__name__}: {outcome}" for outcome in opened(folder, form, KINDS[name])}
    assert re.search(said, found), found
    assert sorted(folder.rglob("*")) == before
