"""``bench.bytes`` at a small size: bytes of each kind of group are counted apart, and a difference is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench.bytes import CASES, Case, measure, table

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("case", [case for case in CASES if case.moments == "fp32"], ids=lambda case: case.name)
def test_a_block_that_is_loaded_twice_moves_what_is_required_and_what_is_loaded_once_less(
    case: Case, tmp_path: Path
) -> None:
    found = replace(measure(case, "gpt-tiny", tmp_path), kernel=(0, 0))
    found = replace(found, kernel=found.moved)
    weights, (read, written) = 4 if case.precision == "fp32" else 2, case.required
    adamw = {"fp32": (16, 12), "bf16": (14, 12)}[case.precision]
    each = {part.name: part.each for part in found.parts}
    assert each == {
        "blocks, loaded twice": (read, written),
        "last block": (read - weights, written),
        "embedding": adamw,  # for its forward and, a whole step later, for its step
        "norm and head": (adamw[0] - weights, 12),
    } | ({"small tensors": each["small tensors"]} if case.muon else {})
    assert found.missed() == []
    kept = sum(part.elements for part in found.parts if part.name != "embedding")
    assert found.again - found.moved[0] == weights * kept
    assert f"| {case.name} | read | {found.moved[0]:,} |" in table([found])

    more = replace(found, kernel=(found.moved[0], int(found.moved[1] * 1.02)))
    assert [line.split(":")[0] for line in more.missed()] == [case.name]
    other = replace(found, case=replace(case, required=(1, 2)))
    said = f"{read} and {written} bytes, not 1 and 2"
    assert other.missed() == [f"{case.name}, blocks, loaded twice: {said}"]


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("case", [case for case in CASES if case.moments != "fp32"], ids=lambda case: case.name)
def test_compact_moments_move_what_is_required_and_small_tensors_what_fp32_does(case: Case, tmp_path: Path) -> None:
    found = measure(case, "gpt-tiny", tmp_path)
    found = replace(found, kernel=found.moved)
    each = {part.name: part.each for part in found.parts}
    assert found.missed() == []
    assert "blocks, loaded twice" in each
    assert each["small tensors"][1] == 12
    for wrong in ((case.required[0] + 0.5, case.required[1]), (case.required[0], case.required[1] - 0.5)):
        assert len(replace(found, case=replace(case, required=wrong)).missed()) == 1
