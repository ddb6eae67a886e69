"""``examine``: measures everything, in order, and gives the profile."""

import socket
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from penstock import accelerator
from penstock.config import format_size
from penstock.doctor import between, contention, device, disk, mounts, optimizer, overhead, work
from penstock.doctor.disk import DiskRates, Scratch
from penstock.doctor.findings import Seen, findings
from penstock.doctor.mounts import Mount
from penstock.doctor.pace import Load, Span, rate
from penstock.errors import BudgetError, ConfigError, StoreError
from penstock.hardware import system
from penstock.hardware.machine import Between, Crossing, Device, Drive, Host, Machine, Measured, Network
from penstock.hardware.peaks import maker_peak
from penstock.hardware.present import mount_point
from penstock.hardware.system import Others, System
from penstock.optim import agreement, kernels, library
from penstock.ranks.group import Ranks
from penstock.schedule.ir.lanes import Lane
from penstock.state import numa
from penstock.state.memory import HostSlab
from penstock.store import packed
from penstock.store.directory import check_directory

Working = Callable[[str], AbstractContextManager[object]]
"""Tells the user what is being measured for as long as it is."""

IO_THREADS = 4
"""The engine's default: half of them read, half of them write."""
_NOTICED = 0.5e9
"""Bytes per second. A slower disk takes too little of cores and memory to slow other lanes, and too long to measure."""
_BRIEF_PRODUCT = 0.03
"""Seconds that one product may take where little time is."""
_TRIED = 4 << 30
"""Bytes. A smaller limit on page-locked memory is tested with a GPU's driver."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Seconds of each single measurement, and how often it is made; the disk's own. ``brief``: what a plan can do
    without is left out, and what is alike is measured once.
    """

    seconds: float
    rounds: int
    disk: disk.Effort
    brief: bool = False


THOROUGH = Effort(seconds=0.25, rounds=3, disk=disk.THOROUGH)
QUICK = Effort(seconds=0.1, rounds=1, disk=disk.QUICK)
SUSTAINED = replace(THOROUGH, disk=disk.SUSTAINED)
BRIEF = Effort(seconds=0.03, rounds=1, disk=disk.BRIEF, brief=True)
"""A few seconds in all, for whoever waits for it: no look at bits, at what is wrong, or at how the disk and other lanes
slow each other."""


