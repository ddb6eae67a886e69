"""Findings for several shapes of micro-batch are put together."""

import pytest
import torch
from torch import nn

import penstock
from penstock.engine.probed import slowest_of
from penstock.shape.model import StageTimes
from tests.stacks import Layer, stack


def test_halves_of_a_backward_have_times_where_those_of_all_shapes_have() -> None:
    """Where one shape's backwards are run as a whole, those of all are."""
    one, other = (StageTimes(forward=(x, 1.0), backward=(1.0, x), weights=(0.5, x)) for x in (2.0, 3.0))
    whole = StageTimes(forward=(1.0, 4.0), backward=(1.0, 1.0))
    assert slowest_of([one, other]) == StageTimes(forward=(3.0, 1.0), backward=(1.0, 3.0), weights=(0.5, 3.0))
    assert slowest_of([one, None, whole]) == StageTimes(forward=(2.0, 4.0), backward=(1.0, 2.0))


class ShortAndLong(nn.Module):
    """Takes short sequences past a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if x.shape[1] > 3 else self.layers[1:]:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("order", [1, -1])
def test_shapes_of_one_step_that_take_different_ways_are_refused_in_words(order: int) -> None:
    micro_batches = [{"x": torch.ones(2, 4, 4)}, {"x": torch.ones(4, 3, 4)}][::order]
    settings = {"loss_fn": lambda model, given: model(**given), "plan": None, "clip_grad_norm": None}
    budget = penstock.Budget(device="64MiB", host="64MiB")
    with (
        penstock.wrap(ShortAndLong(), optimizer=penstock.AdamW(lr=1e-3), budget=budget, **settings) as engine,
        pytest.raises(penstock.ModelError, match="of one step take different ways through the model's blocks"),
    ):
        engine.step(micro_batches)


class WritesElsewhere(Layer):
    """Halves weights of ``others`` for numbers that fall from the first feature to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[nn.Linear] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.others and bool((x[..., 0] - x[..., -1]).sum() > 0):
            with torch.no_grad():
                self.others[0].weight.mul_(0.5)
        return super().forward(x)


def test_a_probe_between_steps_leaves_weights_on_the_device_as_they_are() -> None:
    """Of one block, where those of the block that writes to them are on the host."""
    case = stack(WritesElsewhere)
    model = case.model()
    first, _, last = model.layers
    budget = penstock.Budget(device="128KiB", host="64MiB")
    settings = {"loss_fn": case.loss_fn, "plan": None, "optimizer": penstock.AdamW(lr=1e-3), "budget": budget}
    with penstock.wrap(model, **settings) as engine:
        engine.step(case.micro_batches(2, length=12))
        before = {name: value.clone() for name, value in engine.master_parameters()}
        first.others = [last.linear]
        with pytest.raises(penstock.ModelError, match="changes a parameter"):
            engine.step(case.micro_batches(2, length=30))
        assert all(torch.equal(value, before[name]) for name, value in engine.master_parameters())
