"""Requests spread over the files of an address space by a small thread pool.

The thread that asks works too: it and the pool's threads take pieces off one list until it is empty. So a request
never waits for a thread, however busy the pool is, and a request of one piece does not touch the pool at all.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from penstock.store.layout import ALIGN
from penstock.store.packed import PackedFile
from penstock.store.stalls import Stalls
from penstock.store.striping import Piece, Striping

REQUEST = 8 << 20  # bytes of one system call at most; smaller ones were slower with two requests in flight
_HUGE = 2 << 20

Buffer = memoryview | npt.NDArray[np.uint8]
Move = Callable[[PackedFile, int, memoryview], None]


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
    address = np.frombuffer(view, np.uint8).ctypes.data
    assert address % ALIGN == len(view) % ALIGN == 0, f"buffer of {len(view)} bytes at {address:#x} is not aligned"
    return view


class StripedFiles:
    """One address space over the files of one or several directories. Thread-safe."""

    def __init__(
        self,
        files: Sequence[PackedFile],
        *,
        stripe: int,
        io_threads: int,
        request: int = REQUEST,
        weights: tuple[int, ...] = (),
    ) -> None:
        """``weights``: as in ``Striping``."""
        assert io_threads > 0
        assert request % ALIGN == 0
        self.files = tuple(files)
        self._striping = Striping(files=len(files), stripe=stripe, weights=weights)
        self._request = request
        self._threads = io_threads * len(files)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="penstock-io")
        self._lock = threading.Lock()
        self.stalls = Stalls()
        self.bytes_read = 0
        self.bytes_written = 0
        self.written_each = [0] * len(files)
        """bytes written to each file: of requests that failed, too, what of them was written"""

    def read(self, address: int, view: memoryview) -> None:
        """Fill ``view`` from ``address``; blocks until done, or raises the first error when nothing is in flight."""
        assert not view.readonly, "reading into a read-only buffer"
        self._run(PackedFile.read, address, view)
        with self._lock:
            self.bytes_read += len(view)

    def write(self, address: int, view: memoryview) -> None:
        """Write ``view`` at ``address``; blocks until done, or raises the first error when nothing is in flight."""
        self._run(PackedFile.write, address, view)
        with self._lock:
            self.bytes_written += len(view)

    def _run(self, move: Move, address: int, view: memoryview) -> None:
        pieces = deque(self._striping.pieces(address, len(view), self._request))

        def work() -> None:
            try:
                while piece := _next(pieces):
                    file = self.files[piece.file]
                    with self.stalls.request(file.path, move.__name__, piece.nbytes):
                        move(file, piece.offset, view[piece.start : piece.start + piece.nbytes])
                    if move is PackedFile.write:
                        with self._lock:
                            self.written_each[piece.file] += piece.nbytes
            except BaseException:
                pieces.clear()  # the others finish what they are at, and take no more
                raise

        extra = [self._pool.submit(work) for _ in range(min(self._threads, len(pieces) - 1))]
        try:
            work()
        finally:  # nobody may touch the buffer after we return, whether with an error or without
            started = [future for future in extra if not future.cancel()]
            wait(started)
        for future in started:
            future.result()

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
            with self.stalls.request(file.path, "flush", 0):
                file.flush()

    def close(self) -> None:
        self._pool.shutdown()
        self.stalls.close()
        for file in self.files:
            file.close()


def _next(pieces: deque[Piece]) -> Piece | None:
    try:
        return pieces.popleft()
    except IndexError:
        return None
