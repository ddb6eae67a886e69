"""DeepSpeed's side of ``bench.hosts``: ZeRO-3 in memory over all hosts' ranks, on its CPU accelerator, over gloo.

Runs in DeepSpeed's own virtual environment, started by ``torchrun`` on each host. Weights go after each use, as where
the model does not fit. Activations are kept: a recomputation would gather the weights once more.
"""

import os
import time
from dataclasses import replace

import torch

from bench.peer_deepspeed import RELEASED, initialized, stepped, zero_3
from bench.workload import Tokens, Work, build_initial, main_of_rank


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


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main_of_rank(__doc__, train)
