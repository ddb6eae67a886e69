"""One optimizer step, gradient norms, sums and casts over flat tensors: native on the CPU, fused on a GPU, or torch.

The bits of a result depend on nothing but its inputs: not on the number of threads, the instruction set, the device,
or how a group is cut into chunks. ``formula`` and ``docs/numerics.md`` are the definition.

Calls on CPU tensors release the GIL and run on ``threads`` threads of the library's own pool. On a GPU ``fused`` queues
them on the current stream. On other devices, without the library, or without Triton, ``fallback`` does the work.
"""

import ctypes
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.optim import fallback, library
from penstock.optim.formula import Hyper, scalars
from penstock.optim.norm import BLOCK

_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_CODES = {_FP32: 0, _BF16: 1, _FP16: 2, None: 3}  # enum DType in native/kernels.h
_ROUNDED = 4  # there, too: fp32 that is rounded to bf16 as it is read


def backend() -> Literal["native", "torch"]:
    """The implementation that CPU tensors are computed with."""
    return "native" if library.native() else "torch"


def step(
    hyper: Hyper,
    count: int,
    *,
    grad: torch.Tensor,
    master: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    out: torch.Tensor | None = None,
    grad_dtype: torch.dtype = _FP32,
    grad_scale: float = 1.0,
    partials: NDArray[np.float64] | None = None,
    squares: torch.Tensor | None = None,
    threads: int = 1,
) -> None:
    """Optimizer step number ``count`` (from 1) on n elements, in one pass over memory. In place.

    Args:
        grad: [n] fp32 or bf16; multiplied by ``grad_scale`` first, in fp32.
        grad_dtype: fp32, or bf16: ``grad`` is rounded to it as it is read, before anything else. The bits are those of
            a ``cast`` to bf16 before the step, without the pass over memory.
        master: [n] fp32, updated.
        moments: ``hyper.moments`` tensors [n] fp32, updated. Zero before the first step.
        out: [n] bf16 or fp16, receives the rounded new master.
        partials: [n / BLOCK] double, receives the sums of squares of ``grad`` as read (rounded, where it is),
            before ``grad_scale``. Needs n to be a multiple of ``BLOCK``.
        squares: the same, of a step on an accelerator: [n / BLOCK] double there, which is not waited for.

    Raises:
        ValueError: a tensor has another shape, dtype, device or layout than this, or ``grad_dtype`` is another.
    """
    n = master.numel()
    _check("master", master, n, master.device, _FP32)
    _check("grad", grad, n, master.device, _FP32, _BF16)
    grad_code = _read_code(grad, grad_dtype)
    if len(moments) != hyper.moments:
        raise ValueError(f"{hyper.kind} has {hyper.moments} moments, not {len(moments)}")
    for moment in moments:
        _check("moment", moment, n, master.device, _FP32)
    if out is not None:
        _check("out", out, n, master.device, _BF16, _FP16)
    if partials is not None:
        _check_partials(partials, n)
    if squares is not None:
        _check_squares(squares, n, master.device, partials)
    values = scalars(hyper, count, grad_scale)
    native = _native_for(master)
    if native is None:
        if partials is not None:
            squares = torch.empty(n // BLOCK, dtype=torch.float64, device=master.device)
        _torch_for(master).step(
            hyper.kind,
            values,
            grad=grad,
            master=master,
            moments=moments,
            out=out,
            grad_dtype=grad_dtype,
            squares=squares,
        )
        if partials is not None and squares is not None:
            partials[:] = squares.cpu().numpy()
        return
    first, second = (*(moment.data_ptr() for moment in moments), None, None)[:2]
    args = library.StepArgs(
        grad.data_ptr(),
        master.data_ptr(),
        first,
        second,
        None if out is None else out.data_ptr(),
        None if partials is None else partials.ctypes.data,
        library.Scalars(*vars(values).values()),
    )
    out_code = _CODES[None if out is None else out.dtype]
    native.penstock_step(library.KINDS[hyper.kind], grad_code, out_code, ctypes.byref(args), n, threads)


def partial_norms(
    grad: torch.Tensor, partials: NDArray[np.float64], threads: int = 1, *, grad_dtype: torch.dtype = _FP32
) -> None:
    """Sums of squares of each ``BLOCK`` elements of ``grad`` ([n] fp32 or bf16): ``partials`` is [n / BLOCK] double.

    ``grad_dtype``: as in ``step``. The sums are those of the rounded gradient.
    """
    n = grad.numel()
    _check("grad", grad, n, grad.device, _FP32, _BF16)
    code = _read_code(grad, grad_dtype)
    _check_partials(partials, n)
    native = _native_for(grad)
    if native is None:
        partials[:] = _torch_for(grad).fold_squares(grad, grad_dtype).cpu().numpy()
    else:
        native.penstock_norms(code, grad.data_ptr(), partials.ctypes.data, n, threads)


def fold_squares(grad: torch.Tensor, grad_dtype: torch.dtype = _FP32) -> torch.Tensor:
    """``partial_norms`` that stay on the device of ``grad``, [n / BLOCK] double, and are not waited for."""
    n = grad.numel()
    _check("grad", grad, n, grad.device, _FP32, _BF16)
    if n % BLOCK:
        raise ValueError(f"grad has {n} elements: must be a multiple of {BLOCK}")
    return _torch_for(grad).fold_squares(grad, grad_dtype)


def add(acc: torch.Tensor, x: torch.Tensor, threads: int = 1) -> None:
    """``acc += x`` in fp32; ``acc`` [n] fp32, ``x`` [n] fp32 or bf16."""
    n = acc.numel()
    _check("acc", acc, n, acc.device, _FP32)
    _check("x", x, n, acc.device, _FP32, _BF16)
    native = _native_for(acc)
    if native is None:
        acc.add_(x)
    else:
        native.penstock_add(_CODES[x.dtype], acc.data_ptr(), x.data_ptr(), n, threads)


def cast(dst: torch.Tensor, src: torch.Tensor, threads: int = 1) -> None:
    """Copy ``src`` to ``dst``, rounding to nearest, ties to even; both [n], of fp32, bf16 or fp16."""
    n = dst.numel()
    _check("dst", dst, n, dst.device, _FP32, _BF16, _FP16)
    _check("src", src, n, dst.device, _FP32, _BF16, _FP16)
    native = _native_for(dst)
    if native is None:
        _torch_for(dst).cast(dst, src)
    else:
        native.penstock_cast(_CODES[dst.dtype], dst.data_ptr(), _CODES[src.dtype], src.data_ptr(), n, threads)


def _native_for(tensor: torch.Tensor) -> ctypes.CDLL | None:
    return library.native() if tensor.device.type == "cpu" else None


def _torch_for(tensor: torch.Tensor) -> library.TorchKernels:
    """The implementation for a tensor that the native library does not compute with."""
    return (library.fused(tensor.device) if tensor.device.type == "cuda" else None) or fallback


def _read_code(grad: torch.Tensor, grad_dtype: torch.dtype) -> int:
    """The code by which native code reads a gradient that is to be rounded to ``grad_dtype``."""
    if grad_dtype not in (_FP32, _BF16):
        raise ValueError(f"grad_dtype is {grad_dtype}: must be {_FP32} or {_BF16}")
    return _ROUNDED if (grad.dtype, grad_dtype) == (_FP32, _BF16) else _CODES[grad.dtype]


def _check(name: str, tensor: torch.Tensor, n: int, device: torch.device, *dtypes: torch.dtype) -> None:
    """The native code gets bare addresses, so what it assumes is checked here and not by an assert that -O removes."""
    if tensor.dtype not in dtypes or tensor.numel() != n or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}: must be {n} contiguous elements of "
            f"{' or '.join(str(dtype) for dtype in dtypes)} on {device}"
        )


def _check_partials(partials: NDArray[np.float64], n: int) -> None:
    fits = partials.dtype == np.float64 and partials.flags.c_contiguous and partials.flags.writeable
    if n % BLOCK or partials.size * BLOCK != n or not fits:
        raise ValueError(
            f"partials has {partials.size} elements of {partials.dtype} for a gradient of {n}: the gradient must be a "
            f"multiple of {BLOCK} elements with one writable contiguous float64 for each"
        )


def _check_squares(squares: torch.Tensor, n: int, device: torch.device, partials: NDArray[np.float64] | None) -> None:
    if device.type == "cpu" or partials is not None:
        raise ValueError("squares: must be None on the CPU, and beside partials, which are the same")
    if n % BLOCK:
        raise ValueError(f"grad has {n} elements: must be a multiple of {BLOCK}")
    _check("squares", squares, n // BLOCK, device, torch.float64)
