"""Requests spread over the files of an address space: all of a transfer at once where the kernel does it, else those of
each file one after another."""

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.native import address as address_of
from penstock.store import kernel
from penstock.store.checksums import Borders, Numbers, checksums
from penstock.store.layout import ALIGN
from penstock.store.packed import PackedFile
from penstock.store.stalls import Stalls, Watched
from penstock.store.striping import Piece, Striping

REQUEST = 8 << 20
"""Bytes that an error speaks of at most, and of one call where requests are made one after another."""
_HUGE = 2 << 20
_NONE: Borders = np.zeros(1, dtype=np.int64)

Buffer = memoryview | npt.NDArray[np.uint8]
Verb = Literal["read", "write"]


def aligned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """New memory of ``nbytes`` zeros on a 2 MiB boundary, in huge pages where the kernel has them.

    A drive takes a request as a list of physically contiguous runs, of which it allows only so many (254 on virtio).
    In scattered 4 KiB pages 8 MiB takes eight requests and more: huge pages read up to 3x as fast (so does fio).
    """
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # EINVAL: a kernel without huge pages; plain pages are right too, and slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE
    return raw[start : start + nbytes]


def byte_view(buffer: Buffer) -> memoryview:
    """The buffer's bytes; their address and number must be multiples of ``ALIGN``."""
    view = (buffer if isinstance(buffer, memoryview) else buffer.data).cast("B")
    start = address_of(view)
    assert start % ALIGN == len(view) % ALIGN == 0, f"buffer of {len(view)} bytes at {start:#x} is not aligned"
    return view


class StripedFiles:
    """One address space over the files of one or several directories. Thread-safe."""

    def __init__(
        self, files: Sequence[PackedFile], *, stripe: int, request: int = REQUEST, weights: tuple[int, ...] = ()
    ) -> None:
        """``weights``: as in ``Striping``."""
        assert request % ALIGN == 0
        self.files = tuple(files)
        self._striping = Striping(files=len(files), stripe=stripe, weights=weights)
        self._request = request
        self._direct = all(file.direct for file in files)
        self._lock = threading.Lock()
        self._drives = ThreadPoolExecutor(len(files), thread_name_prefix="penstock-drive")  # no thread until it is used
        self.stalls = Stalls()
        self.bytes_read = 0
        self.bytes_written = 0
        self.written_each = [0] * len(files)
        """bytes written to each file: of transfers that failed, too, what of them is known to be written"""
        if self._direct and (library := kernel.library()) is not None:
            library.try_out()

    def read(self, address: int, view: memoryview, borders: Borders = _NONE) -> Numbers:
        """Fill ``view`` from ``address``; the checksum of each of the blocks that it then consists of.

        Blocks until done, or raises the first error when nothing is in flight: nobody looks at ``view`` any more.

        Raises:
            StoreError: a drive failed.
        """
        assert not view.readonly, "reading into a read-only buffer"
        found = self._move("read", address, view, borders)
        with self._lock:
            self.bytes_read += len(view)
        return found

    def write(self, address: int, view: memoryview, borders: Borders = _NONE) -> Numbers:
        """Write ``view`` at ``address``; the rest as ``read``."""
        found = self._move("write", address, view, borders)
        with self._lock:
            self.bytes_written += len(view)
        return found

    def _move(self, verb: Verb, address: int, view: memoryview, borders: Borders) -> Numbers:
        """A drive waits for what Python does here before and after its bytes, with caches that they have emptied: each
        line of it takes ten times what it does in a loop of its own."""
        pieces = [*self._striping.pieces(address, len(view), self._request)]
        progress, each = np.zeros((len(self.files), 2), dtype=np.int64), dict[int, int]()
        for piece in pieces:
            each[piece.file] = each.get(piece.file, 0) + piece.nbytes
        watched: list[Watched] = []
        try:
            for index, nbytes in each.items():
                watched.append(self.stalls.begin(self.files[index].path, verb, nbytes, progress[index]))
            library = kernel.library() if self._direct else None  # the page cache takes one request at a time
            done = (
                None
                if library is None
                else library.transfer(self.files, pieces, view, borders, progress, write=verb == "write")
            )
            if done is None:
                self._by_calls(verb, pieces, view, progress)
                return checksums(view, borders)
        finally:
            for request in watched:
                request.end()
        if verb == "write":
            for piece, moved in zip(pieces, done.moved.tolist(), strict=True):
                self._written(piece, moved)
        if (failure := done.failure) is not None:
            piece, file = failure.piece, self.files[failure.piece.file]
            cause = OSError(failure.error, os.strerror(failure.error)) if failure.error else None
            raise file.failed(verb, piece.offset, piece.nbytes, failure.done, cause) from cause
        return done.checksums

    def _by_calls(self, verb: Verb, pieces: Sequence[Piece], view: memoryview, progress: npt.NDArray[np.int64]) -> None:
        """Each file's requests one after another, beside those of other files."""

        def work(index: int) -> None:
            for piece in pieces:
                if piece.file == index:
                    progress[index, 0] = time.monotonic_ns()
                    try:
                        move(self.files[index], piece.offset, view[piece.start : piece.start + piece.nbytes])
                    finally:
                        progress[index] = 0, time.monotonic_ns()
                    if verb == "write":
                        self._written(piece, piece.nbytes)

        move = PackedFile.read if verb == "read" else PackedFile.write
        first, *others = dict.fromkeys(piece.file for piece in pieces)
        jobs = [self._drives.submit(work, index) for index in others]
        try:
            work(first)
        finally:  # nobody may touch the buffer after we return, whether with an error or without
            wait(jobs)
        for job in jobs:
            job.result()

    def _written(self, piece: Piece, nbytes: int) -> None:
        with self._lock:
            self.written_each[piece.file] += nbytes

    def stretches(self, address: int, nbytes: int) -> Iterator[tuple[PackedFile, int, int]]:
        """(file, offset, bytes) of each stretch that a range lies in, in order."""
        for piece in self._striping.pieces(address, nbytes, nbytes):
            yield self.files[piece.file], piece.offset, piece.nbytes

    def places(self, address: int, nbytes: int) -> Iterator[str]:
        """The places of a range, in words, file by file."""
        first: dict[PackedFile, int] = {}
        for file, offset, _ in self.stretches(address, nbytes):
            first.setdefault(file, offset)
        return (f"{file.path} at offset {offset}" for file, offset in first.items())

    def flush(self) -> None:
        """Return when everything written is on the drives themselves."""
        for file in self.files:
            request = self.stalls.begin(file.path, "flush", 0)
            try:
                file.flush()
            finally:
                request.end()

    def close(self) -> None:
        self._drives.shutdown()
        self.stalls.close()
        for file in self.files:
            file.close()
