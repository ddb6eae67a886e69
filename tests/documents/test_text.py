"""JSON and files that are none of ours are refused, whatever is in them."""

import os
from pathlib import Path

import pytest

from penstock.documents.text import MalformedError, parse_json, read_bounded
from penstock.documents.typed import shown


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100 + "]" * 100, '{"a": 1, "a": 2}', "NaN", '"\\ud800"']
)
def test_json_that_is_none_of_ours(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(MalformedError):
            parse_json(form)


def test_a_file_is_read_up_to_its_most(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(MalformedError, match="at most"):
        read_bounded(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MalformedError, match="no regular file"):
        read_bounded(tmp_path / "pipe")


def test_a_number_of_too_many_bits_is_said_to_be_one() -> None:
    assert shown(2**63) == "9223372036854775808, which has more than 63 bits"
    assert shown(2**63 - 1) == "9223372036854775807"
