"""The stores of several ranks, converted together: what they have then is what one process makes of the same state, to
the bit. What breaks a conversion off is in ``tests/campaigns/test_conversion_of_ranks.py``.

Ranks are threads here, which meet where ranks tell each other something.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from penstock.config import Precision
from penstock.config.optimizer import Moments
from penstock.engine.start import describe_model
from penstock.errors import ConfigError, RankError, StoreError
from penstock.optim.precision import DTYPES
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.dealt import holders_of, names_of_blocks
from penstock.schedule.place import Format
from penstock.state import snapshots
from penstock.state.buffers import Buffers
from penstock.state.commits import Commits
from penstock.state.memory import BOUNCE, HostSlab
from penstock.state.slots import Slots
from penstock.store import records, successor
from penstock.store.directory import is_there
from penstock.store.manifest import Manifest
from penstock.store.parts import HOLDERS, of_rank, opened_parts
from penstock.store.store import Store
from penstock.store.successor import Stores
from penstock.store.transfer import aligned_bytes
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import ParamGroup, group_parameters
from tests.engine.test_conversion import CASE, OF_A_STORE
from tests.faults import Call, Go, error, intercepted
from tests.patience import PATIENCE
from tests.state.test_convert import CHANGES, arrays_of, fill_at_random
from tests.training import budget
from tests.unreached import ADAMW

pytestmark = pytest.mark.usefixtures("one_thread")

STRANDS = 2
PRECISION: Precision = "bf16"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way in which ranks have the state. ``said``: of what is written anew."""

    ranks: int
    whole: bool = False
    copies: int = 1
    stages: int = 1
    hosts: int = 1
    said: str = ""


ONE = Kind(ranks=1)
KINDS = {
    "shared": Kind(ranks=2),
    "stage 0": Kind(ranks=2, whole=True, said=" by each"),
    "pipeline": Kind(ranks=2, stages=2),
    "copies": Kind(ranks=4, copies=2, said=" for each of 2 copies"),
    "beside": Kind(ranks=4, stages=2),
}
MOST = 4
"""ranks of a kind"""


