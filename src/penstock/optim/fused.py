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
from penstock.optim.formula import Kind, Scalars
from penstock.optim.norm import BLOCK

_ROUNDED: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SETTINGS = {"num_warps": 8, "enable_fp_fusion": False}
"""How kernels are compiled: without fused multiply-adds."""


def step(
    kind: Kind,
    s: Scalars,
    *,
    grad: torch.Tensor,
    master: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    out: torch.Tensor | None,
    grad_dtype: torch.dtype = torch.float32,
    squares: torch.Tensor | None = None,
) -> None:
    """``fallback.step``."""
    first, second = (*moments, None, None)[:2]
    with torch.cuda.device_of(master):  # type: ignore[no-untyped-call]
        device.step[_grid(master)](
            grad,
            master,
            first,
            second,
            _bits(out),
            squares,
            master.numel(),
            *astuple(s),
            kind=kind,
            rounding=_narrower(grad, grad_dtype),
            like=None if out is None else _ROUNDED[out.dtype],
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


def _narrower(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    return grad.dtype == torch.float32 and dtype != torch.float32


def _grid(tensor: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


def _bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(torch.int16)
