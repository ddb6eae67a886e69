"""One rank of ``bench.hosts``: what it has sent in a step, by its trace, and what its host has, by the kernel.

Started by ``torchrun`` on each of several hosts. Leaves one line of JSON for each layout.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import distributed as dist

import penstock
from bench.wire_run import FP32, by_the_formula
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, Work, build
from penstock.schedule.program import GroupSpec

LAYOUTS = ("cut over all", "copies")
LINK = "eth0"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one layout. ``traced``, ``scheduled``: bytes that this rank has sent in a step; ``host``: those that its host
    has sent the others in it, as the kernel counts them. ``formula``: what a host is to send. ``seconds``: of a step;
    ``busy``: of each lane in it."""

    layout: str
    rank: int
    traced: int
    scheduled: int
    host: int
    formula: int
    seconds: float
    busy: Mapping[str, float]


def look(layout: str, work: Work, hosts: int) -> Found:
    """Steps in a layout, after one that plans and does not count; weights and state in memory."""
    mesh = penstock.torchrun_mesh("cpu", copies=hosts if layout == "copies" else 1)
    batch = Tokens(work).step(0)
    with penstock.wrap(
        build(work.model),
        optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        budget=penstock.Budget(device="1GiB", host="4GiB", durability="none"),
        precision="fp32",
        clip_grad_norm=None,
        device="cpu",
        mesh=mesh,
        stage=3,
        plan=None,
    ) as engine:
        engine.step(batch)
        rounds = []
        for _ in range(work.steps):
            before = _together()
            began = time.perf_counter()
            engine.step(batch)
            seconds = time.perf_counter() - began
            rounds.append((_together() - before, seconds))
        trace = [event for event in engine.trace if event.op]
        busy: dict[str, float] = {}
        for event in trace:
            busy[event.lane] = busy.get(event.lane, 0.0) + event.end - event.start
        return Found(
            layout=layout,
            rank=dist.get_rank(),
            traced=sum(event.bytes for event in trace if event.lane == "net"),
            scheduled=engine.plan.schedule.bytes_per_lane()["net"],
            host=int(median(sent for sent, _ in rounds)),
            formula=formula(layout, [g.spec for g in engine.inside.resources.groups], hosts),
            seconds=median(seconds for _, seconds in rounds),
            busy=busy,
        )


def formula(layout: str, groups: list[GroupSpec], hosts: int) -> int:
    """Bytes that a host sends the others in a step, of R ranks on H hosts.

    With a copy on each host its ranks send 8 N (H - 1) / H together; with state that is cut over all ranks what each
    rank gathers and exchanges, (2w + 4) N (R - 1) / R less what stays, but (H - 1) / H of it.
    """
    if layout == "copies":
        return 2 * FP32 * sum(group.numel for group in groups) * (hosts - 1) // hosts
    terms = by_the_formula(groups, hosts)
    return terms["published"] - terms["kept"] + terms["norm"]


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
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    with (arguments.report / f"{os.environ['RANK']}.jsonl").open("w") as file:
        for layout in arguments.layouts.split(","):
            found = look(layout, work, int(os.environ["GROUP_WORLD_SIZE"]))
            print(json.dumps(asdict(found)), file=file, flush=True)


if __name__ == "__main__":
    main()
