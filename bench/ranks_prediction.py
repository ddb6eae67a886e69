"""How right predictions are for several ranks: step time and bytes per lane, predicted before and measured after.

    python -m bench.ranks_prediction

The job of ``bench.ranks`` on 2 and 4 ranks of one thread each. *own drives*: each rank's disk is held to 50/25 MB/s by
a cgroup of its own, as if it had a drive of its own; *one drive*: one cgroup holds all ranks' folders to 200/100 MB/s;
*memory*: no disk, so that cores are the limit, which others on the machine take; there also with sequences that
neighbouring ranks share (``cp``).

The machine is measured by ``penstock doctor`` under the limit, with collectives between 2 and between 4 processes; the
prediction is what the engine says before its first step, and the measurement the median of the steps after it, each as
long as on its slowest rank. Required: bytes exactly equal, step time within 10% in the median.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import (
    MB,
    ROOT,
    SCRATCH,
    BenchError,
    DiskLimit,
    disk_cgroup,
    machine,
    measure_machine,
    results_file,
    why_no_limit,
    write_section,
)
from bench.ranks import OURS, Side, job, run_ranks
from bench.ranks_run import drives
from penstock.hardware.machine import Machine, load_machine

COMMAND = "python -m bench.ranks_prediction"
EACH = DiskLimit(read=50 * MB, write=25 * MB)
ALL = DiskLimit(read=200 * MB, write=100 * MB)
MEDIAN = 0.10
COUNTS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``drives``: each rank's own, ``one`` for all of them, or none. ``length``: tokens of each of 8 micro-batches.
    ``clip``: a limit of the norm that no step is over, which would be run twice. ``cp``: ranks that share each
    sequence.
    """

    ranks: int
    drives: str
    length: int
    clip: float | None = None
    cp: int = 1

    @property
    def limit(self) -> DiskLimit | None:
        return {"own": EACH, "one": ALL}.get(self.drives)


CASES = (
    *(Case(ranks=ranks, drives="own", length=16) for ranks in COUNTS),
    *(Case(ranks=ranks, drives="own", length=64, clip=1e3) for ranks in COUNTS),
    *(Case(ranks=ranks, drives="one", length=16) for ranks in COUNTS),
    *(Case(ranks=ranks, drives="memory", length=128) for ranks in COUNTS),
    *(Case(ranks=ranks, drives="memory", length=512, cp=cp) for ranks, cp in ((2, 2), (4, 2), (4, 4))),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: seconds predicted, the least that its busiest lane takes, and measured."""

    case: Case
    predicted: float
    bound: float
    measured: Sequence[float]
    bytes_equal: bool

    @property
    def error(self) -> float:
        """The error of the predicted step time, relative to the measured."""
        return self.predicted / statistics.median(self.measured) - 1

    def line(self) -> str:
        case, where = self.case, {"own": "own drives", "one": "one drive", "memory": "memory"}[self.case.drives]
        where += "" if case.limit is None else f" at {case.limit}"
        tokens = f"8 x {case.length}" + (", clipped" if case.clip is not None else "")
        tokens += f", cp {case.cp}" if case.cp > 1 else ""
        return (
            f"| {case.ranks} | {where} | {tokens} | "
            f"{self.predicted:.2f} | {statistics.median(self.measured):.2f} | {100 * self.error:+.1f}% | "
            f"{self.bound:.2f} | {'equal' if self.bytes_equal else 'DIFFER'} |"
        )


def measure(case: Case, profile: Machine, scratch: Path, steps: int) -> Row:
    """Raises BenchError: a rank failed."""
    count = {"own": case.ranks, "one": 1, "memory": 0}[case.drives]
    paths = drives(scratch, count)
    known = replace(profile, drives=tuple(replace(profile.drives[0], path=str(path.resolve())) for path in paths))
    file = scratch / "case.json"
    file.write_text(known.to_json())
    work = job(case.length, steps, 1, scratch)
    words = ["--drives", str(count), "--profile", str(file)]
    words += [] if case.clip is None else ["--clip", str(case.clip)]
    words += ["--cp", str(case.cp)]
    side = Side(ranks=case.ranks, threads=1)
    said = run_ranks(side, work, case.limit, [*OURS, *words], shared=case.drives == "one")
    shutil.rmtree(scratch / "ranks", ignore_errors=True)
    lanes = ("h2d", "d2h", "net")
    return Row(
        case=case,
        predicted=said[0][0]["predicted"],
        bound=said[0][0]["bound"],
        measured=[max(of_rank[i]["seconds"] for of_rank in said) for i in range(1, work.steps)],
        bytes_equal=all(
            step["bytes"][lane] == step["predicted_bytes"][lane] for rank in said for step in rank[2:] for lane in lanes
        ),
    )


def describe(rows: Sequence[Row]) -> str:
    errors = [abs(row.error) for row in rows]
    median, worst = statistics.median(errors), max(errors)
    lines = [
        "| ranks | state | tokens | predicted s | measured s | error | bound s | bytes h2d, d2h, net |",
        "|---|---|---|---|---|---|---|---|",
        *(row.line() for row in rows),
        "",
        f"Step time: median error {median:.1%}, worst {worst:.1%} (required {MEDIAN:.0%} in the median).",
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each case, after a first one")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of cases; nothing is written")
    parser.add_argument("--profiles", type=Path, help="a folder to keep measured profiles in, or to take them from")
    arguments = parser.parse_args(words)
    if (reason := why_no_limit()) is not None:
        print(f"bench.ranks_prediction: {reason}", file=sys.stderr)
        return 2
    SCRATCH.mkdir(parents=True, exist_ok=True)
    rows, profiles = [], dict[str, Machine]()
    with TemporaryDirectory(dir=SCRATCH) as folder:
        for i, case in enumerate(CASES):
            if arguments.only and i not in arguments.only:
                continue
            limit = case.limit or EACH
            if str(limit) not in profiles:
                profiles[str(limit)] = _profile(limit, Path(folder), arguments.profiles)
            try:
                rows.append(measure(case, profiles[str(limit)], Path(folder), arguments.steps))
            except BenchError as error:
                print(f"bench.ranks_prediction: {error}", file=sys.stderr)
                return 2
            print(rows[-1].line(), [round(s, 2) for s in rows[-1].measured], flush=True)
    text = describe(rows)
    print(text)
    if not arguments.only:
        note = f"`{COMMAND} --steps {arguments.steps}`, {machine()}"
        path = write_section("ranks: prediction", f"{note}\n\n{text}", results_file())
        print(f"written to {path.relative_to(ROOT)}")
    good = statistics.median(abs(row.error) for row in rows) <= MEDIAN
    return 0 if good and all(row.bytes_equal for row in rows) else 1


def _profile(limit: DiskLimit, folder: Path, kept: Path | None) -> Machine:
    """The machine as ``penstock doctor`` finds it under a limit."""
    file = None if kept is None else kept / f"{limit.read // MB}-{limit.write // MB}.json"
    if file is not None and file.exists():
        return load_machine(file)
    with disk_cgroup(limit, folder) as group:
        found = load_machine(measure_machine(folder, group, COUNTS))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found.to_json())
    return found


if __name__ == "__main__":
    sys.exit(main())
