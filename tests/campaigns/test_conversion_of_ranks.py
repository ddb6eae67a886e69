"""A conversion of the stores of several ranks that a failing call or a kill breaks off: all of them are what they were
or all of them are converted, whoever looks, and the run goes on.

Ranks are threads (``tests/state/test_converted_stores.py``). One that is killed does nothing any more, while the others
learn of it, as late as they may.
"""

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from shutil import copytree, rmtree
from typing import Any

import pytest

from penstock.config.optimizer import Moments
from penstock.errors import RankError, StoreError
from penstock.ranks.group import ALONE
from penstock.store.making import NEXT, STAGED
from penstock.store.manifest import MANIFEST, Manifest
from penstock.store.parts import opened_parts
from tests.conftest import Campaign
from tests.faults import Call, Go, error, intercepted
from tests.state.test_converted_stores import (
    ACTING,
    KINDS,
    MOST,
    Kind,
    Outcome,
    State,
    begun,
    check_nothing_else,
    commits_of,
    contents,
    cut,
    of_all,
    opened,
)

pytestmark = pytest.mark.usefixtures("one_thread")

IN_EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("shared", "pipeline") else pytest.mark.campaign) for name in KINDS]
)


class Killed(BaseException):
    """What a rank raises at any call that would change anything, once it is killed."""


class Hit:
    """A hook that hits one rank at its call of a number. ``code``: with this error; None: it is killed."""

    def __init__(self, rank: int, number: int, code: int | None) -> None:
        self._rank, self._number, self._code = rank, number, code
        self.calls: list[list[Call]] = [[] for _ in range(MOST)]
        self._killed = False

    def __call__(self, call: Call, go: Go) -> Any:
        calls = self.calls[ACTING.rank]
        struck = ACTING.rank == self._rank and len(calls) == self._number
        calls.append(replace(call, data=None))
        if struck and self._code is not None:
            return error(self._code)(call, go)
        self._killed = self._killed or struck
        if self._killed and ACTING.rank == self._rank:
            raise Killed
        return go()


@dataclass(frozen=True, kw_only=True)
class Place:
    """The stores of all ranks, as often as they are asked for; and what they are in each form."""

    folder: Path
    kind: Kind
    calls: Sequence[Sequence[Call]]
    """of each rank that converts them"""
    before: State
    after: State
    """once converted"""
    back: State
    """once converted, and converted back"""

    @staticmethod
    def made(folder: Path, kind: Kind) -> "Place":
        begun(folder, "fp32")
        before = contents(cut(folder / "store", folder / "old", kind))
        after, back = (_once_converted(folder, form, kind) for form in ("int8", "fp32"))
        place = Place(folder=folder, kind=kind, calls=(), before=before, after=after, back=back)
        place.hit("counted", hook := Hit(0, -1, None))
        return replace(place, calls=hook.calls)

    def hit(self, case: str, hook: Hit, **last: Any) -> tuple[Path, list[Outcome]]:
        copytree(self.folder / "old", folder := self.folder / case)
        with intercepted(folder, hook, names=True):
            return folder, opened(folder, "int8", self.kind, **last)

    def check(self, folder: Path, outcomes: Sequence[Outcome], case: int) -> bool:
        """All stores count or none does, whoever looks at them; all ranks go on, whichever form they ask for. Returns
        whether the new ones count."""
        stores = of_all(folder, self.kind)
        counts = any((path / NEXT).exists() for paths in stores for path in paths)
        if counts:
            with pytest.raises(StoreError, match="go on with the run, with as many ranks"), opened_parts(stores):
                pass
        else:
            found = contents(stores)
            assert found in (self.before, self.after)
            counts = found == self.after
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            assert all(isinstance(outcome, RankError | StoreError | Killed) for outcome in outcomes), outcomes
        form: Moments = ("int8", "fp32")[case % 2]
        assert opened(folder, form, self.kind) == [2] * self.kind.ranks
        assert contents(stores) == (self.after if form == "int8" else self.back if counts else self.before)
        check_nothing_else(stores)
        rmtree(folder)
        return counts


def _once_converted(folder: Path, form: Moments, kind: Kind) -> State:
    commits_of(ALONE, folder / "store", form).close()
    return contents(cut(folder / "store", folder / form, kind))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Place]:
    """The places of the stores, by the way in which ranks have the state."""
    return cache(lambda name: Place.made(tmp_path_factory.mktemp("place"), KINDS[name]))


@IN_EACH
def test_a_rank_that_is_killed_leaves_all_stores_as_they_were_or_all_converted(
    name: str, places: Callable[[str], Place], campaign: Campaign
) -> None:
    place, rng, seen = places(name), Random(name), Counter[bool]()
    for rank in range(place.kind.ranks):
        for number in numbers_of(place.calls, rank, rng, campaign):
            folder, outcomes = place.hit(f"killed-{rank}-{number}", Hit(rank, number, None))
            assert isinstance(outcomes[rank], Killed)
            seen[place.check(folder, outcomes, number)] += 1
    assert set(seen) == {False, True}
    campaign.found(f"{seen.total()} ranks killed as they converted moments: {seen[True]} times all had, else none had")


