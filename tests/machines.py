"""Good machines and parts of them, for the tests of doctor to make worse."""

from dataclasses import replace
from typing import Any

from penstock.doctor import disk
from penstock.doctor.disk import DiskRates
from penstock.doctor.mounts import Mount
from penstock.hardware.machine import Device, Drive, Host
from penstock.hardware.system import System

GIB = 1 << 30
SMALL = disk.Effort(nbytes=64 << 20, fill=0.05, seconds=0.03, rounds=1)


def host(**changes: Any) -> Host:
    return replace(
        Host(cores=8, memory=64 * GIB, lockable=64 * GIB, copy=1e10, optimizer={"adamw.fp32": 1e9}), **changes
    )


def gpu(**changes: Any) -> Device:
    made = Device(
        name="GPU", kind="cuda", memory=24 * GIB, flops={"bf16": 1e14}, h2d=2e10, d2h=2e10, h2d_both=2e10, d2h_both=2e10
    )
    return replace(made, **changes)


def drive(**changes: Any) -> Drive:
    return replace(Drive(path="/d", read=5e9, write=3e9, read_both=4e9, write_both=2.5e9, free=500 * GIB), **changes)


def mount(**changes: Any) -> Mount:
    made = Mount(file_system="ext4", device=1, disk="nvme0n1", spins=False, size=1000 * GIB, free=500 * GIB, node=None)
    return replace(made, **changes)


SYSTEM = System(cores=8, quota=None, memory=64 * GIB, installed=64 * GIB, available=60 * GIB, lockable=64 * GIB)
RATES = DiskRates(read=5e9, write=3e9, read_both=4e9, write_both=2.5e9, direct=True, filled=GIB, first=3e9, last=3e9)
