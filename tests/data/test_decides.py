"""What a block does with a micro-batch may depend on its data: the one that was probed is no rule."""

import copy
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ModelError
from penstock.state.values import committed

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 4
ORDERS = ([[1, 0]], [[0], [1]], [[0, 0], [1, 1], [0, 1]])
"""Steps of micro-batches, each of which is one way or the other."""


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, on: bool) -> tuple[torch.Tensor, torch.Tensor]:
        second = torch.zeros(())
        if self.kind == "an output that trains":
            second = self.b(x).pow(2).mean() if on else second
        elif self.kind == "a buffer put in place" and on:
            self.seen = self.seen + 1
        elif self.kind == "a buffer written to":
            self.seen += float(on)
        elif self.kind == "a buffer written to only then" and on:
            self.seen += 1
        return x + self.a(x).tanh() * (1 + self.seen), second


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        h, others = self.into(x), []
        for block in self.blocks:
            h, other = block(h, bool(on))
            others.append(other)
        loss: torch.Tensor = self.out(h).pow(2).mean() + torch.stack(others).sum()
        return loss


def micro_batch(on: int, seed: int) -> dict[str, Any]:
    return {"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)), "on": torch.tensor([on])}


def loss_of(model: nn.Module, given: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**given)
    return loss


def engine_of(model: nn.Module, disk: Path, schedule: Any) -> penstock.Engine:
    return penstock.wrap(
        model,
        optimizer=penstock.AdamW(lr=1e-2),
        budget=penstock.Budget(device="32MiB", host="32MiB", disk=disk),
        device="cpu",
        clip_grad_norm=None,
        schedule=schedule,
        loss_fn=loss_of,
        plan=None,
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("order", "schedule"),
    [pytest.param(o, s, id=f"{i}-{s}") for (i, o), s in product(enumerate(ORDERS), ("vertical", "horizontal"))],
)
@pytest.mark.parametrize("kind", ["an output that trains", "a buffer put in place", "a buffer written to"])
def test_no_gradient_is_lost_and_no_buffer_counts_twice(
    kind: str, order: list[list[int]], schedule: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Model(kind)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    if schedule == "horizontal" or kind.startswith("a buffer"):  # where micro-batches see what another has counted
        order = [[on] for step in order for on in step]
    with engine_of(model, tmp_path / "store", schedule) as engine:
        for number, ways in enumerate(order):
            given = [micro_batch(on, 10 * number + m) for m, on in enumerate(ways)]
            engine.step(given)
            optimizer.zero_grad()
            for one in given:
                (plain(**one) / len(given)).backward()
            optimizer.step()
    with committed([[tmp_path / "store"]]) as found:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found.values.parameter(name), parameter.detach(), msg=name)
        for name, buffer in plain.named_buffers():
            assert torch.equal(found.values.buffers[name], buffer), name


def test_a_buffer_that_only_some_micro_batches_write_to_is_refused(tmp_path: Path) -> None:
    """Where the first has shown it, it is known. The refusal comes before anything has changed."""
    with engine_of(Model("a buffer written to only then"), tmp_path / "store", "vertical") as engine:
        engine.step([micro_batch(0, 0)])
        with pytest.raises(ModelError, match=r"changes its buffer 'seen' for this micro-batch.*self\.seen = "):
            engine.step([micro_batch(1, 1)])
        engine.step([micro_batch(0, 2)])
        assert engine.step_count == 2
