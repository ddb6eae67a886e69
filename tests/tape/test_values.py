"""Small values in a dry run: what follows from constants is known, however a model writes them."""

from collections.abc import Callable

import pytest
import torch

from penstock.tape.values import Values

IDS = torch.arange(8).view(2, 4)


def _assigned(ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    ids[:, [1, 2]] = 9
    return ids


@pytest.mark.parametrize(
    "found",
    [
        lambda ids: ids[:, [-1, 0]],  # as transformers looks for padding
        lambda ids: ids[[True, False]],
        lambda ids: ids[range(1)],
        _assigned,
        lambda ids: torch.isin(ids, torch.tensor([3, 5], device=ids.device)),
        lambda ids: ids + torch.as_tensor(2, device=ids.device),
    ],
)
def test_lists_and_tensors_of_numbers_are_constants(found: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = Values("cpu")
    ids = values.give({"ids": IDS})["ids"]
    with values:
        result = found(ids)
    assert result.is_meta
    known = values.of(result)
    assert known is not None
    assert torch.equal(known, found(IDS))


def test_a_parameter_that_is_made_of_numbers_needs_its_gradient() -> None:
    with Values("cpu"):
        made = torch.tensor([1.0, 2.0], device="meta", requires_grad=True)
    assert made.is_meta
    assert made.is_leaf
    assert made.requires_grad


def test_values_that_are_lost_take_no_later_ones_with_them() -> None:
    """What is made next may have the place in memory of what was lost and is no more."""
    values = Values("cpu")
    with values:
        for _ in range(20):
            picked = torch.rand(4, 4, device="meta").argmax(-1)
            counts = torch.zeros(4, dtype=torch.long, device="meta")
            counts.scatter_add_(0, picked, torch.ones_like(picked))
            assert values.of(counts) is None
            del counts
            assert values.of(torch.arange(4, device="meta")) is not None
