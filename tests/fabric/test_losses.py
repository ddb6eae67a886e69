"""Losses of loops on Fabric: what a loop reads beside the model's outputs, and losses that are made in several ways."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn

import penstock
from tests.fabric.test_fabric import batch, fabric_on, strategy
from tests.library_runs import llama

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:Precision 16")]

TARGETS = torch.tensor([[1000.5, 1.25, -3.125], [1001.25, 0.1, 7.3]])
"""of which bf16 has none but in part"""


class Regression(nn.Module):
    """Puts out a tensor, or by name what its blocks have made, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, labels: torch.Tensor | None = None, every: bool = False) -> Any:
        found = tuple(x := x + layer(x) for layer in self.layers)
        return {"out": self.out(x), "every": found} if every else self.out(x)


def _of_targets(model: Any, x: torch.Tensor) -> Any:
    return F.mse_loss(model(x), TARGETS)


def _of_one_dtype(model: Any, x: torch.Tensor) -> Any:
    return F.huber_loss(model(x=x), TARGETS)


def _of_the_input(model: Any, x: torch.Tensor) -> Any:
    """As an autoencoder's."""
    return F.l1_loss(model(x), x)


def _of_the_input_by_name(model: Any, x: torch.Tensor) -> Any:
    return F.huber_loss(model(x=x), x)


def _of_the_input_that_is_its_own_label(model: Any, x: torch.Tensor) -> Any:
    return F.huber_loss(model(labels=x, x=x), TARGETS)


def _of_parts(model: Any, x: torch.Tensor) -> Any:
    found = model(x, every=True)
    return (found["out"] - TARGETS).square().mean() + torch.stack(found["every"]).mean() + found["every"][0].sum()


def _of_another_call(model: Any, x: torch.Tensor) -> Any:
    """The model is called with what the loop has made of its outputs."""
    return F.mse_loss(model(model(x) * 0.5 + TARGETS), TARGETS)


def _stepped(fabric: Fabric, loss_of: Callable[[Any, torch.Tensor], Any]) -> list[Any]:
    """The loss of a step, and what the model says then."""
    torch.manual_seed(0)
    model: Any = Regression()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.randn(2, 3)
    loss = loss_of(model, x)
    fabric.backward(loss)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        said = model(x)
    return [loss.item(), said.dtype, said.tolist()]


LOSSES_OF = [
    *(_of_targets, _of_one_dtype, _of_the_input, _of_the_input_by_name, _of_the_input_that_is_its_own_label),
    _of_parts,
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("loss_of", LOSSES_OF)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true"])
def test_a_loss_is_computed_in_the_precision_that_fabric_computes_it_in(loss_of: Any, precision: Any) -> None:
    """What a loop alone reads stays as it is, and outputs in 16 bits are handed to it in fp32."""
    own = Fabric(accelerator="cpu", devices=1, precision=precision, strategy=strategy())
    found = _stepped(own, loss_of)
    own.strategy.engine.close()  # type: ignore[attr-defined]
    assert found == _stepped(Fabric(accelerator="cpu", devices=1, precision=precision), loss_of)


def test_a_model_is_called_in_its_own_precision_with_what_a_loop_has_computed_in_fp32() -> None:
    own = Fabric(accelerator="cpu", devices=1, precision="bf16-true", strategy=strategy())
    found, *_ = _stepped(own, _of_another_call)
    own.strategy.engine.close()  # type: ignore[attr-defined]
    expected, *_ = _stepped(Fabric(accelerator="cpu", devices=1, precision="bf16-true"), _of_another_call)
    assert found == expected


LOSSES: dict[str, Callable[[Any], Any]] = {
    "the model's": lambda model: model(**batch()).loss,
    "of logits": lambda model: F.cross_entropy(
        model(**batch()).logits[:, :-1].flatten(0, 1), batch()["labels"][:, 1:].flatten()
    ),
    "of two calls": lambda model: model(**batch()).loss + model(**batch()).logits.square().mean(),
}


def _trained(fabric: Fabric, steps: Sequence[Sequence[str]]) -> list[list[float]]:
    model: Any = llama()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    found = []
    for step in steps:
        losses = [LOSSES[name](model) for name in step]
        for loss in losses:
            fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def test_losses_of_a_step_may_be_made_in_several_ways_and_of_others_in_other_ways() -> None:
    """Of one step they go the same way through the blocks: what does not is refused, and can be taken by itself."""
    steps = [["the model's", "of logits"], ["of two calls"], ["of logits", "the model's"], ["the model's"]]
    expected = _trained(Fabric(accelerator="cpu", devices=1), steps)
    own = fabric_on()
    torch.testing.assert_close(_trained(own, steps), expected, rtol=1e-4, atol=1e-5)
    own.strategy.engine.close()  # type: ignore[attr-defined]
    for mixed in (["the model's", "of two calls"], ["of two calls", "the model's"]):
        own = fabric_on()
        with pytest.raises(penstock.ModelError, match="take different ways through the model's blocks"):
            _trained(own, [mixed])
        own.strategy.engine.close()  # type: ignore[attr-defined]
