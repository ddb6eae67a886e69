"""Optimizer steps, gradient norms, sums and conversions of flat tensors: native on the CPU, fused on a GPU, or torch.

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
from penstock.optim.codes import FORMS, Codes, Moment
from penstock.optim.formula import FIRST_HALVES, Hyper, scalars
from penstock.optim.norm import BLOCK

_FP32, _BF16, _FP16, _INT16 = torch.float32, torch.bfloat16, torch.float16, torch.int16
_DTYPES = {_FP32: 0, _BF16: 1, _FP16: 2}  # enum DType in native/kernels.h
_ROUNDED = 3  # there, too: fp32 that is rounded to bf16 as it is read
_FORMS = {(_FP32, None): 0, (_BF16, _INT16): 1, (_BF16, _FP32): 2, (_FP16, _FP32): 3}  # enum Form: weights and rest
_MADE = 4
"""there, too: bf16 weights that are made, and not stepped"""
_MOMENTS = {_FP32: 0, _BF16: 1, torch.int8: 2, torch.uint8: 2}  # enum Moment
_OF_CODES = FORMS["int8"]


def backend() -> Literal["native", "torch"]:
    """The implementation that CPU tensors are computed with."""
    return "native" if library.native() else "torch"


def step(
    hyper: Hyper,
    count: int,
    *,
    grad: torch.Tensor,
    weights: torch.Tensor,
    rest: torch.Tensor | None = None,
    moments: tuple[Moment, ...],
    grad_dtype: torch.dtype = _FP32,
    grad_scale: float = 1.0,
    partials: NDArray[np.float64] | None = None,
    squares: torch.Tensor | None = None,
    threads: int = 1,
) -> None:
    """Optimizer step number ``count`` (from 1) on n elements, in one pass over memory. In place.

    What is stepped is an fp32 master copy. Where it is follows from the dtypes of ``weights`` and ``rest``:

    | weights | rest | the master copy |
    |---|---|---|
    | fp32 | None | the weights |
    | bf16 | int16 | both together, as ``split`` makes them: its rounded upper half, and its lower 16 bits |
    | bf16, fp16 | fp32 | rest; weights are only written: it, rounded to nearest even |
    | bf16 | None | of the first half of Muon's step there is none; weights are the update that it makes |

    Args:
        grad: [n] fp32 or bf16; multiplied by ``grad_scale`` first, in fp32.
        grad_dtype: fp32, or bf16: ``grad`` is rounded to it as it is read, before anything else. The bits are those of
            a ``cast`` to bf16 before the step, without the pass over memory.
        weights, rest: [n] each, updated.
        moments: ``hyper.moments`` moments of n elements, updated; zero before the first step. Each is fp32, or bf16 or
            ``Codes``, of which n must be a multiple of ``GROUP``: it is widened to fp32, and rounded again afterwards.
        partials: [n / BLOCK] double, receives the sums of squares of ``grad`` as read (rounded, where it is),
            before ``grad_scale``. Needs n to be a multiple of ``BLOCK``.
        squares: the same, of a step on an accelerator: [n / BLOCK] double there, which is not waited for.

    Raises:
        ValueError: a tensor has another shape, dtype, device or layout than this, or ``grad_dtype`` is another.
    """
    n, device = weights.numel(), weights.device
    form = _form_of(weights, rest, makes=hyper.kind in FIRST_HALVES)
    _check("grad", grad, n, device, _FP32, _BF16)
    grad_code = _read_code(grad, grad_dtype)
    if len(moments) != hyper.moments:
        raise ValueError(f"{hyper.kind} has {hyper.moments} moments, not {len(moments)}")
    for moment, of_codes in zip(moments, _OF_CODES, strict=False):
        _check_moment(moment, n, device, of_codes)
    if partials is not None:
        _check_partials(partials, n)
    if squares is not None:
        _check_squares(squares, n, device, partials)
    values = scalars(hyper, count, grad_scale)
    native = _native_for(weights)
    if native is None:
        if partials is not None:
            squares = torch.empty(n // BLOCK, dtype=torch.float64, device=device)
        _torch_for(weights).step(
            hyper.kind,
            values,
            grad=grad,
            weights=weights,
            rest=rest,
            moments=moments,
            grad_dtype=grad_dtype,
            squares=squares,
        )
        if partials is not None and squares is not None:
            partials[:] = squares.cpu().numpy()
        return
    (first, first_type), (second, second_type) = (*map(_moment_args, moments), _NO_MOMENT, _NO_MOMENT)[:2]
    args = library.StepArgs(
        grad.data_ptr(),
        weights.data_ptr(),
        None if rest is None else rest.data_ptr(),
        first,
        second,
        None if partials is None else partials.ctypes.data,
        library.Scalars(*vars(values).values()),
        library.NUMBERS[hyper.kind],
        grad_code,
        form,
        first_type,
        second_type,
    )
    native.penstock_step(ctypes.byref(args), n, threads)


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
        native.penstock_add(_DTYPES[x.dtype], acc.data_ptr(), x.data_ptr(), n, threads)


def cast(dst: torch.Tensor, src: torch.Tensor, threads: int = 1) -> None:
    """Copy ``src`` to ``dst``, rounding to nearest, ties to even; both [n], of fp32, bf16 or fp16."""
    n = dst.numel()
    _check("dst", dst, n, dst.device, _FP32, _BF16, _FP16)
    _check("src", src, n, dst.device, _FP32, _BF16, _FP16)
    native = _native_for(dst)
    if native is None:
        _torch_for(dst).cast(dst, src)
    else:
        native.penstock_cast(_DTYPES[dst.dtype], dst.data_ptr(), _DTYPES[src.dtype], src.data_ptr(), n, threads)


def split(weights: torch.Tensor, rest: torch.Tensor, master: torch.Tensor, threads: int = 1) -> None:
    """Cut a master copy [n] fp32 into its halves, without loss: ``weights`` [n] bf16, ``rest`` [n] int16.

    ``weights`` are the master rounded half-up, ``rest`` its lower 16 bits. Only which NaN a NaN was is lost.
    """
    native, n = _check_split(weights, rest, master)
    if native is None:
        _torch_for(master).split(weights, rest, master)
    else:
        native.penstock_split(weights.data_ptr(), rest.data_ptr(), master.data_ptr(), n, threads)


def join(master: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor, threads: int = 1) -> None:
    """Put a master copy [n] fp32 together from its halves: the inverse of ``split``."""
    native, n = _check_split(weights, rest, master)
    if native is None:
        _torch_for(master).join(master, weights, rest)
    else:
        native.penstock_join(master.data_ptr(), weights.data_ptr(), rest.data_ptr(), n, threads)


def encode(moment: Moment, values: torch.Tensor, threads: int = 1) -> None:
    """Round ``values`` [n] fp32 to a moment of n elements, as a step does."""
    if isinstance(moment, torch.Tensor):
        cast(moment, values, threads)
        return
    native, n = _check_codes(moment, values)
    if native is None:
        _torch_for(values).encode(moment, values)
    else:
        args, second = _moment_args(moment)[0], moment.codes.dtype == torch.uint8
        native.penstock_encode(second, args.values, args.scales, values.data_ptr(), n, threads)


def decode(values: torch.Tensor, moment: Moment, threads: int = 1) -> None:
    """Widen a moment of n elements to ``values`` [n] fp32, as a step does."""
    if isinstance(moment, torch.Tensor):
        cast(values, moment, threads)
        return
    native, n = _check_codes(moment, values)
    if native is None:
        _torch_for(values).decode(values, moment)
    else:
        args, second = _moment_args(moment)[0], moment.codes.dtype == torch.uint8
        native.penstock_decode(second, values.data_ptr(), args.values, args.scales, n, threads)


_NO_MOMENT = (library.MomentArgs(None, None), 0)


def _moment_args(moment: Moment) -> tuple[library.MomentArgs, int]:
    """A moment's addresses and its form, as native code takes them."""
    if isinstance(moment, Codes):
        return library.MomentArgs(moment.codes.data_ptr(), moment.scales.data_ptr()), _MOMENTS[moment.codes.dtype]
    return library.MomentArgs(moment.data_ptr(), None), _MOMENTS[moment.dtype]


