"""Bytes that ranks send each other in a step: by the trace, the schedule, a formula, the kernel, and DeepSpeed's.

    python -m bench.wire

A Llama of 29M parameters in fp32 on 2 and on 4 ranks, state in memory, micro-batches of 16 tokens, vertical schedule.
Required with 1 to 8 micro-batches on each rank, of every rank: the bytes in the trace, those of the schedule and
(2w + 4) N (R - 1) / R, less what stays and with the partial norms (docs/ranks.md), are equal. All ranks run in a
network namespace of their own, and what the kernel has counted there, headers and acknowledgements included, is at
most 1.01 times that sum. DeepSpeed's ZeRO-3 of the same model with 4 micro-batches a rank, where weights are given back
after use as they are with a model that does not fit, sends at least 4 times as much, counted the same way. What it
sends with its default limits, which keep this whole model on the device from a forward to its backward, is shown, too.

How busy the machine is changes no byte. Without root there is no namespace: the kernel's counter is then that of
everything on the machine, so that neither it nor DeepSpeed is measured, which is said. DeepSpeed is installed as for
``bench.zero_infinity``.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import deepspeed_venv, namespace
from bench.harness import ROOT, SCRATCH, BenchError, machine, results_file, write_section
from bench.wire_run import Sent
from bench.workload import Work

COMMAND = "python -m bench.wire"
RANKS = (2, 4)
COUNTS = tuple(range(1, 9))
MODES = ("released", "default")
OVERHEAD = 1.01
PEER = 4.0
_PEER_COUNT = 4
"""micro-batches a rank"""


@dataclass(frozen=True, kw_only=True)
class World:
    """What was found with so many ranks. ``sent[rank]``: for each number of micro-batches. ``peer[mode]``: bytes of all
    of DeepSpeed's ranks."""

    ranks: int
    sent: Sequence[Sequence[Sent]]
    peer: Mapping[str, int] = field(default_factory=dict)

    def overhead(self, index: int) -> float:
        """The kernel's count over the bytes in all ranks' traces, for one number of micro-batches."""
        return self.sent[0][index].kernel / sum(of_rank[index].traced for of_rank in self.sent)

    def times(self, mode: str) -> float:
        """How many times as much DeepSpeed sends, by the kernel's count of both."""
        ours = next(one for one in self.sent[0] if one.micro_batches == _PEER_COUNT)
        return self.peer[mode] / ours.kernel

    def missed(self, *, counted: bool) -> list[str]:
        """What is required and not the case, in words. ``counted``: whether the kernel's counters are theirs alone."""
        found = [
            f"{self.ranks} ranks, rank {rank}, {one.micro_batches} micro-batches: {one.traced} bytes in the trace, "
            f"{one.scheduled} in the schedule, {one.formula} by the formula"
            for rank, of_rank in enumerate(self.sent)
            for one in of_rank
            if not one.traced == one.scheduled == one.formula
        ]
        if counted:
            found += [
                f"{self.ranks} ranks, {one.micro_batches} micro-batches: the kernel counts {self.overhead(i):.4f} "
                f"times as much, and {OVERHEAD} is required"
                for i, one in enumerate(self.sent[0])
                if not 1 <= self.overhead(i) <= OVERHEAD
            ]
        if "released" in self.peer and self.times("released") < PEER:
            found.append(f"{self.ranks} ranks: DeepSpeed sends {self.times('released'):.2f} times as much, not {PEER}")
        return found


def measure(model: str, ranks: int, counts: Sequence[int], scratch: Path) -> World:
    """What Penstock's ranks send.

    Raises:
        BenchError: a rank failed; quotes the end of what they said.
    """
    work = _work(model, 1, 1, scratch)
    words = ["--counts", ",".join(map(str, counts))]
    found = _run(sys.executable, "bench.wire_run", ranks, work, words, {"OMP_WAIT_POLICY": "passive"})
    return World(ranks=ranks, sent=[[Sent(**line) for line in of_rank] for of_rank in found])


def measure_peer(model: str, ranks: int, mode: str, python: Path, scratch: Path) -> int:
    """What DeepSpeed's ranks send together in their second step.

    Raises:
        BenchError: as ``measure``.
    """
    work = _work(model, _PEER_COUNT, 2, scratch)
    environment = deepspeed_venv.environment(python)
    steps = _run(python, "bench.peer_wire", ranks, work, ["--mode", mode], environment)[0]
    return int(steps[-1]["kernel"])


