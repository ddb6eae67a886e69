"""One training job on 1, 2 and 4 ranks: where a drive is the limit and each rank has its own, and in memory.

    python -m bench.ranks

A Llama of 29M parameters in fp32, eight micro-batches a step in all, clipping off, all gradients in 4 strands, so that
every number of ranks computes the same bits, which is looked at.

*drives*: everything on disk, each rank's disk held to 100/50 MB/s by a cgroup of its own, as if it had a drive of its
own. Required: 2 ranks at least 1.85 times as fast as 1, and 4 ranks 3.4 times.

*memory*: everything in memory, 2 ranks of one thread each against 1 rank of two. Required: at most 1.10 times the time.

Runs of one case take turns. The first step of each plans, and does not count. Without root or cgroup v1 the disk's rate
is not held: nothing is required then, and nothing recorded.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import MappingProxyType
from typing import IO, Any

from bench.harness import (
    MB,
    ROOT,
    SCRATCH,
    BenchError,
    DiskLimit,
    disk_cgroup,
    joining,
    machine,
    results_file,
    why_no_limit,
    write_section,
)
from bench.workload import Work, write_initial_weights

COMMAND = "python -m bench.ranks"
EACH = DiskLimit(read=100 * MB, write=50 * MB)
OURS = (sys.executable, "-m", "bench.ranks_run")


@dataclass(frozen=True, kw_only=True)
class Side:
    """A number of ranks, of so many threads each."""

    ranks: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} of {self.threads}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sides against the first of them: each has to be at least so many times as fast."""

    name: str
    disk: bool
    sides: tuple[Side, ...]
    required: tuple[float, ...]
    length: int
    """tokens of a micro-batch: few, where the drive is to be the limit"""


CASES = (
    Case(
        name="drives",
        disk=True,
        sides=(Side(ranks=1, threads=2), Side(ranks=2, threads=1), Side(ranks=4, threads=1)),
        required=(1.85, 3.4),
        length=16,
    ),
    Case(
        name="memory",
        disk=False,
        sides=(Side(ranks=1, threads=2), Side(ranks=2, threads=1)),
        required=(1 / 1.10,),
        length=128,
    ),
)


def job(length: int, steps: int, threads: int, scratch: Path) -> Work:
    """The job of all sides, with its initial weights written. ``length``: tokens of a micro-batch; ``steps``: measured
    ones, after a first one."""
    work = Work(
        model="llama-29m",
        micro_batches=8,
        batch=1,
        length=length,
        steps=1 + steps,
        threads=threads,
        scratch=str(scratch),
    )
    write_initial_weights(work)
    return work


def run(side: Side, case: Case, work: Work, limit: DiskLimit | None) -> tuple[list[float], list[float]]:
    """Seconds of each measured step, and the losses of all.

    Raises:
        BenchError: a rank failed; quotes the end of what it said.
    """
    steps = run_ranks(side, work, limit, [*OURS, *(("--drives", str(side.ranks)) if case.disk else ())])
    losses = {tuple(step["loss"] for step in of_rank) for of_rank in steps}
    if len(losses) != 1:
        raise BenchError(f"{side.name}: ranks report other losses: {losses}")
    seconds = [max(of_rank[i]["seconds"] for of_rank in steps) for i in range(work.steps)]
    return seconds[1:], list(losses.pop())


