"""Finds the cores and the memory near a GPU, and keeps the engine's lane threads and page-locked pools there.

On a machine with several NUMA nodes a copy between a GPU and memory of another node's crosses the link between the
sockets. Threads are bound by their affinity. Memory is bound by first touch: Linux takes a page from the node of the
core that first touches it, which for page-locked memory is the one that registers it with CUDA. (``mbind`` would say
the same more directly, but containers forbid it by default, and it would overrule a user's ``numactl``.)

Nothing is bound on the CPU, on one node, or where the system does not say which node a GPU is on. Threads that a bound
thread starts are bound as well: those that the store and the optimizer kernels start for a lane.

``root`` is ``/`` but for tests.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock import accelerator

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A NUMA node and its cores: all, or those that this process may use and is bound to."""

    index: int
    cpus: frozenset[int]

    def bind_thread(self) -> None:
        """Keep the calling thread, and those that it starts from now on, on these cores."""
        os.sched_setaffinity(0, self.cpus)

    @contextmanager
    def here(self) -> Iterator[None]:
        """The calling thread is on these cores within this context: memory that it first touches is of this node."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def nodes(root: Path = _ROOT) -> tuple[Node, ...]:
    """The nodes that have cores, in order. A GPU's memory that is a node of its own (Grace Hopper) is none of them."""
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpus((folder / "cpulist").read_text())
        if cpus:
            found.append(Node(index=int(folder.name.removeprefix("node")), cpus=cpus))
    return tuple(sorted(found, key=lambda node: node.index))


def parse_cpus(text: str) -> frozenset[int]:
    """The kernel's list of cores: ``"0-3,8"`` is 0, 1, 2, 3 and 8."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_of(device: Path) -> int | None:
    """The node of a device, given its folder in sysfs; a disk's is told by the controller above it. None: not told."""
    for folder in (device, *device.parents):
        if (folder / "numa_node").is_file():
            node = int((folder / "numa_node").read_text())
            return node if node >= 0 else None  # -1: the firmware does not say, or there is one node only
    return None


def pci_address(device: torch.device) -> str | None:
    """A GPU's address on the PCI bus, as sysfs writes it (``"0000:3b:00.0"``); None for the CPU, and if it has none."""
    return None if device.type == "cpu" else accelerator.of(device).pci_address(device)


def gpu_node(pci: str, root: Path = _ROOT) -> int | None:
    """The node of the GPU at a PCI address; None if it is not told."""
    return node_of(root / "sys/bus/pci/devices" / pci)


def bind(pci: str | None, *, allowed: frozenset[int], root: Path = _ROOT) -> Node | None:
    """The node and cores to bind to for the GPU at a PCI address; None: none (see the top of this file).

    ``allowed``: the cores that this process may use. A node that has none of them is not bound to.
    """
    if pci is None or len(every := nodes(root)) < 2:
        return None
    near = gpu_node(pci, root)
    found = (Node(index=node.index, cpus=node.cpus & allowed) for node in every if node.index == near)
    return next((node for node in found if node.cpus), None)


def binding_for(device: torch.device) -> Node | None:
    """The node and cores to bind to for a device on this machine."""
    return bind(pci_address(device), allowed=frozenset(os.sched_getaffinity(0)))


def near(device: torch.device) -> AbstractContextManager[None]:
    """Memory that the calling thread first touches in this context is of the device's node, if there are several."""
    binding = binding_for(device)
    return nullcontext() if binding is None else binding.here()


def thread_count(device: torch.device) -> int:
    """Threads of the optimizer: torch's number, but no more than the node has cores that it is bound to."""
    binding = binding_for(device)
    return torch.get_num_threads() if binding is None else min(torch.get_num_threads(), len(binding.cpus))
