"""Step time against DeepSpeed's ZeRO-Infinity when both train from one slow disk.

    python -m bench.zero_infinity
    python -m bench.zero_infinity --alone --steps 6
    python -m bench.zero_infinity --ranks 2

A GPT of 168M parameters (12 layers of 1024, vocabulary 8,192) in fp32, micro-batches of 4x128 tokens, activations
recomputed and clipping off on both sides, parameters and optimizer state on disk. Both sides run in one cgroup
whose disk is held to a rate, start from the same weights, see the same tokens, and their losses are compared.
DeepSpeed has its fastest settings, with pipelined swapping; Penstock plans for the machine as ``penstock doctor
--quick`` measures it in that cgroup, once told to have everything on disk, and once, in the same budgets, left to
decide what is in memory. Required, where it is told: 3.4x and 3x at 200/100 MB/s (read/write) with 4 and with 8
micro-batches, and 5x at 100/50 MB/s with 8.

``--alone``: Penstock as it plans, without DeepSpeed: with that profile, and once more without one, so that ``wrap``
measures what it needs. Required of both: the median of what steps take over the bound of the same step is at most 1.10.
The bound is the drive's, for what the step moved, reads beside writes; or what its forwards and backwards took, less
all that other lanes took of the processor meanwhile.

DeepSpeed is installed from PyPI into an environment of its own the first time (``.bench/deepspeed``, or the place
named by ``--venv`` or ``$PENSTOCK_BENCH_DEEPSPEED``). Without root or cgroup v1 the disk's rate is not held; the
numbers are then printed, but nothing is required of them and nothing is recorded.

``--ranks 2``: two processes on each side, with half of 8 micro-batches each and a drive of 100/50 MB/s each. Required:
3x or more.
"""

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import deepspeed_venv
from bench.harness import (
    MB,
    ROOT,
    SCRATCH,
    BenchError,
    DiskLimit,
    Run,
    Side,
    alternate,
    machine,
    median_seconds,
    results_file,
    why_no_limit,
    write_section,
)
from bench.ranks import OURS, run_ranks
from bench.ranks import Side as RanksSide
from bench.workload import Work, write_initial_weights

COMMAND = "python -m bench.zero_infinity"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A disk rate, a number of micro-batches, and how many times faster than DeepSpeed Penstock has to be."""

    limit: DiskLimit
    micro_batches: int
    required: float

    @property
    def name(self) -> str:
        return f"{self.limit.read // MB}/{self.limit.write // MB}x{self.micro_batches}"


CASES = (
    Case(limit=DiskLimit(read=200 * MB, write=100 * MB), micro_batches=4, required=3.4),
    Case(limit=DiskLimit(read=200 * MB, write=100 * MB), micro_batches=8, required=3.0),
    Case(limit=DiskLimit(read=100 * MB, write=50 * MB), micro_batches=8, required=5.0),
)
OF_BOUND = 1.10
"""how many times its lower bound a step of Penstock may take, where the plan places things"""
ON_DISK, PLANNED, UNMEASURED = "penstock", "penstock-planned", "penstock-planned, no profile"
"""Penstock's sides: told to have everything on disk, left to place it, and that without ``penstock doctor``."""


OF_RANKS = replace(CASES[-1], required=3.0)
"""The case of several ranks: each of them has the drive, all of them together the micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case that has been measured."""

    case: Case
    limited: bool
    runs: dict[str, list[Run]]

    def ratio(self, name: str) -> float:
        """How many times as long as a side of Penstock DeepSpeed takes."""
        return median_seconds(self.runs["deepspeed"]) / median_seconds(self.runs[name])

    def bounds(self, name: str) -> list[float]:
        """The lower bound of each measured step of a side of Penstock, in seconds."""
        return [
            max(step.read / self.case.limit.read, step.written / self.case.limit.write, step.compute or 0.0)
            for run in self.runs[name]
            for step in run.measured
        ]

    def of_bound(self, name: str) -> float:
        """The median of what steps of a side take over the bound of the same step."""
        steps = [step for run in self.runs[name] for step in run.measured]
        pairs = zip(steps, self.bounds(name), strict=True)
        return statistics.median(step.seconds / bound for step, bound in pairs)

    @property
    def alone(self) -> bool:
        """True if Penstock was measured without DeepSpeed."""
        return "deepspeed" not in self.runs

    @property
    def passed(self) -> bool:
        if not self.limited:
            return True
        if self.alone:
            return all(self.of_bound(name) <= OF_BOUND for name in self.runs)
        return self.ratio(ON_DISK) >= self.case.required

    def rows(self) -> list[str]:
        rows = []
        for name, runs in self.runs.items():
            last = runs[-1].steps[-1]
            cells = [str(self.case.limit) if self.limited else "not held", str(self.case.micro_batches), name]
            cells += [f"{median_seconds(runs):.1f} s", f"{last.read / 1e9:.2f} + {last.written / 1e9:.2f} GB"]
            cells += [f"{max(step.peak_rss for run in runs for step in run.steps) / 1e9:.2f} GB"]
            if not self.alone:
                asked = f" (at least {self.case.required:.1f})" if self.limited and name == ON_DISK else ""
                cells.append("" if name == "deepspeed" else f"**{self.ratio(name):.2f}x**{asked}")
            elif self.limited:
                bound = statistics.median(self.bounds(name))
                cells.append(f"{bound:.1f} s, **{self.of_bound(name):.2f}x** (at most {OF_BOUND:.2f})")
            else:
                cells.append("none")
            rows.append("| " + " | ".join(cells) + " |")
        return rows


