"""Finds what is wrong with a machine and says, in plain words, what it costs and what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import format_size
from penstock.doctor.disk import DiskRates
from penstock.doctor.mounts import Mount
from penstock.hardware.machine import Machine
from penstock.hardware.system import System

SHARED = 1.3
"""Shares of the alone rates that both directions reach at once, added up: 1 is one limit for both, 2 is duplex."""
_FULL = 0.05
_SCARCE = 8 << 30
_BUSY = 0.1
"""Share of the cores; what others take of them tells in the rates of all that computes or copies on the processors."""
_PAST_A_CACHE = 4 << 30
"""Bytes written in a row from which on a falling rate says something."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The facts besides the profile that findings are drawn from. ``disks``: as ``machine.drives``."""

    system: System
    disks: Sequence[tuple[Path, Mount, DiskRates]]
    native: bool
    """true if the optimizer has its native kernels"""
    fused: bool = True
    """true if it has those for the GPU, or there is no GPU"""
    device_free: int | None = None
    """bytes of a GPU's memory that nobody holds"""


def findings(machine: Machine, seen: Seen) -> tuple[str, ...]:
    """One text for each thing that is wrong."""
    found = [*_of_host(machine, seen)]
    for (path, mount, rates), drive in zip(seen.disks, machine.drives, strict=True):
        found += [f"{path}: {text}" for text in _of_disk(mount, rates, drive.kind)]
        if machine.device.node is not None and drive.node is not None and drive.node != machine.device.node:
            found.append(
                f"{path}: the drive is on NUMA node {drive.node} and the GPU on node {machine.device.node}, so what "
                "goes between them crosses the link between the sockets: use a drive of the GPU's node if there is one"
            )
    return (*found, *_of_pairs(seen.disks))


def _of_host(machine: Machine, seen: Seen) -> Iterator[str]:
    system, host = seen.system, machine.host
    if not seen.native:
        yield (
            "the optimizer has no native kernels here and runs in plain torch, with the same results but several times "
            "slower: reinstall penstock where there is a C++17 compiler (or unset PENSTOCK_KERNELS)"
        )
    if not seen.fused:
        yield (
            "the GPU has no kernels of its own for the optimizer and runs it in plain torch, with the same results but "
            "many times slower: pip install triton, and a C compiler beside it (or unset PENSTOCK_KERNELS)"
        )
    if machine.device.kind == "cuda" and host.lockable < host.memory / 2:
        yield (
            f"{format_size(host.lockable)} of {format_size(host.memory)} of memory may be page-locked (ulimit -l). A"
            " GPU copies from such memory, so buffers and what stays in host memory have to fit in it: raise memlock in"
            " /etc/security/limits.conf, or start the container with --ulimit memlock=-1"
        )
    if system.memory < system.installed:
        yield (
            f"a cgroup limits this process to {format_size(system.memory)} of the machine's "
            f"{format_size(system.installed)} of memory"
        )
    if machine.measured is not None and machine.measured.load > _BUSY * host.cores:
        yield (
            f"other programs kept {machine.measured.load:.1f} of {host.cores} cores busy while this was measured, so "
            "that a quiet machine is faster than its profile says. Measure again when it is"
        )
    if system.available < 0.7 * system.memory:
        yield (
            f"other programs hold memory: {format_size(system.available)} of {format_size(system.memory)} are "
            "available now. Plans count on all of it"
        )
    if seen.device_free is not None and seen.device_free < 0.9 * machine.device.memory:
        yield (
            f"other programs hold memory of the GPU: {format_size(seen.device_free)} of "
            f"{format_size(machine.device.memory)} are free now. A budget that is not given takes no more than that"
        )
    if machine.device.other_bits:
        yield (
            f"{', '.join(machine.device.other_bits)}: steps on the GPU differ from the processor's in some bits, so "
            "where the optimizer state lives changes the numbers. Plans say where they put it; please report it with "
            "the GPU's name and the versions of its driver and torch"
        )
    for ranks in machine.between:
        if ranks.other_bits:
            yield (
                f"{', '.join(ranks.other_bits)}: {ranks.ranks} processes of this machine compute other bits from the "
                "same numbers, so a run's bits depend on the number of ranks. Give all of them the same environment "
                "(OMP_NUM_THREADS, PENSTOCK_KERNELS, ATEN_CPU_CAPABILITY); if they have it, please report it with the "
                "processor's name and the version of torch"
            )
    if system.quota is not None:
        yield f"a cgroup limits this process to the time of {system.quota:g} cores"


