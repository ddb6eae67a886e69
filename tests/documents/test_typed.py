"""JSON as instances of dataclasses: what each hint takes, what is made of it, and what is said of all else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.documents.text import MalformedError
from penstock.documents.typed import decode, fits


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size} is less than nothing")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    rows: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    inner: Inner | None = None
    either: int | str | None = None
    by_name: Mapping[str, Inner] = field(default_factory=dict)


NUMBER = st.integers(-(2**64), 2**64) | st.floats(allow_nan=True, allow_infinity=True)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=6,
)
HINTS: tuple[Any, ...] = (
    *(int, float, str, bool, None, Any, Literal["a", 1], int | None, str | Literal[0] | None),
    *(tuple[int, ...], tuple[int, str], Sequence[float], tuple[tuple[str, int | None], ...]),
    *(Mapping[str, int], Mapping[str, tuple[int, ...] | None], int | tuple[int, ...]),
)


def as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(as_tuples, value))
    return {key: as_tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(st.sampled_from(HINTS), JSON)
def test_what_fits_a_hint_is_read_with_tuples_for_lists_and_all_else_is_refused(hint: Any, value: Any) -> None:
    if fits(value, hint):
        found = decode(hint, value)
        assert found == (value if hint is Any else as_tuples(value)) or value != value
    else:
        with pytest.raises(MalformedError, match="must be"):
            decode(hint, value)


def test_an_object_becomes_its_dataclass() -> None:
    asked = {"name": "a", "rows": [["b", 1, [2, 3]], ["c", 4, []]], "inner": {"size": 5}, "either": "d"}
    assert decode(Outer, asked | {"by_name": {"e": {"size": 6}}}) == Outer(
        name="a",
        rows=(("b", 1, (2, 3)), ("c", 4, ())),
        inner=Inner(size=5),
        either="d",
        by_name={"e": Inner(size=6)},
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "the whole of it must be an object, not []"),
        ({}, "it lacks 'name'"),
        ({"name": "a", "other": 1}, "it has 'other', which is none of name, rows, inner, either, by_name"),
        ({"name": 2**63}, "name must be text, not 9223372036854775808, which has more than 63 bits"),
        ({"name": "a", "rows": [["b", 1]]}, "rows[0] must be a list of 3, not ['b', 1]"),
        ({"name": "a", "rows": [["b", True, []]]}, "rows[0][1] must be a whole number, not True"),
        ({"name": "a", "rows": [["b", 1, [2, None]]]}, "rows[0][2][1] must be a whole number, not None"),
        ({"name": "a", "inner": {"size": -1}}, "inner: size=-1 is less than nothing"),
        ({"name": "a", "inner": 3}, "inner must be an object or null, not 3"),
        ({"name": "a", "either": []}, "either must be a whole number or text or null, not []"),
        ({"name": "a", "by_name": {"e": {}}}, "by_name.e lacks 'size'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(MalformedError) as refused:
        decode(Outer, value)
    assert str(refused.value) == said
