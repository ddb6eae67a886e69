"""Ranks of several hosts."""

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread, Timer, current_thread
from types import SimpleNamespace

import pytest
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.ranks import watch
from penstock.ranks.calls import Calls
from penstock.ranks.watch import Place, Watch
from tests.patience import PATIENCE, until
from tests.ranks import test_failures
from tests.ranks.worlds import RankFailedError, World, together
from tests.training import AT_ONCE


def failure_beside(other: Place, monkeypatch: pytest.MonkeyPatch, own: Place | None = None) -> str:
    """What rank 0, which is here, says of rank 1, which beats once. ``own``: the place of the first."""
    monkeypatch.setattr(watch, "EVERY", 0.01)
    monkeypatch.setattr(watch, "SILENT", 0.2)
    store = dist.HashStore()
    store.set("beat/1", "1 0 0 0")
    here = Watch(store, 0, [own or Place.here(), other], Calls())
    until = time.monotonic() + 30
    while here.failure is None and time.monotonic() < until:
        time.sleep(0.01)
    here.close()
    return str(here.failure)


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_killed_process_of_this_host_is_found_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(Place.here(), process=ended_process())
    assert failure_beside(other, monkeypatch) == "rank 1 was killed"


@contextmanager
def cut_name() -> Iterator[None]:
    """This process has a name of which the kernel has cut a letter in two."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes("a\u8bad\u7ec3\u8bad\u7ec3\u8bad\u7ec3".encode())
    try:
        yield
    finally:
        name.write_bytes(before)


@contextmanager
def no_file_to_open() -> Iterator[None]:
    """This process has as many files open as it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("within", [cut_name, no_file_to_open], ids=lambda within: within.__name__)
def test_a_process_that_lives_is_not_taken_for_a_killed_one(
    within: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does whoever looks at it end."""
    other = Place.here()
    with within():
        said = failure_beside(other, monkeypatch, other)
    assert said == "rank 1 has not answered for 0 s"


@pytest.mark.parametrize("what", ["boot", "processes"])
def test_another_host_of_the_same_name_is_known_by_its_beats_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes have numbers that mean nothing here."""
    other = replace(Place.here(), process=ended_process(), **{what: "another"})
    said = failure_beside(other, monkeypatch)
    assert said == f"rank 1 on host {other.name} has not answered for 0 s"


def test_an_error_names_the_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Place(name="second", boot="another", processes="pid:[1]", process=1)
    assert failure_beside(other, monkeypatch).startswith("rank 1 on host second has not answered")


def test_ranks_that_are_all_stopped_for_a_while_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is paused: the clock goes on, and nobody says anything."""
    stopped = 0.0
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped))
    monkeypatch.setattr(watch, "EVERY", 0.5)
    store, places = dist.HashStore(), [Place.here()] * 2
    ranks = [Watch(store, rank, places, Calls()) for rank in (0, 1)]

    def sleeping_after(beat: int) -> None:
        until(lambda: all(int(store.get(f"beat/{rank}").split()[0]) >= beat for rank in (0, 1)))
        time.sleep(0.05)

    sleeping_after(2)
    stopped = 100.0
    assert [rank.failure for rank in ranks] == [None, None], "it was not asked for anything"
    sleeping_after(4)
    assert [rank.failure for rank in ranks] == [None, None], "the other one has had no time to beat"
    ends = [Thread(target=rank.close) for rank in ranks]
    for end in ends:
        end.start()
    for end in ends:
        end.join(PATIENCE)
    assert [rank.failure for rank in ranks] == [None, None]


@pytest.mark.parametrize("asks", ["set", "check"])  # of the beat, and of the look at the others
def test_a_rank_that_is_stopped_as_it_asks_the_store_goes_on(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers at once when all go on, and the other rank has had no time to beat."""
    stopped, asked, answer = 0.0, Event(), Event()
    monkeypatch.setattr(watch, "EVERY", 0.05)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped))

    class Stopped(dist.HashStore):
        def __getattribute__(self, name: str) -> object:
            if name == asks and stops.is_set() and current_thread().name == "penstock-watch":
                asked.set()
                assert answer.wait(PATIENCE)
            return super().__getattribute__(name)

    stops, store, places = Event(), Stopped(), [Place.here()] * 2
    store.set("beat/1", "1 0 0 0")
    rank = Watch(store, 0, places, Calls())
    until(lambda: int(store.get("beat/0").split()[0]) > 2)  # it has looked at the other's
    stops.set()
    assert asked.wait(PATIENCE)
    stopped = 100.0
    Timer(0.1, answer.set).start()
    assert rank.failure is None
    stops.clear()
    before = int(store.get("beat/0").split()[0])
    until(lambda: int(store.get("beat/0").split()[0]) > before + 1)
    assert rank.failure is None
    store.set("ended/1", "")
    rank.close()


def test_ranks_that_end_wait_for_each_other_and_for_no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY", 2 * PATIENCE)
    store, places = dist.HashStore(), [Place.here()] * 2
    first, second = (Watch(store, rank, places, Calls()) for rank in (0, 1))
    ends = Thread(target=first.close)
    ends.start()
    ends.join(0.2)
    assert ends.is_alive(), "the other one has not ended"
    second.close()
    ends.join(PATIENCE)
    assert not ends.is_alive()
    assert first.failure is second.failure is None


def on_hosts(mesh: DeviceMesh, drives: tuple[Path, Path]) -> tuple[int, list[float]]:
    """A step of ranks that are each on a host of its own, with a drive of its own."""
    os.environ["GROUP_RANK"] = str(mesh.get_rank())
    os.chdir(drives[mesh.get_rank()])  # all of them call it so
    return test_failures.steps(mesh, Path("store"), 1, **AT_ONCE)


@pytest.mark.usefixtures("one_thread")
def test_hosts_that_got_other_numbers_do_not_begin_beside_their_state(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for drive in (first, second):
        drive.mkdir()
    wanted = test_failures.whole()
    assert together(2, on_hosts, (first, second)) == [(0, wanted[:1])] * 2
    for error in World(2, on_hosts, (second, first)).outcomes():
        assert isinstance(error, RankFailedError)
        assert "store/rank-1 is the state of a rank that is on another host now" in error.said
        assert "--node-rank" in error.said
    assert sorted(path.name for path in second.glob("store/*")) == ["rank-1"]
    assert together(2, on_hosts, (first, second)) == [(1, wanted[1:2])] * 2
    for drive in (first, second):
        shutil.rmtree(drive / "store")
    assert together(2, on_hosts, (second, first)) == [(0, wanted[:1])] * 2
