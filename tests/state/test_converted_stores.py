"""The stores of several ranks, converted together: what they have then is what one process makes of the same state, to
the bit; whatever breaks it off, all of them are what they were or all of them are converted.

Ranks are threads here: they meet where ranks tell each other something, and one that is killed does nothing any more,
while the others learn of it, as late as they may.
"""

import errno
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from penstock.config import Precision
from penstock.config.optimizer import Moments
from penstock.engine.start import describe_model
from penstock.errors import RankError, StoreError
from penstock.optim.precision import DTYPES
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.share import WHOLE
from penstock.schedule.place import Format
from penstock.state.buffers import Buffers
from penstock.state.commits import Commits
from penstock.state.memory import BOUNCE, HostSlab
from penstock.state.reshard import reshard
from penstock.state.slots import Slots
from penstock.store.making import NEXT, STAGED
from penstock.store.manifest import Manifest
from penstock.store.parts import of_rank, opened_parts
from penstock.store.store import Store
from penstock.store.successor import Stores
from penstock.store.transfer import aligned_bytes
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import ParamGroup, group_parameters
from tests.conftest import Campaign
from tests.engine.test_conversion import CASE, OF_A_STORE
from tests.faults import Call, Go, error, intercepted
from tests.patience import PATIENCE
from tests.state.test_convert import CHANGES, arrays_of, fill_at_random
from tests.training import budget
from tests.unreached import ADAMW

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = 2
STRANDS = 2
PRECISION: Precision = "bf16"
T = TypeVar("T")


