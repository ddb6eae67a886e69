"""Products of settings: a seeded sample that has each value of each parameter, and all of them behind ``--campaign``.

``@pytest.mark.sampled(30)`` over a product of parameters runs 30 of its cases, always the same ones.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import compress

import pytest


def chosen(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, in their order, of all that were collected; and those that are left out."""
    products: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    counts = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            test, _, case = item.nodeid.partition("[")
            products[test][case.removesuffix("]")] = item
            (counts[test],) = marker.args
    kept = {id(cases[name]) for test, cases in products.items() for name in sample(list(cases), counts[test])}
    runs = [item.get_closest_marker("sampled") is None or id(item) in kept for item in items]
    return list(compress(items, runs)), [item for item, run in zip(items, runs, strict=True) if not run]


def sample(names: Sequence[str], count: int) -> list[str]:
    """``count`` names of cases, ``value-value-value`` each, or as many as it takes for every value to be in one."""
    shuffled = random.Random(0).sample(names, len(names))
    seen: set[tuple[int, str]] = set()
    first, others = [], []
    for name in shuffled:
        values = set(enumerate(name.split("-")))
        (others if values <= seen else first).append(name)
        seen |= values
    return [*first, *others][: max(count, len(first))]
