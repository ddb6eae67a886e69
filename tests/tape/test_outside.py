"""Tensors from outside of the model: where a gradient would come to one, in a plain loop, the model is refused."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from penstock.compat.torch import gradient_hooks
from tests.stacks import WIDTH, Layer, Run, Stack, assert_exact, refused, stack

pytestmark = pytest.mark.usefixtures("one_thread")

Read = Callable[[], torch.Tensor]


def _double(*, needs: bool) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, WIDTH, dtype=torch.double).requires_grad_(needs)


PARAMETER, TENSOR, CONSTANT = nn.Parameter(_double(needs=False)), _double(needs=True), _double(needs=False)
FROZEN = nn.Parameter(_double(needs=False), requires_grad=False)
OTHER = nn.Linear(WIDTH, WIDTH, dtype=torch.double)

TRAINED: Mapping[str, Read] = {
    "a parameter": lambda: PARAMETER,
    "a view of one": lambda: PARAMETER.view(1, WIDTH),
    "a tensor": lambda: TENSOR,
    "an output of another model": lambda: OTHER(CONSTANT),
}
"""A gradient would come to each."""

NOT_TRAINED: Mapping[str, Read] = {
    "frozen": lambda: FROZEN,
    "detached": lambda: PARAMETER.detach(),
    "an output that is detached": lambda: OTHER(CONSTANT).detach(),
    "a constant that is a leaf within": lambda: CONSTANT.detach().requires_grad_(),
    "a copy that is a leaf within": lambda: CONSTANT.clone().requires_grad_(),
}
"""In a plain loop none but what the forward itself has made is given a gradient."""


def in_blocks(read: Read) -> tuple[type[nn.Module], Run | None]:
    class Reading(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * read().to(x.dtype)

    return Reading, None


def handed(read: Read) -> tuple[type[nn.Module], Run | None]:
    class Handed(Layer):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale.to(x.dtype)

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        scale = read()
        for layer in model.layers:
            x = layer(x, scale)
        return x

    return Handed, run


def beside_blocks(read: Read) -> tuple[type[nn.Module], Run | None]:
    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        x = x * read().to(x.dtype)
        for layer in model.layers:
            x = layer(x)
        return x * read().to(x.dtype)

    return Layer, run


WHERE = [in_blocks, handed, beside_blocks]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("what", TRAINED)
def test_a_gradient_that_would_be_lost_or_counted_too_often_is_refused(
    what: str, where: Callable[[Read], tuple[type[nn.Module], Run | None]]
) -> None:
    outside = (PARAMETER, TENSOR, OTHER.weight)
    said = refused(stack(*where(TRAINED[what])))
    assert "none of the model's parameters" in said
    first = where is in_blocks or (where is handed and what in ("a parameter", "a tensor"))
    assert said.startswith("block 'layers.0'" if first else "the model itself")
    assert all(t.grad is None and not gradient_hooks(t) for t in outside), "what is outside is as it was"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("what", NOT_TRAINED)
def test_what_no_gradient_comes_to_may_be_read(
    what: str, where: Callable[[Read], tuple[type[nn.Module], Run | None]]
) -> None:
    assert_exact(stack(*where(NOT_TRAINED[what])))


def test_an_output_without_a_block_may_be_read_where_the_loss_does_not_follow_from_it() -> None:
    """Such as a teacher's, whose scores are detached when they are compared."""

    class Reading(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + OTHER(x.detach().double()).sum().detach().to(x.dtype)

    assert_exact(stack(Reading))
