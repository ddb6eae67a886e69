"""The calls of each kind of accelerator alone; all else is ``torch.accelerator`` and torch's streams and events.

``KINDS`` has the kinds that can be computed on; one that is not among them is refused by its name, as nobody has run
Penstock on it. ``cuda`` is NVIDIA's GPUs, and AMD's by ROCm, which torch calls the same. Tests add a simulated one.
May import: nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """One kind of device beside the CPU. Streams and events of a kind are used with each other only."""

    def count(self) -> int:
        """Devices of this kind that can be used; 0 where there is no driver."""

    def stream(self, device: torch.device) -> torch.Stream:
        """A new stream."""

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The calling thread's stream on a device."""

    def queued_on(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Within, the calling thread queues on this stream, and its device is the current one."""

    def selected(self, device: torch.device) -> AbstractContextManager[None]:
        """Within, a device is the calling thread's current one. A thread begins with the first of all: there it would
        have memory taken by each call that is about no device, such as one that waits for an event."""

    def event(self, *, timed: bool = False) -> torch.Event:
        """An event in which a host thread that waits for it sleeps, so that its core is left to the optimizer."""

    def lock_pages(self, device: torch.device, address: int, nbytes: int) -> int:
        """Page-lock host memory, so that the device copies from it and to it beside all else that is done; 0, or an
        error's number."""

    def unlock_pages(self, device: torch.device, address: int) -> None:
        """Undo ``lock_pages``."""

    def name(self, device: torch.device) -> str:
        """The device's name as its maker writes it."""

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Bytes of the device's memory: those that nobody holds, and all."""

    def beside_plans(self, device: torch.device) -> int:
        """Bytes of the device's memory that training takes besides what a plan counts, and besides a first product."""

    def pci_address(self, device: torch.device) -> str | None:
        """The device's address on the PCI bus, as sysfs writes it (``"0000:3b:00.0"``); None if it has none."""


class Cuda:
    """NVIDIA's GPUs, and AMD's.

    Streams and events are CUDA's own: ``torch.Event`` ignores ``blocking``, and CUDA's events do not go with a
    ``torch.Stream``.
    """

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def stream(self, device: torch.device) -> torch.Stream:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self, device: torch.device) -> torch.Stream:
        return torch.cuda.current_stream(device)

    @contextmanager
    def queued_on(self, stream: torch.Stream) -> Iterator[None]:
        assert isinstance(stream, torch.cuda.Stream)
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def selected(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.cuda.device(device)

    def event(self, *, timed: bool = False) -> torch.Event:
        return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]

    def lock_pages(self, device: torch.device, address: int, nbytes: int) -> int:
        with torch.cuda.device(device):  # else CUDA would begin to use the first GPU, whatever is computed on
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
            if code:
                _forget_error(device)
        return code

    def unlock_pages(self, device: torch.device, address: int) -> None:
        with torch.cuda.device(device):  # as above
            if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
                _forget_error(device)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def memory(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.mem_get_info(device)

    def beside_plans(self, device: torch.device) -> int:
        """Bytes that cuBLAS keeps for each stream that it is used on (32 MiB on Hopper), and as much again and more for
        what torch's allocator rounds up: to 2 MiB, and for small tensors to 20. An allowance, not a measurement."""
        return 128 << 20

    def pci_address(self, device: torch.device) -> str | None:
        found: Any = torch.cuda.get_device_properties(device)  # torch's type information leaves these fields out
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _forget_error(device: torch.device) -> None:
    """Have CUDA forget what a call has failed with, which the next launch of a kernel would take for its own error.

    That launch is made here: torch has no other way to ask for the last error, and looking at it is what clears it.
    """
    try:
        torch.empty(1, device=device).fill_(0)
    except RuntimeError:
        return


KINDS: dict[str, Accelerator] = {"cuda": Cuda()}
"""By the type of torch's device."""


def of(device: torch.device) -> Accelerator:
    """The ``Accelerator`` of the kind of a device that is not the CPU."""
    return KINDS[device.type]


def room(device: torch.device) -> int:
    """Bytes that a budget may have of a device that is not the CPU: what nobody else holds once the device is in use by
    this process, without what no plan counts. What torch's allocator keeps for its next tensors can be had again."""
    its, index = of(device), device.index
    torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)  # brings the context, and a library's kernels
    torch.accelerator.synchronize(device)
    cached = torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)
    return max(its.memory(device)[0] + cached - its.beside_plans(device), 0)


def found() -> str | None:
    """The kind that is on this machine and can be computed on."""
    return next((kind for kind, its in KINDS.items() if its.count()), None)
