"""Memory that the engine owns: page-aligned host slabs, page-locked beside an accelerator, and device slabs."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from penstock import accelerator
from penstock.errors import BudgetError
from penstock.schedule.place import BOUNCE as BOUNCE
from penstock.schedule.place import PAGE, page_up
from penstock.store.transfer import aligned_bytes

PIECE = 64 << 20
"""Bytes of memory that a thread faults in at once."""
_MOST_THREADS = 16
"""Beyond so many the memory is the bound."""
POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``: fault pages in, in one call. From Linux 5.14 on."""
madvise = ctypes.CDLL(None, use_errno=True).madvise
"""``madvise`` of Linux. What it has failed with is ``ctypes.get_errno``'s."""
madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_watchers: list[Callable[[int], None]] = []


@contextmanager
def watching(faulted: Callable[[int], None]) -> Iterator[None]:
    """Within, ``faulted`` is told how many bytes more are there of memory that is about to be page-locked, by the
    thread that asks for it: hundreds of gigabytes take a while.
    """
    _watchers.append(faulted)
    try:
        yield
    finally:
        _watchers.remove(faulted)


def fault_in(memory: NDArray[np.uint8]) -> None:
    """Take all pages of new memory, which is zero and begins on a page, in as many threads as this one may use cores.

    The driver that locks pages would fault them in one after the other, in one thread, and the kernel zeroes each. The
    threads have this one's cores, and so its node (``numa.near``).

    Raises:
        OSError: there is not enough.
    """
    pieces = [memory[start : start + PIECE] for start in range(0, len(memory), PIECE)]
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS, len(pieces))
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        faults = map(fault, pieces) if pool is None else pool.map(fault, pieces)
        for piece, _ in zip(pieces, faults, strict=True):
            for faulted in _watchers:
                faulted(len(piece))


def fault(piece: NDArray[np.uint8]) -> None:
    """Fault a piece in, in this thread, which others need not wait for: no thread of Python's is held up."""
    if not madvise(piece.ctypes.data, len(piece), POPULATE_WRITE):
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    piece[::PAGE] = 0  # an older kernel: to touch a page takes it, too


class HostSlab(AbstractContextManager["HostSlab"]):
    """``nbytes`` of private memory (rounded up to pages), zero at first, as a flat uint8 tensor.

    In huge pages where there are any, which drives like better; pages count as used when they are touched. ``beside``
    an accelerator they are page-locked at once: our own mapping is, because torch's pinned allocator rounds sizes up to
    powers of two. ``beside`` the CPU, or nothing, they are not. A context manager that closes it.
    """

    def __init__(self, nbytes: int, *, beside: torch.device | None = None) -> None:
        self.nbytes = max(page_up(nbytes), PAGE)
        memory = aligned_bytes(self.nbytes)
        self.bytes = torch.from_numpy(memory)
        self._locked_for: torch.device | None = None
        if beside is not None and beside.type != "cpu":
            self._take(memory)
            code = accelerator.of(beside).lock_pages(beside, self.bytes.data_ptr(), self.nbytes)
            if code:
                raise BudgetError(
                    f"{self.nbytes} bytes of host memory could not be page-locked ({beside.type} error {code}): lower "
                    "budget.host, or allow the process to lock more memory"
                )
            self._locked_for = beside

    def _take(self, memory: NDArray[np.uint8]) -> None:
        try:
            fault_in(memory)
        except OSError as error:
            raise BudgetError(
                f"{self.nbytes} bytes of host memory are not to be had ({error.strerror}): lower budget.host"
            ) from error

    def close(self) -> None:
        """Give the memory back to the system. Views of it must not be used afterwards."""
        if not hasattr(self, "bytes"):  # closed before
            return
        if self._locked_for is not None:
            accelerator.of(self._locked_for).unlock_pages(self._locked_for, self.bytes.data_ptr())
            self._locked_for = None
        # Tensors may still refer to the mapping, so it cannot be unmapped here; its pages are dropped at once.
        madvise(self.bytes.data_ptr(), self.nbytes, mmap.MADV_DONTNEED)
        del self.bytes

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceSlab:
    """``nbytes`` of device memory as a flat uint8 tensor; on the CPU, a host slab."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._host = HostSlab(nbytes) if device.type == "cpu" else None
        if self._host is not None:
            self.bytes = self._host.bytes
        else:
            self.bytes = torch.empty(max(nbytes, PAGE), dtype=torch.uint8, device=device)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        vars(self).pop("bytes", None)


def numpy_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A host tensor's memory as uint8."""
    return tensor.view(torch.uint8).numpy()
