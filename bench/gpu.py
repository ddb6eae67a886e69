"""Step time on a GPU with the state in host memory, beside what else does that: FSDP2, ZeRO-3 and SuperOffload.

    python -m bench.gpu

A Llama of 3.37B parameters in bf16 with its optimizer state in host memory (54 GB), 4 micro-batches a step, activations
recomputed and clipping off on all sides. *compute* is the same forward and backward with all weights on the GPU and no
optimizer: no side can be faster. Losses are compared. DeepSpeed has to be in the environment that this runs in; sides
that cannot run are named and left out of the table.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from bench.harness import ROOT, BenchError, Run, Side, machine, median_seconds, results_file, run, write_section
from bench.workload import Work

WAYS = ("compute", "penstock", "fsdp2", "deepspeed", "superoffload")
TOLERANCE = 0.02
"""Relative difference of losses: each side rounds to bf16 in other places."""


def measure(work: Work, ways: list[str], rounds: int, extra: list[str]) -> dict[str, tuple[list[Run], int]]:
    """Runs of each way in turn, and the peak of device memory; a way that failed is named and missing."""
    found: dict[str, tuple[list[Run], int]] = {}
    for turn in range(rounds):
        for way in ways:
            command = (sys.executable, "-m", "bench.gpu_side", way, *(extra if way == "penstock" else ()))
            logs = ROOT / ".bench" / "logs" / "gpu" / f"{work.batch}" / str(turn)
            try:
                done = run(Side(name=way, command=command), work, group=None, logs=logs, warm_up=2)
            except BenchError as error:
                print(f"  {way}: {error}", flush=True)
                continue
            peak = json.loads((logs / f"{way}.memory").read_text())["device_peak"]
            runs, most = found.get(way, ([], 0))
            found[way] = ([*runs, done], max(most, peak))
            seconds = " ".join(f"{step.seconds:.2f}" for step in done.steps)
            losses = " ".join(f"{step.loss:.3f}" for step in done.steps)
            print(f"  {way:<12} {seconds}  losses {losses}", flush=True)
    return found


def check_losses(found: dict[str, tuple[list[Run], int]]) -> None:
    """All that train have the losses of the first; ``compute`` has its first loss only, as it changes nothing.

    Raises:
        BenchError: two losses of one step differ by more than ``TOLERANCE``.
    """
    trained = {way: runs[0].steps for way, (runs, _) in found.items() if way != "compute"}
    first = next(iter(trained.values()))
    for way, steps in trained.items():
        for index, (a, b) in enumerate(zip(first, steps, strict=True)):
            if not abs(a.loss - b.loss) <= TOLERANCE * abs(a.loss):
                raise BenchError(f"step {index}: loss {a.loss} of {next(iter(trained))}, but {b.loss} of {way}")


def describe(work: Work, found: dict[str, tuple[list[Run], int]]) -> list[str]:
    """Rows of the table for one size of micro-batch."""
    tokens = work.micro_batches * work.batch * work.length
    ours = median_seconds(found["penstock"][0])
    rows = []
    for way, (runs, peak) in found.items():
        seconds = median_seconds(runs)
        rss = max(step.peak_rss for done in runs for step in done.steps)
        against = "" if way == "penstock" else f"**{seconds / ours:.2f}x**"
        rows.append(
            f"| {work.micro_batches} x {work.batch} x {work.length:,} | {way} "
            f"| {seconds:.2f} s | {tokens / seconds:,.0f} | {peak / 1e9:.1f} GB | {rss / 1e9:.1f} GB | {against} |"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.4b", help="a key of bench.workload.MODELS")
    parser.add_argument("--batch", type=int, action="append", help="sequences in a micro-batch; default: 2 and 8")
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all")
    parser.add_argument("--rounds", type=int, default=1, help="processes a side")
    parser.add_argument("--steps", type=int, default=6, help="steps of a process, of which two are warm-up")
    parser.add_argument("--device", default="60GiB", help="Penstock's device budget")
    parser.add_argument("--host", default="100GiB", help="Penstock's host budget")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: needs an NVIDIA GPU", file=sys.stderr)
        return 2
    rows = []
    for batch in arguments.batch or (2, 8):
        work = Work(
            model=arguments.model,
            micro_batches=4,
            batch=batch,
            length=1024,
            steps=arguments.steps,
            threads=os.cpu_count() or 1,
            scratch=str(Path.cwd()),
        )
        print(f"4 micro-batches of {batch} x 1,024 tokens", flush=True)
        extra = ["--device", arguments.device, "--host", arguments.host]
        found = measure(work, arguments.way or list(WAYS), arguments.rounds, extra)
        if "penstock" not in found:
            return 2
        try:
            check_losses(found)
        except BenchError as error:
            print(f"bench.gpu: {error}", file=sys.stderr)
            return 2
        rows += describe(work, found)
    head = "| micro-batches | way | step | tokens/s | peak of device memory | peak RSS | Penstock is faster by |"
    setting = (
        f"{arguments.model}, bf16, recompute, no clipping; Penstock: device {arguments.device}, host {arguments.host}; "
        f"medians of {arguments.steps - 2} steps a process, {arguments.rounds} processes a side; {machine()}"
    )
    body = "\n".join([setting, "", head, "|" + "---|" * 7, *rows, "", "Command: `python -m bench.gpu`"])
    print(body)
    if not arguments.no_record:
        print(f"recorded in {write_section('gpu', body, results_file())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
