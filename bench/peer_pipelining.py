"""torch's side of ``bench.hosts``: its pipelining package with blocks dealt out in loops, breadth first, over gloo.

Started by ``torchrun`` on each host. Each block is a stage of its own; the embedding goes with the first and the head
with the last, as that package has it. Activations are recomputed, as Penstock does; state is in memory.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleLoopedBFS
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from bench.workload import (
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Tokens,
    Work,
    build_initial,
    main_of_rank,
)


class Block(nn.Module):
    """A block of a Llama, with the embedding if it is the first, and the head if it is the last."""

    def __init__(self, model: Any, index: int, blocks: int) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if index == 0 else None
        self.positions = model.model.rotary_emb
        self.block = model.model.layers[index]
        self.norm, self.head = (model.model.norm, model.lm_head) if index == blocks - 1 else (None, None)

    def forward(self, given: Tensor) -> Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        ids = torch.arange(hidden.shape[1])[None]
        hidden = checkpoint(self._called, hidden, self.positions(hidden, ids), ids, use_reentrant=False)
        if self.norm is None or self.head is None:
            return hidden
        found: Tensor = self.head(self.norm(hidden))
        return found

    def _called(self, hidden: Tensor, positions: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        found: Tensor = self.block(hidden, position_embeddings=positions, position_ids=ids, attention_mask=None)
        return found


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(work: Work) -> list[dict[str, float | None]]:
    """Seconds of each step; and its mean loss on the rank that has the last block, elsewhere None."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model: Any = build_initial(work)
    blocks, device = len(model.model.layers), torch.device("cpu")
    stages = [PipelineStage(Block(model, index, blocks), index, blocks, device) for index in range(rank, blocks, ranks)]
    own = nn.ModuleList([stage.submod for stage in stages])
    optimizer = torch.optim.AdamW(
        own.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = ScheduleLoopedBFS(list(stages), work.micro_batches, loss_of)
    tokens, found = Tokens(work), list[dict[str, float | None]]()
    for step in range(work.steps):
        ids = torch.cat([micro_batch["input_ids"] for micro_batch in tokens.step(step)])
        dist.barrier()
        began = time.perf_counter()
        losses: list[Tensor] = []
        last = {"target": ids, "losses": losses} if rank == (blocks - 1) % ranks else {}
        schedule.step(*((ids,) if rank == 0 else ()), **last)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        mean = sum(loss.item() for loss in losses) / len(losses) if losses else None
        found.append({"seconds": time.perf_counter() - began, "loss": mean})
    return found


if __name__ == "__main__":
    main_of_rank(__doc__, train)
    dist.destroy_process_group()
