"""Sums of gradients: one number for one order, however many micro-batches there are."""

import inspect
import sys

import pytest

from penstock.schedule.check import check
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.meaning.sums import Sums
from penstock.schedule.meaning.values import LEFT
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN
from tests.programs import Case, transformer

MANY = 2000
DEEP = 300
"""more than the test lets calls go deep"""


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_a_step_of_more_micro_batches_than_calls_go_deep_is_proved(family: str) -> None:
    now = len(inspect.stack())
    program = transformer(1)
    home = ("disk",) * len(program.groups)
    place = Placement(weights=home, state=home, gradients="host", activations="host")
    form = Format.of("fp32", 2)
    settings = Settings(micro_batches=DEEP, chunk=20 * ALIGN, form=form, place=place, depths=Depths(), wait=False)
    schedule = Case(program=program, settings=settings, family=family).build()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(now + DEEP // 2)
    try:
        check(schedule)
        prove(schedule, Needs.of(program, settings))
    finally:
        sys.setrecursionlimit(limit)


def test_sums_have_one_number_for_one_order() -> None:
    sums = Sums()
    whole = sums.whole([3, 1], 2)
    third = sums.added(sums.one(3, 0), sums.one(3, 1))
    first = sums.added(sums.one(1, 0), sums.one(1, 1))
    assert whole == sums.added(third, first)
    assert whole != sums.added(first, third)
    assert whole != sums.added(sums.added(third, sums.one(1, 0)), sums.one(1, 1))
    assert sums.added(sums.one(3, 1), sums.one(3, 0)) != third


def test_sums_are_told_without_going_on_for_ever() -> None:
    sums = Sums()
    assert sums.described(LEFT) == "the step before's"
    assert sums.described(sums.one(3, 1)) == "stage 3 of micro-batch 1"
    assert sums.described(sums.whole([3], MANY)) == "stage 3 of micro-batches 0 to 1999"
    nested = sums.described(sums.whole([3, 1], 2))
    assert nested == "stage 3 of micro-batches 0 to 1 + (stage 1 of micro-batches 0 to 1)"
    swapped = sums.added(sums.one(3, 1), sums.one(3, 0))
    assert sums.described(swapped) == "stage 3 of micro-batch 1 + stage 3 of micro-batch 0"
    right = left = sums.one(3, 0)
    for m in range(MANY, 0, -1):
        right, left = sums.added(sums.one(3, m), right), sums.added(left, sums.one(3, m))
    assert sums.described(right) == "stage 3 of micro-batch 1 + (a sum of 2 parts)"
    assert sums.described(left).endswith(" + ...")
