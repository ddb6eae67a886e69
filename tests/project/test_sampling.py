"""A sample of a product has every value of every parameter, and is the same one each time."""

from itertools import combinations, product

import pytest

from tests.sampling import in_pairs, sample

VALUES = ("a", "b", "c", "d", "e", "f", "g", "h-h"), ("fp32", "bf16", "fp16"), ("1", "None")
CASES = {"-".join(values): frozenset(enumerate(values)) for values in product(*VALUES)}


@pytest.mark.parametrize("count", [1, 8, 20, 48, 99])
def test_a_sample_has_each_value_and_no_more_cases_than_it_takes(count: int) -> None:
    found = sample(CASES, count, "test")
    assert found == sample(CASES, count, "test")
    assert len(set(found)) == len(found) == min(max(count, len(sample(CASES, 1, "test"))), len(CASES))
    assert len(found) <= max(count, 8 + 3 + 2)
    for column, values in enumerate(VALUES):
        assert {value for name in found for place, value in CASES[name] if place == column} == set(values)


def test_a_sample_of_pairs_has_each_value_beside_each_of_the_others() -> None:
    found = sample({name: in_pairs(values) for name, values in CASES.items()}, 1, "test")
    assert len(found) <= 8 * 3 + 8
    for one, other in combinations(range(len(VALUES)), 2):
        beside = {tuple(value for place, value in sorted(CASES[name]) if place in (one, other)) for name in found}
        assert beside == set(product(VALUES[one], VALUES[other]))


@pytest.mark.parametrize("count", [1, 5, 99])
def test_a_sample_without_values_has_as_many_cases_as_were_asked_for(count: int) -> None:
    found = sample(dict.fromkeys(CASES, frozenset()), count, "test")
    assert found == sample(dict.fromkeys(CASES, frozenset()), count, "test")
    assert len(set(found)) == len(found) == min(count, len(CASES))


def test_tests_of_the_same_settings_do_not_all_leave_out_the_same_ones() -> None:
    settings = {name: frozenset[object]() for name in "abcde"}
    assert {name for n in range(9) for name in sample(settings, 3, f"test_{n}")} == set(settings)