def check_paths(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The real paths of directories that can be measured.

    Raises:
        ConfigError: one is missing, no directory, not writable, given twice, or on a full file system.
    """
    real: dict[Path, Path] = {}
    for path in paths:
        try:
            check_directory(path)
        except StoreError as error:
            raise ConfigError(str(error)) from error
        if path.resolve() in real:
            raise ConfigError(f"--path {path} and --path {real[path.resolve()]} are the same directory: give it once")
        real[path.resolve()] = path
    return tuple(real)


def announced(paths: Sequence[Path], effort: Effort) -> list[str]:
    """Notices before drives are written for long: how many bytes, where, and that the file is removed in the end.

    Raises:
        ConfigError: a directory has no room.
    """
    settle = effort.disk.settle
    if settle is None:
        return []
    return [
        f"Writes up to {format_size(_file_size(path, mounts.look(path), effort))} in {path}, until the rate at which "
        f"the drive takes it has settled, for {settle.seconds / 60:g} min at most. The file goes when this ends, "
        "however that is."
        for path in check_paths(paths)
    ]


def examine(
    paths: Sequence[Path],
    effort: Effort,
    where: torch.device,
    working: Working,
    ranks: Sequence[int] = (),
    only: str | None = None,
) -> Machine:
    """Measure this machine, with ``paths`` as its disks and ``where`` as what computes. ``ranks``: numbers of processes
    that compute on its processors, to measure what they send each other. ``only``: the one optimizer, as in
    ``Device.optimizer``, whose steps on a GPU are measured; None: all.

    Raises:
        ConfigError: a directory cannot be measured.
        StoreError: a disk failed.
    """
    real = check_paths(paths)
    for path in real:  # before the first of them is measured, which takes a while
        _file_size(path, mounts.look(path), effort)
    seen = system.look()
    others = Others()
    device_free = accelerator.of(where).memory(where)[0] if where.type != "cpu" else None
    with ExitStack() as closing:
        closing.enter_context(numa.near(where))  # threads that are started from here on are where the engine's will be
        disks = [_disk(path, len(real), effort, working, closing) for path in real]
        host = _host(seen, effort, where, working)
        machine = Machine(
            name=socket.gethostname(),
            host=host,
            device=_device(host, effort, where, working, only),
            crossing=_crossing(effort, where, working),
            drives=tuple(each.drive for each in disks),
        )
        first = disks[0] if disks and disks[0].rates.read > _NOTICED and not effort.brief else None
        with working("How lanes slow each other"):
            slower = _slower(where, effort, None if first is None else first.scratch, closing)
        with working("What an op costs besides its work"):
            machine = replace(
                machine,
                contention=slower,
                overhead=overhead.hand_over(where),
                interpreter=overhead.interpreter(where),
                dispatch=overhead.dispatch(where),
            )
    machine = replace(machine, between=tuple(_between(host, count, effort, working) for count in ranks))
    at = datetime.now(UTC).isoformat(timespec="seconds")
    machine = replace(machine, measured=Measured(at=at, load=others.cores()))
    if effort.brief:
        return machine
    facts = Seen(
        system=seen,
        disks=[(each.path, each.mount, each.rates) for each in disks],
        native=kernels.backend() == "native",
        fused=where.type != "cuda" or library.fused(where) is not None,
        device_free=device_free,
    )
    return replace(machine, warnings=findings(machine, facts))


def more_of(
    machine: Machine, paths: Sequence[Path], effort: Effort, working: Working, ranks: Sequence[int] = ()
) -> tuple[tuple[Drive, ...], tuple[Between, ...]]:
    """Measure the parts that a profile of this machine may lack: the drives of ``paths``, and collectives of ``ranks``.

    Raises:
        ConfigError: a directory cannot be measured.
        StoreError: a disk failed.
    """
    real = check_paths(paths)
    with ExitStack() as closing:
        drives = tuple(_disk(path, len(real), effort, working, closing).drive for path in real)
    return drives, tuple(_between(machine.host, count, effort, working) for count in ranks)


@dataclass(frozen=True, kw_only=True)
class _Disk:
    """A directory, what it is on, how fast it is, and the file that was measured with, which is still open."""

    path: Path
    mount: Mount
    rates: DiskRates
    scratch: Scratch

    @property
    def drive(self) -> Drive:
        rates = self.rates
        return Drive(
            path=str(self.path),
            read=rates.read,
            write=rates.write,
            # What runs beside something else is not faster for it: where it seems so, that is noise.
            read_both=min(rates.read_both, rates.read),
            write_both=min(rates.write_both, rates.write),
            sustained=rates.sustained,
            free=self.mount.free,
            kind=self.mount.kind(rates.read),
            mount=mount_point(self.path),
            node=self.mount.node if len(numa.nodes()) > 1 else None,
        )


def _disk(path: Path, count: int, effort: Effort, working: Working, closing: ExitStack) -> _Disk:
    """Measure one of ``count`` directories. With many, each is measured fewer times."""
    mount = mounts.look(path)
    nbytes = _file_size(path, mount, effort)
    less = replace(effort.disk, rounds=max(1, min(effort.disk.rounds, 6 // count)))
    with working(f"Disk {path}: reading, writing, and both at once"):
        scratch = closing.enter_context(Scratch(path, nbytes, depth=IO_THREADS // 2))
        return _Disk(path=path, mount=mount, rates=disk.measure(scratch, less), scratch=scratch)


def _file_size(path: Path, mount: Mount, effort: Effort) -> int:
    try:
        size = disk.file_size(mount, effort.disk)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if effort.disk.settle is not None and not packed.preallocates(path):
        raise ConfigError(
            f"{path}: its file system ({mount.file_system}) reserves no space, so that all of a file is written with "
            "zeros before anything is measured: that fills the cache that --sustained writes past. Leave it out"
        )
    return size


def _host(seen: System, effort: Effort, where: torch.device, working: Working) -> Host:
    with working("Copies in host memory"):
        copies = work.host_copies()
        span = Span(warm=0.05, seconds=effort.seconds)
        copy = statistics.median(rate(copies, span) for _ in range(effort.rounds))
    with working("Optimizer steps on the processor"):
        cpu = torch.device("cpu")
        rates = optimizer.steps(cpu, effort.seconds / 5, effort.rounds, threads=numa.thread_count(where))
    return Host(
        cores=seen.cores,
        memory=seen.memory,
        lockable=_lockable(seen, where),
        copy=copy,
        optimizer=rates,
        nodes=len(numa.nodes()),
    )


def _lockable(seen: System, where: torch.device) -> int:
    """Bytes that may be page-locked. Some drivers of GPUs lock more than ``ulimit -l`` allows, so it is tried."""
    if where.type != "cpu" and seen.lockable < _TRIED:
        try:
            HostSlab(seen.lockable + (64 << 20), beside=where).close()
        except BudgetError:
            return seen.lockable
        return seen.memory
    return seen.lockable


def device_steps(where: torch.device, effort: Effort, only: str | None = None) -> dict[str, float]:
    """``Device.optimizer`` of a GPU, or of it ``only`` one."""
    return optimizer.steps(where, effort.seconds / 5, effort.rounds, threads=1, only=only)


def _device(host: Host, effort: Effort, where: torch.device, working: Working, only: str | None) -> Device:
    """The device's profile. A CPU shares the host's memory and its optimizer."""
    with working("Matrix products on the device"):
        flops = device.throughput(where, effort.seconds, longest=_BRIEF_PRODUCT if effort.brief else device.LONGEST)
    with working("Copies to the device, from it, and both at once"):
        links = device.links(where, effort.seconds, effort.rounds)
    if where.type == "cpu":
        return Device(
            name=system.cpu_name(),
            kind="cpu",
            memory=host.memory,
            flops=flops,
            copy=host.copy,
            optimizer=host.optimizer,
            **links,
        )
    with working("Copies in the device's memory"):
        copy = device.copies(where, effort.seconds, effort.rounds)
    with working("Optimizer steps on the device"):
        steps = device_steps(where, effort, only)
        different = None if effort.brief or only is not None else agreement.other_bits(where)
    pci = numa.pci_address(where)
    return Device(
        name=(name := accelerator.of(where).name(where)),
        kind="cuda",
        memory=accelerator.of(where).memory(where)[1],
        flops=flops,
        copy=copy,
        optimizer=steps,
        peak=maker_peak(name),
        node=numa.gpu_node(pci) if pci is not None and host.nodes > 1 else None,
        other_bits=different,
        room=max(accelerator.room(where), 1),
        **links,
    )


def _crossing(effort: Effort, where: torch.device, working: Working) -> Crossing:
    with working("Gradients to the optimizer and weights back, cast on either side"):
        return optimizer.crossings(where, effort.seconds, effort.rounds, threads=numa.thread_count(where))


def _between(host: Host, ranks: int, effort: Effort, working: Working) -> Between:
    with working(f"What {ranks} ranks send each other"):
        return between.measure(ranks, cores=host.cores, seconds=min(effort.seconds, 0.1), rounds=effort.rounds)


def link(ranks: Ranks, where: torch.device, effort: Effort, working: Working) -> Network:
    """Measure a host's link to the others, together with the ranks on these, which come here, too."""
    with working(f"What {ranks.hosts} hosts send each other"):
        return between.link(ranks, where, min(effort.seconds, 0.1), effort.rounds)


def numbers_of_ranks(where: torch.device) -> tuple[int, ...]:
    """As many ranks as there are cores for: 2, 4, 8; 2 in any case. None beside a GPU, where each rank has its own."""
    if where.type != "cpu":
        return ()
    return (2, *(count for count in (4, 8) if count <= system.look().cores))


def _slower(where: torch.device, effort: Effort, scratch: Scratch | None, closing: ExitStack) -> dict[str, float]:
    """Slow-downs of lanes by each other, as in ``Machine.contention``."""
    gpu = where.type != "cpu"
    once = effort.brief and not gpu  # without a GPU both directions are copies in the same memory
    lanes: dict[Lane, Load] = {
        "compute": work.layer(where),
        "cpu": work.Steps(torch.device("cpu"), threads=numa.thread_count(where)).load("adamw"),
        "h2d": work.copies("h2d", where, closing),
    }
    if not once:
        lanes["d2h"] = work.copies("d2h", where, closing)
    if scratch is not None:
        lanes |= {"read": scratch.reading(), "write": scratch.writing()}
    span = Span(warm=0.02, seconds=min(effort.seconds, 0.1), calls=2, at_most=1.0)
    found = contention.measure(lanes, span, effort.rounds, gpu=gpu)
    return found | {pair.replace("h2d", "d2h"): value for pair, value in found.items()} if once else found
