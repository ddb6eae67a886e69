"""One rank of ``bench.ranks``: trains as its environment says, and prints a line of JSON for each step."""

import argparse
import json
import os
import time
from pathlib import Path

import torch

import penstock
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, Work, build_initial

STRANDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--disk", action="store_true", help="weights and state on disk")
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    mesh = penstock.torchrun_mesh("cpu") if ranks > 1 else None
    disk = Path(work.scratch) / "ranks" if arguments.disk else None
    tokens, share = Tokens(work), work.micro_batches // ranks
    with penstock.wrap(
        build_initial(work),
        optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        budget=penstock.Budget(device="512MiB", host="1GiB", disk=disk),
        precision="fp32",
        clip_grad_norm=None,
        device="cpu",
        plan=None,
        strands=STRANDS,
        mesh=mesh,
    ) as engine:
        for step in range(work.steps):
            own = tokens.step(step)[rank * share : (rank + 1) * share]
            start = time.perf_counter()
            stats = engine.step(own)
            print(json.dumps({"seconds": time.perf_counter() - start, "loss": stats.loss}), flush=True)


if __name__ == "__main__":
    main()
