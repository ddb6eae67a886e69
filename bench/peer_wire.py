"""DeepSpeed's side of ``bench.wire``: one rank of ZeRO-3 in memory, on its CPU accelerator, over gloo.

Runs in DeepSpeed's own virtual environment, started by ``torchrun``. Leaves the kernel's count of a step's bytes.
"""

import argparse
import json
import os
from pathlib import Path

import torch

from bench.namespace import sent_on_loopback
from bench.peer_deepspeed import RELEASED, initialized, stepped, zero_3
from bench.workload import Tokens, Work, build

MODES = ("released", "default")
"""``released``: weights go after each use, as where the model does not fit. ``default``: 0.19.8's limits, under which
up to 1e9 parameters stay from a micro-batch's forward to its backward."""


def train(work: Work, mode: str) -> list[dict[str, float]]:
    """Bytes that all ranks have sent in each step, and its mean loss here. Activations are kept: a recomputation would
    gather the weights once more."""
    import deepspeed  # type: ignore[import-not-found] # installed in its own environment only

    deepspeed.init_distributed(dist_backend="gloo")
    # torch's own optimizer: nothing is compiled, and it sends nothing
    config = zero_3(work, RELEASED if mode == "released" else {}, torch_adam=True)
    engine = initialized(build(work.model), config)
    tokens, found = Tokens(work), []
    barrier = torch.distributed.barrier
    for step in range(work.steps):
        barrier()
        before = sent_on_loopback()
        barrier()
        loss = stepped(engine, tokens.step(step))
        barrier()
        found.append({"kernel": sent_on_loopback() - before, "loss": loss})
        barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--mode", required=True, choices=MODES)
    parser.add_argument("--report", required=True, type=Path, help="folder for each rank's file")
    parser.add_argument("--local_rank", help="as DeepSpeed's own launcher gives it")
    arguments = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    found = train(work, arguments.mode)
    lines = [json.dumps(step) for step in found]
    (arguments.report / f"{os.environ['RANK']}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
