"""The sides of ``bench.gpu``: trains a :class:`bench.workload.Work` in bf16 on a GPU, in one of several ways.

DeepSpeed's needs DeepSpeed in the environment that it is started in; the others need what Penstock does.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.placed import in_words
from bench.workload import (
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Report,
    Tokens,
    Work,
    build,
    recompute_activations,
)

CUDA = torch.device("cuda")
Step = Callable[[list[dict[str, torch.Tensor]]], float]
"""Takes a step's micro-batches, on the host; gives the mean of their losses."""


def initial(work: Work) -> nn.Module:
    """The model in fp32 in host memory. Its random numbers are drawn on the GPU, the same ones in each process."""
    torch.cuda.manual_seed_all(0)
    with CUDA:
        model = build(work.model)
    model = model.cpu()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return model


def loss_of(model: Any, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a micro-batch that is in host memory."""
    loss: torch.Tensor = model(**{name: ids.to(CUDA, non_blocking=True) for name, ids in micro_batch.items()}).loss
    return loss


def mean(losses: list[torch.Tensor]) -> float:
    return torch.stack([loss.detach() for loss in losses]).mean().item()


class Ours:
    """Penstock's steps. It writes what was planned and done beside the report, when no step is timed."""

    def __init__(self, engine: Any, way: str, report: str) -> None:
        self._engine, self._way, self._told = engine, way, Path(report).with_suffix(".plans")
        self._told.unlink(missing_ok=True)

    def __call__(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        loss: float = self._engine.step(micro_batches).loss
        return loss

    def tell(self, batch: int) -> None:
        """The last step's plan, prediction and lanes; and its trace, in place of that of the one before."""
        from penstock.engine.trace import TraceWriter

        engine, prediction, busy = self._engine, self._engine.prediction, dict[str, list[float]]()
        for event in engine.trace:
            busy.setdefault(event.lane, []).append(event.end - event.start)
        lanes = ", ".join(f"{lane} {len(each)} ops {sum(each):.3f} s" for lane, each in busy.items())
        predicted = (
            "nothing" if prediction is None else f"{prediction.time:.3f}, at least {prediction.lower_bound:.3f} s"
        )
        with self._told.open("a") as file:
            print(f"{batch} sequences: predicted {predicted}; {lanes}\n{in_words(engine.plan)}", file=file)
        trace = TraceWriter(self._told.with_name(f"{self._way}-{batch}.trace.json"))
        trace.step(engine.trace)
        trace.close()


@contextmanager
def ours(work: Work, arguments: argparse.Namespace) -> Iterator[Step]:
    """Weights and optimizer state in host memory; as ``planned``, where the plan puts them."""
    import penstock

    planned = arguments.way == "planned"
    host: Any = None if planned else "host"
    with penstock.wrap(
        initial(work),
        optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        budget=penstock.Budget(
            device=arguments.device, host=arguments.host, weights=host, state=host, durability="none"
        ),
        precision="bf16",
        clip_grad_norm=None,
        recompute=None if planned else True,  # as the others do
        device="cuda",
    ) as engine:
        yield Ours(engine, arguments.way, arguments.report)


@contextmanager
def compute(work: Work) -> Iterator[Step]:
    """Forward and backward alone, of a bf16 model that is on the GPU and never changes: no way is faster."""
    model = initial(work).to(torch.bfloat16).to(CUDA)
    recompute_activations(model, reentrant=False)

    def step(micro_batches: list[dict[str, torch.Tensor]]) -> float:
        losses = []
        for micro_batch in micro_batches:
            losses.append(loss_of(model, micro_batch))
            (losses[-1] / len(micro_batches)).backward()
        return mean(losses)

    yield step


@contextmanager
def fsdp2(work: Work) -> Iterator[Step]:
    """``fully_shard`` of each layer with ``CPUOffloadPolicy`` and torch's fused AdamW on the processor.

    Gradients stay on the GPU until the last micro-batch, which is faster than a copy and a sum for each.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (1,))
    model: Any = initial(work)
    recompute_activations(model, reentrant=False)
    rules: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **rules)
    fully_shard(model, **rules)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(micro_batches: list[dict[str, torch.Tensor]]) -> float:
        losses = []
        for micro_batch in micro_batches:
            model.set_requires_gradient_sync(micro_batch is micro_batches[-1])
            losses.append(loss_of(model, micro_batch))
            (losses[-1] / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean(losses)

    yield step
    torch.distributed.destroy_process_group()


@contextmanager
def deepspeed(work: Work, superoffload: bool) -> Iterator[Step]:
    """ZeRO-3 with parameters, gradients and optimizer state in host memory; or SuperOffload, as its guide sets it."""
    import deepspeed  # type: ignore[import-not-found] # only where this side runs

    host: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": host, "sub_group_size": 400_000_000}
    if superoffload:
        zero |= {"overlap_comm": False, "reduce_bucket_size": 400_000_000}
        zero["offload_optimizer"] = host | {"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
    else:
        zero |= {"overlap_comm": True, "offload_param": host}
    config = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
    }
    deepspeed.init_distributed()
    model = initial(work)
    recompute_activations(model, reentrant=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(micro_batches: list[dict[str, torch.Tensor]]) -> float:
        losses = []
        for micro_batch in micro_batches:
            losses.append(loss_of(engine, micro_batch))
            engine.backward(losses[-1])
            engine.step()
        return mean(losses)

    yield step
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["penstock", "planned", "compute", "fsdp2", "deepspeed", "superoffload"])
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--report", required=True, help="file that takes one line of JSON a step")
    parser.add_argument("--batch", type=int, action="append", required=True, help="sequences in a micro-batch; in turn")
    parser.add_argument("--device", default="60GiB", help="Penstock's device budget")
    parser.add_argument("--host", default="100GiB", help="Penstock's host budget")
    arguments = parser.parse_args()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
    }
    work = Work.from_json(arguments.work)
    report = Report(arguments.report)
    with ExitStack() as closing:
        if arguments.way in ("penstock", "planned"):
            way = ours(work, arguments)
        elif arguments.way in ("deepspeed", "superoffload"):
            way = deepspeed(work, arguments.way == "superoffload")
        else:
            way = {"compute": compute, "fsdp2": fsdp2}[arguments.way](work)
        train_step = closing.enter_context(way)
        report.start()
        for batch in arguments.batch:
            tokens = Tokens(replace(work, batch=batch))
            for step in range(work.steps // len(arguments.batch)):
                start = time.perf_counter()
                loss = train_step(tokens.step(step))
                torch.cuda.synchronize()
                report.step(seconds=time.perf_counter() - start, loss=loss)
                if isinstance(train_step, Ours):
                    train_step.tell(batch)
        memory = {"device_peak": torch.cuda.max_memory_allocated(), "device_reserved": torch.cuda.max_memory_reserved()}
        Path(arguments.report).with_suffix(".memory").write_text(json.dumps(memory))


if __name__ == "__main__":
    main()
