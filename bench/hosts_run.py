"""One rank of ``bench.hosts``: what it has sent in a step, by its trace, and what its host has, by the kernel.

Started by ``torchrun`` on each of several hosts. Leaves one line of JSON for each layout.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import distributed as dist

import penstock
from bench.wire_run import FP32, by_the_formula
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, Work, build_initial
from penstock.hardware.machine import Machine, load_machine
from penstock.schedule.program import GroupSpec, Program

FLAT, STAGE_2, COPIES, PIPELINE = LAYOUTS = ("cut over all", "cut over all in stage 2", "copies", "pipeline")
LINK = "eth0"
_PARTIAL = 8
"""bytes of a partial sum of the norm"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one layout. ``traced``, ``scheduled``: bytes that this rank has sent in a step; ``host``: those that its host
    has sent the others in it, as the kernel counts them. ``formula``: what this rank's host is to send. ``seconds``: of
    a step; ``busy``: of each lane in it; ``predicted``: seconds of a step, where a machine was given. ``losses``: of
    each step."""

    layout: str
    rank: int
    traced: int
    scheduled: int
    host: int
    formula: int
    seconds: float
    predicted: float | None
    busy: Mapping[str, float]
    losses: Sequence[float]


def look(layout: str, work: Work, hosts: int, machine: Machine | None) -> Found:
    """Steps in a layout, after one that plans and does not count; weights and state in memory. ``work``: that of all
    ranks together."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    mesh = penstock.torchrun_mesh("cpu", **_AXES.get(layout, lambda *_: {})(hosts, ranks))
    tokens, share = Tokens(work), work.micro_batches // ranks
    own = slice(None) if layout == PIPELINE else slice(rank * share, (rank + 1) * share)
    with penstock.wrap(
        build_initial(work),
        optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        budget=penstock.Budget(device="1GiB", host="4GiB", durability="none"),
        precision="fp32",
        clip_grad_norm=None,
        recompute=True,  # as the others do
        device="cpu",
        mesh=mesh,
        stage={PIPELINE: None, STAGE_2: 2}.get(layout, 3),
        plan=machine,
        replan=False,
    ) as engine:
        losses = [engine.step(tokens.step(0)[own]).loss]
        rounds = []
        for step in range(1, work.steps):
            before = _together()
            began = time.perf_counter()
            losses.append(engine.step(tokens.step(step)[own]).loss)
            seconds = time.perf_counter() - began
            rounds.append((_together() - before, seconds))
        trace = [event for event in engine.trace if event.op]
        busy: dict[str, float] = {}
        for event in trace:
            busy[event.lane] = busy.get(event.lane, 0.0) + event.end - event.start
        said = engine.plan.schedule.bytes_per_lane()
        return Found(
            layout=layout,
            rank=rank,
            traced=sum(event.bytes for event in trace if event.lane in _CROSSING),
            scheduled=sum(said.get(lane, 0) for lane in _CROSSING),
            host=int(median(sent for sent, _ in rounds)),
            formula=(
                of_pipeline(engine.plan.program, work.micro_batches, hosts, rank * hosts // ranks)
                if layout == PIPELINE
                else formula(layout, [group.spec for group in engine.inside.resources.groups], hosts)
            ),
            seconds=median(seconds for _, seconds in rounds),
            predicted=None if engine.prediction is None else engine.prediction.time,
            busy=busy,
            losses=losses,
        )


_AXES: Mapping[str, Callable[[int, int], dict[str, int]]] = {
    COPIES: lambda hosts, _: {"copies": hosts},
    PIPELINE: lambda _, ranks: {"pp": ranks},
}
_CROSSING = ("net", "nic", "send")
"""Lanes whose bytes a rank sends to others."""


def formula(layout: str, groups: list[GroupSpec], hosts: int) -> int:
    """Bytes that a host sends the others in a step: with a copy on each 8 N (H - 1) / H of H hosts, with state that is
    cut over all ranks (w + 4) N (H - 1) / H and its part of the norm.
    """
    terms, elements = by_the_formula(groups, hosts), sum(group.numel for group in groups)
    return (FP32 + 4) * elements * (hosts - 1) // hosts + (layout != COPIES) * terms["norm"]


def of_pipeline(program: Program, micro_batches: int, hosts: int, host: int) -> int:
    """Bytes that a host sends the others in a step of a pipeline: for each micro-batch what its blocks put out for
    other hosts' blocks, the gradients that it gives back, and from the first what others' blocks are handed besides;
    and the partial sums of the norm, of which each of R ranks sends the next R - 1 parts. ``program``: any rank's."""
    dealt = program.dealt
    assert dealt is not None
    of_stages = [rank * hosts // dealt.ranks for rank in dealt.of_stages]
    total = 0
    for stage, (here, there) in zip(program.stages, pairwise(of_stages), strict=False):
        if here != there:
            total += (here == host) * stage.activation + (there == host) * stage.gradient
    total += (host == 0) * sum(n for n, there in zip(dealt.besides, of_stages, strict=True) if there)
    return micro_batches * total + (dealt.ranks - 1) * dealt.partials * _PARTIAL


def _together() -> int:
    """Bytes that this host has sent by when all ranks rest."""
    dist.barrier()
    time.sleep(0.2)  # what a barrier itself sends has left
    found = sent()
    dist.barrier()
    return found


def sent(lines: str | None = None) -> int:
    """Bytes that this host has sent the others since it was made, with all headers. ``lines``: of ``/proc/net/dev``."""
    for line in (Path("/proc/net/dev").read_text() if lines is None else lines).splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == LINK:
            return int(figures.split()[8])
    raise RuntimeError(f"/proc/net/dev has no {LINK}: this is none of bench.cluster's hosts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--layouts", required=True, help="separated by commas")
    parser.add_argument("--report", required=True, type=Path, help="folder for each rank's file")
    parser.add_argument("--profile", type=Path, help="of each host, to predict steps by")
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    machine = None if arguments.profile is None else load_machine(arguments.profile)
    with (arguments.report / f"{os.environ['RANK']}.jsonl").open("w") as file:
        for layout in arguments.layouts.split(","):
            found = look(layout, work, int(os.environ["GROUP_WORLD_SIZE"]), machine)
            print(json.dumps(asdict(found)), file=file, flush=True)


if __name__ == "__main__":
    main()
