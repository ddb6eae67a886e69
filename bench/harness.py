"""Running two sides of a benchmark fairly: each step's record from its own process, alternating, one disk limit.

A *side* is a command that takes ``--work`` and ``--report`` and leaves one line of JSON per step (see
``bench.workload.Report``). Sides run one at a time, A B A B, in one cgroup when the disk is limited.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.workload import Work

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SCRATCH = ROOT / ".bench" / "scratch"
_BLKIO = Path("/sys/fs/cgroup/blkio")
MB = 10**6


class BenchError(RuntimeError):
    """The benchmark cannot run here, or a side failed; says what to do."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A program under test. ``command`` gets ``--work`` and ``--report`` appended. ``doctor``: it finds a profile of
    the machine as it is held, which ``penstock doctor`` has measured; else none."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    doctor: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as a side reported it: seconds, mean loss, and bytes of memory and disk traffic. ``compute``: as
    ``bench.workload.Report``."""

    seconds: float
    loss: float
    peak_rss: int
    read: int
    written: int
    compute: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The steps of one process, warm-up included."""

    steps: tuple[Step, ...]
    warm_up: int

    @property
    def measured(self) -> tuple[Step, ...]:
        return self.steps[self.warm_up :]


def median_seconds(runs: Sequence[Run]) -> float:
    """Median step time over all measured steps of all runs of a side."""
    return statistics.median(step.seconds for run in runs for step in run.measured)


@dataclass(frozen=True, kw_only=True)
class DiskLimit:
    """Rates of the disk in bytes per second."""

    read: int
    write: int

    def __str__(self) -> str:
        return f"{self.read / MB:.0f}/{self.write / MB:.0f} MB/s"


def block_device(path: Path) -> str:
    """``major:minor`` of the whole disk that holds ``path``: throttling ignores partitions.

    Raises:
        BenchError: the path is on no block device (tmpfs, overlay, network).
    """
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise BenchError(f"{path} is on no block device, so its rate cannot be held: give --scratch on a disk")
    device = device.resolve()
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()


def why_no_limit() -> str | None:
    """Why this process cannot hold the disk to a rate, or None when it can."""
    if not (_BLKIO / "blkio.throttle.read_bps_device").exists():
        return f"there is no cgroup v1 blkio controller at {_BLKIO}"
    if os.geteuid() != 0:
        return "setting blkio.throttle needs root"
    return None


@contextmanager
def disk_cgroup(limit: DiskLimit | None, path: Path, name: str = "") -> Iterator[Path | None]:
    """A cgroup whose direct I/O to the disk of ``path`` is held to ``limit``; removed at the end. None: no limit.
    ``name``: of one of several."""
    if limit is None:
        yield None
        return
    reason = why_no_limit()
    if reason is not None:
        raise BenchError(f"the disk cannot be held to {limit}: {reason}")
    group = _BLKIO / f"penstock-bench-{os.getpid()}{name}"
    group.mkdir()
    try:
        device = block_device(path)
        (group / "blkio.throttle.read_bps_device").write_text(f"{device} {limit.read}")
        (group / "blkio.throttle.write_bps_device").write_text(f"{device} {limit.write}")
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove an empty cgroup; the kernel may need a moment after the last process has been reaped."""
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    print(f"the cgroup {group} is still busy: remove it with rmdir", file=sys.stderr)


def joining(group: Path | None) -> Callable[[], None]:
    """What a process does before its program begins, so that the limit of ``group`` is its limit."""

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text("0")

    return join


def end_all_of(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and those that it has started, which would go on beside
    whoever comes next: DeepSpeed's SuperOffload steps in one."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(side: Side, work: Work, *, group: Path | None, logs: Path, warm_up: int, patience: float | None = None) -> Run:
    """Run one side to its end in ``group`` and return what it reported. ``patience``: seconds that it may take.

    Raises:
        BenchError: the side failed, took too long, or left fewer steps than asked; names its log and quotes its end.
    """
    logs.mkdir(parents=True, exist_ok=True)
    report, log = logs / f"{side.name}.jsonl", logs / f"{side.name}.log"
    report.unlink(missing_ok=True)

    with log.open("w") as output:
        process = subprocess.Popen(
            [*side.command, "--work", work.to_json(), "--report", str(report)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(work.threads), "PYTHONUNBUFFERED": "1"} | dict(side.environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=joining(group),
            start_new_session=True,
        )
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            end_all_of(process)
    steps = [Step(**json.loads(line)) for line in report.read_text().splitlines()] if report.exists() else []
    if code != 0 or len(steps) != work.steps:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise BenchError(f"{side.name} ended with code {code} after {len(steps)} of {work.steps} steps; {log}:\n{tail}")
    return Run(steps=tuple(steps), warm_up=warm_up)


def run_in(
    group: Path | None, module: str, *arguments: str, show: bool = False, cache: Path = SCRATCH / "cache"
) -> str:
    """Run ``python -m module`` to its end in ``group`` and return what it printed.

    Profiles of machines that it looks for or stores are in ``cache``, the benchmarks' own. ``show``: what it says on
    its standard error is shown as it comes.

    Raises:
        BenchError: it failed; quotes the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=joining(group),
    )
    if done.returncode:
        asked = " ".join((module, *arguments))[:200]
        said = "what it said is above" if show else done.stderr[-3000:]
        raise BenchError(f"{asked} ended with code {done.returncode}:\n{said}")
    return done.stdout


