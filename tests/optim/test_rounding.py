"""Where a gradient is rounded changes no bit: by a cast before the optimizer, or by the optimizer as it reads."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.optim import fallback, kernels, library
from penstock.optim.crossing import copy_cast
from penstock.optim.formula import MOMENTS, Kind
from penstock.optim.norm import BLOCK, grad_norm
from tests.accelerator import DEVICE
from tests.optim.state import BESIDE, BF16, FORMS, FP16, FP32, WHOLE, Form, assert_same_bits, values
from tests.optim.test_kernels import Case, cases, everyday_case

TIES = (1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2.0**128 - 2.0**119, 2.0**-134, 3 * 2.0**-134)
"""halfway between two bf16 numbers, normal and denormal, or between the largest and infinity"""


def wild_case(kind: Kind, form: Form, n: int = 18 * BLOCK) -> Case:
    """Gradients of every magnitude with ties, infinities, NaNs and denormals; a whole number of blocks."""
    rng = np.random.default_rng(len(kind))
    grad = values(rng, n, wild=True)
    grad[::17] = torch.tensor(TIES).repeat(n)[: len(grad[::17])]
    grad.view(torch.int32)[5::97] = 0x7F800001  # a NaN whose upper half is that of infinity
    moments = tuple(values(rng, n, wild=True).abs() for _ in range(MOMENTS[kind]))
    master = values(rng, n, wild=True)
    return replace(everyday_case(kind, BLOCK), grad=grad, master=master, moments=moments, form=form)


Written = tuple[list[torch.Tensor], np.ndarray]


def run(case: Case, threads: int, grad_dtype: torch.dtype, device: str = "cpu") -> Written:
    """What one step writes; and the sums of squares."""
    state, n = case.state().to(device), len(case.master)
    partials = np.full(n // BLOCK, np.nan)
    kernels.step(
        case.hyper,
        case.count,
        grad=case.grad.to(device),
        **state[:],
        grad_dtype=grad_dtype,
        grad_scale=case.grad_scale,
        partials=partials if n % BLOCK == 0 else None,
        threads=threads,
    )
    return state.tensors(), partials


def assert_same(got: Written, expected: Written) -> None:
    assert_same_bits(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])  # which NaN it is, is open


def cast_before(case: Case) -> Case:
    rounded = torch.empty(len(case.grad), dtype=BF16)
    kernels.cast(rounded, case.grad)
    return replace(case, grad=rounded)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_rounding_as_it_is_read_equals_a_cast_before(kind: Kind, form: Form, threads: int) -> None:
    case = wild_case(kind, form)
    assert_same(run(case, threads, BF16), run(cast_before(case), 1, FP32))


@given(case=cases(), threads=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_of_every_size_on_every_instruction_set(case: Case, threads: int) -> None:
    expected = run(cast_before(case), 1, FP32)
    for level in library.levels():
        with library.use_level(level):
            assert_same(run(case, threads, BF16), expected)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_torch_rounds_as_the_native_kernels_do(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    case = wild_case(kind, BESIDE)
    expected = run(case, 2, BF16)
    monkeypatch.setattr(library, "native", lambda: None)
    assert_same(run(case, 1, BF16), expected)


def test_rounding_is_no_empty_word() -> None:
    case = everyday_case("adamw", 2 * BLOCK, FP32)
    assert not torch.equal(run(case, 1, BF16)[0][0], run(case, 1, FP32)[0][0])


def test_a_gradient_in_bf16_stays_as_it_is() -> None:
    case = everyday_case("adamw", 2 * BLOCK, BF16)
    assert_same(run(case, 1, BF16), run(case, 1, FP32))


@pytest.mark.parametrize("level", library.levels())
def test_the_norm_is_that_of_the_rounded_gradient(level: str) -> None:
    grad = values(np.random.default_rng(3), 20 * BLOCK, wild=False)
    rounded, expected, found = grad.to(BF16), np.zeros(20), np.zeros(20)
    kernels.partial_norms(rounded, expected)
    with library.use_level(level):
        for threads in (1, 2, 3):
            kernels.partial_norms(grad, found, threads, grad_dtype=BF16)
            assert np.array_equal(found, expected)
    assert np.array_equal(fallback.fold_squares(grad, BF16).numpy(), expected)
    kernels.partial_norms(grad, found)
    assert not np.array_equal(found, expected)


def test_what_rounds_to_infinity_is_infinite_in_the_norm() -> None:
    grad = torch.zeros(BLOCK)
    grad[7] = 3.4e38
    partials = np.zeros(1)
    kernels.partial_norms(grad, partials)
    assert np.isfinite(grad_norm([partials]))
    kernels.partial_norms(grad, partials, grad_dtype=BF16)
    assert np.isinf(grad_norm([partials]))


def test_a_dtype_that_gradients_are_not_rounded_to_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grad_dtype is torch\.float16: must be torch\.float32 or torch\.bfloat16"):
        kernels.partial_norms(torch.zeros(BLOCK), np.zeros(1), grad_dtype=FP16)
    with pytest.raises(ValueError, match=r"grad_dtype is torch\.float16"):
        run(everyday_case("sgd", BLOCK, FP32), 1, FP16)


# ---- across the link


@pytest.mark.parametrize("narrow", [BF16, FP16])
def test_in_one_memory_the_cast_is_the_copy(narrow: torch.dtype) -> None:
    source = wild_case("sgd", WHOLE).grad
    expected, target = torch.empty(len(source), dtype=narrow), torch.zeros(len(source), dtype=narrow)
    kernels.cast(expected, source)
    copy_cast(target, source, None)
    assert_same_bits([target], [expected])
    with pytest.raises(ValueError, match="staging: must be None where source and target are both on cpu"):
        copy_cast(target, source, torch.empty(len(source), dtype=narrow))


@pytest.mark.parametrize("staging", [None, torch.empty(8, dtype=FP32), torch.empty(4, dtype=BF16)])
def test_what_does_not_fit_between_host_and_device_is_refused(staging: torch.Tensor | None) -> None:
    source, target = torch.empty(8, device="meta"), torch.empty(8, dtype=BF16)
    with pytest.raises(ValueError, match=r"staging is .*: must be 8 elements of torch\.bfloat16 on meta"):
        copy_cast(target, source, staging)


@pytest.mark.accelerator
@pytest.mark.parametrize("narrow", [BF16, FP16])
def test_a_gpu_casts_to_the_same_bits(narrow: torch.dtype) -> None:
    """Every pattern's neighbourhood is in ``test_rounding_is_to_nearest_even_as_in_torch``; here, a sweep and ties."""
    sweep = torch.from_numpy(np.arange(0, 2**32, 9_973, dtype=np.uint64).astype(np.uint32).view(np.float32))
    for source in (sweep, wild_case("sgd", WHOLE).grad):
        expected = torch.empty(len(source), dtype=narrow)
        kernels.cast(expected, source)
        there = torch.empty(len(source), dtype=narrow, device=DEVICE)
        kernels.cast(there, source.to(DEVICE))
        assert_same_bits([there.cpu()], [expected])
        down = torch.empty(len(source), dtype=narrow).pin_memory()
        copy_cast(down, source.to(DEVICE), torch.empty_like(there))
        up = torch.empty_like(there)
        copy_cast(up, source.pin_memory(), torch.empty(len(source), device=DEVICE))
        torch.accelerator.synchronize()
        assert_same_bits([down, up.cpu()], [expected, expected])


@pytest.mark.accelerator
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_gpu_rounds_a_gradient_to_the_same_bits(kind: Kind) -> None:
    case = wild_case(kind, BESIDE)
    assert_same(run(case, 1, BF16, DEVICE), run(case, 2, BF16))


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_cast_on_the_device_takes_no_memory_besides_its_buffers(dtype: torch.dtype) -> None:
    """A gradient on its way down is rounded wherever the state lives, and a plan counts its buffers alone."""
    source = torch.randn(2 * fallback.DEVICE_PART, device=DEVICE)
    target = torch.empty(len(source), dtype=dtype, device=DEVICE)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    fallback.cast(target, source)
    assert torch.accelerator.max_memory_allocated() == before
