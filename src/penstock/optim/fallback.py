"""The same arithmetic as ``native/`` in plain torch, for any device. Same bits, several times slower on a CPU.

Only operations that round once are used: multiplication, addition, subtraction, division by a tensor, square root.
Not used: ``addcmul``, ``addcdiv``, ``lerp`` and ``add(alpha=...)``, which some devices contract to a fused
multiply-add, and division by a Python number, which CUDA turns into a multiplication by the reciprocal.
"""

from collections.abc import Iterator

import torch

from penstock.optim.formula import Kind, Scalars
from penstock.optim.norm import BLOCK

_CPU_PART = 16 * BLOCK  # elements at a time on a CPU, so that the dozen passes over them stay in its cache
DEVICE_PART = 256 * BLOCK
"""Elements at a time on an accelerator: enough to fill it, few enough for its temporaries to be small."""
DEVICE_TEMPORARIES = 32 * DEVICE_PART
"""Bytes that a step or a norm on an accelerator needs besides its arguments: at most four doubles an element."""


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
    """``kernels.step``. ``squares``: [n / BLOCK] double on the device of the rest, receives the partials."""
    if squares is not None:
        squares.copy_(fold_squares(grad, grad_dtype))
    for part in _parts(master):
        p = _update(kind, s, _rounded(grad[part], grad_dtype), master[part], tuple(moment[part] for moment in moments))
        master[part].copy_(p)
        if out is not None:
            cast(out[part], p)


def fold_squares(grad: torch.Tensor, grad_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The partials of ``grad`` ([n] fp32 or bf16, n a multiple of ``BLOCK``), [n / BLOCK] double on its device.

    ``grad_dtype``: as in ``kernels.step``.
    """
    return torch.cat([_fold(_rounded(grad[part], grad_dtype)) for part in _parts(grad)])


def _rounded(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient as it is read: a new tensor where it is wider than ``dtype``."""
    if dtype == torch.float32 or grad.dtype == dtype:
        return grad
    rounded = torch.empty_like(grad, dtype=dtype)
    cast(rounded, grad)
    return rounded


def _fold(grad: torch.Tensor) -> torch.Tensor:
    halves = grad.view(-1, 2, BLOCK // 2).double()
    v = halves[:, 0].square().add_(halves[:, 1].square())
    while (half := v.shape[1] // 2) > 0:
        v = v[:, :half] + v[:, half:]
    return v[:, 0]


def cast(dst: torch.Tensor, src: torch.Tensor) -> None:
    """``kernels.cast``. Devices disagree about which NaN a NaN is rounded to, so it is written by hand; in place, as no
    plan counts memory for it."""
    dst.copy_(src)
    if dst.dtype != torch.float32:
        dst.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)


def _parts(tensor: torch.Tensor) -> Iterator[slice]:
    n = tensor.numel()
    size = _CPU_PART if tensor.device.type == "cpu" else DEVICE_PART
    return (slice(at, min(at + size, n)) for at in range(0, n, size))


def _update(
    kind: Kind, s: Scalars, grad: torch.Tensor, p: torch.Tensor, moments: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The new master as a new tensor; moments are updated in place. The line order is that of ``formula``."""
    g = grad.float() * s.grad_scale
    if kind in ("adam", "adamw"):
        return _adam(s, p * s.decay, g, *moments) if kind == "adamw" else _adam(s, p, g + p * s.l2, *moments)
    if kind == "lion":
        (m,) = moments
        direction = (m * s.beta1).add_(g * s.weight1).sign_()
        m.mul_(s.beta2).add_(g * s.weight2)
        return (p * s.decay).sub_(direction.mul_(s.rate))
    g.add_(p * s.l2)
    if kind == "sgd":
        return p - g * s.rate
    (m,) = moments
    m.mul_(s.beta1).add_(g)
    return p - (g + m * s.beta1 if kind == "nesterov" else m) * s.rate


def _adam(s: Scalars, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    m.add_((g - m).mul_(s.weight1))
    v.mul_(s.beta2).add_((g * s.weight2).mul_(g))
    root_v = v.double().sqrt_().float()  # correctly rounded through double; torch's own fp32 root on a CPU is not
    return p - (m * s.rate).div_(root_v.mul_(s.root).add_(s.eps))
