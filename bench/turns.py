"""Variants of one training job against each other: an engine each, all in one process, that take turns step by step.

A round is one step of every variant, and each round begins with another one, so that a slow spell of the machine or
of its disk meets all of them. What is compared is the ratio within a round; of these, the median. The process runs in
a cgroup whose disk is held to a rate (``bench.harness``), and all variants must have the same losses to the last bit,
but for those that are said to train differently.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import (
    MB,
    SCRATCH,
    BenchError,
    DiskLimit,
    disk_cgroup,
    machine,
    results_file,
    run_in,
    why_no_limit,
    write_section,
)
from bench.workload import Work
from penstock.config import Precision
from penstock.config.optimizer import Moments

HELD = DiskLimit(read=200 * MB, write=100 * MB)
RUN_MODULE = "bench.turns_run"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What one engine is told besides what all are. ``same``: it computes what the others do, to the last bit.
    ``moments``: of AdamW, their form."""

    name: str
    moments: Moments = "fp32"
    wrap: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    same: bool = True


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, by whom. The first step of each variant plans, and does not count.

    ``profile``: the machine to plan for, a file; None: nothing is predicted. ``device``, ``host``: budgets.
    """

    work: Work
    variants: tuple[Variant, ...]
    profile: str | None = None
    device: str = "256MiB"
    host: str = "1GiB"
    precision: Precision = "fp32"

    @property
    def rounds(self) -> int:
        return self.work.steps - 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        fields = json.loads(text)
        variants = tuple(Variant(**each) for each in fields.pop("variants"))
        return Job(work=Work(**fields.pop("work")), variants=variants, **fields)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One step of one variant, in seconds and bytes.

    ``in_lanes``: from the first op's start to the last one's end; of ``busy`` lanes, those with an op under way, and
    ``idle`` by what the busiest lane waited for. ``state_read``, ``state_written``: of extents, as the store counts;
    ``process_written``: as ``/proc/self/io`` does; ``drive_written``: as the drive's ``stat`` does, for whoever wrote,
    None where there is none. ``commits``: seconds of each.
    """

    seconds: float
    loss: float
    grad_norm: float
    repeats: int
    in_lanes: float
    busy: Mapping[str, float]
    idle: Mapping[str, float]
    state_read: int
    state_written: int
    process_written: int
    drive_written: int | None
    commits: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a variant's plan is. ``settings``: but for whether it waits for the norm and speculates.

    ``predicted``, ``work``: seconds of a step and of each lane's ops alone; None and empty without a profile.
    ``graphs``: calls of blocks, of all ``calls``, whose graph is kept; ``device_bytes``: peak of the device.
    """

    settings: str
    described: str
    delay: float
    speculates: bool
    predicted: float | None
    work: Mapping[str, float]
    graphs: int
    calls: int
    device_bytes: int

    @property
    def lower_bound(self) -> float:
        """The lower bound of a step, in seconds: the busiest lane's work."""
        return max(self.work.values())


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A job that has been done: plans and measured steps by variant, round by round."""

    job: Job
    parameters: int
    plans: Mapping[str, Planned]
    steps: Mapping[str, Sequence[Taken]]

    def seconds(self, name: str) -> float:
        """Median step time of a variant."""
        return statistics.median(step.seconds for step in self.steps[name])

    def ratios(self, name: str, against: str) -> list[float]:
        """Step time of one variant over that of another, of each round."""
        pairs = zip(self.steps[name], self.steps[against], strict=True)
        return [a.seconds / b.seconds for a, b in pairs]

    def ratio(self, name: str, against: str) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios(name, against))

    def spread(self, name: str) -> str:
        """Median, fastest and slowest step, in words."""
        seconds = [step.seconds for step in self.steps[name]]
        return f"{self.seconds(name):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Measured":
        fields = json.loads(text)
        return Measured(
            job=Job.from_json(json.dumps(fields["job"])),
            parameters=fields["parameters"],
            plans={name: Planned(**plan) for name, plan in fields["plans"].items()},
            steps={name: tuple(Taken(**step) for step in steps) for name, steps in fields["steps"].items()},
        )


def measure(job: Job, group: Path | None) -> Measured:
    """Do a job in a process of its own in ``group``.

    Raises:
        BenchError: it failed, or the variants did not compute the same.
    """
    measured = Measured.from_json(run_in(group, RUN_MODULE, job.to_json(), show=True).splitlines()[-1])
    check_same(measured)
    return measured


def check_same(measured: Measured) -> None:
    """Raises:
    BenchError: two variants that should compute the same bits had different losses in some step.
    """
    first, *others = [variant.name for variant in measured.job.variants if variant.same]
    for name in others:
        for i, (a, b) in enumerate(zip(measured.steps[first], measured.steps[name], strict=True)):
            if a.loss != b.loss:
                raise BenchError(f"step {i + 2}: loss {a.loss!r} of {first}, but {b.loss!r} of {name}")


# ---- what the benchmarks' commands have in common


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--scratch", type=Path, default=SCRATCH, help="directory on the disk under test")
    found.add_argument("--model", default="llama-29m", help="a key of bench.workload.MODELS")
    found.add_argument("--rounds", type=int, default=rounds, help="measured steps of each variant")
    found.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads")
    found.add_argument("--not-held", action="store_true", help="leave the disk at its own rate; nothing is recorded")
    found.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    return found


@contextmanager
def disk(arguments: argparse.Namespace) -> Iterator[tuple[Path, Path | None]]:
    """A directory on the disk under test, and the cgroup that holds it to its rate (None: it is not held)."""
    if not arguments.not_held and (reason := why_no_limit()):
        raise BenchError(f"the disk cannot be held to {HELD}: {reason}. --not-held leaves it at its own rate")
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    limit = None if arguments.not_held else HELD
    with (
        TemporaryDirectory(dir=arguments.scratch.resolve(), prefix="penstock-bench-") as folder,
        disk_cgroup(limit, Path(folder)) as group,
    ):
        yield Path(folder), group


def work(arguments: argparse.Namespace, scratch: Path, *, micro_batches: int, batch: int, length: int) -> Work:
    """The work of a job: as many measured steps as asked for, and the one before that plans."""
    return Work(
        model=arguments.model,
        micro_batches=micro_batches,
        batch=batch,
        length=length,
        steps=arguments.rounds + 1,
        threads=arguments.threads,
        scratch=str(scratch),
    )


def setting(measured: Measured, arguments: argparse.Namespace) -> str:
    """One line that says what was trained, where, and with what; not how large a step was."""
    work, job = measured.job.work, measured.job
    held = "disk not held to a rate" if arguments.not_held else f"disk held to {HELD} read/write"
    return (
        f"{work.model}, {measured.parameters / 1e6:.1f}M parameters, {job.precision}, all state on disk, {held}; "
        f"device {job.device}, host {job.host}, {work.threads} threads; medians of {job.rounds} steps; {machine()}"
    )


def size(measured: Measured) -> str:
    """How large a step was, and that variants took turns."""
    work = measured.job.work
    return f"{work.micro_batches} micro-batches of {work.batch}x{work.length}, variants in turn"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(what: str, figure: float, required: float) -> str:
    """A measured ratio beside what it may be at most."""
    return f"{what}: **{figure:.3f}** (required: at most {required:.2f}, {'met' if figure <= required else 'NOT MET'})"


def record(title: str, body: str, arguments: argparse.Namespace) -> None:
    """Print a section, and put it into the results file where the disk was held and nobody asked not to."""
    print(body)
    if not (arguments.no_record or arguments.not_held):
        print(f"recorded in {write_section(title, body, results_file())}")
