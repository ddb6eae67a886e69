"""Micro-batches: every tensor in them is moved, counted and planned for, however deep it lies."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.engine import batch
from penstock.errors import ModelError
from tests.stacks import Own


@dataclass
class Pixels:
    values: torch.Tensor
    sizes: list[torch.Tensor]


def nested(rows: int) -> dict[str, Any]:
    return {
        "input_ids": torch.zeros(rows, 4, dtype=torch.int64),
        "image": {"pixels": Pixels(values=torch.zeros(rows, 3), sizes=[torch.zeros(rows)]), "kind": "rgb"},
        "more": UserDict(mask=(torch.zeros(rows, dtype=torch.bool), None)),
    }


def test_tensors_in_nested_containers_are_moved_and_cast() -> None:
    given = nested(2)
    moved = batch.to_device(given, torch.device("meta"), torch.bfloat16)
    found = [
        moved["input_ids"],
        moved["image"]["pixels"].values,
        moved["image"]["pixels"].sizes[0],
        moved["more"]["mask"][0],
    ]
    assert [t.device.type for t in found] == ["meta"] * 4
    assert [t.dtype for t in found] == [torch.int64, torch.bfloat16, torch.bfloat16, torch.bool]
    assert moved["image"]["kind"] == "rgb"
    assert given["image"]["pixels"].values.device.type == "cpu", "what was given is as it was"


def test_a_plan_has_room_for_the_tensors_in_nested_containers() -> None:
    small, large = batch.shapes(nested(2)), batch.shapes(nested(3))
    assert batch.covers(large, small)
    assert not batch.covers(small, large)
    wide = nested(3)
    wide["image"]["pixels"].values = torch.zeros(3, 5)
    assert not batch.covers(large, batch.shapes(wide))
    assert batch.nbytes(wide) - batch.nbytes(nested(3)) == 3 * 2 * 4


def test_a_micro_batch_whose_tensors_are_nested_is_one() -> None:
    batch.check([{"inputs": {"x": torch.zeros(1)}}])
    with pytest.raises(ModelError, match="no tensor with elements"):
        batch.check([{"inputs": {"x": torch.zeros(0)}, "names": ["a"]}])


def test_what_holds_no_tensor_reaches_the_loss_as_it_is() -> None:
    """The caller may collect in it, wherever in a micro-batch it lies."""
    results: list[float] = []
    notes: dict[str, Any] = {}
    names = UserDict(a=["x"])
    given = {"x": torch.zeros(2), "out": results, "more": {"x": (torch.zeros(2), notes)}, "names": names}
    moved = batch.to_device(given, torch.device("meta"), torch.bfloat16)
    assert moved["out"] is results
    assert moved["more"]["x"][1] is notes
    assert moved["names"] is names
    assert moved["more"] is not given["more"]


def test_nothing_is_written_into_a_mapping_of_an_unknown_kind() -> None:
    """It is handed on as other objects are: whoever made it moves what is in it."""
    own, pixels = Own(x=torch.zeros(2)), torch.zeros(3)
    given = {"a": own, "more": {"own": own, "pixels": pixels}}
    moved = batch.to_device(given, torch.device("cpu"), torch.bfloat16)
    assert own["x"].dtype == torch.float32
    assert moved["a"] is moved["more"]["own"] is own
    assert moved["more"]["pixels"].dtype == torch.bfloat16
    assert batch.nbytes(given) == 3 * 4
    with pytest.raises(ModelError, match="no tensor with elements"):
        batch.check([{"a": own}])


def test_each_tensor_counts_once_under_a_place_of_its_own() -> None:
    nested, flat = torch.zeros(9), torch.zeros(1)
    given = {"a": {"b": nested}, "a.b": flat}
    assert batch.nbytes(given) == 10 * 4
    assert {shape for _, shape, _ in batch.shapes(given)} == {(9,), (1,)}
    twice = {"a": [flat, {"again": flat}]}
    moved = batch.to_device(twice, torch.device("meta"), torch.bfloat16)
    assert batch.nbytes(twice) == 4
    assert moved["a"][0] is moved["a"][1]["again"]


def test_examples_are_those_of_the_first_tensor_as_it_was_given() -> None:
    given = {"pixel_values": torch.zeros(8, 3), "grid": torch.zeros(1, 3)}
    assert batch.tokens(given) == 8
    assert batch.shapes(given) == batch.shapes(dict(reversed(given.items()))), "the order says nothing to a plan"


def test_a_mask_that_hides_something_is_another_shape_wherever_it_lies() -> None:
    def shapes(mask: torch.Tensor) -> batch.Shapes:
        return batch.shapes({"text": {"attention_mask": mask}})

    assert shapes(torch.ones(2, 2)) != shapes(torch.eye(2))
