"""Micro-batches: every tensor in them is moved, counted and planned for, however deep it lies."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.engine import batch
from penstock.errors import ModelError


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
