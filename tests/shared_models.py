"""Small models whose parameters are used by many stages: given to blocks, between them, or tied over them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models import VOCABULARY, Case, causal_lm

WIDTH = 32


class Block(nn.Module):
    """A residual layer that takes what it is given: another tensor to multiply by, or values to add."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.gelu(self.up(x)))
        if scale is not None:
            out = out * scale
        return x + out if values is None else x + out + values


class Language(nn.Module):
    """Embedding, six blocks, norm, head. What it learns at each place is the token's counterpart from the end."""

    LAYERS = 6

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(self.LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def middle(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.norm(self.middle(self.embed(input_ids), input_ids)))
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flip(1).flatten()))


class Given(Language):
    """One parameter that every block is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def middle(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


class Between(Language):
    """A norm and a scalar of its own between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in self.blocks])
        self.factors = nn.Parameter(torch.ones(len(self.blocks)))

    def middle(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(self.norms[i](x) * self.factors[i])
        return x


class Tied(Language):
    """Three blocks that share a matrix, a head that is the embedding, and one parameter more for the tied blocks."""

    def __init__(self) -> None:
        super().__init__()
        for i in (2, 5):
            self.blocks[i].up.weight = self.blocks[0].up.weight
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def middle(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, self.scale) if i % 3 else block(x)
        return x


class ValueEmbeddings(Language):
    """Each layer's input is a mixture with the embedding by scalars of its own, and pairs of layers from the outside in
    share an embedding of the tokens that is added to their output."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.first = nn.Parameter(torch.ones(self.LAYERS)), nn.Parameter(torch.full((self.LAYERS,), 0.1))
        self.values = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH) for _ in range(self.LAYERS // 2)])

    def middle(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        start = x
        for i, block in enumerate(self.blocks):
            values = self.values[min(i, self.LAYERS - 1 - i)](tokens)
            x = block(self.mixed[i] * x + self.first[i] * start, None, values)
        return x


SHARED = {
    name: Case(build=build, micro_batch=causal_lm, blocks=6)
    for name, build in (("given", Given), ("between", Between), ("tied", Tied), ("values", ValueEmbeddings))
}
