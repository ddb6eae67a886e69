"""The fingerprint of a tensor: of its numbers, wherever and however they lie."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.tape.likeness import fingerprint

ONE = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
SAME: dict[str, Callable[[], torch.Tensor]] = {
    "a copy": ONE.clone,
    "a parameter": lambda: nn.Parameter(ONE.clone()),
    "behind others in memory": lambda: torch.cat([ONE.new_zeros(7), ONE.flatten()])[7:].view(2, 3, 4),
    "with gaps": lambda: torch.stack([ONE, ONE], -1)[..., 0],
    "turned in memory": lambda: ONE.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "negated twice": lambda: torch._neg_view(-ONE),
    "whose gradient is wanted": lambda: ONE.clone().requires_grad_(),
}
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "another number": lambda: ONE + (torch.arange(24).view(2, 3, 4) == 23),
    "another sign of zero": lambda: torch.where(ONE == 0, -0.0, ONE),
    "in another order": lambda: ONE.flip(0),
    "fewer": lambda: ONE[:1],
    "a negative view": lambda: torch._neg_view(ONE),
}


@pytest.mark.parametrize("how", SAME)
def test_the_same_numbers_have_one_fingerprint(how: str) -> None:
    assert fingerprint(SAME[how]()) == fingerprint(ONE)


@pytest.mark.parametrize("how", OTHERS)
def test_other_numbers_have_another_one(how: str) -> None:
    assert fingerprint(OTHERS[how]()) != fingerprint(ONE)


def test_what_is_written_by_others_than_torch_shows() -> None:
    tensor = ONE.clone()
    before = fingerprint(tensor)
    tensor.numpy()[1, 2, 3] += 1
    assert fingerprint(tensor) != before


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
def test_there_is_none_of_what_has_no_numbers_in_memory(tensor: torch.Tensor) -> None:
    assert fingerprint(tensor) == 0


@pytest.mark.parametrize("tensor", [torch.ones(6), torch.ones(2, 3).T], ids=["in one piece", "turned"])
def test_there_is_none_of_memory_that_was_given_back(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)
    assert fingerprint(tensor) == 0