def measure_machine(folder: Path, group: Path | None, ranks: Sequence[int] = ()) -> Path:
    """``penstock doctor`` on the disk of ``folder``, as the processes in ``group`` see it; the profile's file.
    ``ranks``: numbers of processes to measure collectives between, instead of the usual ones."""
    target, counts = folder / "machine.json", [word for count in ranks for word in ("--ranks", str(count))]
    target.write_text(run_in(group, "penstock.cli", "doctor", "--path", str(folder), "--json", *counts))
    return target


def alternate(
    sides: Sequence[Side],
    work: Work,
    *,
    rounds: int,
    limit: DiskLimit | None,
    logs: Path,
    warm_up: int = 1,
) -> dict[str, list[Run]]:
    """Each side's runs, taken in turn (A B A B ...), so that a slow spell of the machine meets all of them.

    Raises:
        BenchError: a side failed, or the sides do not compute the same losses from the same weights.
    """
    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    with disk_cgroup(limit, Path(work.scratch)) as group, TemporaryDirectory() as caches:
        measured = Path(caches, "doctor")
        if any(side.doctor for side in sides):
            run_in(group, "penstock.cli", "doctor", "--path", work.scratch, "--quick", cache=measured)
        for turn in range(rounds):
            for side in sides:
                cache = measured if side.doctor else Path(caches, f"{side.name}-{turn}")
                found = replace(side, environment={**side.environment, "XDG_CACHE_HOME": str(cache)})
                done = run(found, work, group=group, logs=logs / str(turn), warm_up=warm_up)
                runs[side.name].append(done)
                seconds = " ".join(f"{step.seconds:.2f}" for step in done.steps)
                print(f"  round {turn + 1}/{rounds}  {side.name:<10} step seconds: {seconds}", flush=True)
    check_same_losses(runs)
    return runs


def check_same_losses(runs: Mapping[str, Sequence[Run]], tolerance: float = 1e-3) -> None:
    """A benchmark of two programs that compute different things is none: compare every step's loss.

    Raises:
        BenchError: two losses of one step differ by more than ``tolerance`` relative.
    """
    reference_name, reference = next((name, side[0]) for name, side in runs.items())
    for name, side in runs.items():
        for one in side:
            for index, (a, b) in enumerate(zip(reference.steps, one.steps, strict=True)):
                if not abs(a.loss - b.loss) <= tolerance * abs(a.loss):
                    raise BenchError(f"step {index}: loss {a.loss} of {reference_name}, but {b.loss} of {name}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return os.uname().machine


def _gpu_model() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def machine() -> str:
    """One line naming what the numbers were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [f"{_cpu_model()}, {os.cpu_count()} cores", f"{memory:.0f} GiB", f"Linux {os.uname().release}"]
    parts += [gpu] if (gpu := _gpu_model()) else []
    return ", ".join([*parts, f"torch {torch.__version__}"])


def results_file() -> Path:
    """``bench/results/HARDWARE-DATE.md``, for example ``epyc-2core-2026-11-20.md``."""
    words = re.findall(r"[a-z0-9]+", _cpu_model().lower())
    known = [word for word in words if word in {"epyc", "xeon", "ryzen", "threadripper", "core", "neoverse", "grace"}]
    name = f"{known[0] if known else '-'.join(words)}-{os.cpu_count()}core"
    if gpu := _gpu_model():
        name = "-".join(re.findall(r"[a-z0-9]+", gpu.lower().removeprefix("nvidia"))[:1]) + "-" + name
    return RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.md"


def write_section(title: str, body: str, path: Path | None = None) -> Path:
    """Put ``body`` under ``## title`` in the results file, in place of an earlier one; other sections stay.

    The file is created with a line that names the machine. Returns its path.
    """
    path = path or results_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else f"# {path.stem}\n\n{machine()}\n"
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    section = f"## {title}\n\n{body.strip()}\n\n"
    names = [part.splitlines()[0] for part in sections]
    if f"## {title}" in names:
        sections[names.index(f"## {title}")] = section
    else:
        sections.append(section)
    parts = [part.rstrip("\n") + "\n" for part in [head, *sections]]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(parts))
    partial.replace(path)
    return path
