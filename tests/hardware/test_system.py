"""What ``penstock doctor`` sees of the system: limits of cgroups, page-locked memory, what a directory is on."""

import os
import resource
from pathlib import Path

import pytest

from penstock.doctor import mounts
from penstock.doctor.mounts import Mount
from penstock.hardware import system


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


def test_caches_that_processors_share_count_once(tmp_path: Path) -> None:
    assert system.cache_size(tree(tmp_path, BASE)) == 0
    for cpu in os.sched_getaffinity(0):
        for level, size in (("index2", "2048K"), ("index3", "307200K")):
            at = f"sys/devices/system/cpu/cpu{cpu}/cache/{level}"
            tree(tmp_path, {f"{at}/shared_cpu_list": "0-15\n", f"{at}/size": f"{size}\n"})
    assert system.cache_size(tmp_path) == 300 << 20


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


def test_a_cgroup_whose_name_begins_like_the_mounted_one_is_not_below_it(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abcdef\n",
        "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/abcdef/memory.limit_in_bytes": "400000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "450000",
    }
    assert memory_of(tmp_path, files) == 450000


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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": "100000000\n",
                "sys/fs/cgroup/a/memory.current": "70000000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 50000000\ninactive_file 15000000\nactive_file 5000000\n",
            },
            45000000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "proc/self/mountinfo": V1,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "100000000\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "70000000\n",
                "sys/fs/cgroup/memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 20000000\n",
            },
            50000000,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "100000000\n",
                "sys/fs/cgroup/a/memory.current": "99000000\n",
                "sys/fs/cgroup/a/b/memory.high": "80000000\n",
                "sys/fs/cgroup/a/b/memory.current": "90000000\n",
            },
            0,
        ),
    ],
)
def test_what_a_cgroup_uses_of_its_limit_is_not_available(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """But for what caches files that nobody reads. One may be over what it is slowed down from."""
    assert system.look(tree(tmp_path, BASE | files)).available == expected


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
    cut = b"Name:\ta\xe8\xae\n"  # as the kernel cuts names of processes
    (tmp_path / "proc/self/status").write_bytes(cut + STATUS.replace("0000\n", "4000\n").encode())  # CAP_IPC_LOCK
    assert system.look(tmp_path).lockable == ALL_OF_IT


def test_this_machine_has_cores_and_memory() -> None:
    found = system.look()
    assert 0 < found.available <= found.memory <= found.installed
    assert 0 < found.cores <= (os.cpu_count() or 0)
    assert system.cpu_name()


def mounted(root: Path, path: Path, kind: str, source: str = "none", *, block: str = "", **queue: str) -> Mount:
    """What ``path`` is on, in a system where its file system is as given. ``block``: folder of its disk in sysfs."""
    number = path.stat().st_dev
    numbers = f"{os.major(number)}:{os.minor(number)}"
    tree(root, {"proc/self/mountinfo": f"27 1 {numbers} / / rw - {kind} {source} rw\n"})
    if block:
        folder = root / "sys/devices" / block
        folder.mkdir(parents=True, exist_ok=True)
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "sys/dev/block" / numbers).symlink_to(folder)
        disk_folder = folder.parent if queue.pop("partition", "") else folder
        tree(disk_folder, {"queue/rotational": queue.get("rotational", "0\n")})
        if disk_folder != folder:
            (folder / "partition").write_text("1\n")
        if "node" in queue:
            (disk_folder.parent / "numa_node").write_text(queue["node"])
    return mounts.look(path, root)


def test_mounts_of_others_may_have_any_name(tmp_path: Path) -> None:
    """That of a stick whose folder is no UTF-8, say."""
    odd = b"29 1 0:99 / /media/caf\xe9 rw - vfat /dev/sdb1 rw\n"
    mounted(tmp_path / "r", tmp_path, "ext4")
    table = tmp_path / "r/proc/self/mountinfo"
    table.write_bytes(odd + table.read_bytes())
    assert mounts.look(tmp_path, tmp_path / "r").file_system == "ext4"
    tree(tmp_path / "s", BASE | {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "800000\n"})
    (tmp_path / "s/proc/self/mountinfo").write_bytes(odd + V2.encode())
    assert system.look(tmp_path / "s").memory == 800000


