"""The rates of a directory: reading, writing and both at once, with the code and the requests of the store.

A request is 8 MiB, direct, into memory in huge pages, and each direction keeps as many in flight as a lane of the
engine has threads. The file is preallocated, written once before anything counts (a block that was never written is
read without touching the drive, and first writes cost more than later ones), and then walked in order, over and over.

Everything is bounded in time and not in bytes, so that a disk of 100 MB/s takes no longer than one of 10 GB/s: of the
file, only what was written in that time is used. The first part of each measurement does not count: a disk that is held
to a rate by the system lets a burst through first.
"""

import secrets
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from penstock.config import format_size
from penstock.doctor.mounts import Mount
from penstock.doctor.pace import Load, Span, rate, rates
from penstock.errors import ConfigError
from penstock.store.packed import PackedFile, allocate
from penstock.store.transfer import REQUEST, StripedFiles, aligned_bytes, byte_view

_MIB = 1 << 20
LEAST = 8 * REQUEST
"""Bytes of the smallest file to measure with."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The extent of a measurement: bytes of the file at most, seconds of filling it, and of each of ``rounds``
    measurements.
    """

    nbytes: int
    fill: float
    seconds: float
    rounds: int


THOROUGH = Effort(nbytes=1024 * _MIB, fill=2.0, seconds=0.7, rounds=3)
QUICK = Effort(nbytes=512 * _MIB, fill=0.8, seconds=0.7, rounds=1)
SUSTAINED = Effort(nbytes=64 * 1024 * _MIB, fill=180.0, seconds=3.0, rounds=3)
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
    """bytes written in a row before the measurements"""
    first: float
    """rate of the first quarter of them"""
    last: float
    """rate of the last quarter"""


class Scratch:
    """A file to measure with. It loses its name as soon as it is open, so it is gone when this process is.

    A context manager.

    Raises:
        ConfigError: there is no room for it, or the directory cannot be used.
        StoreError: the disk failed.
    """

    def __init__(self, folder: Path, nbytes: int, *, depth: int, io_threads: int) -> None:
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
        self.files = StripedFiles([file], stripe=REQUEST, io_threads=io_threads)
        self._chunks = nbytes // REQUEST
        self.used = 0
        """chunks of the file that have been written"""
        content = np.random.default_rng(0).integers(0, 256, REQUEST, np.uint8)  # some drives and file systems compress
        self._buffers = [aligned_bytes(REQUEST) for _ in range(2 * depth)]
        for buffer in self._buffers:
            buffer[:] = content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.files.close()

    def fill(self, seconds: float) -> list[tuple[float, int]]:
        """Write the file from its start, until it is full or the time is over: (seconds since the start, bytes).

        What is written, a few requests at least, is what is read and written from then on.
        """
        begun, ends, lock = time.perf_counter(), [(0.0, 0)], threading.Lock()
        over = threading.Event()

        def write_next(buffer: memoryview) -> None:
            with lock:
                chunk = self.used
                if chunk == self._chunks:
                    over.set()
                    return
                self.used += 1
            self.files.write(chunk * REQUEST, buffer)
            with lock:
                ends.append((time.perf_counter() - begun, len(ends) * REQUEST))

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

    def _load(self, name: str, move: Callable[[int, memoryview], None], first: int) -> Load:
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
    errors: list[BaseException] = []
    left = threading.Semaphore(0)

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it surfaces below
            errors.append(error)
            over.set()
        finally:
            left.release()

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            left.acquire()  # not join: one that Ctrl-C breaks off makes the next join believe that the thread has ended
    finally:  # Ctrl-C: the file must not be closed, and its number given to another, while one still writes to it
        over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


def file_size(mount: Mount, effort: Effort) -> int:
    """Bytes of the file to measure with: no more than half of what is free, and whole requests.

    Raises:
        ConfigError: there is no room.
    """
    if not mount.size:
        raise ConfigError(f"{mount.file_system} has no room for files: give a directory on a drive")
    wanted = effort.nbytes
    if mount.far:  # these often cannot preallocate, so that all of the file is written with zeros first
        wanted = min(wanted, 256 * _MIB)
    size = min(wanted, mount.free // 2) // REQUEST * REQUEST
    if size < LEAST:
        raise ConfigError(
            f"the file system is full: {format_size(mount.free)} are free, and measuring takes "
            f"{format_size(2 * LEAST)}. Free some space, or give another directory"
        )
    return size


def measure(scratch: Scratch, effort: Effort) -> DiskRates:
    """Fill the file, then measure each direction alone and both together, in turn; medians over the rounds."""
    ends = scratch.fill(effort.fill)
    span = Span(
        warm=min(0.2, effort.seconds / 3), seconds=effort.seconds, calls=3, at_most=3 * max(effort.seconds, 1.0)
    )
    found: dict[str, list[float]] = {"read": [], "write": [], "read_both": [], "write_both": []}
    for _ in range(effort.rounds):
        found["write"].append(rate(scratch.writing(), span))
        found["read"].append(rate(scratch.reading(), span))
        both = rates([scratch.reading(), scratch.writing()], span)
        found["read_both"].append(both["read"])
        found["write_both"].append(both["write"])
    quarter = max(1, len(ends) // 4)
    return DiskRates(
        **{name: statistics.median(values) for name, values in found.items()},
        direct=scratch.direct,
        filled=ends[-1][1],
        first=_slope(ends[: quarter + 1]),
        last=_slope(ends[-quarter - 1 :]),
    )


def _slope(ends: list[tuple[float, int]]) -> float:
    (begun, before), (ended, after) = ends[0], ends[-1]
    return (after - before) / (ended - begun)
