"""Plans that follow the machine: a disk that becomes four times slower in mid-run, and fast again.

    python -m bench.replan
    python -m bench.replan --constant 100

Three engines take their steps in turn in one process: one whose plan follows the machine, and two whose plans were made
for the disk at 400/200 MB/s and at 100/50 MB/s, each from a profile that ``penstock doctor`` has measured at that rate.
The process is in a cgroup that holds the disk to the rate of each stretch. Required: from ten steps after a change on,
the one that follows takes at most 1.05x the time of the one whose plan was made for that disk, where the other plan
takes more; and with a constant disk (``--constant``, by itself) it changes its plan in no step. All
losses are equal, bit by bit.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import (
    MB,
    SCRATCH,
    BenchError,
    DiskLimit,
    block_device,
    disk_cgroup,
    machine,
    measure_machine,
    results_file,
    run_in,
    why_no_limit,
    write_section,
)
from bench.turns import table, verdict
from bench.workload import Work

REQUIRED = 1.05
WITHIN = 10
RATES: Mapping[str, DiskLimit] = {
    "fast": DiskLimit(read=400 * MB, write=200 * MB),
    "slow": DiskLimit(read=100 * MB, write=50 * MB),
}
FOLLOWS = "follows"
RUN_MODULE = "bench.replan_run"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    ``stretches``: (key of ``RATES``, steps), one after the other; one alone is for the engine that follows, without
    others. ``profiles``: by such a key. ``group``: the cgroup, whose rate the process sets. ``device``: number of the
    drive.
    """

    work: Work
    stretches: Sequence[tuple[str, int]]
    profiles: Mapping[str, str]
    budget: Mapping[str, Any]
    group: str
    device: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        fields = json.loads(text)
        return Job(work=Work(**fields.pop("work")), **fields)

    def hold(self, rate: str) -> None:
        """Hold the disk to one of ``RATES`` from now on."""
        for what in ("read", "write"):
            limit = getattr(RATES[rate], what)
            Path(self.group, f"blkio.throttle.{what}_bps_device").write_text(f"{self.device} {limit}")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One step: of which stretch (its index), by whom; ``step``: the engine's own count."""

    stretch: int
    name: str
    step: int
    seconds: float
    loss: float
    predicted: float | None
    change: str | None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A job that has been done. ``plans``: the settings of each engine's plan at the end of each stretch, as text."""

    job: Job
    parameters: int
    steps: Sequence[Taken]
    plans: Sequence[Mapping[str, str]]

    def of(self, stretch: int, name: str, *, after: int = 0) -> list[float]:
        """Seconds of an engine's steps in a stretch, but for the first ones."""
        return [t.seconds for t in self.steps if t.stretch == stretch and t.name == name][after:]

    def ratio(self, stretch: int, name: str, against: str, *, after: int) -> float:
        """The median ratio of two engines' steps of one round."""
        pairs = zip(self.of(stretch, name, after=after), self.of(stretch, against, after=after), strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def changes(self) -> list[Taken]:
        return [taken for taken in self.steps if taken.change is not None]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Measured":
        fields = json.loads(text)
        return Measured(
            job=Job.from_json(json.dumps(fields["job"])),
            parameters=fields["parameters"],
            steps=[Taken(**taken) for taken in fields["steps"]],
            plans=fields["plans"],
        )


def check_same(measured: Measured) -> None:
    """Raises:
    BenchError: two engines had different losses in some step.
    """
    losses: dict[int, float] = {}
    for taken in measured.steps:
        if losses.setdefault(taken.step, taken.loss) != taken.loss:
            raise BenchError(
                f"step {taken.step}: loss {taken.loss!r} of {taken.name}, {losses[taken.step]!r} of another"
            )


@dataclass(frozen=True, kw_only=True)
class Told:
    """A section of the results file. ``met``: all that is required."""

    text: str
    met: bool


def describe(measured: Measured) -> Told:
    """The table, the changes, and the verdicts."""
    rows, verdicts, met = [], [], True
    for i, (rate, count) in enumerate(measured.job.stretches):
        after = min(WITHIN, count - 1)
        medians = {
            name: f"{statistics.median(found):.3f} s" if (found := measured.of(i, name, after=after)) else ""
            for name in (FOLLOWS, *RATES)
        }
        plans = measured.plans[i]
        if rate in plans:
            other = next(name for name in RATES if name != rate)
            ratio, apart = (measured.ratio(i, name, rate, after=after) for name in (FOLLOWS, other))
            figures = f"{ratio:.3f}", f"{apart:.3f}", "yes" if plans[FOLLOWS] == plans[rate] else "no"
            verdicts.append(turns_verdict(i, rate, ratio))
            met &= ratio <= REQUIRED
            told = apart > REQUIRED  # else it would make no difference that is asked for
            verdicts.append(
                f"There, a plan that stays as it was made for {RATES[other]}: **{apart:.3f}** "
                f"(more than {REQUIRED}, or nothing is shown: {'so it is' if told else 'NOT SO'})."
            )
            met &= told
        else:
            figures = "", "", ""
        rows.append((f"{i + 1}: {RATES[rate]}", f"{after + 1} to {count}", *medians.values(), *figures))
    header = (
        "disk", "steps", "follows", "made for 400/200", "made for 100/50", "follows / made for this disk",
        "made for the other / made for this one", "follows has the plan made for this disk",
    )  # fmt: skip
    changed = [f"- stretch {t.stretch + 1}, step {t.step}: {t.change}" for t in measured.changes]
    if len(measured.job.stretches) == 1:
        none = not measured.changes
        verdicts.append(f"Changes of plan: **{len(measured.changes)}** (required: 0, {'met' if none else 'NOT MET'}).")
        met &= none
    text = [table(header, rows), "", *(changed or ["- no change of plan"]), "", *verdicts]
    return Told(text="\n".join(text), met=met)


def turns_verdict(stretch: int, rate: str, ratio: float) -> str:
    return verdict(f"Stretch {stretch + 1}, at {RATES[rate]}, over a plan made for it", ratio, REQUIRED) + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="directory on the disk under test")
    parser.add_argument("--model", default="llama-29m", help="a key of bench.workload.MODELS")
    parser.add_argument("--steps", type=int, default=25, help="steps of each stretch")
    parser.add_argument("--constant", type=int, help="so many steps of the one that follows, at 400/200 MB/s, instead")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence: how much there is to compute")
    parser.add_argument("--host", default="200MiB", help="host memory of each engine")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    arguments = parser.parse_args()
    if arguments.constant is not None and arguments.constant < 1:
        parser.error(f"--constant {arguments.constant}: give a number of steps, at least 1")
    stretches = (
        [("fast", arguments.constant)]
        if arguments.constant
        else [(r, arguments.steps) for r in ("fast", "slow", "fast")]
    )
    try:
        if reason := why_no_limit():
            raise BenchError(f"the disk cannot be held to a rate: {reason}")
        arguments.scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=arguments.scratch.resolve(), prefix="penstock-bench-") as scratch:
            measured = _measure(Path(scratch), arguments, stretches)
        check_same(measured)
    except BenchError as error:
        print(f"bench.replan: {error}", file=sys.stderr)
        return 1
    work, budget = measured.job.work, measured.job.budget
    title = "replan: constant disk" if arguments.constant else "replan"
    command = " ".join(["python -m bench.replan", *sys.argv[1:]])
    setting = (
        f"`{command}`: {work.model}, {measured.parameters / 1e6:.1f}M parameters, fp32, {work.micro_batches} "
        f"micro-batches of {work.batch}x{work.length}; {budget}; {work.threads} threads; {machine()}"
    )
    told = describe(measured)
    body = f"{setting}\n\n{told.text}"
    print(body)
    if not arguments.no_record:
        print(f"recorded in {write_section(title, body, results_file())}")
    return 0 if told.met else 1


def _measure(scratch: Path, arguments: argparse.Namespace, stretches: Sequence[tuple[str, int]]) -> Measured:
    profiles = {}
    for rate in dict.fromkeys(rate for rate, _ in stretches):
        (folder := scratch / rate).mkdir()
        with disk_cgroup(RATES[rate], folder, rate) as group:
            profiles[rate] = str(measure_machine(folder, group))
    with disk_cgroup(RATES[stretches[0][0]], scratch) as group:
        job = Job(
            work=Work(
                model=arguments.model, micro_batches=4, batch=2, length=arguments.length,
                steps=sum(n for _, n in stretches), threads=arguments.threads, scratch=str(scratch),
            ),
            stretches=stretches,
            profiles=profiles,
            budget={"device": "256MiB", "host": arguments.host, "durability": "none"},
            group=str(group),
            device=block_device(scratch),
        )  # fmt: skip
        return Measured.from_json(run_in(group, RUN_MODULE, job.to_json(), show=True).splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