def run_ranks(
    side: Side,
    work: Work,
    limit: DiskLimit | None,
    command: Sequence[str],
    *,
    shared: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[list[dict[str, Any]]]:
    """What each rank says of each step, in a line of JSON. ``command`` gets ``--work`` appended; ``{rank}`` in it is
    the rank's number. ``limit``: of each rank, or of all together if they have a drive that is ``shared``.

    Raises:
        BenchError: a rank failed; quotes the end of what it said.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        together = stack.enter_context(disk_cgroup(limit if shared else None, Path(work.scratch)))
        processes, outputs = [], []
        for rank in range(side.ranks):
            own = stack.enter_context(disk_cgroup(None if shared else limit, Path(work.scratch), f"-{rank}"))
            group = together if shared else own
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": side.ranks, "MASTER_PORT": port}
            # Files, as a rank that waits for somebody to read what it says would keep the others waiting.
            outputs.append(tuple(stack.enter_context(TemporaryFile("w+")) for _ in range(2)))
            processes.append(
                subprocess.Popen(
                    [*(word.replace("{rank}", str(rank)) for word in command), "--work", work.to_json()],
                    cwd=ROOT,
                    env=os.environ
                    | {"OMP_NUM_THREADS": str(side.threads), "MASTER_ADDR": "localhost", "OMP_WAIT_POLICY": "passive"}
                    | {name: str(value) for name, value in place.items()}
                    | dict(environment),
                    stdout=outputs[-1][0],
                    stderr=outputs[-1][1],
                    preexec_fn=joining(group),
                )
            )
        codes = [process.wait() for process in processes]
        said = [tuple(_all_of(file) for file in files) for files in outputs]
    failed = [error for code, (_, error) in zip(codes, said, strict=True) if code]
    if failed:
        raise BenchError(f"{side.name}: {failed[0][-3000:]}")
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in said]


def _all_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def measure(case: Case, scratch: Path, *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of all measured steps of each side.

    Raises:
        BenchError: a rank failed, or two sides have other losses.
    """
    found: dict[str, list[float]] = {side.name: [] for side in case.sides}
    wanted: list[float] | None = None
    limit = EACH if case.disk and why_no_limit() is None else None
    for turn in range(rounds):
        for side in case.sides:
            work = job(case.length, steps, side.threads, scratch)
            seconds, losses = run(side, case, work, limit)
            shutil.rmtree(scratch / "ranks", ignore_errors=True)
            if losses != (wanted := wanted or losses):
                raise BenchError(f"{side.name}: losses {losses}, and the first side's are {wanted}")
            found[side.name] += seconds
            print(f"  round {turn + 1}/{rounds}  {side.name}: {' '.join(f'{s:.2f}' for s in seconds)} s", flush=True)
    return found


def ratios(case: Case, found: dict[str, list[float]]) -> list[float]:
    """How many times as fast each side is as the first, by medians."""
    first, *others = (statistics.median(found[side.name]) for side in case.sides)
    return [first / other for other in others]


def table(case: Case, found: dict[str, list[float]]) -> str:
    lines = ["| side | step, median | times as fast | required |", "|---|---|---|---|"]
    faster = (None, *zip(ratios(case, found), case.required, strict=True))
    for side, ratio in zip(case.sides, faster, strict=True):
        times = "" if ratio is None else f"{ratio[0]:.2f}"
        required = "" if ratio is None else f"{ratio[1]:.2f}"
        lines.append(f"| {side.name} | {statistics.median(found[side.name]):.2f} s | {times} | {required} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="measured ones of each run")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="one alone")
    arguments = parser.parse_args(words)
    held, missed = why_no_limit() is None, []
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=SCRATCH) as scratch:
        for case in CASES:
            if arguments.case not in (None, case.name):
                continue
            print(f"{case.name}: {'each rank at ' + str(EACH) if case.disk and held else 'no limit'}", flush=True)
            found = measure(case, Path(scratch), rounds=arguments.rounds, steps=arguments.steps)
            print(table(case, found))
            required = held or not case.disk
            if required:
                note = (
                    f"`{COMMAND} --case {case.name} --rounds {arguments.rounds} --steps {arguments.steps}`, {machine()}"
                )
                path = write_section(f"ranks: {case.name}", f"{note}\n\n{table(case, found)}", results_file())
                print(f"written to {path.relative_to(ROOT)}")
                missed += [
                    f"{case.name}, {side.name}: {ratio:.2f} times as fast, and {wanted:.2f} are required"
                    for side, ratio, wanted in zip(case.sides[1:], ratios(case, found), case.required, strict=True)
                    if ratio < wanted
                ]
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
