"""Documents that somebody has changed: valid ones, mutated in their structure, that readers must refuse in words.

Texts, bytes and words of a command line are mutated as such.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
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


ODD_WORDS = [
    *(
        "",
        "0",
        "-1",
        "1",
        "2",
        "7",
        "1000000",
        "1000001",
        "99999999999",
        "1e9",
        "0x10",
        "٣",
        "nan",
        "inf",
        "1e400",
        "0.5",
    ),
    *("x", "--", "-", "=", "--layers", "../..", "/dev/null", "/", "x" * 10_000, "=" * 50, "9" * 5000, "\ud800"),
]
"""What may stand in the place of a word."""
_ODD_TEXTS = [*ODD_WORDS, "\n", " ", ",", "{", "}", "{{", "}}", "{%", "%}", "(", "[", "*", "\ufeff", "\u202e", "F0m0"]


@st.composite
def mutated_words(draw: st.DrawFn, valid: Sequence[str]) -> list[str]:
    """The words of a command with one to three replaced, taken away, doubled or swapped."""
    words = list(valid)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(words) - 1, 0)))
        change = draw(st.sampled_from(["replace", "replace", "remove", "double", "swap"]))
        found = {
            "replace": [draw(st.sampled_from(ODD_WORDS))],
            "remove": [],
            "double": [*words[at : at + 1]] * 2,
            "swap": [*words[at + 1 : at + 2], *words[at : at + 1]],
        }[change]
        words[at : at + (2 if change == "swap" else 1)] = found
    return words


@st.composite
def mutated_text(draw: st.DrawFn, valid: str) -> str:
    """A text with lines or parts of it replaced, taken away, doubled, put elsewhere, or cut off."""
    text = valid
    for _ in range(draw(st.integers(1, 3))):
        lines = text.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        end = min(start + draw(st.sampled_from([0, 1, 1, 2, 8, 100])), len(text))
        change = draw(st.sampled_from(["put", "put", "put", "line away", "line twice", "line elsewhere", "cut"]))
        if change == "put":
            text = text[:start] + draw(st.sampled_from(_ODD_TEXTS)) + text[end:]
        elif change == "cut":
            text = text[:start]
        else:
            line = lines.pop(at)
            places = {"line away": [], "line twice": [at, at], "line elsewhere": [draw(st.integers(0, len(lines)))]}
            for place in places[change]:
                lines.insert(place, line)
            text = "\n".join(lines)
    return text


@st.composite
def mutated_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes with a few replaced, parts taken away or doubled, or cut off; the ends more often, where files say most."""
    found = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        size = len(found)
        at = draw(st.one_of(st.integers(0, max(size - 1, 0)), st.integers(max(size - 200, 0), max(size - 1, 0))))
        end = min(at + draw(st.sampled_from([1, 1, 1, 4, 8, 64])), size)
        change = draw(st.sampled_from(["put", "put", "put", "away", "twice", "cut"]))
        if change == "put":
            odd = st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 8, b"\0" * 8])
            found[at:end] = draw(st.one_of(st.binary(min_size=end - at, max_size=end - at), odd))
        elif change == "cut":
            del found[at:]
        else:
            found[at:end] = found[at:end] * (2 if change == "twice" else 0)
    return bytes(found)
