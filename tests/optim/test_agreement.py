"""A device that steps with other bits than the host is found out, in every optimizer and precision."""

from typing import Any

import pytest
import torch

from penstock.engine import device
from penstock.optim import fallback, kernels
from penstock.optim.agreement import PRECISIONS, other_bits
from penstock.optim.codes import Codes
from penstock.optim.formula import FIRST_HALVES, KINDS, Hyper, scalars

CPU = torch.device("cpu")


def in_torch(hyper: Hyper, count: int, *, grad_scale: float, **arrays: Any) -> None:
    """What another device than the CPU computes with."""
    fallback.step(hyper.kind, scalars(hyper, count, grad_scale), grad_dtype=torch.float32, **arrays)


def test_what_other_devices_compute_with_has_the_bits_of_the_native_kernels() -> None:
    assert kernels.backend() == "native"
    assert other_bits(CPU, step=in_torch) == ()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FIRST_HALVES])
@pytest.mark.parametrize("form", [form for forms in PRECISIONS.values() for form in forms])
def test_one_bit_of_one_element_is_a_difference(kind: Any, form: tuple[torch.dtype, torch.dtype | None]) -> None:
    def off(hyper: Hyper, count: int, **arrays: Any) -> None:
        in_torch(hyper, count, **arrays)
        weights, rest = arrays["weights"], arrays["rest"]
        if (weights.dtype, None if rest is None else rest.dtype, count) == (*form, 3):
            weights.view(torch.uint8)[0] ^= 1

    (precision,) = (name for name, forms in PRECISIONS.items() if form in forms)
    assert other_bits(CPU, (kind,), PRECISIONS, ("fp32",), step=off) == (f"{kind}.{precision}",)


@pytest.mark.parametrize("kind", sorted(FIRST_HALVES))
def test_one_bit_of_one_update_is_a_difference_in_every_precision(kind: Any) -> None:
    def off(hyper: Hyper, count: int, **arrays: Any) -> None:
        in_torch(hyper, count, **arrays)
        arrays["weights"].view(torch.uint8)[0] ^= count == 3

    assert other_bits(CPU, (kind,), PRECISIONS, ("fp32",), step=off) == tuple(f"{kind}.{name}" for name in PRECISIONS)


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_bit_of_compact_moments_is_a_difference_and_named(part: str, which: int) -> None:
    def off(hyper: Hyper, count: int, **arrays: Any) -> None:
        in_torch(hyper, count, **arrays)
        moment = arrays["moments"][which]
        if isinstance(moment, Codes) and count == 3:
            getattr(moment, part).view(torch.uint8)[-1] ^= 1

    assert other_bits(CPU, ("adamw",), ("bf16",), step=off) == ("adamw.bf16.int8",)


@pytest.mark.parametrize(("different", "said"), [((), 0), (("adamw.bf16",), 1)])
def test_a_run_that_steps_on_the_device_says_once_where_bits_differ(
    different: tuple[str, ...], said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "other_bits", lambda *_: different)
    device.warn_of_other_bits.cache_clear()
    for _ in range(2):
        device.warn_of_other_bits(CPU, "adamw.bf16")
    assert len([r for r in caplog.records if "differ from the host's in some bits" in r.message]) == said
    device.warn_of_other_bits.cache_clear()