class Meeting:
    """Where threads meet that are the ranks of a run."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.said: list[Any] = [None] * RANKS
        self.failure: RankError | None = None

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or RankError(f"another rank has failed: {type(error).__name__}: {error}")
        self.barrier.abort()


class Thread(Ranks):
    """A rank that is a thread. ``deaf``: what it is told last before it learns that another one has failed.
    ``elsewhere``: its directories are on another machine, or so it is told by the others."""

    def __init__(self, rank: int, meeting: Meeting, *, deaf: str = "", elsewhere: bool = False) -> None:
        self.rank, self.size = rank, RANKS
        self._meeting = meeting
        self._deaf = deaf
        self._elsewhere = elsewhere

    def told(self, what: str, value: T) -> list[T]:
        self.check()
        self._meeting.said[self.rank] = (what, value)
        try:
            self._meeting.barrier.wait(PATIENCE)
            found = list(self._meeting.said)
            self._meeting.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise self.failure or RankError("another rank has failed") from None
        assert {theirs for theirs, _ in found} == {what}
        if what == self._deaf:
            raise RankError(f"another rank has failed after {what}")
        if self._elsewhere and what == "directories of the state":
            return [said if rank == self.rank else [(0, 0)] for rank, (_, said) in enumerate(found)]
        return [said for _, said in found]

    @property
    def failure(self) -> RankError | None:
        return self._meeting.failure

    def fail(self, error: BaseException) -> None:
        self._meeting.fail(error)


def commits_of(ranks: Ranks, folder: Path, form: Moments, *, whole: bool) -> Commits:
    """What the engine of one rank opens in ``folder``."""
    share = ranks.share(1 if whole else ranks.size)
    groups, kept, description, model = laid_out(form, share.size)
    of_all = {"strands": STRANDS} if ranks.size > 1 else {}
    return Commits(
        budget(folder).of_rank(ranks.rank, ranks.size),
        [share.part(group.spec) for group in groups],
        kept,
        DTYPES[PRECISION],
        torch.device("cpu"),
        Buffers(model),
        model=description | of_all | of_rank(ranks.rank, ranks.size, whole=whole),
        io_threads=1,
        ranks=ranks,
        share=share,
    )


@cache
def laid_out(form: Moments, parts: int) -> tuple[Sequence[ParamGroup], Format, dict[str, Any], nn.Module]:
    model, optimizer = CASE.model(), replace(ADAMW, moments=form)
    kept = Format.of(PRECISION, optimizer.moment_count, form, optimizer.whole)
    model.get_buffer("mean").copy_(torch.tensor([1.0, 2.0, 3.0]))
    groups = group_parameters(model, find_blocks(model), parts, kept)
    return groups, kept, describe_model(groups, Buffers(model), PRECISION, optimizer), model


def begun(folder: Path, form: Moments) -> None:
    """A store of one process in ``folder / "store"``, of a run that has taken two steps, with any bits in its state."""
    commits = commits_of(ALONE, folder / "store", form, whole=False)
    into, names = commits.arrays, [s.name for group in laid_out(form, 1)[0] for s in group.slices if s.trainable]
    with closing(arrays_of(laid_out(form, 1)[2], WHOLE)) as arrays, closing(HostSlab(BOUNCE)) as bounce:
        fill_at_random(arrays, 0)
        for name in into.parts:
            into.begin(name)
            for start, piece in into.pieces(name, bounce):
                piece.copy_(arrays.array(name)[start : start + piece.numel()])
                into.write(name, start, piece)
            into.flip(name)
    of_groups = [{"lr": 1e-2, "param_names": names[::2]}, {"lr": 2e-2, "param_names": names[1::2]}]
    commits.commit({"step": 2, "missed": {"3": 1, "7": 2}, "param_groups": of_groups, "position": {"at": 1}})
    commits.close()


Outcome = int | None | BaseException
"""Of a rank: the step that it goes on from, None: it begins; or what has ended it."""


def opened(folder: Path, form: Moments, *, whole: bool, **last: Any) -> list[Outcome]:
    """What all ranks find who open their stores and close them. ``last``: how the last is another ``Thread``."""
    meeting = Meeting()

    def run(rank: int) -> Outcome:
        ACTING.rank = rank
        try:
            ranks = Thread(rank, meeting, **(last if rank == RANKS - 1 else {}))
            found = commits_of(ranks, folder, form, whole=whole)
            found.close()
            return None if found.resumed is None else int(found.resumed["step"])
        except BaseException as error:  # noqa: BLE001 - all of it is told
            if not isinstance(error, StoreError):  # which all ranks have raised
                meeting.fail(error)
            return error.with_traceback(None)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


ACTING = threading.local()
"""``rank``: that of the thread."""


def of_all(folder: Path) -> list[list[Path]]:
    return [[folder / f"rank-{rank}"] for rank in range(RANKS)]


State = list[dict[str, Any]]
"""Of each store, all its arrays and what its last commit says."""


def contents(stores: Stores) -> State:
    with opened_parts(stores) as found:
        return [_contents(store) for store in found]


def _contents(store: Store) -> dict[str, Any]:
    slots, found = Slots.of(store), dict[str, Any]()
    for extent in store.layout.extents:
        pages = aligned_bytes(extent.stride)
        store.read(extent.name, 0, pages, slots.current(extent.name))
        found[extent.name] = pages.tobytes()
    record = store.last_commit()
    assert record is not None
    return found | {
        "record": {key: value for key, value in record.items() if key != "slots"},
        "model": {key: value for key, value in store.model.items() if key != "world"},
        "sizes": [(extent.name, extent.slots) for extent in store.layout.extents],
    }


FEW = ((("fp32", "int8"), False), (("int8", "fp32"), True))
STAGES = pytest.mark.parametrize(
    "whole", [pytest.param(False, id="stage 3"), pytest.param(True, id="stage 0", marks=pytest.mark.campaign)]
)


def cut(one: Path, into: Path, *, whole: bool) -> list[list[Path]]:
    """The stores of all ranks, made of that of one process."""
    into.mkdir()
    reshard([[one]], stores := of_all(into), names=stores, strands=STRANDS, whole=whole)
    return stores


@pytest.mark.parametrize(
    ("change", "whole"),
    [
        pytest.param(change, whole, marks=() if (change, whole) in FEW else pytest.mark.campaign)
        for change in CHANGES
        for whole in (False, True)
    ],
    ids=str,
)
def test_ranks_make_of_their_stores_what_one_process_makes_of_the_same_state(
    change: tuple[Moments, Moments], whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every byte of every array with its padding, of every buffer, and all that the commit says. It is said once."""
    had, form = change
    begun(tmp_path, had)
    stores = cut(tmp_path / "store", tmp_path / "ranks", whole=whole)
    before = contents(stores)
    caplog.clear()
    assert opened(tmp_path / "ranks", form, whole=whole) == [2, 2]
    (said,) = [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]
    assert f"rank-0 and the stores of all 2 ranks: moments are converted from {had} to {form}, " in said
    assert said.endswith(" are written anew" + " by each" * whole)
    commits_of(ALONE, tmp_path / "store", form, whole=False).close()
    assert (found := contents(stores)) == contents(cut(tmp_path / "store", tmp_path / "cut", whole=whole))
    assert found != before
    check_nothing_else(stores)
    caplog.clear()
    assert opened(tmp_path / "ranks", form, whole=whole) == [2, 2]
    assert "converted" not in caplog.text


