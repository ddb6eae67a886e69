"""Memory that the engine owns: page-aligned host slabs, page-locked beside an accelerator, and device slabs."""

import ctypes
import mmap

import torch

from penstock import accelerator
from penstock.errors import BudgetError
from penstock.schedule.place import BOUNCE as BOUNCE
from penstock.schedule.place import PAGE, page_up
from penstock.store.transfer import aligned_bytes


class HostSlab:
    """``nbytes`` of private memory (rounded up to pages), zero at first, as a flat uint8 tensor.

    In huge pages where there are any, which drives like better; pages count as used when they are touched. ``beside``
    an accelerator they are page-locked at once: our own mapping is, because torch's pinned allocator rounds sizes up to
    powers of two. ``beside`` the CPU, or nothing, they are not.
    """

    def __init__(self, nbytes: int, *, beside: torch.device | None = None) -> None:
        self.nbytes = max(page_up(nbytes), PAGE)
        self.bytes = torch.from_numpy(aligned_bytes(self.nbytes))
        self._locked_for: torch.device | None = None
        if beside is not None and beside.type != "cpu":
            code = accelerator.of(beside).lock_pages(beside, self.bytes.data_ptr(), self.nbytes)
            if code:
                raise BudgetError(
                    f"{self.nbytes} bytes of host memory could not be page-locked ({beside.type} error {code}): lower "
                    "budget.host, or allow the process to lock more memory"
                )
            self._locked_for = beside

    def close(self) -> None:
        """Give the memory back to the system. Views of it must not be used afterwards."""
        if self._locked_for is not None:
            accelerator.of(self._locked_for).unlock_pages(self._locked_for, self.bytes.data_ptr())
            self._locked_for = None
        # Tensors may still refer to the mapping, so it cannot be unmapped here; its pages are dropped at once.
        address = ctypes.c_void_p(self.bytes.data_ptr())
        ctypes.CDLL(None, use_errno=True).madvise(address, ctypes.c_size_t(self.nbytes), mmap.MADV_DONTNEED)
        del self.bytes


class DeviceSlab:
    """``nbytes`` of device memory as a flat uint8 tensor; on the CPU, a host slab."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._host = HostSlab(nbytes) if device.type == "cpu" else None
        if self._host is not None:
            self.bytes = self._host.bytes
        else:
            self.bytes = torch.empty(max(nbytes, PAGE), dtype=torch.uint8, device=device)

    def close(self) -> None:
        del self.bytes
        if self._host is not None:
            self._host.close()
