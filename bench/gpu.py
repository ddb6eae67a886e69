"""Step time on a GPU with the state in host memory, beside what else does that: FSDP2, ZeRO-3 and SuperOffload.

    python -m bench.gpu

A Llama of 3.37B parameters in bf16 with its optimizer state in host memory (54 GB), 4 micro-batches a step of one size
and then of another, activations recomputed and clipping off on all sides; but *planned* is Penstock with state, weights
and recomputation as the plan has them. *compute* is the same forward and backward with all weights on the GPU and no
optimizer: no side that recomputes can be faster. Losses are compared. DeepSpeed has to be in the environment that this
runs in; a side that cannot run is named and left out of the table.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.harness import ROOT, BenchError, Side, Step, machine, results_file, run, write_section
from bench.workload import Work

WAYS = ("compute", "penstock", "planned", "fsdp2", "deepspeed", "superoffload")
WARM_UP = 2
"""Steps of each size that do not count."""
TOLERANCE = 0.02
"""Relative difference of losses: each side rounds to bf16 in other places."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a side reported: the steps of each size of micro-batch, and the peak of device memory in bytes."""

    steps: dict[int, list[Step]]
    device_peak: int

    def seconds(self, batch: int) -> float:
        return statistics.median(step.seconds for step in self.steps[batch][WARM_UP:])


def measure(way: str, work: Work, batches: list[int], arguments: argparse.Namespace) -> Done:
    """One process of one side.

    Raises:
        BenchError: it failed or took too long.
    """
    flags = [word for batch in batches for word in ("--batch", str(batch))]
    command = (sys.executable, "-m", "bench.gpu_side", way, *flags)
    if way in ("penstock", "planned"):
        command += ("--device", arguments.device, "--host", arguments.host)
    logs = ROOT / ".bench" / "logs" / "gpu"
    side = Side(name=way, command=command)
    steps = run(side, work, group=None, logs=logs, warm_up=0, patience=arguments.patience).steps
    each = arguments.steps
    return Done(
        steps={batch: list(steps[i * each : (i + 1) * each]) for i, batch in enumerate(batches)},
        device_peak=json.loads((logs / f"{way}.memory").read_text())["device_peak"],
    )


def check_losses(found: dict[str, Done]) -> None:
    """All sides that train have the same losses; ``compute`` changes nothing and has others after the first.

    Raises:
        BenchError: two losses of one step differ by more than ``TOLERANCE``.
    """
    (first, reference), *others = ((way, done) for way, done in found.items() if way != "compute")
    for way, done in others:
        for batch, steps in done.steps.items():
            for index, (a, b) in enumerate(zip(reference.steps[batch], steps, strict=True)):
                if not abs(a.loss - b.loss) <= TOLERANCE * abs(a.loss):
                    raise BenchError(f"batch {batch}, step {index}: loss {a.loss} of {first}, but {b.loss} of {way}")


def describe(work: Work, batches: list[int], found: dict[str, Done], arguments: argparse.Namespace) -> str:
    """The section of the results file."""
    setting = (
        f"{work.model}, bf16, recompute (planned: as the plan has it), no clipping, {work.micro_batches} micro-batches;"
        " Penstock: device "
        f"{arguments.device}, host {arguments.host}; medians of {arguments.steps - WARM_UP} steps; {machine()}"
    )
    head = "| micro-batch | side | step | tokens/s | its time over Penstock's | peak of device memory, RSS |"
    rows = []
    for batch in batches:
        ours = found["penstock"].seconds(batch)
        tokens = work.micro_batches * batch * work.length
        for way, done in found.items():
            seconds, rss = done.seconds(batch), max(step.peak_rss for step in done.steps[batch])
            rows.append(
                f"| {batch} x {work.length:,} | {way} | {seconds:.2f} s | {tokens / seconds:,.0f} "
                f"| {seconds / ours:.2f}x | {done.device_peak / 1e9:.1f} GB, {rss / 1e9:.1f} GB |"
            )
    return "\n".join([setting, "", head, "|" + "---|" * 6, *rows, "", "Command: `python -m bench.gpu`"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.4b", help="a key of bench.workload.MODELS")
    parser.add_argument("--batch", type=int, action="append", help="sequences in a micro-batch; default: 2, then 8")
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all")
    parser.add_argument("--steps", type=int, default=6, help=f"steps of each size, of which {WARM_UP} are warm-up")
    parser.add_argument("--device", default="60GiB", help="Penstock's device budget")
    parser.add_argument("--host", default="100GiB", help="Penstock's host budget")
    parser.add_argument("--patience", type=float, default=600, help="seconds that a side may take")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: needs an NVIDIA GPU", file=sys.stderr)
        return 2
    batches = arguments.batch or [2, 8]
    work = Work(
        model=arguments.model,
        micro_batches=4,
        batch=batches[0],
        length=1024,
        steps=arguments.steps * len(batches),
        threads=os.cpu_count() or 1,
        scratch=str(Path.cwd()),
    )
    found: dict[str, Done] = {}
    for way in arguments.way or WAYS:
        try:
            found[way] = measure(way, work, batches, arguments)
        except BenchError as error:
            print(f"  {error}", flush=True)
            continue
        steps = [f"{step.seconds:.2f}" for batch in batches for step in found[way].steps[batch]]
        print(f"  {way:<12} step seconds: {' '.join(steps)}", flush=True)
    if "penstock" not in found:
        return 2
    try:
        check_losses(found)
    except BenchError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    body = describe(work, batches, found, arguments)
    print(body)
    if not arguments.no_record:
        print(f"recorded in {write_section('gpu', body, results_file())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
