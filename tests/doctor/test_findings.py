"""What ``penstock doctor`` says is wrong, and that it says nothing else."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.doctor.disk import DiskRates
from penstock.doctor.findings import Seen, findings
from penstock.doctor.mounts import Mount
from penstock.hardware.machine import Between, Device, Drive, Host, Machine
from tests.machines import GIB, RATES, SYSTEM, drive, gpu, host, mount


def what_is_wrong(
    *,
    host: Host = host(),  # noqa: B008 - these are constants
    device: Device = gpu(),  # noqa: B008
    drive: Drive = drive(),  # noqa: B008
    between: tuple[Between, ...] = (),
    mount: Mount = mount(),  # noqa: B008
    rates: DiskRates = RATES,
    **seen: Any,
) -> tuple[str, ...]:
    machine = Machine(name="box", host=host, device=device, drives=(drive,), between=between)
    facts = {"system": SYSTEM, "native": True, "device_free": 24 * GIB} | seen
    return findings(machine, Seen(disks=[(Path("/d"), mount, rates)], **facts))


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert what_is_wrong() == ()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "memory": ({"drive": drive(kind="tmpfs"), "mount": mount(file_system="tmpfs")}, "/d: this is tmpfs: .* in memory"),
    "network": (
        {"drive": drive(kind="network"), "mount": mount(file_system="nfs4")},
        r"/d: this is a network file system \(nfs4\).*local drive",
    ),
    "spinning": ({"drive": drive(kind="hdd"), "mount": mount(disk="sda")}, "/d: sda is a spinning disk.*Use an SSD"),
    "virtual": ({"drive": drive(kind="unknown"), "mount": mount(disk="vda")}, "/d: vda is a virtual disk and as slow"),
    "overlay": (
        {"drive": drive(kind="unknown"), "mount": mount(disk="", file_system="overlay")},
        "/d: what drive is below this overlay cannot be seen",
    ),
    "shared": (
        {"rates": replace(RATES, read_both=2.5e9, write_both=1.5e9)},
        r"/d: reading and writing share one limit: 5 GB/s read or 3 GB/s written alone, but 2.5 GB/s \+ 1.5 GB/s",
    ),
    "buffered": ({"rates": replace(RATES, direct=False)}, "/d: ext4 does not do direct I/O"),
    "cache": (
        {"rates": replace(RATES, filled=32 * GIB, last=1e9)},
        "/d: writing fell from 3 GB/s to 1 GB/s over 32 GiB: the drive's cache is full",
    ),
    "full": ({"mount": mount(free=20 * GIB)}, "/d: the file system is nearly full: 20 GiB of 0.977 TiB"),
    "lockable": ({"host": host(lockable=8 << 20)}, r"8 MiB of 64 GiB of memory may be page-locked \(ulimit -l\)"),
    "no kernel": ({"native": False}, "no native kernels"),
    "far": ({"device": gpu(node=0), "drive": drive(node=1)}, "/d: the drive is on NUMA node 1 and the GPU on node 0"),
    "cgroup": ({"system": replace(SYSTEM, memory=32 * GIB, available=32 * GIB)}, "limits this process to 32 GiB of"),
    "busy": ({"system": replace(SYSTEM, available=30 * GIB)}, "other programs hold memory: 30 GiB of 64 GiB"),
    "other bits": (
        {"device": replace(gpu(), other_bits=("adamw.bf16",))},
        "adamw.bf16: steps on the GPU differ from the processor's in some bits",
    ),
    "other bits between ranks": (
        {"between": (Between(ranks=2, bandwidth=1e9, latency=1e-3, other_bits=("adamw.bf16", "product")),)},
        "adamw.bf16, product: 2 processes .* compute other bits .* depend on the number of ranks.*OMP_NUM_THREADS",
    ),
    "busy GPU": ({"device_free": 12 * GIB}, "other programs hold memory of the GPU: 12 GiB of 24 GiB"),
    "quota": ({"system": replace(SYSTEM, quota=1.5)}, "the time of 1.5 cores"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_and_nothing_else(name: str) -> None:
    case, message = WRONG[name]
    (found,) = what_is_wrong(**case)
    assert re.search(message, found), found


def test_lockable_memory_matters_to_gpus_only() -> None:
    cpu = replace(gpu(), kind="cpu")
    assert what_is_wrong(host=host(lockable=0), device=cpu, device_free=None) == ()


def test_directories_on_one_drive_are_said() -> None:
    machine = Machine(name="box", host=host(), device=gpu(), drives=(drive(), drive(), drive()))
    disks = [(Path("/a"), mount(), RATES), (Path("/b"), mount(device=2), RATES), (Path("/c"), mount(disk="sdb"), RATES)]
    (found,) = findings(machine, Seen(system=SYSTEM, disks=disks, native=True))
    assert found.startswith("/a, /b are all on nvme0n1: striping over them is no faster")
