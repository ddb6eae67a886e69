"""The gradient norm is one number: that of the definition, however chunks, groups and threads cut the work."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.optim import fallback, kernels, library
from penstock.optim.formula import Hyper
from penstock.optim.norm import BLOCK, clip_scale, grad_norm


def reference_partial(x: torch.Tensor) -> float:
    """The fold as docs/numerics.md has it, in plain Python."""
    d = [float(v) * float(v) for v in x]
    while len(d) > 1:
        half = len(d) // 2
        d = [d[i] + d[i + half] for i in range(half)]
    return d[0]


def gradients(blocks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of near sizes, so that every addition of the fold rounds and shows in the result."""
    torch.manual_seed(blocks)
    return torch.randn(blocks * BLOCK).to(dtype)


def partials_of(grad: torch.Tensor, threads: int = 1) -> np.ndarray:
    partials = np.full(len(grad) // BLOCK, np.nan)
    kernels.partial_norms(grad, partials, threads)
    return partials


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partials_are_those_of_the_definition(dtype: torch.dtype) -> None:
    grad = gradients(3, dtype)
    expected = [reference_partial(block) for block in grad.float().view(-1, BLOCK)]
    assert partials_of(grad).tolist() == expected
    assert fallback.fold_squares(grad).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_chunks_and_instruction_sets_change_nothing(dtype: torch.dtype) -> None:
    grad = gradients(50, dtype)
    expected = partials_of(grad)
    for level in library.levels():
        with library.use_level(level):
            for threads in (1, 2, 3):
                assert np.array_equal(partials_of(grad, threads), expected)
    chunks = np.concatenate([partials_of(chunk) for chunk in grad.split(7 * BLOCK)])
    assert np.array_equal(chunks, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_gives_the_same_partials_before_scaling(dtype: torch.dtype) -> None:
    grad, partials = gradients(20, dtype), np.zeros(20)
    n = len(grad)
    hyper = Hyper(kind="adamw", lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    kernels.step(
        hyper,
        1,
        grad=grad,
        weights=torch.zeros(n, dtype=torch.bfloat16),
        rest=torch.zeros(n),
        moments=(torch.zeros(n), torch.zeros(n)),
        grad_scale=0.1,
        partials=partials,
        threads=2,
    )
    assert np.array_equal(partials, partials_of(grad))


@given(st.lists(st.floats(0, 1e30), max_size=40), st.lists(st.integers(0, 39), max_size=5))
def test_partials_are_summed_one_after_the_other(partials: list[float], cuts: list[int]) -> None:
    total = 0.0
    for value in partials:
        total += value
    pieces = np.split(np.array(partials, np.float64), sorted(cuts))
    assert grad_norm(pieces) == math.sqrt(total)


def test_the_norm_is_right() -> None:
    grad = gradients(9)
    assert grad_norm([partials_of(grad)]) == pytest.approx(float(grad.double().norm()), rel=1e-14)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_gradient_is_seen_in_the_norm(bad: float) -> None:
    grad = gradients(4)
    grad[2 * BLOCK + 77] = bad
    assert not math.isfinite(grad_norm([partials_of(grad)]))


def test_clipping_is_that_of_torch() -> None:
    for scale in (0.1, 1.0, 30.0):
        p = torch.nn.Parameter(torch.zeros(BLOCK, dtype=torch.float64))
        grad = torch.full((BLOCK,), scale, dtype=torch.float64)
        p.grad = grad.clone()
        norm = float(torch.nn.utils.clip_grad_norm_([p], 1.7))
        torch.testing.assert_close(p.grad, grad * clip_scale(norm, 1.7), rtol=1e-14, atol=0)
