"""One rank of ``bench.wire``: what it has sent in a step, by its trace, by its schedule and by the formula.

Started by ``torchrun``. Leaves one line of JSON for each number of micro-batches.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import penstock
from bench.namespace import sent_on_loopback
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, Work, build
from penstock.schedule.program import GroupSpec

FP32 = 4
_PARTIAL_NORM = 8 / 4096
"""bytes for each element: a partial sum of the gradients' norm"""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes of one step: of this rank, and by the kernel's counter of all ranks together.

    ``published``: (2w + 4) N (R - 1) / R. ``kept``: of these the second gathers of what stays, which are not sent.
    """

    micro_batches: int
    traced: int
    scheduled: int
    published: int
    kept: int
    norm: int
    kernel: int

    @property
    def formula(self) -> int:
        return self.published - self.kept + self.norm


def look(mesh: DeviceMesh, work: Work, counts: Iterable[int]) -> Iterator[Sent]:
    """A step with each number of micro-batches, after one that plans and does not count; weights, state in memory."""
    (micro_batch,) = Tokens(work).step(0)
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
        for count in counts:
            engine.step([micro_batch] * count)
            kernel = counted(lambda count=count: engine.step([micro_batch] * count))  # type: ignore[misc]
            yield Sent(
                micro_batches=count,
                traced=sum(event.bytes for event in engine.trace if event.lane == "net"),
                scheduled=engine.plan.schedule.bytes_per_lane()["net"],
                kernel=kernel,
                **by_the_formula([group.spec for group in engine.inside.resources.groups], mesh.size()),
            )


def counted(work: Callable[[], object]) -> int:
    """Bytes that all ranks send while they do something, from when all have begun until all have ended."""
    dist.barrier()
    before = sent_on_loopback()
    dist.barrier()  # who is first has not begun before all have read
    work()
    dist.barrier()
    after = sent_on_loopback()
    dist.barrier()
    return after - before


def by_the_formula(groups: list[GroupSpec], ranks: int) -> dict[str, int]:
    """What a rank sends, as docs/ranks.md has it: of a model whose parameters are all trained, and whose embedding and
    head are groups of their own, so that each group is used in one stage. N counts the groups' padding to whole shares
    of 4,096 elements.

    The last block's weights stay for its backward, and the ends' (embedding, head) are needed once.
    """
    blocks = [group.numel for group in groups if group.name.startswith("blocks.")]
    ends = sum(group.numel for group in groups) - sum(blocks)
    assert all(group.trainable == group.numel for group in groups)
    everything = ends + sum(blocks)
    bytes_of_all = {
        "published": (2 * FP32 + 4) * everything,
        "kept": FP32 * (blocks[-1] + ends),
        "norm": everything * _PARTIAL_NORM,
    }
    return {name: int(nbytes) * (ranks - 1) // ranks for name, nbytes in bytes_of_all.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--counts", required=True, help="numbers of micro-batches, such as 1,2,4")
    parser.add_argument("--report", required=True, type=Path, help="folder for each rank's file")
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    mesh = penstock.torchrun_mesh("cpu")
    with (arguments.report / f"{os.environ['RANK']}.jsonl").open("w") as file:
        for sent in look(mesh, work, [int(count) for count in arguments.counts.split(",")]):
            print(json.dumps(asdict(sent)), file=file, flush=True)


if __name__ == "__main__":
    main()
