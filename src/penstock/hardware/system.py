"""Cores, memory, limits and devices, as the system gives them to this process, and what other programs take of them.

``root`` is ``/`` but for tests.
"""

import math
import os
import platform
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_CAP_IPC_LOCK = 1 << 14  # include/uapi/linux/capability.h: may lock memory without limit


@dataclass(frozen=True, kw_only=True)
class System:
    """Bytes, and numbers of cores."""

    cores: int
    """cores that this process may use: the least of its affinity and every cgroup's quota"""
    quota: float | None
    """the quota of processor time, in cores, if a cgroup sets one"""
    memory: int
    """bytes that this process may use: the least of what is installed and every cgroup's limit"""
    installed: int
    available: int
    """bytes that could be had now without swapping: of the machine's memory, and of what every cgroup's limit leaves"""
    lockable: int
    """bytes that may be page-locked"""


def look(root: Path = _ROOT) -> System:
    """The system as this process sees it."""
    info = _meminfo(root)
    limits = list(_memory_limits(root))
    memory = min([info["MemTotal"], *(limit for limit, _ in limits)])
    quota = min(_cpu_quotas(root), default=None)
    cores = len(os.sched_getaffinity(0))
    return System(
        cores=cores if quota is None else max(1, min(cores, math.floor(quota))),
        quota=quota,
        memory=memory,
        installed=info["MemTotal"],
        available=max(min([info["MemAvailable"], *(limit - used for limit, used in limits)]), 0),
        lockable=min(memory, _lock_limit(root)),
    )


def cpu_name(root: Path = _ROOT) -> str:
    """The processor's name as its maker gives it, or else its architecture."""
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def nvidia_names(root: Path = _ROOT) -> set[str]:
    """The names of NVIDIA's GPUs, as its driver lists them; none without the driver."""
    found = set()
    for file in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                found.add(value.strip())
    return found


class Others:
    """Load of other programs on the processors that this process may use, from now on. Time that a virtual machine's
    neighbours take (steal) counts. What they do on processors that a quota leaves this process no time for does not."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        cores = len(os.sched_getaffinity(0))
        self._unused = cores - min(_cpu_quotas(root), default=cores)
        self._begun = self._now()

    def cores(self) -> float:
        """Cores that they have kept busy since, on average."""
        busy, own, clock = (now - then for now, then in zip(self._now(), self._begun, strict=True))
        return max((busy - own) / clock - max(self._unused, 0), 0.0) if clock > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Seconds that the processors were busy, those of them that this process and its children took, and the time.
        Children count once they have ended and been waited for."""
        own = os.times()
        return (
            _busy_seconds(self._root),
            own.user + own.system + own.children_user + own.children_system,
            time.monotonic(),
        )


def _busy_seconds(root: Path) -> float:
    """Seconds in which the processors that this process may use were not idle (proc_stat(5))."""
    mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    ticks = 0
    for line in (root / "proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in mine:
            user, nice, kernel, _, _, irq, soft, *steal = map(int, counts[:8])
            ticks += user + nice + kernel + irq + soft + sum(steal)
    return ticks / os.sysconf("SC_CLK_TCK")


def cache_size(root: Path = _ROOT) -> int:
    """Bytes of the last-level caches of the processors that this process may use; 0 where the kernel does not tell."""
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        for cache in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[3-9]"):
            shared, size = _read(cache / "shared_cpu_list"), _read(cache / "size")
            if shared and size and size.endswith("K"):
                found[shared] = max(found.get(shared, 0), int(size[:-1]) * 1024)
    return sum(found.values())


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def _lock_limit(root: Path) -> int:
    """``ulimit -l``, which does not hold for a process with the right to lock memory, as root usually is."""
    for line in (root / "proc/self/status").read_text(errors="replace").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) & _CAP_IPC_LOCK:
            return 2**63
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return 2**63 if soft == resource.RLIM_INFINITY else soft


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Every limit on the memory of this process's cgroups, and of those above them, and the bytes of it that are used
    and could not be given back at once, as a cache of files that nobody reads could."""
    versions = {
        "memory.max": ("memory.current", "inactive_file"),
        "memory.high": ("memory.current", "inactive_file"),
        "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
    }
    for folder in _cgroups(root, "memory"):
        for name, (usage, cache) in versions.items():
            text = _read(folder / name)
            if text is not None and text != "max":  # without a limit, version 1 has a number larger than any memory
                lines = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
                given_back = sum(int(count) for key, count in lines if key == cache)
                yield int(text), max(int(_read(folder / usage) or 0) - given_back, 0)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Every quota on processor time, in cores."""
    for folder in _cgroups(root, "cpu"):
        text = _read(folder / "cpu.max")
        if text is None:
            parts = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
            text = " ".join(part for part in parts if part is not None)
        match text.split():
            case [quota, period] if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of all above it, in the hierarchies that may have a controller.

    ``/proc/self/cgroup`` says where the process is in each hierarchy (version 2: number 0, no controllers), and
    ``/proc/self/mountinfo`` where a hierarchy is mounted, and from which of its folders down (in a container).
    """
    places = {}
    for line in (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
        number, controllers, place = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            places["cgroup2" if number == "0" else "cgroup"] = place
    for line in (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        if kind not in places or (kind == "cgroup" and controller not in options.split(" ")[-1].split(",")):
            continue
        _, _, _, top, point = mount.split()[:5]
        inside = Path(os.path.relpath(places[kind], top)) if Path(places[kind]).is_relative_to(top) else Path()
        base = root / point.lstrip("/")
        for part in (inside, *inside.parents):
            yield base / part
