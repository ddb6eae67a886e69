"""DeepSpeed's side of ``bench.hosts``: ZeRO-3 in memory over all hosts' ranks, on its CPU accelerator, over gloo.

Runs in DeepSpeed's own virtual environment, started by ``torchrun`` on each host. Weights go after each use, as where
the model does not fit. Activations are kept: a recomputation would gather the weights once more.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.peer_deepspeed import RELEASED, initialized, stepped, zero_3
from bench.workload import Tokens, Work, build_initial


def train(work: Work) -> list[dict[str, float]]:
    """Seconds of each step, and its mean loss here."""
    import deepspeed  # type: ignore[import-not-found] # installed in its own environment only

    deepspeed.init_distributed(dist_backend="gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    tokens, share, found = Tokens(work), work.micro_batches // ranks, []
    # torch's own optimizer: nothing is compiled
    engine = initialized(build_initial(work), zero_3(replace(work, micro_batches=share), RELEASED, torch_adam=True))
    for step in range(work.steps):
        torch.distributed.barrier()
        began = time.perf_counter()
        loss = stepped(engine, tokens.step(step)[rank * share : (rank + 1) * share])
        torch.distributed.barrier()
        found.append({"seconds": time.perf_counter() - began, "loss": loss})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--report", required=True, type=Path, help="folder for each rank's file")
    parser.add_argument("--local_rank", help="as DeepSpeed's own launcher gives it")
    arguments = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    lines = [json.dumps(step) for step in train(work)]
    (arguments.report / f"{os.environ['RANK']}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
