"""``penstock doctor``: what it measures is what is there, it leaves nothing behind, and it says what is wrong."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import harness
from bench.harness import MB, BenchError, DiskLimit

from penstock.cli import main
from penstock.cli.doctor import describe, parse_doctor
from penstock.doctor import contention, device, disk, examine, mounts, optimizer, overhead, system, work
from penstock.doctor.disk import DiskRates, Scratch
from penstock.doctor.findings import Seen, findings
from penstock.doctor.mounts import Mount
from penstock.doctor.pace import Load, Span, rate, rates
from penstock.doctor.system import System
from penstock.errors import ConfigError, StoreError
from penstock.plan.machine import Device, Drive, Host, Machine, load_machine, parse_machine
from penstock.plan.profiles import find_profile, profile_folder

CPU = torch.device("cpu")
GIB = 1 << 30
REQUEST = disk.REQUEST
SMALL = disk.Effort(nbytes=64 << 20, fill=0.05, seconds=0.03, rounds=1)
BRIEF = examine.Effort(seconds=0.02, rounds=1, disk=SMALL)


# ---- pace


def sleeper(name: str, seconds: float, workers: int = 1) -> Load:
    return Load(name=name, workers=[lambda: time.sleep(seconds)] * workers, amount=2.0)


def customer(name: str, shared: ThreadPoolExecutor, seconds: float) -> Load:
    """Work that a resource which serves one after the other does, fairly."""
    return Load(name=name, workers=[lambda: shared.submit(time.sleep, seconds).result()], amount=1.0)


def test_a_rate_is_amounts_per_second_summed_over_the_workers() -> None:
    found = rate(sleeper("a", 0.01, workers=2), Span(warm=0.02, seconds=0.2))
    assert 100 < found <= 2 * 2 / 0.01


def test_loads_that_share_something_share_its_rate() -> None:
    with ThreadPoolExecutor(1) as shared:
        loads = [customer(name, shared, 0.01) for name in ("a", "b")]
        both = rates(loads, Span(warm=0.05, seconds=0.3, calls=10))
    assert both["a"] == pytest.approx(both["b"], rel=0.3)
    assert 30 < sum(both.values()) < 1.1 / 0.01


def test_a_call_that_takes_longer_than_the_span_still_has_its_rate() -> None:
    found = rate(sleeper("a", 0.1), Span(warm=0.0, seconds=0.01, calls=3))
    assert 10 < found <= 2 / 0.1


def test_a_call_that_takes_longer_than_there_is_time_has_a_rate_too() -> None:
    found = rate(sleeper("a", 0.1), Span(warm=0.05, seconds=0.01, calls=100, at_most=0.15))
    assert 5 < found <= 2 / 0.1


def test_a_burst_at_the_start_does_not_count() -> None:
    begun = time.perf_counter()

    def call() -> None:
        time.sleep(0.001 if time.perf_counter() - begun < 0.1 else 0.02)

    load = Load(name="a", workers=[call], amount=1)
    assert rate(load, Span(warm=0.15, seconds=0.3)) <= 1 / 0.02


def test_an_error_surfaces_and_no_thread_is_left() -> None:
    def fail() -> None:
        raise StoreError("broken")

    before = threading.active_count()
    with pytest.raises(StoreError, match="broken"):
        rates([sleeper("a", 0.01), Load(name="b", workers=[fail], amount=1)], Span(warm=0.1, seconds=5))
    assert threading.active_count() == before


# ---- system


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MEMINFO = "MemTotal:       1048576 kB\nMemAvailable:    524288 kB\nHugePages_Total:       0\n"
STATUS = "Name:\tpython\nCapEff:\t0000000000000000\n"
V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1 = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)
BASE = {"proc/meminfo": MEMINFO, "proc/self/status": STATUS, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2}
ALL_OF_IT = 1 << 30


def memory_of(root: Path, files: dict[str, str]) -> int:
    return system.look(tree(root, BASE | files)).memory


def test_without_a_limit_memory_is_what_is_installed(tmp_path: Path) -> None:
    found = system.look(tree(tmp_path, BASE))
    assert (found.memory, found.installed, found.available) == (ALL_OF_IT, ALL_OF_IT, ALL_OF_IT // 2)
    assert found.quota is None
    assert found.cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "1000000\n"}, 1000000),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "900000\n"}, 900000),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.high": "800000\n",
            },
            800000,
        ),
        ({"sys/fs/cgroup/memory.max": "700000\n"}, 700000),  # in a container: its cgroup is the root that it sees
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/other/memory.max": "1\n"}, ALL_OF_IT),
    ],
)
def test_the_limits_of_cgroups_of_version_2(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory_of(tmp_path, files) == expected


@pytest.mark.parametrize(
    ("place", "file", "limit", "expected"),
    [
        ("/a/b", "a/b", "600000", 600000),
        ("/a/b", "a", "500000", 500000),
        ("/a/b", "a/b", "9223372036854771712", ALL_OF_IT),
        ("/a", "c", "1", ALL_OF_IT),
    ],
)
def test_the_limits_of_cgroups_of_version_1(tmp_path: Path, place: str, file: str, limit: str, expected: int) -> None:
    files = {
        "proc/self/cgroup": f"4:memory:{place}\n1:cpu,cpuacct:/\n0::/\n",
        "proc/self/mountinfo": V1,
        f"sys/fs/cgroup/memory/{file}/memory.limit_in_bytes": limit,
    }
    assert memory_of(tmp_path, files) == expected


def test_a_container_that_sees_its_own_part_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc/job\n",
        "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "400000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "450000",
    }
    assert memory_of(tmp_path, files) == 400000


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"},
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/a\n",
            "proc/self/mountinfo": V1,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_a_quota_of_time_limits_the_cores(tmp_path: Path, files: dict[str, str]) -> None:
    found = system.look(tree(tmp_path, BASE | files))
    assert (found.quota, found.cores) == (1.5, 1)


def test_no_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "1:cpu,cpuacct:/\n0::/a\n",
        "proc/self/mountinfo": V1 + V2,
        "sys/fs/cgroup/a/cpu.max": "max 100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert system.look(tree(tmp_path, BASE | files)).quota is None


@pytest.mark.parametrize(("soft", "expected"), [(8 << 20, 8 << 20), (resource.RLIM_INFINITY, ALL_OF_IT), (0, 0)])
def test_memory_that_may_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft: int, expected: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: {resource.RLIMIT_MEMLOCK: (soft, soft)}[what])
    assert system.look(tree(tmp_path, BASE)).lockable == expected
    (tmp_path / "proc/self/status").write_text(STATUS.replace("0000\n", "4000\n"))  # CAP_IPC_LOCK
    assert system.look(tmp_path).lockable == ALL_OF_IT


def test_this_machine_has_cores_and_memory() -> None:
    found = system.look()
    assert 0 < found.available <= found.memory <= found.installed
    assert 0 < found.cores <= (os.cpu_count() or 0)
    assert system.cpu_name()


# ---- mounts


def mounted(root: Path, path: Path, kind: str, source: str = "none", *, block: str = "", **queue: str) -> Mount:
    """What ``path`` is on, in a system where its file system is as given. ``block``: folder of its disk in sysfs."""
    number = path.stat().st_dev
    numbers = f"{os.major(number)}:{os.minor(number)}"
    tree(root, {"proc/self/mountinfo": f"27 1 {numbers} / / rw - {kind} {source} rw\n"})
    if block:
        folder = root / "sys/devices" / block
        folder.mkdir(parents=True)
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "sys/dev/block" / numbers).symlink_to(folder)
        disk_folder = folder.parent if queue.pop("partition", "") else folder
        tree(disk_folder, {"queue/rotational": queue.get("rotational", "0\n")})
        if disk_folder != folder:
            (folder / "partition").write_text("1\n")
        if "node" in queue:
            (disk_folder.parent / "numa_node").write_text(queue["node"])
    return mounts.look(path, root)


def test_a_partition_is_on_its_disk(tmp_path: Path) -> None:
    found = mounted(tmp_path / "r", tmp_path, "ext4", block="pci/nvme0/nvme0n1/nvme0n1p2", partition="1", node="1\n")
    assert (found.file_system, found.disk, found.spins, found.node) == ("ext4", "nvme0n1", False, 1)
    assert found.kind(1e8) == "ssd"
    assert 0 < found.free <= found.size


@pytest.mark.parametrize(
    ("disk_name", "read", "kind"), [("sda", 2e8, "hdd"), ("sda", 1e9, "ssd"), ("vda", 2e8, "unknown")]
)
def test_a_disk_that_spins(tmp_path: Path, disk_name: str, read: float, kind: str) -> None:
    found = mounted(tmp_path / "r", tmp_path, "xfs", block=f"ata/{disk_name}", rotational="1\n")
    assert found.spins
    assert found.kind(read) == kind


@pytest.mark.parametrize(
    ("file_system", "kind"),
    [
        ("tmpfs", "tmpfs"),
        ("ramfs", "tmpfs"),
        ("nfs4", "network"),
        ("cifs", "network"),
        ("fuse.sshfs", "network"),
        ("lustre", "network"),
        ("overlay", "unknown"),
        ("fuse.mergerfs", "unknown"),
    ],
)
def test_what_is_no_disk(tmp_path: Path, file_system: str, kind: str) -> None:
    found = mounted(tmp_path / "r", tmp_path, file_system)
    assert found.kind(5e9) == kind
    assert found.far == (kind == "network")


def test_this_machines_memory_file_system_is_seen() -> None:
    assert mounts.look(Path("/dev/shm")).kind(1e10) == "tmpfs"


# ---- disk


def test_a_disk_is_measured_and_its_file_has_no_name_meanwhile(tmp_path: Path) -> None:
    with Scratch(tmp_path, SMALL.nbytes, depth=2, io_threads=4) as made:
        assert not list(tmp_path.iterdir())
        found = disk.measure(made, SMALL)
    assert not list(tmp_path.iterdir())
    assert min(found.read, found.write, found.read_both, found.write_both, found.first, found.last) > 0
    assert found.filled == SMALL.nbytes


def test_filling_ends_with_the_time_but_writes_enough_to_read(tmp_path: Path) -> None:
    with Scratch(tmp_path, 256 << 20, depth=2, io_threads=4) as made:
        slow = made._files.write

        def write(address: int, view: memoryview) -> None:
            time.sleep(0.02)
            slow(address, view)

        made._files.write = write  # type: ignore[method-assign]
        ends = made.fill(0.0)
    assert disk._LEAST <= ends[-1][1] <= disk._LEAST + 2 * REQUEST


def test_only_what_was_written_is_read(tmp_path: Path) -> None:
    with Scratch(tmp_path, 256 << 20, depth=2, io_threads=4) as made:
        made.fill(0.0)
        seen = []
        made._files.read = lambda address, view: seen.append(address)  # type: ignore[method-assign]
        first, second = made.reading().workers
        for _ in range(40):
            first()
            second()
    assert max(seen) < made._used * REQUEST < 256 << 20
    assert len(set(seen)) == made._used


def mount(**changes: Any) -> Mount:
    made = Mount(file_system="ext4", device=1, disk="nvme0n1", spins=False, size=1000 * GIB, free=500 * GIB, node=None)
    return replace(made, **changes)


def test_the_file_takes_no_more_than_half_of_what_is_free() -> None:
    assert disk.file_size(mount(), disk.THOROUGH) == GIB
    assert disk.file_size(mount(free=GIB), disk.THOROUGH) == GIB // 2
    assert disk.file_size(mount(free=200 << 20), disk.SUSTAINED) == 96 << 20
    assert disk.file_size(mount(file_system="nfs4"), disk.THOROUGH) == GIB // 4


def test_a_drive_whose_cache_fills_is_measured_past_it(tmp_path: Path) -> None:
    effort = replace(SMALL, fill=5.0)
    with Scratch(tmp_path, effort.nbytes, depth=1, io_threads=1) as made:
        fast, written = made._files.write, 0

        def write(address: int, view: memoryview) -> None:
            nonlocal written
            written += len(view)
            if written > effort.nbytes // 2:
                time.sleep(0.1)
            fast(address, view)

        made._files.write = write  # type: ignore[method-assign]
        found = disk.measure(made, effort)
    assert found.last < REQUEST / 0.1 < found.first
    assert found.write < REQUEST / 0.1


def test_a_file_system_without_files_is_not_measured() -> None:
    with pytest.raises(ConfigError, match="proc has no room for files: give a directory on a drive"):
        disk.file_size(mounts.look(Path("/proc")), disk.QUICK)


def test_a_full_file_system_is_not_measured() -> None:
    with pytest.raises(ConfigError, match="the file system is full: 100 MiB are free, and measuring takes 128 MiB"):
        disk.file_size(mount(free=100 << 20), disk.QUICK)


def test_a_limit_on_the_size_of_files_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot be measured: .*a limit on the size of files stands in the way"):
            Scratch(tmp_path, SMALL.nbytes, depth=2, io_threads=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(harness.why_no_limit() is not None, reason="needs root and the cgroup v1 blkio controller")
def test_a_disk_that_is_held_to_a_rate_is_measured_at_that_rate_in_time(tmp_path: Path) -> None:
    limit = DiskLimit(read=80 * MB, write=60 * MB)
    script = (
        "import sys, time; from pathlib import Path; from penstock.doctor import disk\n"
        "begun = time.perf_counter()\n"
        "with disk.Scratch(Path(sys.argv[1]), disk.QUICK.nbytes, depth=2, io_threads=4) as scratch:\n"
        "    found = disk.measure(scratch, disk.QUICK)\n"
        "print(found.read, found.write, found.read_both, found.write_both, time.perf_counter() - begun)"
    )
    try:
        harness.block_device(tmp_path)
    except BenchError:
        pytest.skip("the temporary directory is on no block device")
    with harness.disk_cgroup(limit, tmp_path) as group:
        assert group is not None
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: (group / "cgroup.procs").write_text("0"),
        )
    *found, seconds = (float(word) for word in done.stdout.split())
    # Within 2% on a quiet machine, and within 15% on one whose cores are busy with something else.
    assert found == pytest.approx([limit.read, limit.write, limit.read, limit.write], rel=0.25)
    assert seconds < 12


# ---- work


@pytest.mark.parametrize("name", ["h2d", "d2h"])
def test_copies_move_what_they_say(name: str) -> None:
    with ExitStack() as closing:
        load = work.copies(name, CPU, closing)
        assert load.amount == work.CHUNK * 4
        load.workers[0]()
        assert rate(load, Span(warm=0, seconds=0.01)) > 1e6


def test_steps_step(one_thread: None) -> None:
    steps = work.Steps(CPU, threads=1)
    before = [state[1].clone() for state in steps._states]
    for kind in optimizer.KINDS:
        load = steps.load(kind, torch.bfloat16)
        for _ in steps._states:
            load.workers[0]()
        after = [state[1] for state in steps._states]
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), kind
        for state in steps._states:
            assert torch.equal(state[4].view(torch.bfloat16)[: work.CHUNK], state[1].bfloat16())
        before = [tensor.clone() for tensor in after]


def test_every_optimizer_has_a_rate_in_every_precision() -> None:
    found = optimizer.steps(CPU, 0.002, 1, threads=1)
    kinds = ("adamw", "adam", "sgd", "momentum", "nesterov", "lion")
    assert found.keys() == {f"{kind}.{precision}" for kind in kinds for precision in ("fp32", "bf16", "fp16")}
    assert min(found.values()) > 1e5


def test_a_dtype_that_is_only_emulated_is_not_tried_at_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def product(device: torch.device, dtype: torch.dtype, size: int) -> Load:
        tried.append((dtype, size))
        flops = {torch.float32: 1e13, torch.bfloat16: 2e10, torch.float16: 5e9}[dtype]
        return replace(sleeper("compute", 2 * size**3 / flops), amount=2 * size**3)

    monkeypatch.setattr(work, "product", product)
    device.throughput(CPU, 0.001)
    assert [size for dtype, size in tried if dtype == torch.float32] == [512, 1024, 2048]
    assert [size for dtype, size in tried if dtype == torch.bfloat16] == [512, 1024]
    assert [size for dtype, size in tried if dtype == torch.float16] == [512]


def test_work_beside_other_work_is_never_reported_as_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "rates", lambda loads, span: {"h2d": 9e9, "d2h": 1e9})
    monkeypatch.setattr(device, "rate", lambda load, span: 5e9)
    monkeypatch.setattr(work, "copies", lambda name, where, closing: sleeper(name, 0))
    found = device.links(CPU, 0.01, 1)
    assert (found.h2d, found.h2d_both, found.d2h_both) == (5e9, 5e9, 1e9)


# ---- contention and overhead


def test_lanes_that_share_a_resource_evenly_have_contention_one() -> None:
    with ThreadPoolExecutor(1) as shared:
        lanes = {lane: customer(lane, shared, 0.01) for lane in ("compute", "cpu")}
        found = contention.measure(lanes, Span(warm=0.02, seconds=0.15, calls=8), 3, gpu=False)
    assert found == {"compute+cpu": pytest.approx(1.0, abs=0.4), "cpu+compute": pytest.approx(1.0, abs=0.4)}


def test_lanes_that_share_nothing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "rate", lambda load, span: 100.0)
    monkeypatch.setattr(contention, "rates", lambda loads, span: {"compute": 98.0, "read": 101.0})
    lanes = {"compute": sleeper("compute", 1), "read": sleeper("read", 1)}
    assert contention.measure(lanes, Span(warm=0, seconds=0), 1, gpu=False) == {}


def test_the_pairs() -> None:
    lanes = {lane: sleeper(lane, 1) for lane in ("compute", "cpu", "h2d", "d2h", "read", "write")}
    alone = {frozenset(pair) for pair in contention.pairs(lanes, gpu=False)}
    assert len(alone) == 13
    assert frozenset(("h2d", "d2h")) not in alone
    assert frozenset(("read", "write")) not in alone
    gpu = {frozenset(pair) for pair in contention.pairs(lanes, gpu=True)}
    assert gpu == {pair for pair in alone if "compute" not in pair}


def test_an_op_costs_something_and_not_much() -> None:
    assert 1e-7 < overhead.hand_over() < 0.02


# ---- findings


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


SYSTEM = System(cores=8, quota=None, memory=64 * GIB, installed=64 * GIB, available=60 * GIB, lockable=64 * GIB)
RATES = DiskRates(read=5e9, write=3e9, read_both=4e9, write_both=2.5e9, direct=True, filled=GIB, first=3e9, last=3e9)


def what_is_wrong(
    *,
    host: Host = host(),  # noqa: B008 - these are constants
    device: Device = gpu(),  # noqa: B008
    drive: Drive = drive(),  # noqa: B008
    mount: Mount = mount(),  # noqa: B008
    rates: DiskRates = RATES,
    **seen: Any,
) -> tuple[str, ...]:
    machine = Machine(name="box", host=host, device=device, drives=(drive,))
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


# ---- the command


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[examine.Effort]:
    """The command measures nothing and finds a machine like any; the efforts that it was asked for."""
    asked = []

    def examine_nothing(paths: Sequence[Path], effort: examine.Effort, *rest: object) -> Machine:
        asked.append(effort)
        drives = tuple(drive(path=str(path.resolve())) for path in paths)
        return Machine(name="box", host=host(), device=gpu(), drives=drives, warnings=("it is Monday",))

    monkeypatch.setattr(examine, "examine", examine_nothing)
    return asked


def _environment(cache: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(cache)}


def test_json_is_the_profile_and_nothing_else_and_is_stored(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "QUICK", BRIEF)
    folder = tmp_path / "data"
    folder.mkdir()
    assert main(["doctor", "--path", str(folder), "--json", "--quick"]) == 0
    out, err = capsys.readouterr()
    machine = parse_machine(out, "stdout")
    assert machine == find_profile([folder])
    assert not list(folder.iterdir())
    assert [d.path for d in machine.drives] == [str(folder)]
    assert {"fp32", "bf16", "fp16"} == machine.device.flops.keys()
    assert machine.overhead > 0
    assert f"Disk {folder}: reading, writing, and both at once: " in err
    assert "Traceback" not in err
    (stored,) = profile_folder().iterdir()
    assert load_machine(stored) == machine


def test_a_person_gets_tables_and_what_is_wrong(
    tmp_path: Path,
    cache: Path,
    measured: list[examine.Effort],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out, _ = capsys.readouterr()
    assert "What is wrong\n  - it is Monday\n" in out
    assert f"    {tmp_path.resolve()}" in out  # the current directory
    assert f"Stored as {profile_folder()}" in out
    assert measured == [examine.THOROUGH]


@pytest.mark.parametrize(("switch", "effort"), [("--quick", "QUICK"), ("--sustained", "SUSTAINED")])
def test_the_switches_choose_the_effort(
    tmp_path: Path, cache: Path, measured: list[examine.Effort], switch: str, effort: str
) -> None:
    assert main(["doctor", switch, "--path", str(tmp_path)]) == 0
    assert measured == [getattr(examine, effort)]


def test_memory_file_systems_are_measured_and_said() -> None:
    mount = mounts.look(Path("/dev/shm"))
    with Scratch(Path("/dev/shm"), SMALL.nbytes, depth=2, io_threads=4) as made:
        found = disk.measure(made, SMALL)
    assert found.read > 0
    kind = mount.kind(found.read)
    (text,) = what_is_wrong(drive=drive(kind=kind), mount=mount, rates=found)
    assert "this is tmpfs: its files are in memory" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--path", "{tmp}/none"], "/none does not exist: is the drive mounted?"),
        (["--path", "{tmp}/file"], "/file is not a directory: give one"),
        (["--path", "{tmp}", "--path={tmp}/."], "are the same directory: give it once"),
        (["--path"], "--path needs a directory: --path DIR"),
        (["--path", "--json"], "--path needs a directory: --path DIR"),
        (["--path="], "--path needs a directory: --path DIR"),
        (["--fast"], "penstock doctor does not know '--fast': it takes --path DIR"),
        (["/data"], "penstock doctor does not know '/data': it takes --path DIR"),
        (["--quick", "--sustained"], "give one of them"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", *(word.format(tmp=tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert not cache.exists()


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert main(["doctor", "--path", str(tmp_path)]) == 2
    assert "is not writable: change its owner or mode" in capsys.readouterr().err


def test_a_read_only_file_system_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/proc cannot be measured: .*"):
        Scratch(Path("/proc"), SMALL.nbytes, depth=2, io_threads=4)


def test_a_profile_that_cannot_be_stored_is_still_printed(
    tmp_path: Path, cache: Path, measured: list[examine.Effort], capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file")
    assert main(["doctor", "--path", str(tmp_path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["drives"]
    assert "cannot be stored" in err


def test_the_words() -> None:
    assert parse_doctor([]).paths == (Path(),)
    parsed = parse_doctor(["--json", "--path", "/a", "--sustained", "--path=/b"])
    assert (parsed.paths, parsed.json, parsed.quick, parsed.sustained) == ((Path("/a"), Path("/b")), True, False, True)
    assert parse_doctor(["--path", "~/x"]).paths == (Path.home() / "x",)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "doctor", "--path", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(tmp_path / "cache"),
    )
    deadline = time.monotonic() + 60
    while not _open_files(process.pid, str(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # in the middle of the first disk measurement
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert not list(folder.iterdir())
    assert not (tmp_path / "cache").exists()
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == "penstock: interrupted"
        assert "Traceback" not in err


def _open_files(pid: int, folder: str) -> list[str]:
    """Names of a process's open files in a folder."""
    found = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if name.startswith(folder):
            found.append(name)
    return found