def _work(model: str, micro_batches: int, steps: int, scratch: Path) -> Work:
    return Work(
        model=model, micro_batches=micro_batches, batch=1, length=16, steps=steps, threads=1, scratch=str(scratch)
    )


def _run(
    python: Path | str, module: str, ranks: int, work: Work, words: Sequence[str], environment: Mapping[str, str]
) -> list[list[dict[str, Any]]]:
    """The lines that each rank leaves."""
    report = Path(work.scratch) / "report"
    shutil.rmtree(report, ignore_errors=True)
    report.mkdir()
    log = report / "log"
    words = ["--work", work.to_json(), "--report", str(report), *words]
    if namespace.run_ranks(python, ranks, module, *words, root=ROOT, environment=environment, log=log):
        raise BenchError(f"{module} on {ranks} ranks: {log.read_text(errors='replace')[-3000:]}")
    return [[json.loads(line) for line in (report / f"{rank}.jsonl").read_text().splitlines()] for rank in range(ranks)]


def table(worlds: Sequence[World], *, counted: bool) -> str:
    lines = [
        "| ranks | micro-batches | trace = schedule = formula | (2w + 4) N (R-1) / R | stays | norms | kernel | over |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for world in worlds:
        for i, one in enumerate(world.sent[0]):
            kernel = (f"{one.kernel:,}", f"{world.overhead(i):.4f}") if counted else ("not counted", "")
            equal = all(of[i].traced == of[i].scheduled == of[i].formula for of in world.sent)
            cells = (
                f"{world.ranks}",
                f"{one.micro_batches}",
                f"{one.traced:,}" if equal else f"{one.traced:,}, {one.scheduled:,}, {one.formula:,} DIFFER",
                f"{one.published:,}",
                f"-{one.kept:,}",
                f"+{one.norm:,}",
                *kernel,
            )
            lines.append(f"| {' | '.join(cells)} |")
    if any(world.peer for world in worlds):
        lines += [
            "",
            f"| ranks | DeepSpeed's weights, {_PEER_COUNT} micro-batches | kernel | over ours |",
        ]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| {world.ranks} | {mode} | {nbytes:,} | {world.times(mode):.2f} |"
            for world in worlds
            for mode, nbytes in world.peer.items()
        ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--model", default="llama-29m", help="of bench.workload.MODELS, with a large vocabulary")
    parser.add_argument("--venv", type=Path, default=deepspeed_venv.default_place(), help="DeepSpeed's environment")
    parser.add_argument("--no-peer", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    arguments = parser.parse_args(words)
    counted = namespace.why_none() is None
    if not counted:
        print(f"bench.wire: nothing is asked of the kernel: {namespace.why_none()}", file=sys.stderr)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    worlds: list[World] = []
    try:
        peer = deepspeed_venv.prepare(arguments.venv) if counted and not arguments.no_peer else None
        with TemporaryDirectory(dir=SCRATCH) as scratch:
            for ranks in arguments.ranks:
                world = measure(arguments.model, ranks, COUNTS, Path(scratch))
                print(table([world], counted=counted), flush=True)
                theirs = {}
                for mode in MODES if peer is not None else ():
                    theirs[mode] = measure_peer(arguments.model, ranks, mode, peer, Path(scratch))
                worlds.append(World(ranks=ranks, sent=world.sent, peer=theirs))
    except BenchError as error:
        print(f"bench.wire: {error}", file=sys.stderr)
        return 2
    print(table(worlds, counted=counted))
    if counted and not arguments.no_record:
        theirs_are = f"DeepSpeed {deepspeed_venv.VERSION}, activations kept; " if peer is not None else ""
        note = f"`{COMMAND}`: {arguments.model}, fp32, micro-batches of 1x16 tokens; {theirs_are}{machine()}"
        path = write_section("wire", f"{note}\n\n{table(worlds, counted=True)}", results_file())
        print(f"written to {path.relative_to(ROOT)}")
    missed = [line for world in worlds for line in world.missed(counted=counted)]
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
