"""The same arithmetic as ``native/`` in plain torch, for any device. Same bits, several times slower on a CPU.

Only operations that round once are used: multiplication, addition, subtraction, division by a tensor, square root.
Not used: ``addcmul``, ``addcdiv``, ``lerp`` and ``add(alpha=...)``, which some devices contract to a fused
multiply-add, and division by a Python number, which CUDA turns into a multiplication by the reciprocal.
"""

from collections.abc import Iterator

import torch

from penstock.optim.codes import BELOW, FIRST, GROUP, NAN_SCALE, ROOT_STEP, SECOND, STEP, Codes, Moment
from penstock.optim.formula import FIRST_HALVES, Kind, Scalars
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
    weights: torch.Tensor,
    rest: torch.Tensor | None,
    moments: tuple[Moment, ...],
    grad_dtype: torch.dtype = torch.float32,
    squares: torch.Tensor | None = None,
) -> None:
    """``kernels.step``. ``squares``: [n / BLOCK] double on the device of the rest, receives the partials."""
    if squares is not None:
        squares.copy_(fold_squares(grad, grad_dtype))
    split_up = rest is not None and rest.dtype == torch.int16
    for part in _parts(weights, halved=split_up or any(_is_compact(moment) for moment in moments)):
        ours = None if rest is None else rest[part]
        wide = tuple(_wide(moment[part]) for moment in moments)
        p = _update(kind, s, _rounded(grad[part], grad_dtype), _master(weights[part], ours), wide)
        _keep(weights[part], ours, p)
        for moment, values in zip(moments, wide, strict=True):
            _narrow(moment[part], values)


def _master(weights: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """The fp32 master copy, in place or put together."""
    if rest is None or rest.dtype == torch.float32:
        return weights if rest is None else rest
    master = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    join(master, weights, rest)
    return master


def _keep(weights: torch.Tensor, rest: torch.Tensor | None, master: torch.Tensor) -> None:
    """Write a new master copy to where it belongs."""
    if rest is not None and rest.dtype == torch.int16:
        split(weights, rest, master)
        return
    cast(weights, master)
    if rest is not None:
        rest.copy_(master)


def _wide(moment: Moment) -> torch.Tensor:
    """A moment in fp32: itself, to be updated in place, or a new tensor."""
    if isinstance(moment, torch.Tensor):
        return moment.float()
    values = torch.empty(moment.numel(), dtype=torch.float32, device=moment.codes.device)
    decode(values, moment)
    return values


def _is_compact(moment: Moment) -> bool:
    return isinstance(moment, Codes) or moment.dtype != torch.float32


def _narrow(moment: Moment, values: torch.Tensor) -> None:
    """Write a moment's new fp32 values, if they are not in place."""
    if isinstance(moment, Codes):
        encode(moment, values)
    elif moment.dtype != torch.float32:
        cast(moment, values)


def split(weights: torch.Tensor, rest: torch.Tensor, master: torch.Tensor) -> None:
    """``kernels.split``."""
    bits, number = master.view(torch.int32), ~master.isnan()
    weights.view(torch.int16).copy_(torch.where(number, (bits + 0x8000) >> 16, 0x7FC0))
    rest.copy_(bits * number)  # cut off


def join(master: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor) -> None:
    """``kernels.join``."""
    master.view(torch.int32).copy_((weights.view(torch.int16).int() << 16) + rest)


def encode(codes: Codes, values: torch.Tensor) -> None:
    """``kernels.encode``. The line order is that of ``native/compact.h``."""
    second = codes.codes.dtype == torch.uint8
    x = (values.double().sqrt_().float() if second else values).view(-1, GROUP)
    size = x.view(torch.int32) & 0x7FFFFFFF
    largest = size.amax(dim=1)
    scale = ((largest + 0xFFF + ((largest >> 13) & 1)) >> 13).sub_(BELOW).clamp_(1, NAN_SCALE - 1)
    scale = torch.where(largest == 0, 0, torch.where(largest > 0x7F800000, NAN_SCALE, scale))
    codes.scales.copy_(scale)
    valid = (scale != 0) & (scale != NAN_SCALE)
    value = _of_scale(scale)
    inverse = torch.where(valid, torch.ones_like(value) / value, 0.0)
    part = size.view(torch.float32) * inverse.unsqueeze(1)
    if second:
        code = (part * SECOND).nan_to_num_(nan=SECOND).clamp_(1, SECOND).round_()
    else:
        code = (((part + part) / (1.0 + part)) * FIRST).nan_to_num_(nan=FIRST).clamp_(max=FIRST).round_()
        code = torch.where(x.view(torch.int32) < 0, -code, code)
    codes.codes.copy_((code * valid.unsqueeze(1)).view(-1))


def decode(values: torch.Tensor, codes: Codes) -> None:
    """``kernels.decode``."""
    scale = _of_scale(codes.scales.int() & 0xFFFF).unsqueeze(1)
    code = codes.codes.view(-1, GROUP).float()
    if codes.codes.dtype == torch.uint8:
        root = code.mul_(scale.mul_(ROOT_STEP))
        torch.mul(root, root, out=values.view(-1, GROUP))
        return
    y = code.abs() * STEP
    size = y.div_(2.0 - y).mul_(scale)
    torch.where(code < 0, -size, size, out=values.view(-1, GROUP))


def _of_scale(code: torch.Tensor) -> torch.Tensor:
    """The values of scales, in fp32, of their codes in int32."""
    bits = (code + BELOW) << 13
    return torch.where(code == 0, 0, torch.where(code == NAN_SCALE, 0x7FC00000, bits)).int().view(torch.float32)


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


def _parts(tensor: torch.Tensor, *, halved: bool = False) -> Iterator[slice]:
    """``halved``: state is widened to fp32 first, which takes memory, too."""
    n = tensor.numel()
    size = (_CPU_PART if tensor.device.type == "cpu" else DEVICE_PART) // (2 if halved else 1)
    return (slice(at, min(at + size, n)) for at in range(0, n, size))


def _update(
    kind: Kind, s: Scalars, grad: torch.Tensor, p: torch.Tensor, moments: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The new master (of the first half of Muon's step, the update); moments are updated in place. The line order is
    that of ``formula``."""
    g = grad.float() * s.grad_scale
    if kind in ("adam", "adamw"):
        return _adam(s, p * s.decay, g, *moments) if kind == "adamw" else _adam(s, p, g + p * s.l2, *moments)
    if kind == "lion":
        (m,) = moments
        direction = (m * s.beta1).add_(g * s.weight1).sign_()
        m.mul_(s.beta2).add_(g * s.weight2)
        return (p * s.decay).sub_(direction.mul_(s.rate))
    if kind in FIRST_HALVES:
        (m,) = moments
        m.add_((g - m).mul_(s.weight1))
        return m if kind == "muon" else (g - m).mul_(s.weight1).add_(m)
    if kind == "orthogonal":
        return (p * s.decay).sub_(g.mul_(s.rate))
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
