"""The rates of a directory: reading, writing and both at once, with the code and the requests of the store.

A request is 8 MiB, direct, into memory in huge pages, and each direction keeps as many in flight as a lane of the
engine has threads. The file is preallocated, written once before anything counts (a block that was never written is
read without touching the drive, and first writes cost more than later ones), and then walked in order, over and over.

Everything is bounded in time and not in bytes, so that a disk of 100 MB/s takes no longer than one of 10 GB/s: of the
file, only what was written in that time is used. The first part of each measurement does not count: a disk that is held
to a rate by the system lets a burst through first.

Most SSDs take what is written into faster cells at first, and are several times slower once these are full. The
*sustained* rate is found by writing on until the rate settles (``Settle``), and measuring again without a pause.
"""

import math
import secrets
import threading
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from penstock.config import format_size
from penstock.doctor.mounts import Mount
from penstock.doctor.pace import Load, Span, medians, rate, rates
from penstock.errors import ConfigError
from penstock.hardware.machine import Sustained
from penstock.store.packed import PackedFile, allocate
from penstock.store.transfer import REQUEST, StripedFiles, aligned_bytes, byte_view

_MIB = 1 << 20
_FELL = 0.8
_STEADY = 0.1
Ends = Sequence[tuple[float, int]]
"""(seconds since the start, bytes written by then), in order."""
LEAST = 8 * REQUEST
"""Bytes of the smallest file to measure with."""


@dataclass(frozen=True, kw_only=True)
class Settle:
    """Limits on how long a drive is written until its rate has settled: ``nbytes`` and ``seconds`` at most.

    The rate has settled when it has fallen, and the last ``span`` seconds went at the rate of the ``span`` before them,
    to 10%. It has fallen when it is below 0.8 of the rate at which writing began. A drive whose rate does not fall is
    written to the end of what is allowed, since its cache may be larger than what has been written so far.
    """

    nbytes: int
    span: float
    seconds: float

    def fell(self, ends: Ends, first: float) -> bool:
        """True if the last span went slower than ``first``, at which writing began, or than its own first span."""
        last = ends[-1][0]
        if len(ends) == 1:  # there was no room for more than what had been written before
            return False
        return _between(ends, last - self.span, last) < _FELL * max(first, _between(ends, 0.0, self.span))

    def settled(self, ends: Ends, first: float) -> bool:
        """True if the rate has fallen and stays where it is."""
        last = ends[-1][0]
        if last < 2 * self.span or not self.fell(ends, first):
            return False
        before = _between(ends, last - 2 * self.span, last - self.span)
        return before > 0 and abs(_between(ends, last - self.span, last) / before - 1) <= _STEADY


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The extent of a measurement: bytes of the file at most, seconds of filling it, and of each of ``rounds``
    measurements, which a slow drive prolongs up to ``at_most``. ``settle``: what is written after that, to find the
    sustained rate; None: nothing.
    """

    nbytes: int
    fill: float
    seconds: float
    rounds: int
    at_most: float = 3.0
    settle: Settle | None = None


THOROUGH = Effort(nbytes=1024 * _MIB, fill=2.0, seconds=0.7, rounds=3)
QUICK = Effort(nbytes=512 * _MIB, fill=0.8, seconds=0.7, rounds=1)
BRIEF = Effort(nbytes=128 * _MIB, fill=0.3, seconds=0.2, rounds=1, at_most=1.0)
SUSTAINED = replace(THOROUGH, settle=Settle(nbytes=256 * 1024 * _MIB, span=10.0, seconds=300.0))
"""Writes past the cache that most drives have in front of their slower cells."""


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Bytes per second; ``*_both``: while the other direction is busy too."""

    read: float
    write: float
    read_both: float
    write_both: float
    direct: bool
    """true if the file system did without the page cache"""
    filled: int
    """bytes written in a row, at first or until the rate settled"""
    first: float
    """rate at which writing began"""
    last: float
    """rate of the last quarter of them; until the rate settled, of the last span"""
    sustained: Sustained | None = None
    """None: it was not asked for"""
    settled: bool = True
    """false if the rate was still falling when time or space was over"""