class Meeting:
    """A place where threads meet that are the ranks of a run."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.said: list[Any] = [None] * ranks
        self.failure: RankError | None = None

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or RankError(f"another rank has failed: {type(error).__name__}: {error}")
        self.barrier.abort()


class Thread(Ranks):
    """A rank that is a thread. ``deaf``: what it is told last before it learns that another one has failed.
    ``elsewhere``: it finds copies where the others have their stores, or so it is told by them."""

    def __init__(self, rank: int, kind: Kind, meeting: Meeting, *, deaf: str = "", elsewhere: bool = False) -> None:
        self.rank, self.size, self.copies, self.stages = rank, kind.ranks, kind.copies, kind.stages
        self.hosts = kind.hosts
        self._meeting = meeting
        self._deaf = deaf
        self._elsewhere = elsewhere

    def gather_objects(self, what: str, value: T) -> list[T]:
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
        if self._elsewhere and what == "stores of the state":
            others = [type(said)("another", said.sequence) for _, said in found]
            return [*others[: self.rank], found[self.rank][1], *others[self.rank + 1 :]]
        return [said for _, said in found]

    def lend(self, tensor: torch.Tensor, owner: int) -> None:
        lent = self.gather_objects("what is lent", tensor.clone() if self.rank == owner else None)[owner]
        assert lent is not None
        tensor.copy_(lent)

    @property
    def failure(self) -> RankError | None:
        return self._meeting.failure

    def fail(self, error: BaseException) -> None:
        self._meeting.fail(error)


@dataclass(frozen=True, kw_only=True)
class Laid:
    """What is made for a rank: its share, and the groups of which it has it."""

    groups: Sequence[ParamGroup]
    form: Format
    share: Share
    description: dict[str, Any]
    model: nn.Module


def laid_out_for(ranks: Ranks, form: Moments, kind: Kind) -> Laid:
    parts = 1 if kind.whole else ranks.each
    groups, kept, description, model = laid_out(form, parts)
    share = ranks.share(parts, _holders(form, parts, kind.stages) if kind.stages > 1 else ())
    stages = kind.stages if kind.stages > 1 else None
    of_this = of_rank(
        ranks.rank, kind.ranks, whole=share.is_whole, copies=kind.copies, holders=share.holders, stages=stages
    )
    made = description | {"strands": STRANDS} | of_this
    return Laid(groups=groups, form=kept, share=share, description=made, model=model)


def _holders(form: Moments, parts: int, stages: int) -> list[int]:
    """As a run goes on with the deal of its store: that of the groups in fp32."""
    first, specs = ([group.spec for group in laid_out(each, parts)[0]] for each in ("fp32", form))
    blocks = names_of_blocks(first)
    return holders_of(specs, blocks, stages, holders_of(first, blocks, stages)[0])[1]


def commits_of(ranks: Ranks, folder: Path, form: Moments, kind: Kind = ONE) -> Commits:
    """What the engine of one rank opens in ``folder``."""
    laid = laid_out_for(ranks, form, kind)
    return Commits(
        budget(folder).of_rank(ranks.rank, ranks.size),
        [laid.share.part(group.spec) for group in laid.groups],
        laid.form,
        DTYPES[PRECISION],
        torch.device("cpu"),
        Buffers(laid.model),
        model=laid.description,
        ranks=ranks,
        share=laid.share,
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
    commits = commits_of(ALONE, folder / "store", form)
    into, names = commits.arrays, [s.name for group in laid_out(form, 1)[0] for s in group.slices if s.trainable]
    with closing(arrays_of(laid_out(form, 1)[2], WHOLE)) as arrays, closing(HostSlab(BOUNCE)) as bounce:
        fill_at_random(arrays, 0)
        for name in into.parts:
            into.begin(name)
            for start, piece in into.pieces(name, bounce.bytes):
                piece.copy_(arrays.array(name)[start : start + piece.numel()])
                into.write(name, start, piece)
            into.flip(name)
    of_groups = [{"lr": 1e-2, "param_names": names[::2]}, {"lr": 2e-2, "param_names": names[1::2]}]
    commits.commit({"step": 2, "missed": {"3": 1, "7": 2}, "param_groups": of_groups, "position": {"at": 1}})
    commits.close()


Outcome = int | None | BaseException
"""The end of a rank: the step that it goes on from, None: it begins; or what has ended it."""


def opened(folder: Path, form: Moments, kind: Kind, **last: Any) -> list[Outcome]:
    """What all ranks find who open their stores and close them. ``last``: how the last is another ``Thread``."""

    def run(ranks: Ranks) -> int | None:
        found = commits_of(ranks, folder, form, kind)
        found.close()
        return None if found.resumed is None else int(found.resumed["step"])

    return of_each(run, kind, **last)


def of_each(what: Callable[[Ranks], int | None], kind: Kind, **last: Any) -> list[Outcome]:
    meeting = Meeting(kind.ranks)

    def run(rank: int) -> Outcome:
        ACTING.rank = rank
        try:
            return what(Thread(rank, kind, meeting, **(last if rank == kind.ranks - 1 else {})))
        except BaseException as error:  # noqa: BLE001 - all of it is told
            if not isinstance(error, StoreError | ConfigError):  # which all ranks have raised
                meeting.fail(error)
            return _alone(error)

    with ThreadPoolExecutor(kind.ranks) as pool:
        return list(pool.map(run, range(kind.ranks)))


def _alone(error: BaseException) -> BaseException:
    """The error without the frames that it has come through: they keep all that they had, and the thread's keeps it."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
    return error


ACTING = threading.local()
"""``rank``: that of the thread."""


def of_all(folder: Path, kind: Kind) -> list[list[Path]]:
    return [[folder / f"rank-{rank}"] for rank in range(kind.ranks)]


State = list[dict[str, Any]]
"""All arrays of each store and what its last commit says."""


def contents(stores: Stores) -> State:
    with opened_parts(stores) as found:
        return [_contents(store) for store in found]


def _contents(store: Store) -> dict[str, Any]:
    slots, found = Slots(store), dict[str, Any]()
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


def cut(one: Path, into: Path, kind: Kind) -> list[list[Path]]:
    """The stores of all ranks, with the state of that of one process."""
    into.mkdir()
    form: Moments = Manifest.read(one).model.get("moments", "fp32")
    mine, saved, record = laid_out_for(ALONE, form, ONE), into.parent / f"{into.name}-saved", dict[str, Any]()
    with closing(commits_of(ALONE, one, form)) as commits:
        assert commits.resumed is not None
        record |= {key: value for key, value in commits.resumed.items() if key not in ("slots", "whole")}
        meta = record | {"model": mine.description}
        snapshots.save(saved, commits.arrays, Buffers(mine.model), meta, overwrite=False)

    def begin(ranks: Ranks) -> int:
        laid = laid_out_for(ranks, form, kind)
        with closing(commits_of(ranks, into, form, kind)) as commits:
            with snapshots.opened(saved, laid.description, ranks, laid.share) as snapshot:
                snapshots.restore(snapshot, commits.arrays, Buffers(laid.model))
            commits.commit(record)
        return 0

    assert of_each(begin, kind) == [0] * kind.ranks
    return of_all(into, kind)


