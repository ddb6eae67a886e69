"""Random generators of a model's own: those of torch, numpy and Python that are none of the global ones.

Nobody seeds them for a stage: their state goes on from one micro-batch to the next. So it is put back behind runs that
do not count, and a probe sees which segments draw.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.compat.torch import generator_key

Generator = torch.Generator | np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
KINDS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)

_DRAWS: tuple[Any, ...] = (random.random, np.random.random)
_SEEDED = frozenset(id(draw.__self__) for draw in _DRAWS)
"""Generators of numpy and of Python that are seeded for each stage. That of torch is a new object at each look."""


def is_own(value: Any) -> bool:
    """True of a generator that is none of the global ones."""
    if not issubclass(type(value), KINDS):  # an instance, of which torch's class has Python code say it, is slow
        return False
    if isinstance(value, torch.Generator):
        return generator_key(value) != generator_key(torch.default_generator)
    return id(value) not in _SEEDED


def of_modules(modules: Iterable[nn.Module]) -> Iterator[Generator]:
    """The generators that are attributes of modules."""
    return (value for module in modules for value in vars(module).values() if is_own(value))


def key_of(generator: Generator) -> int:
    """The identity of a generator, as of ``generator_key``."""
    return generator_key(generator) if isinstance(generator, torch.Generator) else id(generator)


class States:
    """The states of generators, to be put back as they were."""

    def __init__(self, generators: Iterable[Generator]) -> None:
        self._before = [(g, _state(g)) for g in {id(g): g for g in generators}.values()]

    def drawn(self) -> list[Generator]:
        """The generators whose state is another one now."""
        return [generator for generator, before in self._before if not _same(before, _state(generator))]

    def put_back(self) -> None:
        for generator, state in self._before:
            if isinstance(generator, torch.Generator | np.random.RandomState):
                generator.set_state(state)
            elif isinstance(generator, random.Random):
                random.Random.setstate(generator, state)
            else:
                _bits(generator).state = state


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    # Of a class of the user's own, too: Python's own state, which its numbers follow from unless it has others.
    return random.Random.getstate(generator) if isinstance(generator, random.Random) else _bits(generator).state


def _bits(generator: np.random.Generator | np.random.BitGenerator) -> np.random.BitGenerator:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, dict):
        return all(_same(before[key], now[key]) for key in before)
    if isinstance(before, torch.Tensor):
        return torch.equal(before, now)
    return bool(np.array_equal(before, now)) if isinstance(before, np.ndarray) else bool(before == now)
