"""The same arithmetic as ``native/`` on a GPU: a step with its norm and its cast in one pass over memory.

Written in Triton, which torch's builds for GPUs bring. The bits are those of ``fallback``: multiplications and
additions are not contracted, quotients and roots are correctly rounded, denormals are kept. Every program of a kernel
takes one ``BLOCK`` of elements, so that its fold of squares is the partial of that block.
"""

from dataclasses import astuple
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.optim import fused_device as device
from penstock.optim.codes import Codes, Moment
from penstock.optim.formula import Kind, Scalars
from penstock.optim.norm import BLOCK

_ROUNDED: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SETTINGS = {"num_warps": 8, "enable_fp_fusion": False}
"""Settings that kernels are compiled with: no fused multiply-adds, which would change bits."""


def step(
    kind: Kind,
    s: Scalars,
    *,
    grad: torch.Tensor,
    weights: torch.Tensor,
    rest: torch.Tensor | None,
    moments: tuple[Moment, ...],
    grad_dtype: torch.dtype = torch.float32,
    squares: torch.Tensor | None = None,
) -> None:
    """``fallback.step``."""
    first, second = (*map(_pointers, moments), (None, None), (None, None))[:2]
    with torch.cuda.device_of(weights):  # type: ignore[no-untyped-call]
        device.step[_grid(weights)](
            grad,
            weights if weights.dtype == torch.float32 else _bits(weights),
            rest,
            *first,
            *second,
            squares,
            weights.numel(),
            *astuple(s),
            kind=kind,
            rounding=_narrower(grad, grad_dtype),
            split=rest is not None and rest.dtype == torch.int16,
            like=_ROUNDED.get(weights.dtype),
            **_SETTINGS,
        )


def fold_squares(grad: torch.Tensor, grad_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``fallback.fold_squares``."""
    squares = torch.empty(grad.numel() // BLOCK, dtype=torch.float64, device=grad.device)
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        device.squares[_grid(grad)](grad, squares, rounding=_narrower(grad, grad_dtype), **_SETTINGS)
    return squares


def cast(dst: torch.Tensor, src: torch.Tensor) -> None:
    """``fallback.cast``."""
    if dst.dtype == torch.float32:
        dst.copy_(src)
        return
    with torch.cuda.device_of(dst):  # type: ignore[no-untyped-call]
        device.cast[_grid(dst)](_bits(dst), src, dst.numel(), like=_ROUNDED[dst.dtype], **_SETTINGS)


def split(weights: torch.Tensor, rest: torch.Tensor, master: torch.Tensor) -> None:
    """``fallback.split``."""
    with torch.cuda.device_of(master):  # type: ignore[no-untyped-call]
        device.split[_grid(master)](_bits(weights), rest, master, master.numel(), **_SETTINGS)


def join(master: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor) -> None:
    """``fallback.join``."""
    with torch.cuda.device_of(master):  # type: ignore[no-untyped-call]
        device.join[_grid(master)](master, _bits(weights), rest, master.numel(), **_SETTINGS)


def encode(codes: Codes, values: torch.Tensor) -> None:
    """``fallback.encode``."""
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        device.encode[_grid(values)](codes.codes, codes.scales, values, values.numel(), **_SETTINGS)


def decode(values: torch.Tensor, codes: Codes) -> None:
    """``fallback.decode``."""
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        device.decode[_grid(values)](values, codes.codes, codes.scales, values.numel(), **_SETTINGS)


def _pointers(moment: Moment) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A moment as the kernels take it: fp32, the bits of bf16, or codes, and their scales."""
    if isinstance(moment, Codes):
        return moment.codes, moment.scales
    return moment if moment.dtype == torch.float32 else _bits(moment), None


def _narrower(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    return grad.dtype == torch.float32 and dtype != torch.float32


def _grid(tensor: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)