FEW = {
    ("fp32", "int8"): ("shared", "pipeline", "copies"),
    ("int8", "fp32"): ("stage 0", "beside"),
}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(change, name, marks=() if name in FEW.get(change, ()) else pytest.mark.campaign)
        for change in CHANGES
        for name in KINDS
    ],
    ids=str,
)
def test_ranks_make_of_their_stores_what_one_process_makes_of_the_same_state(
    change: tuple[Moments, Moments], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every byte of every array with its padding, of every buffer, and all that the commit says. It is said once."""
    (had, form), kind = change, KINDS[name]
    begun(tmp_path, had)
    stores = cut(tmp_path / "store", tmp_path / "ranks", kind)
    before = contents(stores)
    caplog.clear()
    assert opened(tmp_path / "ranks", form, kind) == [2] * kind.ranks
    (said,) = [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]
    assert f"rank-0 and so on): moments are converted from {had} to {form}, " in said
    assert said.endswith(" are written anew" + kind.said)
    commits_of(ALONE, tmp_path / "store", form).close()
    assert (found := contents(stores)) == contents(cut(tmp_path / "store", tmp_path / "cut", kind))
    assert found != before
    check_nothing_else(stores)
    caplog.clear()
    assert opened(tmp_path / "ranks", form, kind) == [2] * kind.ranks
    assert "converted" not in caplog.text


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("name", ["stage 0", "pipeline", "copies", "beside"])
def test_ranks_need_no_store_of_another_host_if_what_they_share_is_on_theirs(name: str, tmp_path: Path) -> None:
    """Each host has drives of its own, and a file of another one's is not there."""
    kind = replace(KINDS[name], hosts=2)
    begun(tmp_path, "fp32")
    stores = cut(tmp_path / "store", tmp_path / "ranks", KINDS[name])
    with hosts_apart(tmp_path / "ranks", kind):
        assert opened(tmp_path / "ranks", "int8", kind) == [2] * kind.ranks
    commits_of(ALONE, tmp_path / "store", "int8").close()
    assert contents(stores) == contents(cut(tmp_path / "store", tmp_path / "cut", kind))
    check_nothing_else(stores)


def test_ranks_that_share_the_state_over_hosts_are_refused_if_they_do_not_find_it(tmp_path: Path) -> None:
    kind = replace(KINDS["shared"], hosts=2)
    begun(tmp_path, "fp32")
    stores = cut(tmp_path / "store", tmp_path / "ranks", KINDS["shared"])
    before = contents(stores)
    with hosts_apart(tmp_path / "ranks", kind):
        first, second = opened(tmp_path / "ranks", "int8", kind)
    assert f"rank 0 does not find the state of rank 1, {stores[1][0]}, of which it needs its part" in str(first)
    assert f"rank 1 does not find the state of rank 0, {stores[0][0]}, of which it needs its part" in str(second)
    assert "start ranks that share the state where each has the directories of the others; or go on" in str(first)
    assert contents(stores) == before
    check_nothing_else(stores)


@contextmanager
def hosts_apart(folder: Path, kind: Kind) -> Iterator[None]:
    """The threads of a host find the stores of its own ranks alone."""
    each, look = kind.ranks // kind.hosts, Path.lstat

    def is_elsewhere(path: str | Path) -> bool:
        (rank,) = [int(part[5:]) for part in Path(path).parts if part.startswith("rank-")] or [ACTING.rank]
        return bool(rank // each != ACTING.rank // each)

    def call(call: Call, go: Go) -> Any:
        return error(errno.ENOENT)(call, go) if is_elsewhere(call.path) else go()

    def lstat(path: Path) -> os.stat_result:
        if is_elsewhere(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return look(path)

    with pytest.MonkeyPatch.context() as patch, intercepted(folder, call, names=True):
        patch.setattr(Path, "lstat", lstat)
        yield


@pytest.mark.parametrize("name", ["stage 0", "copies"])
def test_a_copy_that_is_lost_while_all_are_put_in_their_place_takes_the_state_over(name: str, tmp_path: Path) -> None:
    """Its host is new. A store of which there is no other copy is missed, and nothing is moved."""
    kind, folder = KINDS[name], tmp_path / "ranks"
    begun(tmp_path, "fp32")
    stores = cut(tmp_path / "store", folder, kind)
    for number, paths in enumerate(cut(tmp_path / "store", tmp_path / "new", kind)):
        shutil.copytree(paths[0], successor.staged(stores[number])[0])
    successor.decide(stores[0][0])
    shutil.rmtree(stores[-1][0])
    if name == "copies":
        (aside := stores[1][0]).rename(tmp_path / "aside")
        for found in opened(folder, "fp32", kind):
            assert f"{stores[1][0]} holds no store, and other ranks have theirs" in str(found)
        assert not any(is_there(paths[0] / "penstock.store.next") for paths in stores[1:])
        (tmp_path / "aside").rename(aside)
    assert opened(folder, "fp32", kind) == [2] * kind.ranks
    assert contents(stores) == contents(of_all(tmp_path / "new", kind))
    check_nothing_else(stores)


def test_stores_of_a_pipeline_that_is_dealt_otherwise_are_refused(tmp_path: Path) -> None:
    kind = KINDS["pipeline"]
    begun(tmp_path, "fp32")
    stores = cut(tmp_path / "store", tmp_path / "ranks", kind)
    before = contents(stores)

    def open_so(ranks: Ranks) -> None:
        laid = laid_out_for(ranks, "int8", kind)
        holders = tuple(1 - holder for holder in laid.share.holders or ())
        share = replace(laid.share, holders=holders)
        Commits(
            budget(tmp_path / "ranks").of_rank(ranks.rank, ranks.size),
            [share.part(group.spec) for group in laid.groups],
            laid.form,
            DTYPES[PRECISION],
            torch.device("cpu"),
            Buffers(laid.model),
            model=laid.description | {HOLDERS: list(holders)},
            ranks=ranks,
            share=share,
        )

    found = [str(outcome) for outcome in of_each(open_so, kind)]
    assert all("another model: holders." in said or "has failed" in said for said in found), found
    assert contents(stores) == before


@pytest.mark.parametrize("torn", [False, True])
def test_a_rank_that_cannot_read_anothers_last_commit_does_not_take_the_one_before(
    torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a store would be whole, of another step, and converted without a word."""
    begun(tmp_path, "fp32")
    kind = KINDS["shared"]
    stores = cut(tmp_path / "store", tmp_path / "ranks", kind)
    with closing(Store.open(stores[1])) as store:
        newest, before = f"commit.{store.commits.sequence % 2}", store.commits.sequence - 1
    was = contents(stores)
    open_store, read = Store.open, records.read_bounded
    lent = threading.local()

    def opened_so(paths: Sequence[Path], **how: Any) -> Store:
        lent.now = how.get("lent", False)
        return open_store(paths, **how)

    def failing(path: Path, most: int) -> str:
        if getattr(lent, "now", False) and path == stores[1][0] / newest:
            if torn:
                return read(path, most)[:60]
            raise OSError(errno.EIO, "Input/output error")
        return read(path, most)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "open", staticmethod(opened_so))
        patched.setattr(records, "read_bounded", failing)
        for found in opened(tmp_path / "ranks", "int8", kind):
            assert isinstance(found, StoreError)
            said = f"rank 0 finds commit {before} in" if torn else "it may hold the last commit, so try again"
            assert said in str(found)
    assert contents(stores) == was
    check_nothing_else(stores)


def test_a_start_that_converts_nothing_looks_into_no_other_ranks_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not be within reach."""
    begun(tmp_path, "fp32")
    cut(tmp_path / "store", tmp_path / "ranks", KINDS["shared"])
    looked = []

    def look(path: Path) -> bool:
        looked.append((ACTING.rank, path))
        return is_there(path)

    monkeypatch.setattr(successor, "is_there", look)
    assert opened(tmp_path / "ranks", "fp32", KINDS["shared"]) == [2, 2]
    assert looked
    assert all(f"rank-{rank}" in path.parts for rank, path in looked)


def check_nothing_else(stores: Stores) -> None:
    assert {item.name for paths in stores for path in paths for item in path.iterdir()} <= OF_A_STORE
