"""A store that is set aside is there again, or gone, whatever its start is broken off by."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.store import Layout, Store, aside, directory
from penstock.store.aside import Aside, has_room, settle
from penstock.store.facts import facts_of

Paths = Sequence[Path]

LAYOUT = Layout.build([("a", 8192, 2)])


def made(paths: Paths, step: int) -> Paths:
    with Store.create(paths, LAYOUT, model={}, stripe=4096) as store:
        store.commit({"step": step, "whole": True})
    return paths


def step_of(paths: Paths) -> int | None:
    facts = facts_of(paths)
    return None if facts is None else facts.step


def left(paths: Paths) -> list[str]:
    return [path.name for folder in paths for path in folder.iterdir() if "aside" in path.name]


@pytest.fixture
def old(tmp_path: Path) -> Paths:
    return made([tmp_path / "a", tmp_path / "b"], 7)


def test_a_store_is_put_back_and_what_was_begun_in_its_place_goes(old: Paths) -> None:
    assert has_room(old)
    begun = Aside(old)
    assert step_of(old) is None
    made(old, 0)
    settle(old)  # another process looks: it is not decided yet
    assert step_of(old) == 0
    begun.put_back()
    assert (step_of(old), left(old)) == (7, [])
    with Store.open(old) as store:
        assert store.last_commit() == {"step": 7, "whole": True}


def test_a_store_is_removed_when_the_new_one_counts(old: Paths) -> None:
    begun = Aside(old)
    made(old, 0)
    begun.remove()
    assert (step_of(old), left(old)) == (0, [])


def test_who_looked_just_before_a_store_was_set_aside_does_not_decide(
    old: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found the folders before they were locked, and had to wait for the directories until they were."""
    begun = Aside(old)
    asked: list[Path] = []

    def is_locked(folder: Path) -> bool:
        asked.append(folder)
        return len(asked) > len(old) and directory.is_locked(folder)

    with monkeypatch.context() as early:
        early.setattr(aside, "is_locked", is_locked)
        settle(old)
    assert len(asked) > len(old)
    assert left(old) != []
    begun.put_back()
    assert (step_of(old), left(old)) == (7, [])


def test_a_store_that_was_put_back_by_others_is_not_removed(old: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file system's locks are known on one host alone."""
    begun = Aside(old)
    with monkeypatch.context() as unseen:
        unseen.setattr(aside, "is_locked", lambda folder: False)
        settle(old)
    assert step_of(old) == 7
    begun.put_back()
    assert step_of(old) == 7


def test_no_store_is_made_where_another_is_still_being_set_aside(old: Paths) -> None:
    """The old one counts: whoever puts it back would write over the new one."""
    for renames in range(1, 7):
        assert not _ends(lambda: Aside(old), renames=renames)
        if not any((path / "penstock.store").exists() for path in old):
            break
    else:
        raise AssertionError("it never was in neither place")
    with pytest.raises(StoreError, match=r"stopped as it set that aside. A start of penstock.hf.Trainer"):
        made(old, 0)
    settle(old)
    assert (step_of(old), left(old)) == (7, [])
    assert has_room(old)


def _ends(work: Callable[[], object], *, renames: int = 99) -> bool:
    """Do this in a process that is killed once it has given so many names. Returns whether it was not."""
    if (child := os.fork()) == 0:
        rename, done = os.rename, [0]

        def limited(*names: Path) -> None:
            if done[0] == renames:
                os._exit(9)
            done[0] += 1
            rename(*names)

        os.rename = limited  # type: ignore[assignment]
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 0


@pytest.mark.parametrize("then", ["put_back", "remove"])
def test_whatever_it_is_broken_off_by_one_of_the_two_stores_is_there(then: str, tmp_path: Path) -> None:
    """At each name that is given; and again at each of them as the next start settles it."""

    def begin() -> None:
        begun = Aside(paths)
        made(paths, 0 if then == "put_back" else 3)
        getattr(begun, then)()

    for number in range(60):
        paths = made([tmp_path / f"a{number}", tmp_path / f"b{number}"], 7)
        whole = _ends(begin, renames=number)
        for again in range(60):
            if _ends(lambda: settle(paths), renames=again):  # noqa: B023
                break
        found = step_of(paths)
        assert found == 7 or (then == "remove" and found == 3), number
        assert left(paths) == []
        with Store.open(paths):
            pass
        if whole:
            assert found == (7 if then == "put_back" else 3)
            return
    raise AssertionError("it never came to its end")


def test_parts_of_a_store_are_not_put_back_alone(old: Paths) -> None:
    assert _ends(lambda: Aside(old))
    with pytest.raises(StoreError):
        settle(old[:1])
    settle(old)
    assert step_of(old) == 7