@IN_EACH
def test_a_call_that_fails_on_one_rank_is_said_on_all_and_leaves_all_stores_as_they_were_or_all_converted(
    name: str, places: Callable[[str], Place], campaign: Campaign
) -> None:
    place, rng, seen = places(name), Random(f"fails {name}"), Counter[bool]()
    for rank in range(place.kind.ranks):
        for number in numbers_of(place.calls, rank, rng, campaign):
            hook = Hit(rank, number, (errno.EIO, errno.ENOSPC)[number % 2])
            folder, outcomes = place.hit(f"failed-{rank}-{number}", hook)
            if said_by_all := "and the state is as it was" in str(outcomes[rank]):
                others = {str(outcome) for number, outcome in enumerate(outcomes) if number != rank}
                assert others == {f"rank {rank}: {outcomes[rank]}"}
                check_nothing_else(of_all(folder, place.kind))
                assert contents(of_all(folder, place.kind)) == place.before
            seen[said_by_all] += 1
            place.check(folder, outcomes, number)
    assert set(seen) == {False, True}
    campaign.found(
        f"{seen.total()} calls of ranks that converted moments failed, {seen[True]} of them on all: all whole"
    )


def numbers_of(calls: Sequence[Sequence[Call]], rank: int, rng: Random, campaign: Campaign) -> Sequence[int]:
    """All calls of a rank; or of the first the one that decides, and the next one, and of the others one of those
    before or after."""
    own = calls[rank]
    if campaign.full:
        return range(len(own))
    if rank:
        return [rng.randrange(len(own) // 2, len(own))]
    decides = next(n for n, call in enumerate(own) if call.name == "rename" and call.path.endswith(STAGED))
    return [decides, decides + 1]


def test_who_learns_late_that_a_rank_has_failed_removes_nothing_that_may_count(
    places: Callable[[str], Place],
) -> None:
    """The first rank lets all count while the other, whose own is whole, already hears that something has failed."""
    place = places("shared")
    folder, outcomes = place.hit("late", Hit(0, -1, None), deaf="converted state")
    assert all(isinstance(outcome, RankError) for outcome in outcomes)
    assert (folder / "rank-0" / NEXT).exists()
    assert (folder / "rank-1" / STAGED).exists()
    assert place.check(folder, outcomes, 0)


def test_stores_of_which_only_the_first_are_in_their_place_are_put_there_for_all(
    places: Callable[[str], Place],
) -> None:
    """The first rank finds nothing left in its own directories: another one's say so."""
    place = places("shared")
    first = next(
        n for n, call in enumerate(place.calls[1]) if call.name == "rename" and f"rank-1/{NEXT}/" in str(call.path)
    )
    folder, outcomes = place.hit("half", Hit(1, first, None))
    assert isinstance(outcomes[1], Killed)
    assert [(paths[0] / NEXT).exists() for paths in of_all(folder, place.kind)] == [False, True]
    assert place.check(folder, outcomes, 0)


def test_ranks_that_do_not_find_the_stores_of_those_that_they_share_the_state_with_are_refused(
    places: Callable[[str], Place],
) -> None:
    """The last rank finds other stores there."""
    place = places("shared")
    folder, (other, own) = place.hit("elsewhere", Hit(0, -1, None), elsewhere=True)
    assert str(own) == (
        "moments are not converted, and the state is as it was: they are kept in fp32, optimizer.moments='int8' asks "
        f"for another form, and rank 1 does not find the state of rank 0, {folder / 'rank-0'}, of which it needs its "
        "part: start ranks that share the state where each has the directories of the others; or go on with "
        "moments='fp32'; or load a snapshot into new stores"
    )
    assert str(other) == f"rank 1: {own}"
    assert contents(of_all(folder, place.kind)) == place.before
    check_nothing_else(of_all(folder, place.kind))


def test_stores_in_which_nothing_is_committed_are_made_anew_also_where_some_are_already(tmp_path: Path) -> None:
    kind = KINDS["shared"]
    assert opened(tmp_path, "fp32", kind) == [None, None]
    first = Hit(1, -1, None)
    copytree(tmp_path, tmp_path / "counted")
    with intercepted(tmp_path / "counted", first, names=True):
        assert opened(tmp_path / "counted", "int8", kind) == [None, None]
    removes = next(n for n, call in enumerate(first.calls[1]) if call.name == "rename")
    with intercepted(tmp_path, Hit(1, removes, None), names=True):
        _, killed = opened(tmp_path, "int8", kind)
    assert isinstance(killed, Killed)
    made = [path for (path,) in of_all(tmp_path, kind) if (path / MANIFEST).exists()]
    assert [Manifest.read(path).model.get("moments") for path in made] != ["int8", "int8"]
    assert opened(tmp_path, "int8", kind) == [None, None]
    assert [Manifest.read(path).model["moments"] for (path,) in of_all(tmp_path, kind)] == ["int8", "int8"]
