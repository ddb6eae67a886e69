"""Products of settings: a seeded sample that has each value of each parameter, and all of them behind ``--campaign``.

``@pytest.mark.sampled(30)`` over a product of parameters runs 30 of its cases, always the same ones of one test;
``sampled(30, values=False)`` 30 that need not have each value, where every value of a parameter would be most of them;
``@pytest.mark.campaign`` none.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import compress

import pytest


def chosen(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, in their order, of all that were collected; and those that are left out."""
    products: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    counts, all_values = {}, {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            test, _, case = item.nodeid.partition("[")
            products[test][case] = item
            (counts[test],), all_values[test] = marker.args, marker.kwargs.get("values", True)
    kept = {
        id(cases[name])
        for test, cases in products.items()
        for name in sample(
            {name: _values(item) if all_values[test] else frozenset() for name, item in cases.items()},
            counts[test],
            test,
        )
    }
    runs = [
        item.get_closest_marker("campaign") is None and (item.get_closest_marker("sampled") is None or id(item) in kept)
        for item in items
    ]
    return list(compress(items, runs)), [item for item, run in zip(items, runs, strict=True) if not run]


def _values(item: pytest.Item) -> frozenset[tuple[str, str]]:
    """What each parameter of a case is."""
    assert isinstance(item, pytest.Function)
    return frozenset((name, repr(value)) for name, value in item.callspec.params.items())


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
