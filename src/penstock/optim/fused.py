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
    _run(
        device.step,
        weights,
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
    )


def fold_squares(grad: torch.Tensor, grad_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``fallback.fold_squares``."""
    squares = torch.empty(grad.numel() // BLOCK, dtype=torch.float64, device=grad.device)
    _run(device.squares, grad, grad, squares, rounding=_narrower(grad, grad_dtype))
    return squares


def cast(dst: torch.Tensor, src: torch.Tensor) -> None:
    """``fallback.cast``."""
    if dst.dtype == torch.float32:
        dst.copy_(src)
    else:
        _run(device.cast, dst, _bits(dst), src, dst.numel(), like=_ROUNDED[dst.dtype])


def split(weights: torch.Tensor, rest: torch.Tensor, master: torch.Tensor) -> None:
    """``fallback.split``."""
    _run(device.split, master, _bits(weights), rest, master, master.numel())


def join(master: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor) -> None:
    """``fallback.join``."""
    _run(device.join, master, master, _bits(weights), rest, master.numel())


def encode(codes: Codes, values: torch.Tensor) -> None:
    """``fallback.encode``."""
    _run(device.encode, values, codes.codes, codes.scales, values, values.numel())


def decode(values: torch.Tensor, codes: Codes) -> None:
    """``fallback.decode``."""
    _run(device.decode, values, values, codes.codes, codes.scales, values.numel())


def _run(kernel: Any, over: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Queue a kernel on a tensor's device, with one program for each ``BLOCK`` of its elements. It is compiled without
    fused multiply-adds, which would change bits."""
    with torch.cuda.device_of(over):  # type: ignore[no-untyped-call]
        grid = (triton.cdiv(over.numel(), BLOCK),)
        kernel[grid](*arguments, **constants, num_warps=8, enable_fp_fusion=False)


def _pointers(moment: Moment) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A moment as the kernels take it: fp32, the bits of bf16, or codes, and their scales."""
    if isinstance(moment, Codes):
        return moment.codes, moment.scales
    return moment if moment.dtype == torch.float32 else _bits(moment), None


def _narrower(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    return grad.dtype == torch.float32 and dtype != torch.float32


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)