def check_nothing_else(stores: Stores) -> None:
    assert {item.name for paths in stores for path in paths for item in path.iterdir()} <= OF_A_STORE


class Killed(BaseException):
    """What a rank raises at any call that would change anything, once it is killed."""


class Hit:
    """A hook that hits one rank at its call of a number. ``code``: with this error; None: it is killed."""

    def __init__(self, rank: int, number: int, code: int | None) -> None:
        self._rank, self._number, self._code = rank, number, code
        self.calls: list[list[Call]] = [[] for _ in range(RANKS)]
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
    whole: bool
    calls: Sequence[Sequence[Call]]
    """of each rank that converts them"""
    before: State
    after: State
    """once converted"""
    back: State
    """once converted, and converted back"""

    @staticmethod
    def made(folder: Path, *, whole: bool) -> "Place":
        begun(folder, "fp32")
        before = contents(cut(folder / "store", folder / "old", whole=whole))
        after, back = (_once_converted(folder, form, whole=whole) for form in ("int8", "fp32"))
        place = Place(folder=folder, whole=whole, calls=(), before=before, after=after, back=back)
        place.hit("counted", hook := Hit(0, -1, None))
        return replace(place, calls=hook.calls)

    def hit(self, case: str, hook: Hit, **last: Any) -> tuple[Path, list[Outcome]]:
        copytree(self.folder / "old", folder := self.folder / case)
        with intercepted(folder, hook, names=True):
            return folder, opened(folder, "int8", whole=self.whole, **last)

    def check(self, folder: Path, outcomes: Sequence[Outcome], case: int) -> bool:
        """All stores count or none does, whoever looks at them; all ranks go on, whichever form they ask for. Returns
        whether the new ones count."""
        stores = of_all(folder)
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
        assert opened(folder, form, whole=self.whole) == [2, 2]
        assert contents(stores) == (self.after if form == "int8" else self.back if counts else self.before)
        check_nothing_else(stores)
        return counts


def _once_converted(folder: Path, form: Moments, *, whole: bool) -> State:
    commits_of(ALONE, folder / "store", form, whole=False).close()
    return contents(cut(folder / "store", folder / form, whole=whole))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Place]:
    """By whether each rank has all of the state."""
    return cache(lambda whole: Place.made(tmp_path_factory.mktemp("place"), whole=whole))


@STAGES
def test_a_rank_that_is_killed_leaves_all_stores_as_they_were_or_all_converted(
    whole: bool, places: Callable[[bool], Place], campaign: Campaign
) -> None:
    place, rng, seen = places(whole), Random(whole), Counter[bool]()
    for rank in range(RANKS):
        for number in numbers_of(place.calls[rank], rng, campaign):
            folder, outcomes = place.hit(f"killed-{rank}-{number}", Hit(rank, number, None))
            assert isinstance(outcomes[rank], Killed)
            seen[place.check(folder, outcomes, number)] += 1
    assert set(seen) == {False, True}
    campaign.found(f"{seen.total()} ranks killed as they converted moments: {seen[True]} times all had, else none had")


