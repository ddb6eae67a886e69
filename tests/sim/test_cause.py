"""A cause prints as one short text, and parses back."""

import pytest

from penstock.schedule.ir.text import op_id
from penstock.sim.cause import Cause, parse_cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("B3m0", Cause("B3m0")),
        ("12:RA5m0", Cause("RA5m0", rank=12)),
        ("pool stage_in (given by UW1.0@F1)", Cause("UW1.0@F1", pool="stage_in")),
        ("pool act (given by 3:B0m0)", Cause("B0m0", rank=3, pool="act")),
        ("pool act", Cause("", pool="act")),
        (f"{'9' * 5000}:F0m0", Cause(f"{'9' * 5000}:F0m0")),
        ("pool of a text that nobody writes", Cause("pool of a text that nobody writes")),
    ],
)
def test_a_cause_is_taken_apart_and_put_together(text: str, cause: Cause) -> None:
    assert parse_cause(text) == cause
    assert str(cause) == text


def test_the_text_of_a_cause_in_a_schedule_is_plain() -> None:
    assert type(str(Cause(op_id("B3m0")))) is str


def test_no_text_is_no_cause() -> None:
    assert parse_cause("") is None