def _of_disk(mount: Mount, rates: DiskRates, kind: str) -> Iterator[str]:
    if kind == "tmpfs":
        yield (
            f"this is {mount.file_system}: its files are in memory, so it holds nothing that host memory could not "
            "hold. Give a directory on a drive"
        )
        return
    if kind == "network":
        yield (
            f"this is a network file system ({mount.file_system}): others share its rate, and it may stall or buffer. "
            "Training streams through it without a pause: give a directory on a local drive"
        )
    elif kind == "unknown" and mount.disk:
        yield (
            f"{mount.disk} is a virtual disk and as slow as a spinning one; what is below it cannot be seen. Training "
            "from it waits for it most of the time: use an SSD, or a faster class of volume"
        )
    elif kind == "unknown":
        yield (
            f"what drive is below this {mount.file_system or 'file system'} cannot be seen (a container's overlay?): "
            "the rates are as measured, but give a directory that is mounted from a drive if there is one"
        )
    elif kind == "hdd":
        yield (f"{mount.disk} is a spinning disk: training from it waits for it most of the time. Use an SSD")
    if not rates.direct:
        yield (
            f"{mount.file_system} does not do direct I/O (O_DIRECT): everything goes through the page cache, which is "
            "slower, takes memory, and makes these rates doubtful. Use ext4 or XFS"
        )
    if rates.read_both / rates.read + rates.write_both / rates.write < SHARED:
        yield (
            f"reading and writing share one limit: {_gbps(rates.read)} read or {_gbps(rates.write)} written alone, but "
            f"{_gbps(rates.read_both)} + {_gbps(rates.write_both)} at once. Plans take it into account; a second drive "
            "would help more than for a duplex one"
        )
    if rates.filled >= _PAST_A_CACHE and rates.last < 0.6 * rates.first:
        yield (
            f"writing fell from {_gbps(rates.first)} to {_gbps(rates.last)} over {format_size(rates.filled)}: the "
            "drive's cache is full then, or it is too hot. The lower rate is what training gets, and what plans take"
        )
    if not rates.settled:
        yield (
            f"the rate of writing had not settled after {format_size(rates.filled)}, so that what was measured may not "
            "be the last of it: give it more free space, or let it cool, and measure again"
        )
    if mount.free < max(_FULL * mount.size, min(_SCARCE, mount.size // 2)):
        yield (
            f"the file system is nearly full: {format_size(mount.free)} of {format_size(mount.size)} are free. SSDs "
            "also write slower when they are full"
        )


def _of_pairs(disks: Sequence[tuple[Path, Mount, DiskRates]]) -> Iterator[str]:
    """Directories that are on one drive."""
    by_disk: dict[str, list[Path]] = {}
    for path, mount, _ in disks:
        by_disk.setdefault(mount.disk or f"file system {mount.device}", []).append(path)
    for disk, paths in by_disk.items():
        if len(paths) > 1:
            yield (
                f"{', '.join(map(str, paths))} are all on {disk}: striping over them is no faster than one of them, "
                "and their rates and free space do not add up. Give one directory per drive"
            )


def _gbps(rate: float) -> str:
    return f"{rate / 1e9:.2g} GB/s" if rate < 1e10 else f"{rate / 1e9:.0f} GB/s"
