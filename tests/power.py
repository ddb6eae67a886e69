"""A power cut, replayed from a log: what a drive may hold when everything that was not flushed is up to chance."""

import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.store import Store
from tests.faults import Call, Go, intercepted

E = TypeVar("E", bound="_Event")

SECTORS = (4096, 512)
"""bytes that a drive writes whole or not at all: today's drives, and what a file system may be told of older ones"""

LOSSES = ("dropped", "kept", "reordered", "torn", "mixed")


@dataclass(kw_only=True)
class _Event:
    """Something that took from tick ``began`` to tick ``ended`` (still unknown while it is under way)."""

    began: int
    ended: int = 1 << 60


@dataclass(kw_only=True)
class _Write(_Event):
    file: str
    offset: int
    data: bytes

    def torn(self, rng: random.Random) -> "list[_Write]":
        """Some of its sectors, in any order."""
        first, end, sector = self.offset, self.offset + len(self.data), rng.choice(SECTORS)
        cuts = [first, *range(first // sector * sector + sector, end, sector), end]
        pieces = [(a, b) for a, b in itertools.pairwise(cuts) if rng.random() < 0.5]
        rng.shuffle(pieces)
        return [
            _Write(began=self.began, ended=self.ended, file=self.file, offset=a, data=self.data[a - first : b - first])
            for a, b in pieces
        ]


@dataclass(kw_only=True)
class _Flush(_Event):
    file: str


@dataclass(kw_only=True)
class Commit(_Event):
    step: int


class Killed(BaseException):
    """Stands for the end of a process whose log goes on with the next one's."""


class WriteLog:
    """Every write and flush of the files in a store's folder, from when the store had been made, and its commits."""

    def __init__(self, folder: Path, base: Path, clock: Callable[[], int] | None = None) -> None:
        """``base``: where the files as they were at first are kept. ``clock``: what ticks are; None: they are counted.
        Logs of several processes have one clock in common."""
        self._folder = folder
        self._base = base
        self._writes: list[_Write] = []
        self._flushes: list[_Flush] = []
        self.commits: list[Commit] = []
        self._kill = self._dead = False
        self._tick = 0
        self._clock = clock
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """A log that is over, for another process."""
        return vars(self) | {"_lock": None}

    @property
    def end(self) -> int:
        """The last tick. Every beginning and end of a call is one."""
        return self._tick

    def _next(self) -> int:
        self._tick = self._tick + 1 if self._clock is None else self._clock()
        return self._tick

    @property
    def writes(self) -> int:
        return len(self._writes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        real_create, real_commit = Store.create, Store.commit

        def create(*rest: Any, **more: Any) -> Store:
            store = real_create(*rest, **more)
            shutil.copytree(self._folder, self._base)
            self._writes.clear()
            self._flushes.clear()
            return store

        def commit(store: Store, record: dict[str, Any], *rest: Any, **more: Any) -> Any:
            self._check_alive()
            event = self._begin(Commit(began=0, step=record["step"]))
            self.commits.append(event)
            result = real_commit(store, record, *rest, **more)
            self._end(event)
            return result

        with pytest.MonkeyPatch.context() as patch, intercepted(self._folder, self._log):
            patch.setattr(Store, "create", staticmethod(create))
            patch.setattr(Store, "commit", commit)
            yield

    @contextmanager
    def killed_before_flush_of_record(self) -> Iterator[None]:
        """The process dies when it has written a commit record, before that is flushed: it writes nothing after that,
        whatever it does about the error that stands for its death."""
        self._kill = True
        yield
        self._kill = self._dead = False

    def found(self, step: int) -> None:
        """A run has been opened and goes on from ``step``: that one must be found from now on."""
        self._end(self._begin(event := Commit(began=0, step=step)))
        self.commits.append(event)

    def _log(self, call: Call, go: Go) -> Any:
        file = str(Path(call.path).relative_to(self._folder.resolve()))
        event: _Event
        self._check_alive()
        if call.writes:
            assert call.data is not None
            event = write = self._begin(_Write(began=0, file=file, offset=call.offset, data=bytes(call.data)))
            self._writes.append(write)
        elif call.flushes:
            if self._kill and "commit" in file:
                self._dead = True
                raise Killed
            event = flush = self._begin(_Flush(began=0, file=file))
            self._flushes.append(flush)
        else:
            return go()
        result = go()
        assert not call.writes or result == call.nbytes
        self._end(event)
        return result

    def _check_alive(self) -> None:
        if self._dead:
            raise Killed

    def _begin(self, event: E) -> E:
        with self._lock:
            event.began = self._next()
        return event

    def _end(self, event: _Event) -> None:
        with self._lock:
            event.ended = self._next()

    def image(self, instant: int, loss: str, rng: random.Random, folder: Path) -> None:
        """What may be on the drive when the power fails at tick ``instant``.

        A write is safe once a flush of its file has ended that began after the write had ended. Of the others, each is
        there or not, whole or in part, and they reach the drive in any order.
        """
        shutil.copytree(self._base, folder)
        before = [write for write in self._writes if write.began <= instant]
        safe = [write for write in before if self._safe(write, instant)]
        unsafe = [write for write in before if not self._safe(write, instant)]
        for file in {write.file for write in before}:
            mine = [write for write in unsafe if write.file == file]
            written = [write for write in safe if write.file == file] + _after_cut(mine, loss, rng)
            with (folder / file).open("r+b") as out:
                for write in written:
                    out.seek(write.offset)
                    out.write(write.data)

    def _safe(self, write: _Write, instant: int) -> bool:
        return any(
            flush.file == write.file and write.ended < flush.began and flush.ended <= instant for flush in self._flushes
        )

    def unsafe(self, instant: int) -> int:
        """Number of writes that a power cut at this tick may lose."""
        return sum(write.began <= instant and not self._safe(write, instant) for write in self._writes)


def _after_cut(writes: list[_Write], loss: str, rng: random.Random) -> list[_Write]:
    if loss == "mixed":
        writes = [part for write in writes for part in _after_cut([write], rng.choice(LOSSES[:-1]), rng)]
        rng.shuffle(writes)
        return writes
    if loss == "dropped":
        return []
    if loss == "kept":
        return writes
    if loss == "reordered":
        writes = [write for write in writes if rng.random() < 0.5]
        rng.shuffle(writes)
        return writes
    pieces = [piece for write in writes for piece in write.torn(rng)]
    rng.shuffle(pieces)
    return pieces