class Scratch(AbstractContextManager["Scratch"]):
    """A file to measure with. It loses its name as soon as it is open, so it is gone when this process is.

    A context manager.

    Raises:
        ConfigError: there is no room for it, or the directory cannot be used.
        StoreError: the disk failed.
    """

    def __init__(self, folder: Path, nbytes: int, *, depth: int) -> None:
        self.depth = depth
        self.direct = True
        path = folder / f".penstock-doctor-{secrets.token_hex(4)}"
        with ExitStack() as named:
            named.callback(_remove, path)
            try:
                allocate(path, nbytes)
            except OSError as error:
                raise ConfigError(f"{folder} cannot be measured: {error}") from error
            with warnings.catch_warnings():  # a file system without direct I/O is among the findings
                warnings.simplefilter("ignore")
                file = PackedFile(path)
        self.direct = file.direct
        self.files = StripedFiles([file], stripe=REQUEST)
        self._chunks = nbytes // REQUEST
        self.used = 0
        """chunks of the file that have been written"""
        content = np.random.default_rng(0).integers(0, 256, REQUEST, np.uint8)  # some drives and file systems compress
        self._buffers = [aligned_bytes(REQUEST) for _ in range(2 * depth)]
        for buffer in self._buffers:
            buffer[:] = content

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def fill(
        self, seconds: float, nbytes: int | None = None, enough: Callable[[Ends], bool] = lambda ends: False
    ) -> list[tuple[float, int]]:
        """Write the file on from where it ends, until it has ``nbytes`` (None: is full), the time is over, or it is
        ``enough``: (seconds since the start, bytes).

        What is written, a few requests at least, is what is read and written from then on.
        """
        begun, ends, lock = time.perf_counter(), [(0.0, 0)], threading.Lock()
        over = threading.Event()
        most = self._chunks if nbytes is None else min(self._chunks, nbytes // REQUEST)

        def write_next(buffer: memoryview) -> None:
            with lock:
                chunk = self.used
                if chunk >= most:
                    over.set()
                    return
                self.used += 1
            self.files.write(chunk * REQUEST, buffer)
            with lock:
                ends.append((time.perf_counter() - begun, len(ends) * REQUEST))
                if enough(ends):
                    over.set()

        def work(buffer: memoryview) -> None:
            while not over.is_set():
                if time.perf_counter() - begun > seconds and self.used * REQUEST >= LEAST:
                    return
                write_next(buffer)

        _all([partial(work, byte_view(buffer)) for buffer in self._buffers[: self.depth]], over)
        self.files.flush()
        return ends

    def reading(self) -> Load:
        """The read lane's work, as a load of bytes."""
        return self._load("read", self.files.read, 0)

    def writing(self) -> Load:
        """The write lane's work, as a load of bytes."""
        return self._load("write", self.files.write, 1)

    def _load(self, name: str, move: Callable[[int, memoryview], object], first: int) -> Load:
        def worker(index: int) -> Callable[[], None]:
            buffer, turn = byte_view(self._buffers[2 * index + first]), index

            def step() -> None:
                nonlocal turn
                move(turn % self.used * REQUEST, buffer)
                turn += self.depth

            return step

        return Load(name=name, workers=[worker(i) for i in range(self.depth)], amount=REQUEST)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _all(works: list[Callable[[], None]], over: threading.Event) -> None:
    """Run each in a thread of its own until all have ended; raises the first error. ``over`` tells them to end."""
    with ThreadPoolExecutor(
        len(works)
    ) as pool:  # which joins: the file must not be closed while one still writes to it
        try:
            done, _ = wait([pool.submit(work) for work in works], return_when=FIRST_EXCEPTION)
        finally:
            over.set()
    for each in done:
        each.result()


def file_size(mount: Mount, effort: Effort) -> int:
    """Bytes of the file to measure with: no more than half of what is free, and whole requests.

    Raises:
        ConfigError: there is no room.
    """
    if not mount.size:
        raise ConfigError(f"{mount.file_system} has no room for files: give a directory on a drive")
    wanted = effort.nbytes if effort.settle is None else effort.settle.nbytes
    if mount.far and effort.settle is None:  # these often cannot preallocate: all of it is written with zeros first
        wanted = min(wanted, 256 * _MIB)
    size = min(wanted, mount.free // 2) // REQUEST * REQUEST
    if size < LEAST:
        raise ConfigError(
            f"the file system is full: {format_size(mount.free)} are free, and measuring takes "
            f"{format_size(2 * LEAST)}. Free some space, or give another directory"
        )
    return size


def measure(scratch: Scratch, effort: Effort) -> DiskRates:
    """Fill the file, then measure each direction alone and both together, in turn; medians over the rounds. Where it is
    asked for, write on until the rate settles, and measure what a drive is slower in then.
    """
    ends = scratch.fill(effort.fill, effort.nbytes)
    span = Span(warm=min(0.2, effort.seconds / 3), seconds=effort.seconds, calls=3, at_most=effort.at_most)

    def measured() -> dict[str, float]:
        alone = {"write": rate(scratch.writing(), span), "read": rate(scratch.reading(), span)}
        both = rates([scratch.reading(), scratch.writing()], span)
        return alone | {"read_both": both["read"], "write_both": both["write"]}

    found, quarter = medians(effort.rounds, measured), max(1, len(ends) // 4)
    burst = DiskRates(
        read=found["read"],
        write=found["write"],
        read_both=found["read_both"],
        write_both=found["write_both"],
        direct=scratch.direct,
        filled=ends[-1][1],
        first=_slope(ends[: quarter + 1]),
        last=_slope(ends[-quarter - 1 :]),
    )
    return burst if effort.settle is None else _sustained(scratch, effort.settle, burst, _slope(ends))


def _sustained(scratch: Scratch, settle: Settle, burst: DiskRates, first: float) -> DiskRates:
    """The rates with what is left of them once writing has settled. Where it never falls, that is what they are.

    Both directions come first, and there is no pause before them: in one a drive makes room in its cache.
    """
    reached = False

    def enough(ends: Ends) -> bool:  # what is under way then still ends, and must not change the verdict
        nonlocal reached
        reached = reached or settle.settled(ends, first)
        return reached

    ends = scratch.fill(settle.seconds, enough=enough)
    last, after = ends[-1][0], scratch.used * REQUEST
    if not settle.fell(ends, first):
        same = Sustained(write=burst.write, read_both=burst.read_both, write_both=burst.write_both, after=after)
        return replace(burst, filled=after, sustained=same)
    span = Span(warm=0.0, seconds=settle.span / 2, calls=3, at_most=3 * settle.span)
    both, write = rates([scratch.reading(), scratch.writing()], span), rate(scratch.writing(), span)
    left = Sustained(
        write=min(write, burst.write),
        read_both=min(both["read"], burst.read_both),
        write_both=min(both["write"], burst.write_both),
        after=after,
    )
    return replace(
        burst,
        filled=after,
        first=max(first, _between(ends, 0.0, settle.span)),
        last=_between(ends, last - settle.span, last),
        sustained=left,
        settled=reached,
    )


def _slope(ends: Ends) -> float:
    (begun, before), (ended, after) = ends[0], ends[-1]
    return (after - before) / (ended - begun)


def _between(ends: Ends, start: float, stop: float) -> float:
    """Bytes per second of what ended between two times."""
    first, last = (bisect_left(ends, (at, math.inf)) - 1 for at in (max(start, 0.0), stop))
    return (ends[last][1] - ends[first][1]) / (ends[last][0] - ends[first][0]) if last > first else 0.0
