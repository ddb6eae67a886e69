"""Documents that somebody has changed: valid ones, mutated in their structure, that readers must refuse in words."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

Place = tuple[str | int, ...]

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 4096, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, 0.5, -0.5, 1e308, 1e-320),
    *("", "x", "\0", "\ud800", "fp32", "x" * 10_000, "../../x", "/", "0" * 50, "٣"),
    *([], {}, [[]], [None], [0] * 1000, {"a": 1}, {"": {}}, [1, 2], ["x", "y"], DEEP),
]
"""What may stand in the place of anything."""


def places(document: Any, at: Place = ()) -> Iterator[Place]:
    """Every node of a document; of long lists the first and the last few, and nothing that is very deep."""
    yield at
    if len(at) > 12:
        return
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*at, key))
    elif isinstance(document, list):
        numbers = range(len(document))
        for number in numbers if len(document) < 8 else (*numbers[:3], *numbers[-3:]):
            yield from places(document[number], (*at, number))


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """A valid document with one to three nodes replaced, taken away, doubled, or with something unknown beside."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        where = list(places(found))
        found = _changed(found, draw(st.sampled_from(where)), draw)
    return found


def _changed(document: Any, at: Place, draw: st.DrawFn) -> Any:
    if not at:
        return copy.deepcopy(draw(st.sampled_from(ODD)))
    parent = document
    for step in at[:-1]:
        parent = parent[step]
    change: Callable[[Any, Any, st.DrawFn], None] = draw(st.sampled_from([_replace, _replace, _remove, _add, _wrap]))
    change(parent, at[-1], draw)
    return document


def _replace(parent: Any, key: Any, draw: st.DrawFn) -> None:
    parent[key] = copy.deepcopy(draw(st.sampled_from(ODD)))


def _remove(parent: Any, key: Any, draw: st.DrawFn) -> None:
    del parent[key]


def _add(parent: Any, key: Any, draw: st.DrawFn) -> None:
    if isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[draw(st.sampled_from(["", "unknown", "\0", *parent]))] = copy.deepcopy(parent[key])


def _wrap(parent: Any, key: Any, draw: st.DrawFn) -> None:
    parent[key] = draw(st.sampled_from([[parent[key]], {"x": parent[key]}, str(parent[key])]))
