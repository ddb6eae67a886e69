"""DeepSpeed's side of ``bench.zero_infinity``: ZeRO-3 with parameters and optimizer state on disk.

Runs in DeepSpeed's own virtual environment, on its CPU accelerator, as one rank over gloo. The settings are the
fastest that were found to finish a step (see the notes at each); anything else is DeepSpeed's default.
"""

import argparse
import os
import time
from typing import Any

import torch

from bench.workload import (
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Report,
    Tokens,
    Work,
    build_initial,
    recompute_activations,
)


def settings(work: Work, largest: int, pipeline: bool, sub_group: int) -> dict[str, Any]:
    """DeepSpeed's configuration. ``largest`` is the number of elements of the largest parameter."""
    disk = {"device": "nvme", "nvme_path": work.scratch, "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group,
            "overlap_comm": False,
            # With prefetching on, 0.19.8 fails in a step: the parameter is "already assigned swap buffer".
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "offload_param": disk | {"buffer_count": 16, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": disk
            | {"buffer_count": 16 if pipeline else 5, "pipeline_read": pipeline, "pipeline_write": pipeline},
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 1 << 30,
    }


def train(work: Work, report: Report, pipeline: bool, sub_group: int) -> None:
    import deepspeed  # type: ignore[import-not-found] # installed in its own environment only

    deepspeed.init_distributed(dist_backend="gloo")
    model = build_initial(work)
    # Not the non-reentrant kind: it compares recomputed shapes, and ZeRO-3's partitioned parameters have none.
    recompute_activations(model, reentrant=True)
    largest = max(p.numel() for p in model.parameters())
    config = settings(work, largest, pipeline, sub_group)
    # Partitioned here, not by initialize(): that passes a dtype on, which 0.19.8 takes as bf16 on a CPU without fp16.
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = Tokens(work)
    report.start()
    for step in range(work.steps):
        start = time.perf_counter()
        losses = []
        for micro_batch in tokens.step(step):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        report.step(seconds=time.perf_counter() - start, loss=sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--report", required=True, help="file that takes one line of JSON a step")
    parser.add_argument("--pipeline", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--sub-group", type=int, default=1_000_000_000)
    arguments = parser.parse_args()
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29571"),
    }
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    train(work, Report(arguments.report), arguments.pipeline, arguments.sub_group)


if __name__ == "__main__":
    main()