def test_the_table_of_a_machine_with_a_gpu() -> None:
    machine = Machine(
        name="box",
        host=host(nodes=2, lockable=GIB),
        device=gpu(node=1, optimizer={"adamw.fp32": 5e9}),
        drives=(drive(path="/mnt/a-rather-long-name/of/a/directory", node=0), drive(path="/b", kind="hdd", read=9.9e7)),
        contention={"cpu+read": 0.25, "read+cpu": 0.1},
        overhead=2e-5,
        warnings=("something " * 30,),
    )
    text = describe(machine)
    assert "64 GiB; may be page-locked: 1 GiB" in text
    assert "GPU; 24 GiB, on NUMA node 1" in text
    assert "8, on 2 NUMA nodes" in text
    assert "1,000        5,000" in text
    (row,) = (line.split() for line in text.splitlines() if "rather" in line)
    assert " ".join(row) == "/mnt/a-rather-long-name/of/a/directory 5 3 4 + 2.5 500 GiB ssd, NUMA node 0"
    assert "0.099" in text
    assert "    cpu                              1.25x" in text
    assert max(len(line) for line in text.splitlines()) <= 110


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    machine = examine.examine([tmp_path], BRIEF, torch.device("cuda", 0), lambda text: nullcontext())
    device = machine.device
    assert parse_machine(machine.to_json(), "x") == machine
    assert device.kind == "cuda"
    assert device.memory > GIB
    assert device.flops["bf16"] > device.flops["fp32"] > 1e12
    assert 1e9 < device.h2d_both <= device.h2d
    assert 1e9 < device.d2h_both <= device.d2h
    assert device.optimizer.keys() == machine.host.optimizer.keys()
    assert not any("compute" in pair for pair in machine.contention)
