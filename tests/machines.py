"""Good machines and parts of them, for the tests of doctor to make worse; and profiles that count on this one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.doctor import disk
from penstock.doctor.disk import DiskRates
from penstock.doctor.mounts import Mount
from penstock.hardware import system
from penstock.hardware.machine import Device, Drive, Host, Machine, Measured, Network
from penstock.hardware.present import mount_point
from penstock.hardware.profiles import shipped_machine
from penstock.hardware.system import System

GIB = 1 << 30
HERE = Measured(at="2026-01-31T12:00:00+00:00", load=0.25)


def measured_here(machine: Machine) -> Machine:
    """A profile as if it had been measured here and now: it counts when it is stored."""
    now, device, drives = system.look(), machine.device, machine.drives
    return replace(
        machine,
        host=replace(machine.host, cores=now.cores, memory=min(machine.host.memory, now.memory)),
        device=replace(device, name=system.cpu_name()) if device.kind == "cpu" else device,
        drives=tuple(replace(drive, mount=drive.mount or mount_point(Path(drive.path))) for drive in drives),
        measured=HERE,
    )


SMALL = disk.Effort(nbytes=64 << 20, fill=0.05, seconds=0.03, rounds=1)


def host(**changes: Any) -> Host:
    return replace(
        Host(cores=8, memory=64 * GIB, lockable=64 * GIB, copy=1e10, optimizer={"adamw.fp32": 1e9}), **changes
    )


def gpu(**changes: Any) -> Device:
    made = Device(
        name="GPU",
        kind="cuda",
        memory=24 * GIB,
        flops={"bf16": 1e14},
        copy=1e12,
        h2d=2e10,
        d2h=2e10,
        h2d_both=2e10,
        d2h_both=2e10,
    )
    return replace(made, **changes)


def drive(**changes: Any) -> Drive:
    return replace(Drive(path="/d", read=5e9, write=3e9, read_both=4e9, write_both=2.5e9, free=500 * GIB), **changes)


def mount(**changes: Any) -> Mount:
    made = Mount(file_system="ext4", device=1, disk="nvme0n1", spins=False, size=1000 * GIB, free=500 * GIB, node=None)
    return replace(made, **changes)


def cluster_profile(folder: Path) -> Path:
    """A profile in a file, of a machine with a network between ranks."""
    profile = replace(shipped_machine("a100-40g"), name="cluster", network=Network(bandwidth=25e9, latency=1e-5))
    path = folder / "cluster.json"
    path.write_text(profile.to_json())
    return path


SYSTEM = System(cores=8, quota=None, memory=64 * GIB, installed=64 * GIB, available=60 * GIB, lockable=64 * GIB)
RATES = DiskRates(read=5e9, write=3e9, read_both=4e9, write_both=2.5e9, direct=True, filled=GIB, first=3e9, last=3e9)
