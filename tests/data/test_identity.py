"""``data.json``, which anybody may have changed: what it says is compared or refused, and never believed blindly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.identity import FileFacts, Identity, facts_of

OURS = Identity(
    files=(
        FileFacts(name="a", nbytes=5, changed_ns=7, digest="d"),
        FileFacts(name="b", nbytes=1, changed_ns=7, digest="e"),
    ),
    settings={"seed": 1, "data.packing": True, "data.sources": [{"kind": "text"}], "data.shuffle": None},
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [path, *(place for key in keys for place in _places(value[key], (*path, key)))]


@given(st.data(), json_values)
def test_one_that_was_changed_differs_or_cannot_be_read(data: st.DataObject, new: Any) -> None:
    tree = [json.loads(OURS.to_json())]
    place = data.draw(st.sampled_from(_places(tree)[1:]))
    node: Any = tree
    for key in place[:-1]:
        node = node[key]
    if isinstance(node, dict) and data.draw(st.booleans()):
        del node[place[-1]]
    else:
        node[place[-1]] = new
    try:
        found = Identity.from_json(json.dumps(tree[0]))
    except (ValueError, KeyError, TypeError):
        return  # said, by whoever reads it
    assert (OURS.difference(found) is None) == (OURS.fingerprint == found.fingerprint)


@pytest.mark.parametrize(("key", "value"), [("seed", 1.0), ("seed", True), ("data.packing", 1), ("data.shuffle", ...)])
def test_what_python_takes_for_equal_differs_where_its_json_does(key: str, value: Any) -> None:
    settings = dict(OURS.settings)
    if value is ...:
        del settings[key]
    else:
        settings[key] = value
    before = Identity(files=OURS.files, settings=settings)
    assert key in (OURS.difference(before) or "")


def test_a_file_whose_name_is_not_utf8_is_known_again(tmp_path: Path) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.txt"))
    path.write_text("water")
    found = facts_of([path], (), whole=True)
    kept = Identity.from_json(Identity(files=found, settings={}).to_json())
    assert kept.files == found
    assert found[0].name.endswith("caf\\xe9.txt")
    marked = [FileFacts(name=f.name, nbytes=f.nbytes, changed_ns=f.changed_ns, digest="as before") for f in kept.files]
    assert facts_of([path], marked, whole=True) == tuple(marked), "it is not read again"


def test_another_version_is_said_before_what_differs_with_it() -> None:
    then, now = (Identity(files=(), settings={"a hash": one, "version": one}) for one in (4, 5))
    assert "this version of Penstock prepares data otherwise" in str(now.difference(then))
