"""A sample of a product has every value of every parameter, and is the same one each time."""

from itertools import product

import pytest

from tests.sampling import sample

NAMES = ["-".join(values) for values in product("abcdefgh", ("fp32", "bf16", "fp16"), ("1", "None"))]


@pytest.mark.parametrize("count", [1, 8, 20, 48, 99])
def test_a_sample_has_each_value_and_no_more_cases_than_it_takes(count: int) -> None:
    found = sample(NAMES, count)
    assert found == sample(NAMES, count)
    assert len(set(found)) == len(found) == min(max(count, len(sample(NAMES, 1))), len(NAMES))
    assert len(found) <= max(count, 8 + 3 + 2)
    for column in range(3):
        assert {name.split("-")[column] for name in found} == {name.split("-")[column] for name in NAMES}
