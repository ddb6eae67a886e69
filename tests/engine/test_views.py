"""Outputs of a block that have memory of their own in one micro-batch and are views in another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
CHUNK = 4


class Block(nn.Module):
    """Its second output is the last of the states of whole chunks, a view, or that of what is left over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x if state is None else x + state).tanh()
        made = y.cumsum(1)
        return x + y, made[:, -1:] if x.shape[1] % CHUNK == 0 else made[:, -1:] + y[:, :1]


class Model(nn.Module):
    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self.first = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, state = self.first(x), None
        for block in self.blocks:
            x, found = block(x, state)
            state = found if self.read else None
        return self.last(x).square().mean()


class Unpadded(nn.Module):
    """Hands its blocks the numbers that are not 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x[x != 0].unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("activations", ["device", "host", "disk"])
def test_outputs_that_are_larger_for_other_numbers_have_to_stay_on_the_device(activations: Any, tmp_path: Path) -> None:
    few, many = {"x": torch.zeros(4096)}, {"x": torch.ones(4096)}
    few["x"][:8] = 1
    budget = penstock.Budget(device="16MiB", host="16MiB", disk=tmp_path, activations=activations)
    with penstock.wrap(
        Unpadded(), optimizer=penstock.SGD(lr=0.0), budget=budget, precision="fp32", device="cpu", plan=None,
        loss_fn=lambda model, mb: model(**mb),
    ) as engine:  # fmt: skip
        engine.step([few] * 3)
        if activations == "device":
            engine.step([many] * 3)
            return
        with pytest.raises(ModelError, match=r"puts out 131072 bytes, .* out 256\. .* budget\.activations='device'"):
            engine.step([many] * 3)
        assert engine.step([few] * 3).step == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("read", [True, False], ids=["read", "not-read"])
@pytest.mark.parametrize("order", [(8, 6), (6, 8), (8,), (6,)], ids=str)
def test_an_output_may_be_a_view_in_some_micro_batches(order: tuple[int, ...], read: bool, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The largest, which is what is probed, has it as a view or not, and one is probed or several."""
    generator = torch.Generator().manual_seed(0)
    # Fewer rows of what is longer: none is smaller than another in every respect; then one that is.
    shapes = [(20 - length, length) for length in order] + [(2, 4), (2, 5)]
    micro_batches = [{"x": torch.randn(rows, length, 2, generator=generator)} for rows, length in shapes]
    torch.manual_seed(1)
    model, plain = Model(read=read), Model(read=read)
    plain.load_state_dict(model.state_dict())
    for mb in micro_batches:
        (plain(**mb) / len(micro_batches)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    budget = penstock.Budget(device="1MiB", host="1MiB", disk=tmp_path, activations="host")
    with penstock.wrap(
        model,
        optimizer=penstock.SGD(lr=0.1),
        budget=budget,
        precision="fp32",
        device="cpu",
        loss_fn=lambda model, mb: model(**mb),
        clip_grad_norm=None,
        plan=None,
    ) as engine:
        engine.step(micro_batches, loss_weights=[1 / len(micro_batches)] * len(micro_batches))
        after = dict(engine.master_parameters())
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(
            after[name], wanted.detach(), rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )
