"""Accelerate's search for a batch size, around a loop on the engine, ends at one that the budget has room for."""

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch import nn

import penstock
from penstock.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_budget_that_is_too_small_is_tried_with_a_smaller_batch_and_other_errors_end_the_search() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(size: int) -> float:
        tried.append(size)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        with penstock.wrap(
            model,
            optimizer=penstock.SGD(lr=1e-3),
            budget=penstock.Budget(device="500KiB", host="8MiB", durability="none"),
            loss_fn=lambda model, micro_batch: model(micro_batch["x"]).square().mean(),
            blocks=list(model),
            device="cpu",
        ) as engine:
            return engine.step([{"x": torch.ones(size * 8, 64)}]).loss

    assert train() > 0
    assert tried == sorted(tried, reverse=True)
    assert len(tried) > 1

    @find_executable_batch_size(starting_batch_size=64)
    def fail(size: int) -> None:
        tried.append(size)
        raise ConfigError("not for want of room")

    tried.clear()
    with pytest.raises(ConfigError, match="not for want of room"):
        fail()
    assert tried == [64]
