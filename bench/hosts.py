"""Bytes that hosts send each other in a step: by the kernel and by a formula; and the time of a step on a slow network.

    python -m bench.hosts [--timings]

A Llama of 29M parameters in fp32 on two hosts of two ranks each, which are network namespaces joined by a switch
(``bench.cluster``), state in memory, vertical schedule; with state that is cut over all ranks, and with a copy of it on
each host. Required: every rank's bytes in the trace are those of its schedule, and what the kernel has counted
on each host's link, with all headers, is within 1% of the formula (``bench.hosts_run.formula``).

With ``--timings`` also, at 200 Mbit/s between the hosts: a step takes at most 1.15 times its largest lane bound. That
is what the busiest lane of a rank works, or what its host's link takes for the formula's bytes. These need a machine
that does nothing else; bytes do not. Needs root.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import cluster
from bench.cluster import Cluster, started
from bench.harness import ROOT, SCRATCH, BenchError, machine, results_file, write_section
from bench.hosts_run import LAYOUTS, Found
from bench.workload import Work

COMMAND = "python -m bench.hosts"
HOSTS, EACH = 2, 2
WITHIN = 0.01
MBIT = 200.0
AT_MOST = 1.15
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What was found of one layout. ``ranks``: by rank; ``slow``: the same at 200 Mbit/s, if that was measured."""

    name: str
    ranks: Sequence[Found]
    slow: Sequence[Found] = ()

    @property
    def links(self) -> list[int]:
        """Bytes that each host has sent, by the kernel."""
        return [found.host for found in self.ranks[::EACH]]

    @property
    def bound(self) -> tuple[str, float]:
        """The lane that takes longest by itself in a step on the slow network, and how long."""
        lanes = {lane: seconds for lane, seconds in self.ranks[0].busy.items() if lane != "net"}
        lanes["net"] = self.ranks[0].formula / (MBIT * 1e6 / 8)
        return max(lanes.items(), key=lambda one: one[1])

    def missed(self) -> list[str]:
        """What is required and not the case, in words."""
        found = [
            f"{self.name}, rank {one.rank}: {one.traced} bytes in the trace, {one.scheduled} in the schedule"
            for one in self.ranks
            if one.traced != one.scheduled
        ]
        formula = self.ranks[0].formula
        found += [
            f"{self.name}, host {host}: the kernel counts {counted} bytes, and the formula says {formula}"
            for host, counted in enumerate(self.links)
            if abs(counted / formula - 1) > WITHIN
        ]
        if self.slow and self.slow[0].seconds > AT_MOST * self.bound[1]:
            found.append(
                f"{self.name}: a step takes {self.slow[0].seconds / self.bound[1]:.2f} times its largest bound"
            )
        return found


def measure(model: str, layouts: Sequence[str], steps: int, mbit: float | None, scratch: Path) -> list[list[Found]]:
    """What each rank has found, by layout.

    Raises:
        BenchError: a rank failed; quotes the end of what they said.
    """
    work = Work(model=model, micro_batches=2, batch=1, length=16, steps=steps, threads=1, scratch=str(scratch))
    words = ["-m", "--", "bench.hosts_run", "--work", work.to_json(), "--layouts", ",".join(layouts)]
    with Cluster(HOSTS, scratch) as made:
        if mbit is not None:
            made.shape(mbit)
        commands = [made.torchrun(h, EACH, sys.executable, [*words, "--report", str(scratch)]) for h in range(HOSTS)]
        logs = [scratch / f"log-{host}" for host in range(HOSTS)]
        with started(commands, logs, cwd=ROOT, env=made.environment({"OMP_WAIT_POLICY": "passive"})) as running:
            codes = [process.wait(_PATIENCE) for process in running]
    if any(codes):
        raise BenchError("\n".join(log.read_text(errors="replace")[:6000] for log in logs))
    lines = [(scratch / f"{rank}.jsonl").read_text().splitlines() for rank in range(HOSTS * EACH)]
    return [[Found(**json.loads(line)) for line in by_rank] for by_rank in zip(*lines, strict=True)]


def table(found: Sequence[Layout]) -> str:
    lines = ["| layout | formula, bytes of each host | kernel, by host | over |", "|---|---|---|---|"]
    for one in found:
        formula = one.ranks[0].formula
        counted = ", ".join(f"{sent:,}" for sent in one.links)
        over = ", ".join(f"{sent / formula:.4f}" for sent in one.links)
        lines.append(f"| {one.name} | {formula:,} | {counted} | {over} |")
    if any(one.slow for one in found):
        lines += ["", f"| layout | a step at {MBIT:.0f} Mbit/s | largest bound | over |", "|---|---|---|---|"]
        for one in found:
            (lane, bound), seconds = one.bound, one.slow[0].seconds
            lines.append(f"| {one.name} | {seconds:.2f} s | {lane} {bound:.2f} s | {seconds / bound:.2f} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-29m", help="of bench.workload.MODELS, with a large vocabulary")
    parser.add_argument("--timings", action="store_true", help="on a machine that does nothing else")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    arguments = parser.parse_args(words)
    if (why := cluster.why_none()) is not None:
        print(f"bench.hosts: {why}", file=sys.stderr)
        return 2
    SCRATCH.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=SCRATCH) as scratch:
            by_layout = measure(arguments.model, LAYOUTS, 1, None, Path(scratch))
            slow: list[list[Found]] = [[] for _ in LAYOUTS]
            if arguments.timings:
                slow = measure(arguments.model, LAYOUTS, 3, MBIT, Path(scratch))
    except BenchError as error:
        print(f"bench.hosts: {error}", file=sys.stderr)
        return 2
    found = [Layout(name=n, ranks=r, slow=s) for n, r, s in zip(LAYOUTS, by_layout, slow, strict=True)]
    print(table(found))
    if not arguments.no_record:
        note = f"`{COMMAND}`: {arguments.model}, fp32, {HOSTS} hosts of {EACH} ranks (network namespaces); {machine()}"
        path = write_section("hosts", f"{note}\n\n{table(found)}", results_file())
        print(f"written to {path.relative_to(ROOT)}")
    missed = [line for one in found for line in one.missed()]
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
