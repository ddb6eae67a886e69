"""What training from disk costs over training in memory: step time against a plain PyTorch loop.

    python -m bench.overhead

A 45M Llama in fp32, 8 micro-batches of 2x256 tokens. Penstock keeps weights and optimizer state on disk; the plain
loop keeps everything in memory, recomputes its layers in the backward and uses torch's fused AdamW. Both start from
the same weights, see the same tokens, and their losses are compared. Required: at most 1.10x the plain loop's time.
"""

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import (
    ROOT,
    SCRATCH,
    BenchError,
    Run,
    Side,
    alternate,
    machine,
    median_seconds,
    results_file,
    write_section,
)
from bench.workload import Work, write_initial_weights

REQUIRED = 1.10


def sides(device: str, host: str) -> tuple[Side, Side]:
    python = sys.executable
    return (
        Side(name="torch", command=(python, "-m", "bench.peer_torch")),
        Side(
            name="penstock",
            command=(python, "-m", "bench.side_penstock", "--device", device, "--host", host),
        ),
    )


def describe(work: Work, runs: dict[str, list[Run]], device: str, host: str) -> str:
    """The section of the results file: a table of both sides, and the ratio."""
    setting = (
        f"45M Llama, fp32, {work.micro_batches} micro-batches of {work.batch}x{work.length}, {work.threads} threads; "
        f"Penstock with weights and state on disk, device {device}, host {host}; {machine()}"
    )
    rows = [
        setting,
        "",
        "| side | median step | fastest, slowest | peak RSS | disk read, written per step | loss, last step |",
        "|---|---|---|---|---|---|",
    ]
    for name, done in runs.items():
        seconds = [step.seconds for run in done for step in run.measured]
        last = done[-1].steps[-1]
        rows.append(
            f"| {name} | {median_seconds(done):.3f} s | {min(seconds):.3f}, {max(seconds):.3f} s "
            f"| {max(step.peak_rss for run in done for step in run.steps) / 2**20:.0f} MiB "
            f"| {last.read / 1e9:.2f}, {last.written / 1e9:.2f} GB | {last.loss:.6f} |"
        )
    ratio = median_seconds(runs["penstock"]) / median_seconds(runs["torch"])
    steps = sum(len(run.measured) for run in runs["torch"])
    best = {name: min(step.seconds for run in done for step in run.measured) for name, done in runs.items()}
    verdict = (
        f"**{ratio:.3f}x** of the plain loop's time (required: at most {REQUIRED:.2f}x), "
        f"{steps} measured steps a side, alternating processes; "
        f"fastest step against fastest step, {best['penstock'] / best['torch']:.3f}x."
    )
    return "\n".join([*rows, "", verdict, "", "Command: `python -m bench.overhead`"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="directory on the disk under test")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side")
    parser.add_argument("--steps", type=int, default=5, help="steps per process, the first of which is warm-up")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of either side")
    parser.add_argument("--device", default="128MiB", help="Penstock's device budget")
    parser.add_argument("--host", default="256MiB", help="Penstock's host budget")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    pair = sides(arguments.device, arguments.host)
    try:
        with TemporaryDirectory(dir=arguments.scratch.resolve(), prefix="penstock-bench-") as scratch:
            work = Work(
                model="llama-45m",
                micro_batches=8,
                batch=2,
                length=256,
                steps=arguments.steps,
                threads=arguments.threads,
                scratch=scratch,
            )
            write_initial_weights(work)
            logs = ROOT / ".bench" / "logs" / "overhead"
            runs = alternate(pair, work, rounds=arguments.rounds, limit=None, logs=logs)
    except BenchError as error:
        print(f"bench.overhead: {error}", file=sys.stderr)
        return 2
    body = describe(work, runs, arguments.device, arguments.host)
    print(body)
    if not arguments.no_record:
        print(f"recorded in {write_section('overhead', body, results_file())}")
    return 0 if median_seconds(runs["penstock"]) <= REQUIRED * median_seconds(runs["torch"]) else 1


if __name__ == "__main__":
    sys.exit(main())
