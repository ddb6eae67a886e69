"""Models that keep something (``tests.any_memory``): each has the losses of a plain loop, or is refused."""

import random
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ModelError
from tests.any_memory import Spec, any_memory
from tests.conftest import Campaign
from tests.training import budget

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = penstock.SGD(lr=0.1)
REFUSALS = (
    "passes from one micro-batch to the next",
    "returned other numbers when it was recomputed",
    "that is none of its arguments",
    "has written to before",
    "made, not returned",
    "is a tensor that the block computes and that other code reads later",
)


def loss_of(model: nn.Module, micro_batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(micro_batch["x"])
    return nn.functional.cross_entropy(found.flatten(0, 1), micro_batch["y"].flatten())


def plain(spec: Spec) -> list[float]:
    model, losses = spec.build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in spec.data():
        optimizer.zero_grad()
        each = [0.0]
        for micro_batch in step:
            loss = loss_of(model, micro_batch) / len(step)
            loss.backward()
            each.append(float(loss.detach()))
        optimizer.step()
        losses.append(sum(each))
    return losses


def trained(spec: Spec, settings: dict[str, Any]) -> list[float]:
    with penstock.wrap(
        spec.build(), budget=budget(None), loss_fn=loss_of, optimizer=SGD, clip_grad_norm=None, device="cpu", **settings
    ) as engine:
        return [engine.step(step, loss_weights=[1 / len(step)] * len(step)).loss for step in spec.data()]


def fails(spec: Spec, settings: dict[str, Any]) -> str:
    try:
        found, wanted = trained(spec, settings), plain(spec)
    except ModelError as error:
        return "" if any(words in str(error) for words in REFUSALS) else str(error)
    except penstock.errors.NonFiniteError:
        return ""
    return "" if found == pytest.approx(wanted, rel=2e-4) else f"{found} is not {wanted}"


def shrunk(spec: Spec, settings: dict[str, Any]) -> Spec:
    simpler = list(spec.simpler())
    while simpler:
        other = simpler.pop()
        if {"set", "reset"} & {*other.acts()} and fails(other, settings):
            spec, simpler = other, list(other.simpler())
    return spec


def test_what_a_model_keeps_in_any_place_is_each_micro_batch_s_own_or_refused(campaign: Campaign) -> None:
    for seed in range(campaign.cases(12, 3000)):
        drawn = random.Random(seed)
        spec = any_memory(drawn)
        settings = {
            "schedule": drawn.choice(("vertical", "vertical", "horizontal")),
            "recompute": drawn.choice((None, True)),
        }
        if fails(spec, settings):
            simple = shrunk(spec, settings)
            pytest.fail(f"seed {seed}, {settings}: {fails(simple, settings)}\n{simple}\n{simple.source()}")