def _work(case: Case, arguments: argparse.Namespace, scratch: str) -> Work:
    return Work(
        model="gpt-168m",
        micro_batches=case.micro_batches,
        batch=4,
        length=128,
        steps=arguments.steps,
        threads=arguments.threads,
        scratch=scratch,
    )


def measure(case: Case, sides: Sequence[Side], arguments: argparse.Namespace, scratch: str) -> Outcome:
    """Run all sides of a case in turn, with their files in ``scratch``."""
    limited = why_no_limit() is None
    work = _work(case, arguments, scratch)
    write_initial_weights(work)
    print(f"{case.micro_batches} micro-batches, disk {case.limit if limited else 'not held to a rate'}", flush=True)
    runs = alternate(
        sides,
        work,
        rounds=arguments.rounds,
        limit=case.limit if limited else None,
        logs=ROOT / ".bench" / "logs" / "zero_infinity" / case.name.replace("/", "-"),
    )
    return Outcome(case=case, limited=limited, runs=runs)


def measure_ranks(ranks: int, arguments: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Seconds of each measured step of both sides, as long as on the slowest rank.

    Raises:
        BenchError: a rank failed, or the sides have other losses.
    """
    case, work = OF_RANKS, _work(OF_RANKS, arguments, str(scratch))
    write_initial_weights(work)
    python = deepspeed_venv.prepare(arguments.venv)
    report = str(scratch / "deepspeed-{rank}.jsonl")
    commands = {
        "deepspeed": (str(python), "-m", "bench.peer_deepspeed", *_peer_flags(arguments), "--report", report),
        "penstock": (*OURS, "--drives", str(ranks)),
    }
    side = RanksSide(ranks=ranks, threads=max(1, arguments.threads // ranks))
    limit = case.limit if why_no_limit() is None else None
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(arguments.rounds):
        losses: dict[str, list[float]] = {}
        for name, command in commands.items():
            environment = deepspeed_venv.environment(python) if name == "deepspeed" else {}
            said = run_ranks(side, work, limit, command, environment=environment)
            shutil.rmtree(scratch / "ranks", ignore_errors=True)
            shutil.rmtree(scratch / "zero_stage_3", ignore_errors=True)
            seconds = [max(steps[i]["seconds"] for steps in said) for i in range(work.steps)]
            losses[name] = [statistics.mean(steps[i]["loss"] for steps in said) for i in range(work.steps)]
            found[name] += seconds[1:]
            print(f"  round {turn + 1}  {name}: {' '.join(f'{s:.1f}' for s in seconds)} s", flush=True)
        for a, b in zip(losses["deepspeed"], losses["penstock"], strict=True):
            if not abs(a - b) <= 1e-3 * abs(a):
                raise BenchError(f"the sides have other losses: {losses}")
    return found


def describe_ranks(ranks: int, found: dict[str, list[float]], arguments: argparse.Namespace) -> tuple[str, float]:
    """The section of the results file, and how many times as fast Penstock is."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratio = medians["deepspeed"] / medians["penstock"]
    case, held = OF_RANKS, why_no_limit() is None
    setting = (
        f"GPT-2 classes, 168M, fp32, micro-batches of 4x128, recompute and no clipping on both sides; {ranks} ranks of "
        f"{max(1, arguments.threads // ranks)} threads; Penstock's budgets as in bench.ranks; DeepSpeed "
        f"{deepspeed_venv.VERSION}, {_flags(arguments)}; medians of {len(found['penstock'])} steps; {machine()}"
    )
    row = (
        f"| {case.limit if held else 'not held'} | {case.micro_batches} | {medians['deepspeed']:.1f} s "
        f"| {medians['penstock']:.1f} s | **{ratio:.2f}x** | {f'{case.required:.1f}x' if held else 'none'} |"
    )
    lines = [
        setting,
        "",
        "| each rank's disk | micro-batches of all | DeepSpeed step | Penstock step | ratio | required |",
        "|---|---|---|---|---|---|",
        row,
        "",
        f"Command: `{COMMAND} --ranks {ranks}`",
    ]
    return "\n".join(lines), ratio


def describe(outcomes: list[Outcome], arguments: argparse.Namespace) -> str:
    """The section of the results file."""
    alone, first = outcomes[0].alone, next(iter(outcomes[0].runs.values()))
    measured = sum(len(run.measured) for run in first)
    peer = "" if alone else f"DeepSpeed {deepspeed_venv.VERSION}, {_flags(arguments)}; "
    setting = (
        f"GPT-2 classes, 168M, fp32, micro-batches of 4x128, recompute and no clipping, {arguments.threads} threads; "
        f"{peer}Penstock: device {arguments.device}, host {arguments.host}, "
        f"{'' if alone else 'all on disk or '}as planned in them; medians of {measured} steps a side after a warm-up "
        f"step; {machine()}"
    )
    header = "| disk read/write | micro-batches | side | step | read + written | peak RSS | "
    header += "its bound, times it |" if alone else "DeepSpeed's time over its |"
    rule = "|" + "---|" * (header.count("|") - 1)
    rows = (row for o in outcomes for row in o.rows())
    command = f"{COMMAND} --alone --steps {arguments.steps}" if alone else COMMAND
    return "\n".join([setting, "", header, rule, *rows, "", f"Command: `{command}`"])


def _peer_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    return ("--pipeline" if arguments.pipeline else "--no-pipeline", "--sub-group", str(arguments.sub_group))


def _flags(arguments: argparse.Namespace) -> str:
    pipeline = "on" if arguments.pipeline else "off"
    return f"pipelined optimizer swapping {pipeline}, sub-groups of {arguments.sub_group:,} elements"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="directory on the disk under test")
    parser.add_argument("--venv", type=Path, default=deepspeed_venv.default_place(), help="DeepSpeed's environment")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each side")
    parser.add_argument("--alone", action="store_true", help="how near Penstock's planned steps come to their bound")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--rounds", type=int, default=1, help="processes per side and case")
    parser.add_argument("--steps", type=int, default=3, help="steps per process, the first of which is warm-up")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of either side")
    parser.add_argument("--device", default="256MiB", help="Penstock's device budget")
    parser.add_argument("--host", default="2GiB", help="Penstock's host budget")
    parser.add_argument("--pipeline", action=argparse.BooleanOptionalAction, default=True, help="DeepSpeed's")
    parser.add_argument("--sub-group", type=int, default=30_000_000, help="DeepSpeed's, in elements")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    return parser.parse_args()


