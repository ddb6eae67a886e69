"""The GPU's kernels have the bits of the native ones: here in Triton's interpreter, on a GPU in ``test_kernels``."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.optim import fallback, kernels, library
from penstock.optim.codes import Codes, zero_moment
from penstock.optim.formula import Hyper, Kind, scalars
from penstock.optim.norm import BLOCK
from tests.optim.state import (
    BESIDE,
    BESIDE_FP16,
    BF16,
    EIGHT_BIT,
    FP16,
    FP32,
    SPLIT,
    WHOLE,
    Form,
    State,
    assert_same_bits,
    form_for,
    values,
)
from tests.optim.test_compact import every_lower, wild

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinities and NaNs


@pytest.fixture(scope="module")
def fused() -> Iterator[ModuleType]:
    """The kernels, interpreted: Triton decides when they are defined."""
    triton = pytest.importorskip("triton", reason="needs triton")
    names = ("penstock.optim.fused_device", "penstock.optim.fused")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        _, interpreted = (importlib.reload(importlib.import_module(name)) for name in names)
        yield interpreted
    for name in names:
        importlib.reload(importlib.import_module(name))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(
    ("grad_dtype", "form", "moment_dtype"),
    [(FP32, WHOLE, FP32), (FP32, BESIDE_FP16, BF16), (BF16, BESIDE, EIGHT_BIT), (BF16, SPLIT, FP32)],
)
def test_a_step_has_the_same_bits(
    kind: Kind, grad_dtype: torch.dtype, form: Form, moment_dtype: torch.dtype, fused: ModuleType
) -> None:
    """The values are of every magnitude, with denormals, infinities and NaNs, in a part of a block, too."""
    rng, n = np.random.default_rng(3), BLOCK + 96
    hyper = Hyper(kind=kind, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    grad, master = values(rng, n, wild=True), values(rng, n, wild=True)
    moments = tuple(values(rng, n, wild=True).abs() for _ in range(hyper.moments))
    found = []
    for module in (fused, fallback):
        state = State.of(master, moments, form_for(kind, form), moment_dtype)
        module.step(kind, scalars(hyper, 2, 0.5), grad=grad, grad_dtype=grad_dtype, **state[:])
        found.append(state.tensors())
    assert_same_bits(*found)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_squares_are_folded_in_one_order_and_in_passing(dtype: torch.dtype, fused: ModuleType) -> None:
    grad = values(np.random.default_rng(4), 2 * BLOCK, wild=False)
    wanted = fallback.fold_squares(grad, dtype)
    assert torch.equal(fused.fold_squares(grad, dtype), wanted)
    squares, s = torch.empty_like(wanted), scalars(Hyper(kind="sgd", lr=0.1), 1)
    state = State.of(grad, (), WHOLE, FP32)
    fused.step("sgd", s, grad=grad, **state[:], grad_dtype=dtype, squares=squares)
    assert torch.equal(squares, wanted)


@pytest.mark.parametrize("source", [FP32, BF16, FP16])
@pytest.mark.parametrize("target", [FP32, BF16, FP16])
def test_casts_have_the_native_bits(source: torch.dtype, target: torch.dtype, fused: ModuleType) -> None:
    wild = values(np.random.default_rng(5), BLOCK + 1, wild=True).to(source)
    found, wanted = torch.empty(len(wild), dtype=target), torch.empty(len(wild), dtype=target)
    fused.cast(found, wild)
    kernels.cast(wanted, wild)
    assert_same_bits([found], [wanted])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_have_the_native_bits(dtype: torch.dtype, fused: ModuleType) -> None:
    x = wild()
    x = x.abs() if dtype == torch.uint8 else x
    found, wanted = zero_moment(dtype, len(x)), zero_moment(dtype, len(x))
    assert isinstance(found, Codes)
    assert isinstance(wanted, Codes)
    fused.encode(found, x)
    kernels.encode(wanted, x)
    assert_same_bits([found.codes, found.scales], [wanted.codes, wanted.scales])
    back, expected = torch.empty(len(x)), torch.empty(len(x))
    fused.decode(back, found)
    kernels.decode(expected, wanted)
    assert_same_bits([back], [expected])


def test_split_weights_have_the_native_bits(fused: ModuleType) -> None:
    master = torch.cat([every_lower()[::61], values(np.random.default_rng(6), 77, wild=True)])
    (weights, rest), (mine, lower) = (
        (torch.empty(len(master), dtype=BF16), torch.empty(len(master), dtype=torch.int16)) for _ in range(2)
    )
    kernels.split(weights, rest, master)
    fused.split(mine, lower, master)
    assert_same_bits([mine, lower], [weights, rest])
    back, expected = torch.empty(len(master)), torch.empty(len(master))
    kernels.join(expected, weights, rest)
    fused.join(back, weights, rest)
    assert_same_bits([back], [expected])


@pytest.fixture
def fresh() -> Iterator[None]:
    library.fused.cache_clear()
    yield
    library.fused.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_missing_kernels_are_said_once_or_an_error_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    monkeypatch.setitem(sys.modules, "penstock.optim.fused", None)
    with pytest.warns(RuntimeWarning, match="the GPU run in plain torch, with the same results but many times slower"):
        assert library.fused(here) is None
    library.fused.cache_clear()
    monkeypatch.setenv("PENSTOCK_KERNELS", "native")
    with pytest.raises(ConfigError, match="PENSTOCK_KERNELS=native, but there are none for the GPU"):
        library.fused(here)
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    assert library.fused(here) is None


@pytest.mark.usefixtures("fresh")
def test_a_gpu_that_triton_cannot_compile_for_is_no_error_but_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusedError(Exception):
        """An error as Triton's own, which are of no kind of Python's."""

    def refused(grad: torch.Tensor) -> torch.Tensor:
        raise RefusedError("sm_999 is not a recognized processor")

    def full(grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    here, found = torch.device("cpu"), ModuleType("penstock.optim.fused")
    monkeypatch.setitem(sys.modules, "penstock.optim.fused", found)
    monkeypatch.setattr(found, "fold_squares", refused, raising=False)
    with pytest.warns(RuntimeWarning, match="RefusedError: sm_999"):
        assert library.fused(here) is None
    library.fused.cache_clear()
    monkeypatch.setattr(found, "fold_squares", full)
    with pytest.raises(torch.OutOfMemoryError):
        library.fused(here)


@pytest.mark.usefixtures("fresh")
def test_a_triton_without_a_steps_roots_is_found_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norm compiles: quotients and roots that are rounded correctly came to Triton later than the rest."""

    def step(*_: object, **__: object) -> None:
        raise AttributeError("module 'triton.language' has no attribute 'div_rn'")

    found = ModuleType("penstock.optim.fused")
    vars(found).update(fold_squares=fallback.fold_squares, step=step)
    monkeypatch.setitem(sys.modules, "penstock.optim.fused", found)
    with pytest.warns(RuntimeWarning, match=r"many times slower \(AttributeError: .* has no attribute 'div_rn'"):
        assert library.fused(torch.device("cpu")) is None


@pytest.mark.usefixtures("fresh")
def test_kernels_that_work_are_used(fused: ModuleType) -> None:
    assert library.fused(torch.device("cpu")) is fused
