"""A block puts what it has computed in the place of what it was handed, in the object that it was handed."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import penstock

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Carrying:
    hidden: torch.Tensor
    count: int = 0


class ReplacingBlock(nn.Module):
    """Puts its result into the object that it is handed, in the place of what it read, and returns that object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, carrying: Carrying) -> Carrying:
        carrying.hidden = carrying.hidden + torch.tanh(self.linear(carrying.hidden))
        carrying.count += 1
        return carrying


class OfReplacingBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(ReplacingBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        carrying = Carrying(hidden=self.first(x))
        for layer in self.layers:
            carrying = layer(carrying)
        return carrying.hidden.square().mean() * carrying.count


def test_a_block_may_put_its_result_in_the_place_of_what_it_read_of_an_object_that_it_returns() -> None:
    """It is computed again from what was there, for each of several micro-batches."""
    torch.manual_seed(0)
    model, xs = OfReplacingBlocks(), torch.randn(2, 4, 8)
    torch.stack([model(x) for x in xs]).mean().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    model.zero_grad()
    with penstock.wrap(
        model,
        optimizer=penstock.SGD(lr=0.1),
        budget=penstock.Budget(device="8MiB", host="8MiB", durability="none"),
        loss_fn=lambda model, micro_batch: model(micro_batch["x"]),
        device="cpu",
    ) as engine:
        assert engine.step([{"x": x} for x in xs]).grad_norm == pytest.approx(float(norm), rel=1e-6)
