"""The optimizer in the hands of a library's loop is whole: whoever looks at it or hooks on to it finds torch's."""

import copy
from typing import Any

import pytest
import torch

from penstock.config.optimizer import AdamW
from penstock.optim.driven import DrivenOptimizer
from penstock.optim.facade import StreamedOptimizer

SEEN: list[str] = []


def driven() -> DrivenOptimizer:
    SEEN.clear()
    streamed = StreamedOptimizer(AdamW(), [("w", torch.nn.Parameter(torch.zeros(3)))])
    return DrivenOptimizer(streamed, _step)


def _step() -> None:
    SEEN.append("step")


def test_hooks_are_called_around_what_they_hook_on_to() -> None:
    optimizer = driven()
    optimizer.register_step_pre_hook(lambda *_: SEEN.append("before"))
    optimizer.register_step_post_hook(lambda *_: SEEN.append("behind"))
    optimizer.register_state_dict_pre_hook(lambda _: SEEN.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda _: SEEN.append("loaded"))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert SEEN == ["before", "step", "behind", "saved", "loaded"]


@pytest.mark.parametrize("look", [copy.copy, copy.deepcopy])
def test_a_copy_that_somebody_makes_leaves_its_steps_alone(look: Any) -> None:
    """torch puts its own code around the step of a class of which an optimizer is copied."""
    optimizer = driven()
    look(optimizer)
    optimizer.step()
    assert SEEN == ["step"]