def measure_all(arguments: argparse.Namespace) -> list[Outcome]:
    """All cases asked for. What is measured so far is recorded after each, since a case takes many minutes."""
    command = (sys.executable, "-m", "bench.side_penstock", "--device", arguments.device, "--host", arguments.host)
    planned = Side(name=PLANNED, command=(*command, "--planned"), doctor=True)
    if arguments.alone:
        sides = [planned, replace(planned, name=UNMEASURED, doctor=False)]
    else:
        peer = deepspeed_venv.side(arguments.venv, *_peer_flags(arguments))
        sides = [peer, Side(name=ON_DISK, command=command, doctor=True), planned]
    title = "zero_infinity: the bound" if arguments.alone else "zero_infinity"
    outcomes: list[Outcome] = []
    with TemporaryDirectory(dir=arguments.scratch.resolve(), prefix="penstock-bench-") as scratch:
        for case in CASES:
            if arguments.case is None or case.name in arguments.case:
                outcomes.append(measure(case, sides, arguments, scratch))
                if outcomes[-1].limited and not arguments.no_record:
                    path = write_section(title, describe(outcomes, arguments), results_file())
                    print(f"recorded in {path}", flush=True)
    return outcomes


def main_of_ranks(arguments: argparse.Namespace) -> int:
    try:
        with TemporaryDirectory(dir=arguments.scratch.resolve(), prefix="penstock-bench-") as scratch:
            found = measure_ranks(arguments.ranks, arguments, Path(scratch))
    except BenchError as error:
        print(f"bench.zero_infinity: {error}", file=sys.stderr)
        return 2
    text, ratio = describe_ranks(arguments.ranks, found, arguments)
    print(text)
    if why_no_limit() is not None:
        return 0
    if not arguments.no_record:
        print(f"recorded in {write_section('zero_infinity of ranks', text, results_file())}")
    return 0 if ratio >= OF_RANKS.required else 1


def main() -> int:
    arguments = parse()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    if reason := why_no_limit():
        print(f"the disk is not held to a rate: {reason}", file=sys.stderr)
    if arguments.ranks > 1:
        return main_of_ranks(arguments)
    try:
        outcomes = measure_all(arguments)
    except BenchError as error:
        print(f"bench.zero_infinity: {error}", file=sys.stderr)
        return 2
    print(describe(outcomes, arguments))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
