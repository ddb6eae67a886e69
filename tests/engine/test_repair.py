"""Gradients that are infinite, or a thousand times too large, at a chosen block and micro-batch: what a step that has
begun before it knew is turned into. The oracle is a serial run that waits for the norm, with the same faults."""

from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import Case, MicroBatch
from tests.training import Result, assert_same, budget, train

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, WIDTH = 4, 48


class Scale(torch.autograd.Function):
    """Leaves what passes through as it is, and multiplies the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class Layer(nn.Module):
    """A residual block whose gradients are multiplied in the block that ``fault`` names (1 for the first)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, fault: torch.Tensor) -> torch.Tensor:
        block, factor = (float(f) for f in fault)
        y = torch.tanh(self.up(self.norm(x)))
        return x + (Scale.apply(y, factor) if block == self.index else y)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer(i) for i in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, fault: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, fault)
        return self.head(x)


def loss_of(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    out = model(micro_batch["x"], micro_batch["fault"])
    return (out - 2 * micro_batch["x"]).float().square().mean()


def drawn(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
    return {"x": torch.randn(rows, length, 8, generator=generator), "fault": torch.tensor([-1.0, 1.0])}


CASE = Case(build=Stack, micro_batch=drawn, blocks=BLOCKS, loss_fn=loss_of)
M = 3


@cache
def steps(block: int, micro_batch: int, factor: float) -> list[list[MicroBatch]]:
    """Three steps; in the second one micro-batch has the fault."""
    found = [CASE.micro_batches(M, seed=step, length=6) for step in range(3)]
    found[1][micro_batch]["fault"] = torch.tensor([float(block), factor])
    return found


@cache
def oracle(precision: str, clip: float, block: int, micro_batch: int, factor: float) -> Result:
    with TemporaryDirectory() as folder:
        return train(
            CASE,
            budget(Path(folder, "store")),
            steps(block, micro_batch, factor),
            precision=precision,
            clip_grad_norm=clip,
            overlap=False,
            speculate=False,
            delay=0.0,
        )


PLACES: dict[str, dict[str, Any]] = {
    "disk": {},
    "weights-host": {"weights": "host"},
    "host": {"weights": "host", "state": "host"},
    "device": {"weights": "device", "state": "device"},
    "mixed": {"weights": None, "state": None, "durability": "none", "device": "260KiB", "host": "300KiB"},
}


def early(precision: str, place: str) -> bool:
    """True if anything can step before the norm is known: in fp32 weights in memory are state in memory."""
    return place in ("disk", "mixed") or (precision != "fp32" and place == "weights-host")


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize(("precision", "place"), list(product(("fp32", "bf16", "fp16"), PLACES)))
@pytest.mark.parametrize(("block", "micro_batch"), [(0, 2), (2, 0), (3, 1)])
def test_a_step_with_an_infinite_gradient_never_was(
    tmp_path: Path, precision: str, place: str, block: int, micro_batch: int
) -> None:
    wanted = oracle(precision, 1.0, block, micro_batch, float("inf"))
    found = train(
        CASE,
        budget(tmp_path, **PLACES[place]),
        steps(block, micro_batch, float("inf")),
        precision=precision,
        clip_grad_norm=1.0,
        speculate=early(precision, place) or None,
        delay=0.4,
    )
    assert found.losses == wanted.losses
    assert found.norms[::2] == wanted.norms[::2]
    assert_same(Result(state=wanted.state), Result(state=found.state))
    assert [s.skipped for s in found.stats] == [False, True, False]
    assert [s.loss_scale for s in found.stats] == [s.loss_scale for s in wanted.stats]
    said = found.stats[1].non_finite
    assert said is not None
    assert f"layers.{block}." in said


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize(("precision", "place"), list(product(("fp32", "bf16"), PLACES)))
def test_a_spike_is_clipped_to_the_bit(tmp_path: Path, precision: str, place: str) -> None:
    """A hundred thousand times its size: the step's norm is far over the limit, and that of the others below it."""
    wanted = oracle(precision, 1e3, 1, 1, 1e5)
    assert [s.clipped for s in wanted.stats] == [False, True, False]
    found = train(
        CASE,
        budget(tmp_path, **PLACES[place]),
        steps(1, 1, 1e5),
        precision=precision,
        clip_grad_norm=1e3,
        speculate=early(precision, place) or None,
        delay=0.4,
    )
    assert_same(wanted, found)
    assert place != "mixed" or len(found.placed) > 1
    assert "disk" in found.placed or place in ("host", "device")
    if place == "disk":
        assert [s.repeats for s in found.stats] == [0, 1, 0]
