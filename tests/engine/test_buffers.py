"""Buffers of a model that are out of the ordinary: the numbers of a plain loop, or a refusal that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from tests.stacks import Stack, of, stack
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = penstock.SGD(lr=0.1)
STEPS = steps_of(stack(), 3)


def plain(model: nn.Module, clip: float) -> tuple[list[float], nn.Module]:
    """Losses of a plain loop over ``STEPS``, and the model as it ends."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for micro_batches in STEPS:
        optimizer.zero_grad()
        each = []
        for micro_batch in micro_batches:
            loss = model(**micro_batch) / len(micro_batches)
            loss.backward()
            each.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(sum(each))
    return losses, model


def assert_plain(build: Callable[[], nn.Module], where: penstock.Budget, clip: float = 100, **settings: Any) -> None:
    case = of(build)
    wanted, model = plain(case.model(), clip)
    with wrap(case, where, optimizer=SGD, clip_grad_norm=clip, plan=None, **settings) as engine:
        assert [engine.step(s).loss for s in STEPS] == pytest.approx(wanted, rel=1e-6)
        found = engine.values().buffers
        assert all(torch.allclose(found[name], buffer) for name, buffer in model.named_buffers() if name in found)


def noisy(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + torch.randn(x.shape, generator=model.generator)
    for layer in model.layers:
        x = layer(x)
    return x


def with_generator() -> nn.Module:
    model = Stack(run=noisy)
    model.generator = torch.Generator().manual_seed(0)
    return model


@pytest.mark.parametrize("speculate", [True, False])
def test_a_models_own_generator_draws_once_for_each_micro_batch(tmp_path: Path, speculate: bool) -> None:
    """Not in the probe, and not again in a step that is run twice, as all are that speculate here."""
    assert_plain(with_generator, budget(tmp_path), clip=0.01, speculate=speculate)
