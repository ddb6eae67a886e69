"""Bytes that hosts send each other in a step: by the kernel and by a formula; and the time of a step on a slow network.

    python -m bench.hosts [--timings]

A Llama of 29M parameters in fp32 on two hosts of two ranks each, which are network namespaces joined by a switch
(``bench.cluster``), state in memory, vertical schedule, 8 micro-batches in all where nothing else is said; with state
that is cut over all ranks (in stages 3 and 2), with a copy of it on each host, and with its blocks dealt out to a
pipeline of all ranks. Required: every rank's bytes in the trace are those of its schedule, and what the kernel has
counted on each host's link, with all headers, is within 1% of the formula (``bench.hosts_run.formula``), with
micro-batches of 4x96 tokens.

With ``--timings`` also, at 200 Mbit/s between the hosts: a step takes at most 1.15 times its largest lane bound, which
is what the busiest lane of a rank works, or what its host's link takes for the formula's bytes in full frames, whose
headers its rate counts. It takes as long as was predicted, to 10%, by the profile that ``penstock doctor`` measures of
this machine, of which each host is a part, and of the link between them. Two races:

- *links*: state that is cut over all ranks, and copies of it, with one micro-batch of 16 tokens for each rank, so that
  little but bytes counts: copies send nothing before the first gradient is there, so that their forward comes on top
  of the bound.
- *pipelines*, with micro-batches of 64 tokens (``--length``), and with as many ranks on each host as it has processors
  (``--each``): ranks that share one wait for each other, of which no bound and no prediction knows. A pipeline is at
  least 2.5 times as fast as state that is cut over all ranks; it is as fast as torch's own pipelining package with each
  block a stage of its own, and 3 times as fast as DeepSpeed's ZeRO-3.

All sides of a race start from the same weights, see the same tokens, and their losses are compared. They run in turn,
in rounds (``--rounds``; DeepSpeed, whose step takes twenty times as long, in the first alone); a ratio is that of one
round, and what is told is the median over rounds, since processors are not as fast in one minute as in another. These
need a machine that does nothing else; bytes do not. Needs root; DeepSpeed is installed as for ``bench.zero_infinity``.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from bench import cluster, deepspeed_venv
from bench.cluster import Cluster, started
from bench.harness import ROOT, SCRATCH, BenchError, machine, measure_machine, results_file, write_section
from bench.hosts_run import COPIES, FLAT, LAYOUTS, PIPELINE, Found
from bench.workload import Work, write_initial_weights
from penstock.hardware.machine import Between, Machine, Network, load_machine
from penstock.hardware.sharing import of_each_rank, within_host

COMMAND = "python -m bench.hosts"
HOSTS, EACH = 2, 2
SHORT = 16
"""Tokens of a micro-batch where links are what counts."""
WITHIN = 0.01
MBIT = 200.0
AT_MOST = 1.15
AS_PREDICTED = 0.10
FASTER = {FLAT: 2.5, "torch pipelining": 1.0, "DeepSpeed ZeRO-3": 3.0}
"""How many times as fast as each the pipeline has to be."""
PAYLOAD = 1448 / 1514
"""of a frame of Ethernet, which TCP and IP take the rest of"""
_SAME = 1e-3
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What was found of one layout, by rank."""

    name: str
    ranks: Sequence[Found]

    @property
    def links(self) -> list[tuple[int, int]]:
        """Bytes that each host has sent by the kernel, and by the formula."""
        return [(found.host, found.formula) for found in self.ranks[:: len(self.ranks) // HOSTS]]

    @property
    def bound(self) -> tuple[str, float]:
        """The lane that takes longest by itself in a step on the slow network, on any rank, and how long."""
        lanes: dict[str, float] = {"nic": max(one.formula for one in self.ranks) / bytes_per_second(MBIT)}
        for one in self.ranks:
            for lane, seconds in one.busy.items():
                if lane not in ("net", "nic", "send", "recv"):
                    lanes[lane] = max(lanes.get(lane, 0.0), seconds)
        return max(lanes.items(), key=lambda one: one[1])

    @property
    def seconds(self) -> float:
        """Of a step, on the rank that takes longest."""
        return max(one.seconds for one in self.ranks)

    @property
    def predicted(self) -> float | None:
        """Seconds that a step was to take."""
        return self.ranks[0].predicted

    def bytes_missed(self) -> list[str]:
        """What is required of bytes and not the case, in words."""
        found = [
            f"{self.name}, rank {one.rank}: {one.traced} bytes in the trace, {one.scheduled} in the schedule"
            for one in self.ranks
            if one.traced != one.scheduled
        ]
        return found + [
            f"{self.name}, host {host}: the kernel counts {counted} bytes, and the formula says {formula}"
            for host, (counted, formula) in enumerate(self.links)
            if abs(counted / formula - 1) > WITHIN
        ]

    @property
    def over_bound(self) -> float:
        return self.seconds / self.bound[1]

    @property
    def over_prediction(self) -> float | None:
        return None if self.predicted is None else self.seconds / self.predicted


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another trainer's side. ``module``: run by ``python`` on each rank; ``rounds``: that it takes part in (all)."""

    name: str
    module: str
    python: Path | str
    rounds: int | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a peer took for each step on its slowest rank, but the first, and its mean loss in each."""

    name: str
    seconds: Sequence[float]
    losses: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Every side of a race once, one after the other."""

    layouts: Sequence[Layout]
    peers: Sequence[Timed]

    @property
    def seconds(self) -> dict[str, float]:
        """Of a step, by side."""
        layouts = {one.name: one.seconds for one in self.layouts}
        return layouts | {peer.name: median(peer.seconds) for peer in self.peers}


Race = Sequence[Round]


def bytes_per_second(mbit: float) -> float:
    """The most that a link of so many Mbit/s, which count headers, carries of what ranks send."""
    return mbit * 1e6 / 8 * PAYLOAD


def host_of(whole: Machine, nic: Network, each: int) -> Machine:
    """The profile of one of the hosts, which share this machine as so many ranks would. ``each``: ranks on it."""
    among = within_host(whole, HOSTS * each)
    inside = Between(ranks=each, bandwidth=among.bandwidth, latency=among.latency, contention=among.contention)
    return replace(
        of_each_rank(whole, HOSTS),
        network=None,
        nic=nic,
        between=(inside,) if each > 1 else (),
        contention=whole.contention,
    )


def job(model: str, batch: int, length: int, steps: int, scratch: Path, micro_batches: int = 8) -> Work:
    """The job of all ranks together, with its initial weights written. ``steps``: the first one does not count."""
    shape = {"micro_batches": micro_batches, "batch": batch, "length": length, "steps": steps}
    work = Work(model=model, threads=1, scratch=str(scratch), **shape)
    write_initial_weights(work)
    return work


def measure_link(each: int, mbit: float, scratch: Path) -> Network:
    """A host's link of so many Mbit/s, as ranks measure it who are on them, ``each`` on each.

    Raises:
        BenchError: a rank failed; quotes what they said.
    """
    with TemporaryDirectory(dir=scratch) as folder, Cluster(HOSTS, Path(folder)) as made:
        made.shape(mbit)
        words = ["-m", "--", "penstock.doctor.between", "0.25", "3"]
        commands = [made.torchrun(host, each, sys.executable, words) for host in range(HOSTS)]
        logs = [Path(folder) / f"log-{host}" for host in range(HOSTS)]
        with started(commands, logs, cwd=ROOT, env=made.environment()) as running:
            codes = [process.wait(_PATIENCE) for process in running]
        said = [log.read_text(errors="replace") for log in logs]
    if any(codes):
        raise BenchError("\n".join(text[:6000] for text in said))
    return Network(**json.loads(next(line for line in said[0].splitlines() if line.startswith("{"))))


def measure(
    work: Work, layouts: Sequence[str], each: int = EACH, mbit: float | None = None, profile: Machine | None = None
) -> list[list[Found]]:
    """What each rank has found, by layout. ``each``: ranks on a host; ``profile``: of a host, to predict steps by.

    Raises:
        BenchError: a rank failed; quotes what they said.
    """
    words, scratch = ["--layouts", ",".join(layouts)], Path(work.scratch)
    if profile is not None:
        (scratch / "host.json").write_text(profile.to_json())
        words += ["--profile", str(scratch / "host.json")]
    environment = {"OMP_WAIT_POLICY": "passive"}
    lines = _run(sys.executable, "bench.hosts_run", work, each, mbit, words, environment)
    return [[Found(**line) for line in by_rank] for by_rank in zip(*lines, strict=True)]


def measure_peer(peer: Peer, work: Work, each: int, mbit: float) -> Timed:
    """Raises BenchError: a rank failed; quotes what they said."""
    lines = _run(peer.python, peer.module, work, each, mbit, [], peer.environment)
    steps = list(zip(*lines, strict=True))
    losses = [[line["loss"] for line in step if line["loss"] is not None] for step in steps]
    return Timed(
        name=peer.name,
        seconds=[max(line["seconds"] for line in step) for step in steps[1:]],
        losses=[mean(of_step) for of_step in losses],
    )


def race(work: Work, layouts: Sequence[str], each: int, whole: Machine, peers: Sequence[Peer], rounds: int) -> Race:
    """Layouts and peers on the slow network, all in turn, in so many rounds. ``whole``: the profile of the machine that
    all hosts are on.

    Raises:
        BenchError: a side failed, or not all compute the same losses.
    """
    profile = host_of(whole, measure_link(each, MBIT, Path(work.scratch)), each)
    found: list[Round] = []
    for turn in range(rounds):
        by_layout = measure(work, layouts, each, MBIT, profile)
        runs = [Layout(name=name, ranks=ranks) for name, ranks in zip(layouts, by_layout, strict=True)]
        taking_part = [peer for peer in peers if peer.rounds is None or turn < peer.rounds]
        found.append(Round(layouts=runs, peers=[measure_peer(peer, work, each, MBIT) for peer in taking_part]))
        check_same_losses(found[-1])
    return found


def _run(
    python: Path | str,
    module: str,
    work: Work,
    each: int,
    mbit: float | None,
    words: Sequence[str],
    environment: Mapping[str, str],
) -> list[list[dict[str, Any]]]:
    """The lines that each rank leaves."""
    report = Path(work.scratch) / "report"
    shutil.rmtree(report, ignore_errors=True)
    report.mkdir()
    words = ["-m", "--", module, "--work", work.to_json(), "--report", str(report), *words]
    with Cluster(HOSTS, report) as made:
        if mbit is not None:
            made.shape(mbit)
        commands = [made.torchrun(host, each, python, words) for host in range(HOSTS)]
        logs = [report / f"log-{host}" for host in range(HOSTS)]
        with started(commands, logs, cwd=ROOT, env=made.environment(environment)) as running:
            codes = [process.wait(_PATIENCE) for process in running]
    if any(codes):
        raise BenchError("\n".join(log.read_text(errors="replace")[:6000] for log in logs))
    files = [report / f"{rank}.jsonl" for rank in range(HOSTS * each)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def table_of_bytes(found: Sequence[Layout]) -> str:
    lines = ["| layout | formula, bytes of each host | kernel, by host | over |", "|---|---|---|---|"]
    for one in found:
        formula = ", ".join(f"{said:,}" for said in dict.fromkeys(said for _, said in one.links))
        counted = ", ".join(f"{sent:,}" for sent, _ in one.links)
        over = ", ".join(f"{sent / said:.4f}" for sent, said in one.links)
        lines.append(f"| {one.name} | {formula} | {counted} | {over} |")
    return "\n".join(lines)


def table_of_times(found: Race) -> str:
    """Medians over the rounds, of each column by itself."""
    times = ratios(found)
    lines = [f"| at {MBIT:.0f} Mbit/s | a step | largest bound | over | predicted | over | the pipeline is |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, runs in _by_layout(found).items():
        lanes, over = {one.bound[0] for one in runs}, median(one.over_bound for one in runs)
        bound = f"{' or '.join(sorted(lanes))} {median(one.bound[1] for one in runs):.2f} s | {over:.2f}"
        predicted, of_it = [one.predicted for one in runs], _over_predictions(runs)
        told = f"{median(filter(None, predicted)):.2f} s | {median(of_it):.2f}" if of_it else "none | "
        faster = f"**{times[name]:.2f}x**" if name in times else ""
        lines.append(f"| {name} | {median(one.seconds for one in runs):.2f} s | {bound} | {told} | {faster} |")
    for name in dict.fromkeys(peer.name for of_round in found for peer in of_round.peers):
        seconds = median(of_round.seconds[name] for of_round in found if name in of_round.seconds)
        lines.append(f"| {name} | {seconds:.2f} s | | | | | **{times[name]:.2f}x** |")
    return "\n".join(lines)


def _by_layout(found: Race) -> dict[str, list[Layout]]:
    runs: dict[str, list[Layout]] = {}
    for of_round in found:
        for one in of_round.layouts:
            runs.setdefault(one.name, []).append(one)
    return runs


def _over_predictions(runs: Sequence[Layout]) -> list[float]:
    return [over for one in runs if (over := one.over_prediction) is not None]


def ratios(found: Race) -> dict[str, float]:
    """How many times as fast as others the pipeline is, by name: the median of rounds; none where it takes no part."""
    by_name: dict[str, list[float]] = {}
    for of_round in found:
        seconds = of_round.seconds
        ours = seconds.pop(PIPELINE, None)
        for name, theirs in seconds.items() if ours else ():
            by_name.setdefault(name, []).append(theirs / ours)
    return {name: median(times) for name, times in by_name.items()}


def times_missed(found: Race) -> list[str]:
    """What is required of the times of steps on the slow network and not the case, in words."""
    missed: list[str] = []
    for name, runs in _by_layout(found).items():
        over, of_prediction = median(one.over_bound for one in runs), _over_predictions(runs)
        if over > AT_MOST:
            missed.append(f"{name}: a step takes {over:.2f} times its largest bound")
        if len(of_prediction) < len(runs):
            missed.append(f"{name}: nothing is predicted")
        elif abs(median(of_prediction) - 1) > AS_PREDICTED:
            missed.append(f"{name}: a step takes {median(of_prediction):.2f} of what was predicted")
    return missed + [
        f"the pipeline is {times:.2f} times as fast as {name}, and {FASTER[name]} are required"
        for name, times in ratios(found).items()
        if times < FASTER.get(name, 0.0)
    ]


def check_same_losses(found: Round) -> None:
    """Raises BenchError: not all compute the same losses."""
    first = found.layouts[0].ranks[0].losses
    sides = [(one.name, rank.losses) for one in found.layouts for rank in one.ranks]
    for name, losses in [*sides, *((peer.name, peer.losses) for peer in found.peers)]:
        if not all(abs(a - b) <= _SAME * abs(b) for a, b in zip(losses, first, strict=True)):
            raise BenchError(f"{name} has the losses {list(losses)}, and {found.layouts[0].name} {list(first)}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-29m", help="of bench.workload.MODELS, with a large vocabulary")
    parser.add_argument("--timings", action="store_true", help="on a machine that does nothing else")
    parser.add_argument("--length", type=int, help="tokens of a micro-batch of a pipeline, with --timings (64)")
    parser.add_argument(
        "--each", type=int, help="ranks of a pipeline on each host, with --timings (processors / hosts)"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run, with --timings")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side, in turn, with --timings")
    parser.add_argument("--venv", type=Path, default=deepspeed_venv.default_place(), help="DeepSpeed's environment")
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    arguments = parser.parse_args(words)
    if (arguments.length or arguments.each) is not None and not arguments.timings:
        parser.error("--length and --each are of --timings, and have no effect without")
    length, each = arguments.length or 64, arguments.each or max(1, len(os.sched_getaffinity(0)) // HOSTS)
    if (why := cluster.why_none()) is not None:
        print(f"bench.hosts: {why}", file=sys.stderr)
        return 2
    SCRATCH.mkdir(parents=True, exist_ok=True)
    races: dict[str, Race] = {}
    try:
        with TemporaryDirectory(dir=SCRATCH) as folder:
            scratch = Path(folder)
            by_layout = measure(job(arguments.model, 4, 96, 2, scratch), LAYOUTS)
            found = [Layout(name=name, ranks=ranks) for name, ranks in zip(LAYOUTS, by_layout, strict=True)]
            if arguments.timings:
                python = deepspeed_venv.prepare(arguments.venv)
                counts = sorted({HOSTS, each, HOSTS * each, EACH, HOSTS * EACH} - {1})
                whole = load_machine(measure_machine(scratch, None, counts))
                work = job(arguments.model, 1, SHORT, 1 + arguments.steps, scratch, HOSTS * EACH)
                races[f"{SHORT} tokens, {EACH} on each host"] = race(
                    work, (FLAT, COPIES), EACH, whole, [], arguments.rounds
                )
                work = job(arguments.model, 1, length, 1 + arguments.steps, scratch)
                peers = [TORCH, _deepspeed(python)]
                races[f"{length} tokens, {each} on each host"] = race(
                    work, (FLAT, PIPELINE), each, whole, peers, arguments.rounds
                )
    except BenchError as error:
        print(f"bench.hosts: {error}", file=sys.stderr)
        return 2
    tables = [table_of_bytes(found)]
    for name, rounds in races.items():
        tables += [f"{name}, {arguments.rounds} rounds:", table_of_times(rounds)]
    print("\n\n".join(tables))
    if not arguments.no_record:
        timings = f" --timings --length {length} --each {each}" if arguments.timings else ""
        note = f"`{COMMAND}{timings}`: {arguments.model}, fp32, {HOSTS} hosts of {EACH} ranks (network namespaces)"
        title = "hosts, timings" if arguments.timings else "hosts"
        path = write_section(title, "\n\n".join([f"{note}; {machine()}", *tables]), results_file())
        print(f"written to {path.relative_to(ROOT)}")
    missed = [line for one in found for line in one.bytes_missed()]
    missed += [f"{name}: {line}" for name, rounds in races.items() for line in times_missed(rounds)]
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


TORCH = Peer(name="torch pipelining", module="bench.peer_pipelining", python=sys.executable)


def _deepspeed(python: Path) -> Peer:
    return Peer(
        name="DeepSpeed ZeRO-3",
        module="bench.peer_hosts",
        python=python,
        rounds=1,
        environment=deepspeed_venv.environment(python),
    )


if __name__ == "__main__":
    sys.exit(main())
