"""A block puts what it has computed in the place of what it was handed, in the object that it was handed."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import penstock

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Inner:
    hidden: torch.Tensor
    within: "Carrying | None" = None
    """the object that holds it"""


@dataclass
class Notes:
    """Without a tensor, until a block puts one there."""

    total: torch.Tensor | None = None
    calls: int = 0


@dataclass
class Carrying:
    hidden: torch.Tensor
    inner: Inner
    count: int = 0
    listed: list[torch.Tensor] = field(default_factory=list)


class ReplacingBlock(nn.Module):
    """Puts its results into the object that it is handed, in the place of what it read. ``returns``: what it returns
    besides: nothing, that object, or what else is true of both."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(8, 8), returns

    def forward(self, carrying: Carrying, notes: Notes) -> Carrying | torch.Tensor | None:
        carrying.hidden = carrying.hidden + torch.tanh(self.linear(carrying.hidden))
        assert carrying.inner.within is carrying
        carrying.inner.hidden = carrying.inner.hidden * carrying.inner.within.hidden.sigmoid()
        carrying.listed[0] = carrying.listed[0] + carrying.inner.hidden
        carrying.count += 1
        notes.calls += 1
        term = carrying.hidden.square().mean() / notes.calls
        notes.total = term if notes.total is None else notes.total + term
        return {"nothing": None, "the object": carrying, "a tensor": carrying.hidden.sum()}[self.returns]


class OfReplacingBlocks(nn.Module):
    def __init__(self, returns: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(ReplacingBlock(returns) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        carrying, more = Carrying(hidden=first, inner=Inner(first * 2), listed=[x]), []
        carrying.inner.within, notes = carrying, Notes()
        for layer in self.layers:
            answer = layer(carrying, notes)
            carrying = answer if isinstance(answer, Carrying) else carrying
            more += [answer] if isinstance(answer, torch.Tensor) else []
        found = carrying.hidden.square().mean() * carrying.count + carrying.listed[0].square().sum()
        assert notes.total is not None
        return found + 0.1 * sum(more) + notes.total * notes.calls


@pytest.mark.parametrize("recompute", [True, None])
@pytest.mark.parametrize("returns", ["nothing", "the object", "a tensor"])
def test_a_block_may_put_its_results_in_the_place_of_what_it_read(returns: str, recompute: bool | None) -> None:
    """It is computed again from what was there, for each of several micro-batches, and all gradients find their way."""
    torch.manual_seed(0)
    model, xs = OfReplacingBlocks(returns), torch.randn(2, 4, 8)
    torch.stack([model(x) for x in xs]).mean().backward()
    plain = {name: p.detach() - 1e-3 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with penstock.wrap(
        model,
        optimizer=penstock.SGD(lr=1e-3),
        budget=penstock.Budget(device="8MiB", host="8MiB", durability="none"),
        loss_fn=lambda model, micro_batch: model(micro_batch["x"]),
        clip_grad_norm=None,
        recompute=recompute,
        device="cpu",
    ) as engine:
        engine.step([{"x": x} for x in xs])
        found = dict(engine.master_parameters())
    assert found.keys() == plain.keys()
    for name, values in plain.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6, msg=name)
