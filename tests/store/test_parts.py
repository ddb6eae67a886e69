"""The stores of all ranks of a run: what counts is what all of them have."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.store.facts import facts_of_all
from penstock.store.layout import Layout
from penstock.store.owner import Owner
from penstock.store.parts import opened_parts
from penstock.store.store import Store
from penstock.store.transfer import aligned_bytes

LAYOUT = Layout.build([("weights.0", 4096, 2)])


def stores(
    folder: Path, steps: Sequence[int], *, worlds: Sequence[str] = ("a", "a", "a"), owner: Owner | None = None
) -> list[list[Path]]:
    """One store for each rank, which has committed so many steps; each step fills its array with its number."""
    paths = [[folder / f"rank-{rank}"] for rank in range(len(steps))]
    folder.mkdir(exist_ok=True)
    for rank, (path, count) in enumerate(zip(paths, steps, strict=True)):
        model = {"rank": rank, "ranks": len(steps), "world": worlds[rank]}
        with Store.create(path, LAYOUT, model=model, owner=owner) as store:
            for step in range(1, count + 1):
                page = aligned_bytes(4096)
                page[:] = step
                store.write("weights.0", 0, page, slot=step % 2)
                store.commit({"step": step, "whole": True})
    return paths


@pytest.mark.parametrize(("steps", "common"), [((3, 3), 3), ((3, 2), 2), ((2, 3, 3), 2), ((1, 0), 0), ((0, 0), 0)])
def test_the_newest_commit_that_all_have_counts(tmp_path: Path, steps: Sequence[int], common: int) -> None:
    paths = stores(tmp_path / "store", steps)
    facts = facts_of_all(paths)
    assert facts is not None
    assert (facts.step or 0) == common
    assert facts.untouched == (common == 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("commit.*")}
    with opened_parts(paths) as opened:
        assert [(store.last_commit() or {"step": 0})["step"] for store in opened] == [common] * len(steps)
        for store in opened if common else ():
            page = aligned_bytes(4096)
            store.read("weights.0", 0, page, slot=common % 2)
            assert (page == common).all()
    assert {path: path.read_bytes() for path in tmp_path.rglob("commit.*")} == before


def test_a_rank_that_is_two_commits_ahead_is_refused(tmp_path: Path) -> None:
    paths = stores(tmp_path / "store", (3, 1))
    with pytest.raises(StoreError, match=r"no commit in common: .*rank-1 is at commit \d, and others are at \d\."):
        facts_of_all(paths)
    with pytest.raises(StoreError, match="is not the one before"), opened_parts(paths):
        pass


@pytest.mark.parametrize("record", [{"step": None, "whole": True}, {"step": 2}, {"whole": True}, {}])
def test_a_commit_that_says_no_step_is_refused(record: dict[str, object], tmp_path: Path) -> None:
    """Its checksum is right, and that it was penstock who wrote it is not said."""
    (path,) = stores(tmp_path / "store", (1,))
    with Store.open(path) as store:
        store.commit(record)
    with pytest.raises(StoreError, match=r"rank-0: a commit does not say which step it is of\."):
        facts_of_all([path])


def test_a_store_that_is_not_there_is_missing(tmp_path: Path) -> None:
    paths = stores(tmp_path / "store", (2, 2))
    facts = facts_of_all([*paths, [tmp_path / "nothing"]])
    assert facts is not None
    assert facts.missing == (tmp_path / "nothing",)
    assert facts_of_all([[tmp_path / "nothing"]]) is None
    assert facts_of_all(()) is None
    with ExitStack() as stack, pytest.raises(StoreError, match="does not exist"):
        stack.enter_context(opened_parts([*paths, [tmp_path / "nothing"]]))


def test_parts_in_another_order_and_of_two_runs_are_refused(tmp_path: Path) -> None:
    one, other = stores(tmp_path / "store", (1, 1))
    for wrong in ([other, one], [one]):
        with pytest.raises(StoreError, match="has the part of rank"), opened_parts(wrong):
            pass
    mixed = stores(tmp_path / "mixed", (1, 1), worlds=("a", "b"))
    with pytest.raises(StoreError, match="parts of two runs"), opened_parts(mixed):
        pass
    (_, second) = stores(tmp_path / "owned", (1, 1), owner=Owner(id="me", folder="here"))
    with pytest.raises(StoreError, match="parts of two runs"):
        facts_of_all([one, second])