@STAGES
def test_a_call_that_fails_on_one_rank_is_said_on_all_and_leaves_all_stores_as_they_were_or_all_converted(
    whole: bool, places: Callable[[bool], Place], campaign: Campaign
) -> None:
    place, rng, seen = places(whole), Random(2 + whole), Counter[bool]()
    for rank in range(RANKS):
        for number in numbers_of(place.calls[rank], rng, campaign):
            hook = Hit(rank, number, (errno.EIO, errno.ENOSPC)[number % 2])
            folder, outcomes = place.hit(f"failed-{rank}-{number}", hook)
            if said_by_all := "and the state is as it was" in str(outcomes[rank]):
                assert str(outcomes[1 - rank]) == f"rank {rank}: {outcomes[rank]}"
                check_nothing_else(of_all(folder))
                assert contents(of_all(folder)) == place.before
            seen[said_by_all] += 1
            place.check(folder, outcomes, number)
    assert set(seen) == {False, True}
    campaign.found(
        f"{seen.total()} calls of ranks that converted moments failed, {seen[True]} of them on all: all whole"
    )


def numbers_of(calls: Sequence[Call], rng: Random, campaign: Campaign) -> Sequence[int]:
    """All calls; or the one that decides, and the next one, or else one of those before."""
    decides = next((n for n, call in enumerate(calls) if call.name == "rename" and call.path.endswith(STAGED)), None)
    few = [rng.randrange(len(calls) // 2, len(calls))] if decides is None else [decides, decides + 1]
    return range(len(calls)) if campaign.full else few


def test_who_learns_late_that_a_rank_has_failed_removes_nothing_that_may_count(
    places: Callable[[bool], Place],
) -> None:
    """The first rank lets all count while the other, whose own is whole, already hears that something has failed."""
    place = places(False)
    folder, outcomes = place.hit("late", Hit(0, -1, None), deaf="converted state")
    assert all(isinstance(outcome, RankError) for outcome in outcomes)
    assert (folder / "rank-0" / NEXT).exists()
    assert (folder / "rank-1" / STAGED).exists()
    assert place.check(folder, outcomes, 0)


def test_stores_that_are_not_all_on_one_machine_are_refused_and_left(places: Callable[[bool], Place]) -> None:
    place = places(False)
    folder, (other, own) = place.hit("elsewhere", Hit(0, -1, None), elsewhere=True)
    assert str(own) == (
        "moments are not converted, and the state is as it was: they are kept in fp32, optimizer.moments='int8' asks "
        f"for another form, and rank 1 does not find the state of rank 0, {folder / 'rank-0'}: start all ranks where "
        "each has the directories of the others; or go on with moments='fp32'; or load a snapshot into new stores"
    )
    assert str(other) == f"rank 1: {own}"
    assert contents(of_all(folder)) == place.before
    check_nothing_else(of_all(folder))


def test_stores_in_which_nothing_is_committed_are_made_anew_also_where_some_are_already(tmp_path: Path) -> None:
    assert opened(tmp_path, "fp32", whole=False) == [None, None]
    first = Hit(1, -1, None)
    copytree(tmp_path, tmp_path / "counted")
    with intercepted(tmp_path / "counted", first, names=True):
        assert opened(tmp_path / "counted", "int8", whole=False) == [None, None]
    removes = next(n for n, call in enumerate(first.calls[1]) if call.name == "rename")
    with intercepted(tmp_path, Hit(1, removes, None), names=True):
        _, killed = opened(tmp_path, "int8", whole=False)
    assert isinstance(killed, Killed)
    forms = [Manifest.read(path).model.get("moments") for (path,) in of_all(tmp_path)]
    assert forms == ["int8", None]
    assert opened(tmp_path, "int8", whole=False) == [None, None]
    assert [Manifest.read(path).model["moments"] for (path,) in of_all(tmp_path)] == ["int8", "int8"]
