"""A drive that does not answer is said to, once, and when it is over; at no other time."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.store import kernel, transfer
from penstock.store.layout import ALIGN, Layout, Region
from penstock.store.stalls import Stalls
from penstock.store.store import Store
from penstock.store.transfer import StripedFiles, aligned_bytes
from tests.patience import PATIENCE

LATE = 0.2
SIZE = 64 * ALIGN
LAYOUT = Layout.build([("a", SIZE, 1)], {"a": (Region(nbytes=SIZE, block=ALIGN),)})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """One whose requests count as late after a moment, in pieces of 4 KiB."""
    monkeypatch.setattr(transfer, "Stalls", partial(Stalls, late=LATE))
    monkeypatch.setattr("penstock.store.store.StripedFiles", partial(StripedFiles, request=ALIGN))
    with Store.create([tmp_path / "store"], LAYOUT, model={}) as store:
        yield store


def _stalling(
    call: str, patch: pytest.MonkeyPatch, go_on: Callable[[], bool], calls: range = range(1)
) -> Callable[..., object]:
    """``os.<call>``, that waits until ``go_on()`` when it is called for the times in ``calls``."""
    real: Callable[..., object] = getattr(os, call)
    number = iter(range(1 << 30))

    def stall(*args: object) -> object:
        if next(number) in calls:
            while not go_on():
                time.sleep(0.01)
            time.sleep(0.2)  # so that it is looked at more than once
        return real(*args)

    patch.setattr(os, call, stall)
    return real


@pytest.mark.parametrize(
    ("call", "verb", "what"),
    [("preadv", "read", "read of 256 KiB"), ("pwritev", "write", "write of 256 KiB"), ("fdatasync", "flush", "flush")],
)
def test_a_stall_is_said_while_it_lasts_and_when_it_is_over(
    call: str, verb: str, what: str, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its length is told in whole seconds: no less than when it was said, and no more than passed here."""
    caplog.set_level(logging.WARNING, "penstock")
    if verb == "read":
        store.write("a", 0, aligned_bytes(SIZE))
    _stalling(call, monkeypatch, lambda: len(caplog.messages) > 0)
    began = time.monotonic()
    if verb == "flush":
        store.flush()
    else:
        getattr(store, verb)("a", 0, aligned_bytes(SIZE))
    store.close()
    passed = time.monotonic() - began
    begun, over = caplog.messages
    path = re.escape(str(store.paths[0] / "penstock.store"))
    until_said = re.match(rf"{path}: a {what} has been under way for (\d+) s", begun)
    length = re.fullmatch(rf"{path}: goes on after a stall of (\d+) s", over)
    assert until_said is not None
    assert length is not None
    assert round(LATE) <= int(until_said[1]) <= int(length[1]) <= round(passed)


def test_requests_of_which_some_come_back_are_not_late(caplog: pytest.LogCaptureFixture) -> None:
    """Many that are made together may take long. When none comes back any more, the stall is as long as that lasted."""
    caplog.set_level(logging.WARNING, "penstock")
    stalls, progress = Stalls(late=LATE), np.zeros(2, dtype=np.int64)
    request = stalls.begin(Path("drive"), "read", 1 << 30, progress)
    until = time.monotonic() + 3 * LATE
    while time.monotonic() < until:
        progress[:] = time.monotonic_ns()
        time.sleep(LATE / 50)
    said = [*caplog.messages]
    stopped = time.monotonic()
    while len(caplog.messages) == len(said):
        time.sleep(0.01)
    progress[:] = 0, time.monotonic_ns()
    while "goes on" not in caplog.messages[-1]:
        time.sleep(0.01)
    request.end()
    passed = time.monotonic() - stopped
    stalls.close()
    assert not said or passed > LATE * 4  # a busy machine may really have kept the clock of the first loop waiting
    length = re.fullmatch(r"drive: goes on after a stall of (\d+) s", caplog.messages[-1])
    assert length is not None
    assert int(length[1]) <= round(passed + LATE)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_drive_that_stalls_is_the_only_one_that_is_said_to(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All files of a transfer wait for the slowest; the others have nothing under way meanwhile."""
    caplog.set_level(logging.WARNING, "penstock")
    monkeypatch.setattr(transfer, "Stalls", partial(Stalls, late=LATE))
    paths = [tmp_path / name for name in "abc"]
    with Store.create(paths, LAYOUT, model={}, stripe=4 * ALIGN) as store:
        store.write("a", 0, aligned_bytes(SIZE))
        if at_once:
            if not store.direct:
                pytest.skip("the temporary directory does no direct I/O")
            monkeypatch.setattr(kernel, "library", lambda: Late(lambda: len(caplog.messages) > 0))
        else:
            real = os.preadv

            def slow(fd: int, views: list[memoryview], offset: int) -> int:
                while "/b/" in os.readlink(f"/proc/self/fd/{fd}") and not caplog.messages:
                    time.sleep(0.01)
                return real(fd, views, offset)

            monkeypatch.setattr(os, "preadv", slow)
        store.read("a", 0, aligned_bytes(SIZE))
    assert [str(paths[1]) in message for message in caplog.messages] == [True, True]


class Late(kernel.Library):
    """The library, whose transfers hand over all that they have moved but say of the second file that it stalls."""

    def __init__(self, go_on: Callable[[], bool]) -> None:
        super().__init__(kernel.PATH)
        self._go_on = go_on

    def transfer(self, *words: Any, **more: Any) -> kernel.Done | None:
        progress = words[-1]
        done = super().transfer(*words, **more)
        assert (progress[:, 0] == 0).all(), "requests are under way after a transfer"
        assert (progress[:, 1] > 0).all()
        progress[1, 0] = time.monotonic_ns()
        while not self._go_on():
            time.sleep(0.01)
        progress[1] = 0, time.monotonic_ns()
        return done


def test_two_stalls_are_said_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    said = iter((1, 3))
    wanted = [0]
    real = _stalling("pwritev", monkeypatch, lambda: len(caplog.messages) >= wanted[0], range(2))
    assert real is not os.pwritev
    for _ in range(2):
        wanted[0] = next(said)
        store.write("a", 0, aligned_bytes(ALIGN))
        while len(caplog.messages) < wanted[0] + 1:
            time.sleep(0.01)
    assert ["goes on" in message for message in caplog.messages] == [False, True, False, True]


def test_requests_that_come_back_are_not_said_and_nothing_is_left_at_the_end(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    slowest = 0.0
    for _ in range(20):
        for transfer_all in (store.write, store.read):
            began = time.monotonic()
            transfer_all("a", 0, aligned_bytes(SIZE))
            slowest = max(slowest, time.monotonic() - began)
    watcher = store.files.stalls.watcher
    assert watcher is not None
    assert watcher.is_alive()
    assert not store.files.stalls.under_way
    store.close()
    assert not watcher.is_alive()
    assert not caplog.messages or slowest >= LATE  # a busy machine's drive may really have been late


def test_a_process_does_not_wait_for_the_watcher_of_a_store_that_was_not_closed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.store.store import Store;"
        "from penstock.store.layout import Layout; from penstock.store.transfer import aligned_bytes;"
        "s = Store.create([Path(sys.argv[1])], Layout.build([('a', 4096, 1)]), model={});"
        "s.write('a', 0, aligned_bytes(4096))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], timeout=PATIENCE, check=False)
    assert done.returncode == 0
