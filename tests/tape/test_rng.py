"""Whether anything was drawn from a global generator."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.tape.rng import RandomState, seed_on_cpu

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "Python": random.random,
    "numpy": lambda: np.random.rand(),  # noqa: NPY002  what models draw from
    "numpy, of a pair": lambda: np.random.randn(),  # noqa: NPY002
    "seeded": lambda: seed_on_cpu(2),
    "seeded with numpy alone": lambda: np.random.seed(3),  # noqa: NPY002
}


@pytest.mark.parametrize("before", ["nothing", *DRAWS])
@pytest.mark.parametrize("draw", DRAWS)
def test_whatever_is_drawn_is_noticed_and_nothing_else(before: str, draw: str) -> None:
    """The second of two normal numbers of numpy's changes no word of its generator: the first has made both."""
    seed_on_cpu(1)
    if before != "nothing":
        DRAWS[before]()
    state = RandomState.capture(CPU)
    assert state.is_now()
    DRAWS[draw]()
    assert state.is_now() == (draw == before and draw.startswith("seeded")), "who is seeded alike begins anew"
