"""DeepSpeed's side of ``bench.zero_infinity``: ZeRO-3 with parameters and optimizer state on disk.

Runs in DeepSpeed's own virtual environment, on its CPU accelerator, over gloo, as the one rank or as that of its
environment, which takes its share of a step's micro-batches. The settings are the fastest that were found to finish a
step (see the notes at each); anything else is DeepSpeed's default.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

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

RELEASED = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""Weights go after each use, as where the model does not fit."""


def zero_3(work: Work, zero: dict[str, Any], **optimizer: Any) -> dict[str, Any]:
    """DeepSpeed's configuration of ZeRO-3 on CPUs. ``zero``: settings of it; ``optimizer``: parameters of AdamW."""
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, **optimizer},
        },
        # With prefetching on, 0.19.8 fails in a step: the parameter is "already assigned swap buffer".
        "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_prefetch_bucket_size": 0, **zero},
        "steps_per_print": 1 << 30,
    }


def initialized(model: nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine of a model."""
    import deepspeed  # type: ignore[import-not-found] # installed in its own environment only

    # Partitioned here, not by initialize(): that passes a dtype on, which 0.19.8 takes as bf16 on a CPU without fp16.
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def stepped(engine: Any, micro_batches: Sequence[dict[str, torch.Tensor]]) -> float:
    """A step of this rank's micro-batches; the mean of their losses."""
    losses = []
    for micro_batch in micro_batches:
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def settings(work: Work, largest: int, pipeline: bool, sub_group: int) -> dict[str, Any]:
    """DeepSpeed's configuration. ``largest`` is the number of elements of the largest parameter."""
    disk = {"device": "nvme", "nvme_path": work.scratch, "pin_memory": True}
    zero = {
        "sub_group_size": sub_group,
        "offload_param": disk | {"buffer_count": 16, "buffer_size": largest, "max_in_cpu": 0},
        "offload_optimizer": disk
        | {"buffer_count": 16 if pipeline else 5, "pipeline_read": pipeline, "pipeline_write": pipeline},
    }
    aio = {
        "block_size": 1 << 20,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
    }
    return zero_3(work, zero | RELEASED) | {"aio": aio}


def train(work: Work, report: Report, pipeline: bool, sub_group: int) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    tokens, share = Tokens(work), work.micro_batches // ranks
    model = build_initial(work)
    # Not the non-reentrant kind: it compares recomputed shapes, and ZeRO-3's partitioned parameters have none.
    recompute_activations(model, reentrant=True)
    largest = max(p.numel() for p in model.parameters())
    engine = initialized(model, settings(replace(work, micro_batches=share), largest, pipeline, sub_group))
    report.start()
    for step in range(work.steps):
        start = time.perf_counter()
        loss = stepped(engine, tokens.step(step)[rank * share : (rank + 1) * share])
        report.step(seconds=time.perf_counter() - start, loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--report", required=True, help="file that takes one line of JSON a step")
    parser.add_argument("--pipeline", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--sub-group", type=int, default=1_000_000_000)
    arguments = parser.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    for name, value in (alone | {"DS_ACCELERATOR": "cpu"}).items():
        os.environ.setdefault(name, value)
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    train(work, Report(arguments.report), arguments.pipeline, arguments.sub_group)


if __name__ == "__main__":
    main()
