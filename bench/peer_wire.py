"""DeepSpeed's side of ``bench.wire``: one rank of ZeRO-3 in memory, on its CPU accelerator, over gloo.

Runs in DeepSpeed's own virtual environment, started by ``torchrun``. Leaves the kernel's count of a step's bytes.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from bench.namespace import sent_on_loopback
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, Work, build

MODES = ("released", "default")
"""``released``: weights go after each use, as where the model does not fit. ``default``: 0.19.8's limits, under which
up to 1e9 parameters stay from a micro-batch's forward to its backward."""


def settings(work: Work, mode: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": False, "stage3_prefetch_bucket_size": 0}
    if mode == "released":
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            # torch's own optimizer: nothing is compiled, and it sends nothing
            "params": {
                "lr": LEARNING_RATE,
                "betas": BETAS,
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
                "torch_adam": True,
            },
        },
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
    }


def train(work: Work, mode: str) -> list[dict[str, float]]:
    """Bytes that all ranks have sent in each step, and its mean loss here. Activations are kept: a recomputation would
    gather the weights once more."""
    import deepspeed  # type: ignore[import-not-found] # installed in its own environment only

    deepspeed.init_distributed(dist_backend="gloo")
    model, config = build(work.model), settings(work, mode)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens, found = Tokens(work), []
    barrier = torch.distributed.barrier
    for step in range(work.steps):
        losses = []
        barrier()
        before = sent_on_loopback()
        barrier()
        for micro_batch in tokens.step(step):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        barrier()
        found.append({"kernel": sent_on_loopback() - before, "loss": sum(losses) / len(losses)})
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
