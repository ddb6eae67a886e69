"""Products of settings: a seeded sample that has each value of each parameter, and all of them behind ``--campaign``.

``@pytest.mark.sampled(30)`` over a product of parameters runs 30 of its cases, always the same ones of one test;
``sampled(30, values=False)`` 30 that need not have each value, where every value of a parameter would be most of them;
``sampled(4, pairs=True)`` as many as it takes for each two values of two parameters to be in one, where parameters act
on each other; ``@pytest.mark.campaign`` none.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import combinations, compress
from typing import Any

import pytest


def chosen(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, in their order, of all that were collected; and those that are left out."""
    products: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    counts, wanted = {}, {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            test, _, case = item.nodeid.partition("[")
            products[test][case] = item
            (counts[test],), wanted[test] = marker.args, marker.kwargs
    kept = {
        id(cases[name])
        for test, cases in products.items()
        for name in sample(
            {name: _asked_of(item, **wanted[test]) for name, item in cases.items()},
            counts[test],
            test,
        )
    }
    runs = [
        item.get_closest_marker("campaign") is None and (item.get_closest_marker("sampled") is None or id(item) in kept)
        for item in items
    ]
    return list(compress(items, runs)), [item for item, run in zip(items, runs, strict=True) if not run]


def _asked_of(item: pytest.Item, *, values: bool = True, pairs: bool = False) -> frozenset[Any]:
    """What a case has of what a sample is to have in one of its cases."""
    assert isinstance(item, pytest.Function)
    found = frozenset((name, repr(value)) for name, value in item.callspec.params.items())
    return in_pairs(found) if pairs else found if values else frozenset()


def in_pairs(values: Set[tuple[Any, Any]]) -> frozenset[Any]:
    """Each two of the values of a case, by the name or number of their parameter."""
    return frozenset(combinations(sorted(values), 2))


def sample(cases: Mapping[str, Set[object]], count: int, test: str) -> list[str]:
    """Names of ``count`` cases, each with its values, or of as many as it takes for every value to be in one. By the
    name of the ``test``, so that tests of the same settings do not all leave out the same ones."""
    left = random.Random(test).sample(list(cases), len(cases))
    unseen: set[object] = set().union(*cases.values())
    found: list[str] = []
    while left and (unseen or len(found) < count):
        name = max(left, key=lambda name: len(cases[name] & unseen))  # the first of those with the most
        left.remove(name)
        found.append(name)
        unseen -= cases[name]
    return found
