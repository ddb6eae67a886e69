"""The stores of several ranks, converted together: what they have then is what one process makes of the same state, to
the bit. What breaks a conversion off is in ``tests/campaigns/test_conversion_of_ranks.py``.

Ranks are threads here, which meet where ranks tell each other something.
"""

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
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
from penstock.store import records, successor
from penstock.store.directory import is_there
from penstock.store.parts import of_rank, opened_parts
from penstock.store.store import Store
from penstock.store.successor import Stores
from penstock.store.transfer import aligned_bytes
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import ParamGroup, group_parameters
from tests.engine.test_conversion import CASE, OF_A_STORE
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
    """A place where threads meet that are the ranks of a run."""

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
"""The end of a rank: the step that it goes on from, None: it begins; or what has ended it."""


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
"""All arrays of each store and what its last commit says."""


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
    assert f"rank-0 and so on): moments are converted from {had} to {form}, " in said
    assert said.endswith(" are written anew" + " by each" * whole)
    commits_of(ALONE, tmp_path / "store", form, whole=False).close()
    assert (found := contents(stores)) == contents(cut(tmp_path / "store", tmp_path / "cut", whole=whole))
    assert found != before
    check_nothing_else(stores)
    caplog.clear()
    assert opened(tmp_path / "ranks", form, whole=whole) == [2, 2]
    assert "converted" not in caplog.text


def test_a_rank_that_cannot_read_anothers_last_commit_does_not_take_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a store would be whole, of another step, and converted without a word."""
    begun(tmp_path, "fp32")
    stores = cut(tmp_path / "store", tmp_path / "ranks", whole=False)
    with closing(Store.open(stores[1])) as store:
        newest, before = f"commit.{store.commits.sequence % 2}", store.commits.sequence
    was = contents(stores)
    open_store, read = Store.open, records.read_bounded
    lent = threading.local()

    def opened_so(paths: Sequence[Path], **how: Any) -> Store:
        lent.now = how.get("lent", False)
        return open_store(paths, **how)

    def failing(path: Path, most: int) -> str:
        if getattr(lent, "now", False) and path == stores[1][0] / newest:
            raise OSError(errno.EIO, "Input/output error")
        return read(path, most)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "open", staticmethod(opened_so))
        patched.setattr(records, "read_bounded", failing)
        for found in opened(tmp_path / "ranks", "int8", whole=False):
            assert isinstance(found, StoreError)
            assert f"rank 0 finds commit {before - 1} in" in str(found)
    assert contents(stores) == was
    check_nothing_else(stores)


def test_a_start_that_converts_nothing_looks_into_no_other_ranks_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not be within reach."""
    begun(tmp_path, "fp32")
    cut(tmp_path / "store", tmp_path / "ranks", whole=False)
    looked = []

    def look(path: Path) -> bool:
        looked.append((ACTING.rank, path))
        return is_there(path)

    monkeypatch.setattr(successor, "is_there", look)
    assert opened(tmp_path / "ranks", "fp32", whole=False) == [2, 2]
    assert looked
    assert all(f"rank-{rank}" in path.parts for rank, path in looked)


def check_nothing_else(stores: Stores) -> None:
    assert {item.name for paths in stores for path in paths for item in path.iterdir()} <= OF_A_STORE
