"""A small model of which a step reaches only a part, as its micro-batches decide, and what training it must give.

``Switches`` has a trunk of blocks and a tower of blocks beside it. A step is a letter:

    f   all of it: an image goes through the tower, its projection and the trunk
    t   text alone: neither the tower nor its projection
    s   text alone, and the forward leaves out a block in the middle of the trunk
    c   an image, and the trunk is cut: nothing before its last block gets a gradient, so of the ends only the head does
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import penstock
from tests.models import VOCABULARY, Case, MicroBatch
from tests.training import Result

WIDTH = 64
KINDS = "ftsc"
ADAMW = penstock.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


class _Block(nn.Module):
    """More than one chunk of trained parameters, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x))) * self.scale


class Switches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.tower = nn.ModuleList(_Block() for _ in range(2))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.trunk = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        tokens: torch.Tensor,
        image: torch.Tensor | None = None,
        short: torch.Tensor | None = None,
        cut: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(tokens)
        if image is not None:
            for block in self.tower:
                image = block(image)
            x = x + self.project(image).mean(1, keepdim=True)
        for number, block in enumerate(self.trunk):
            if number == 1 and short is not None:
                continue
            if number == 2 and cut is not None:
                x = x.detach()
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    loss = model(**micro_batch)
    assert isinstance(loss, torch.Tensor)
    return loss


CASE = Case(build=Switches, micro_batch=lambda g, rows, length: _draw("f", g, rows, length), blocks=5, loss_fn=_loss)


def _draw(kind: str, generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    drawn = {"tokens": torch.randint(VOCABULARY, (rows, length), generator=generator)}
    if kind in "fc":
        drawn["image"] = torch.randn(rows, 3, WIDTH, generator=generator)
    if kind in "sc":
        drawn["short" if kind == "s" else "cut"] = torch.ones(1)
    return drawn


def steps_of(pattern: str, *, micro_batches: int = 2) -> list[list[MicroBatch]]:
    """The micro-batches of each step of a pattern, a letter each; of unequal lengths."""
    return [
        [_draw(kind, torch.Generator().manual_seed(100 * step + m), 2, 5 + m) for m in range(micro_batches)]
        for step, kind in enumerate(pattern)
    ]


def plain_loop(steps: Sequence[Sequence[MicroBatch]], clip: float | None, seed: int = 0) -> Result:
    """The training by plain PyTorch: losses, norms and parameters."""
    model = CASE.model(seed)
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1
    )
    losses, norms = [], []
    for micro_batches in steps:
        optimizer.zero_grad()
        each = [model(**mb) / len(micro_batches) for mb in micro_batches]
        for loss in each:
            loss.backward()
        losses.append(float(sum(loss.detach() for loss in each)))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip)))
        optimizer.step()
    return Result(losses=losses, norms=norms, state={n: p.detach() for n, p in model.named_parameters()})