def test_a_partition_is_on_its_disk(tmp_path: Path) -> None:
    found = mounted(tmp_path / "r", tmp_path, "ext4", block="pci/nvme0/nvme0n1/nvme0n1p2", partition="1", node="1\n")
    assert (found.file_system, found.disk, found.spins, found.node) == ("ext4", "nvme0n1", False, 1)
    assert found.kind(1e8) == "ssd"
    assert 0 < found.free <= found.size


def stacked(root: Path, *drives: str) -> None:
    """Below the volume ``dm-0`` (LUKS) lies ``dm-1`` (LVM), and that is on partitions of these drives."""
    virtual = root / "sys/devices/virtual/block"
    (virtual / "dm-0/slaves").mkdir(parents=True)
    (virtual / "dm-1/slaves").mkdir(parents=True)
    (virtual / "dm-0/slaves/dm-1").symlink_to(virtual / "dm-1")
    for drive in drives:
        files = {f"{drive}p2/partition": "2\n", "queue/rotational": "0\n", "../numa_node": "1\n"}
        (root / "sys/devices/pci" / drive).mkdir(parents=True)
        tree(root / "sys/devices/pci" / drive, files)
        (virtual / f"dm-1/slaves/{drive}p2").symlink_to(root / f"sys/devices/pci/{drive}/{drive}p2")


def test_a_volume_is_on_the_drive_below_it_if_that_is_one(tmp_path: Path) -> None:
    stacked(tmp_path / "one", "nvme0n1")
    found = mounted(tmp_path / "one", tmp_path, "ext4", block="virtual/block/dm-0")
    assert (found.disk, found.node) == ("nvme0n1", 1)
    stacked(tmp_path / "two", "nvme0n1", "nvme1n1")
    assert mounted(tmp_path / "two", tmp_path, "ext4", block="virtual/block/dm-0").disk == "dm-1"


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


STAT = "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 {} 0 0 500 0 0 0 {} 0 0\ncpu1 {} 0 0 500 0 0 0 0 0 0\n"


def test_what_other_programs_take_of_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy less what this process and its children took: what a virtual machine's neighbours take counts."""
    spent, clock = os.times_result((1.0, 0.0, 0.0, 0.0, 0.0)), 100.0
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(system.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(system.os, "times", lambda: spent)
    monkeypatch.setattr(system.time, "monotonic", lambda: clock)
    tree(tmp_path, BASE | {"proc/stat": STAT.format(1000, 0, 0)})
    others = system.Others(tmp_path)
    spent, clock = os.times_result((2.0, 1.0, 1.0, 0.0, 0.0)), 110.0
    tree(tmp_path, {"proc/stat": STAT.format(1600, 200, 900)})
    assert others.cores() == pytest.approx((8.0 - 3.0) / 10), "the other processor is not this process's"
    spent = os.times_result((99.0, 0.0, 0.0, 0.0, 0.0))
    assert others.cores() == 0.0


def test_what_other_programs_do_where_a_quota_leaves_no_time_is_not_taken_from_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four processors with a quota of one and a half, two and a half may be busy with anything."""
    clock = 100.0
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(system.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(system.os, "times", lambda: os.times_result((0.0, 0.0, 0.0, 0.0, 0.0)))
    monkeypatch.setattr(system.time, "monotonic", lambda: clock)
    quota = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}
    tree(tmp_path, BASE | quota | {"proc/stat": STAT.format(0, 0, 0) + "cpu2 0 0 0 0 0 0 0 0 0 0\n"})
    others = system.Others(tmp_path)
    clock = 110.0
    tree(tmp_path, {"proc/stat": STAT.format(900, 0, 900) + "cpu2 700 0 0 0 0 0 0 0 0 0\n"})
    assert others.cores() == 0.0
    tree(tmp_path, {"proc/stat": STAT.format(1000, 0, 1000) + "cpu2 1000 0 0 0 0 0 0 0 0 0\n"})
    assert others.cores() == pytest.approx(0.5)
