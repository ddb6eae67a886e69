"""One rank of ``bench.ranks``: trains as its environment says, and prints a line of JSON for each step."""

import argparse
import json
import os
import time
from pathlib import Path

import torch

import penstock
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, Work, build_initial
from penstock.hardware.machine import load_machine

STRANDS = 4


def drives(scratch: Path, count: int) -> list[Path]:
    """Directories that stand for drives; they are made."""
    found = [scratch / "ranks" / str(i) for i in range(count)]
    for folder in found:
        folder.mkdir(parents=True, exist_ok=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--drives", type=int, default=0, help="weights and state on disk, in so many directories")
    parser.add_argument("--device", default="512MiB", help="each rank's device budget")
    parser.add_argument("--host", default="1GiB", help="the host budget of all ranks together")
    parser.add_argument("--profile", type=Path, help="a machine profile to plan for; without it nothing is predicted")
    parser.add_argument("--clip", type=float, help="the largest norm of the gradients")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    mesh = penstock.torchrun_mesh("cpu", cp=arguments.cp) if ranks > 1 else None
    disk = drives(Path(work.scratch), arguments.drives) or None
    tokens, share, place = Tokens(work), work.micro_batches * arguments.cp // ranks, rank // arguments.cp
    with penstock.wrap(
        build_initial(work),
        optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        budget=penstock.Budget(device=arguments.device, host=arguments.host, disk=disk),
        precision="fp32",
        clip_grad_norm=arguments.clip,
        device="cpu",
        plan=None if arguments.profile is None else load_machine(arguments.profile),
        strands=STRANDS,
        mesh=mesh,
    ) as engine:
        for step in range(work.steps):
            own = tokens.step(step)[place * share : (place + 1) * share]
            start = time.perf_counter()
            stats = engine.step(own)
            found = {"seconds": time.perf_counter() - start, "loss": stats.loss}
            if (prediction := engine.prediction) is not None:
                found |= {
                    "predicted": prediction.time,
                    "bound": prediction.lower_bound,
                    "predicted_bytes": prediction.bytes_per_lane(),
                    "bytes": dict(stats.bytes_moved),
                    "delay": engine.plan.settings.delay,
                }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