def _native_for(tensor: torch.Tensor) -> ctypes.CDLL | None:
    return library.native() if tensor.device.type == "cpu" else None


def _torch_for(tensor: torch.Tensor) -> library.TorchKernels:
    """The implementation for a tensor that the native library does not compute with."""
    return (library.fused(tensor.device) if tensor.device.type == "cuda" else None) or fallback


def _read_code(grad: torch.Tensor, grad_dtype: torch.dtype) -> int:
    """The code by which native code reads a gradient that is to be rounded to ``grad_dtype``."""
    if grad_dtype not in (_FP32, _BF16):
        raise ValueError(f"grad_dtype is {grad_dtype}: must be {_FP32} or {_BF16}")
    return _ROUNDED if (grad.dtype, grad_dtype) == (_FP32, _BF16) else _DTYPES[grad.dtype]


def _form_of(weights: torch.Tensor, rest: torch.Tensor | None, *, makes: bool) -> int:
    """The code of where the master copy is; both tensors fit. ``makes``: a step only makes what is in ``weights``."""
    n, device = weights.numel(), weights.device
    if makes:
        if rest is not None:
            raise ValueError(f"rest is {rest.dtype}: must be None where an update is made")
        _check("weights", weights, n, device, _BF16)
        return _MADE
    form = _FORMS.get((weights.dtype, None if rest is None else rest.dtype))
    if form is None:
        found = f"weights are {weights.dtype}, rest is {None if rest is None else rest.dtype}"
        raise ValueError(f"{found}: must be fp32 and None, bf16 and int16, or bf16 or fp16 and fp32")
    _check("weights", weights, n, device, weights.dtype)
    if rest is not None:
        _check("rest", rest, n, device, rest.dtype)
    return form


def _check_split(weights: torch.Tensor, rest: torch.Tensor, master: torch.Tensor) -> tuple[ctypes.CDLL | None, int]:
    n, device = master.numel(), master.device
    _check("master", master, n, device, _FP32)
    _check("weights", weights, n, device, _BF16)
    _check("rest", rest, n, device, _INT16)
    return _native_for(master), n


def _check_codes(codes: Codes, values: torch.Tensor) -> tuple[ctypes.CDLL | None, int]:
    n, device = values.numel(), values.device
    _check("values", values, n, device, _FP32)
    _check("codes", codes.codes, n, device, *_OF_CODES)
    return _native_for(values), n


def _check_moment(moment: Moment, n: int, device: torch.device, of_codes: torch.dtype) -> None:
    if isinstance(moment, Codes):
        _check("moment", moment.codes, n, device, of_codes)  # the scales fit the codes: see there
    else:
        _check("moment", moment, n, device, _FP32, _BF16)


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
