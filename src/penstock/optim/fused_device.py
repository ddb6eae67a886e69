"""The kernels that ``fused`` runs on a GPU, in Triton's language: each program takes one ``BLOCK`` of elements.

Values are [BLOCK] numbers, arguments are pointers to [n] where nothing else is said. ``rounding``: gradients are
rounded to bf16 as they are read. ``like``: the dtype, bf16 or fp16, of what is written as the int16 of its bits.
"""

import triton
import triton.language as tl

from penstock.optim import codes
from penstock.optim.norm import BLOCK

_SIZE = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(codes.GROUP)
_GROUPS = tl.constexpr(BLOCK // codes.GROUP)
_BELOW = tl.constexpr(codes.BELOW)
_NAN_SCALE = tl.constexpr(codes.NAN_SCALE)
_FIRST = tl.constexpr(float(codes.FIRST))
_SECOND = tl.constexpr(float(codes.SECOND))
_STEP = tl.constexpr(codes.STEP)
_ROOT_STEP = tl.constexpr(codes.ROOT_STEP)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: in a sum with it, the last bits are a small number rounded
_ROUND_BITS = tl.constexpr(0x4B400000)
_LEVELS = tl.constexpr(BLOCK.bit_length() - 1)


@triton.jit
def step(
    grad,
    weights,
    rest,
    first,
    first_scales,
    second,
    second_scales,
    squares,
    n,
    grad_scale,
    decay,
    l2,
    beta1,
    weight1,
    beta2,
    weight2,
    rate,
    root,
    eps,
    kind: tl.constexpr,
    rounding: tl.constexpr,
    split: tl.constexpr,
    like: tl.constexpr,
):
    """``formula``, line by line. ``split``: ``weights`` and ``rest`` are the halves of the master copy.

    ``weights`` that are no floats, and moments in bf16, are the int16 of their bits; ``like`` is the weights' dtype,
    None for floats. Without ``rest``, such weights are only written: the update that the kind makes.
    """
    at = _places()
    inside = at < n
    g = _as_read(tl.load(grad + at, mask=inside, other=0.0), rounding)
    if squares is not None:
        tl.store(squares + tl.program_id(0), _fold(g))
    g = g * grad_scale
    if rest is None and like is not None:
        p = g
    elif rest is None:
        p = tl.load(weights + at, mask=inside, other=0.0)
    elif split:
        p = _joined(tl.load(weights + at, mask=inside, other=0), tl.load(rest + at, mask=inside, other=0))
    else:
        p = tl.load(rest + at, mask=inside, other=0.0)
    if kind == "adamw":
        p = p * decay
    elif kind == "adam" or kind == "sgd" or kind == "momentum" or kind == "nesterov":
        g = g + p * l2
    if kind == "sgd":
        p = p - g * rate
    elif kind == "orthogonal":
        p = p * decay - g * rate
    else:
        m = _moment(first, first_scales, at, n)
        if kind == "lion":
            c = m * beta1 + g * weight1
            m = m * beta2 + g * weight2
            p = p * decay - tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0)) * rate
        elif kind == "momentum":
            m = m * beta1 + g
            p = p - m * rate
        elif kind == "nesterov":
            m = m * beta1 + g
            p = p - (g + m * beta1) * rate
        elif kind == "muon":
            m = m + (g - m) * weight1
            p = m
        elif kind == "nesterov-muon":
            m = m + (g - m) * weight1
            p = m + (g - m) * weight1
        else:
            m = m + (g - m) * weight1
            v = _moment(second, second_scales, at, n)
            v = v * beta2 + (g * weight2) * g
            p = p - tl.div_rn(m * rate, tl.sqrt_rn(v) * root + eps)
            _keep(second, second_scales, at, n, v)
        _keep(first, first_scales, at, n, m)
    if rest is None and like is not None:
        tl.store(weights + at, _rounded(p, like), mask=inside)
    elif rest is None:
        tl.store(weights + at, p, mask=inside)
    elif split:
        tl.store(weights + at, _upper(p), mask=inside)
        tl.store(rest + at, _lower(p), mask=inside)
    else:
        tl.store(rest + at, p, mask=inside)
        tl.store(weights + at, _rounded(p, like), mask=inside)


@triton.jit
def squares(grad, squares, rounding: tl.constexpr):
    tl.store(squares + tl.program_id(0), _fold(_as_read(tl.load(grad + _places()), rounding)))


@triton.jit
def cast(dst, src, n, like: tl.constexpr):
    at = _places()
    inside = at < n
    tl.store(dst + at, _rounded(_wide(tl.load(src + at, mask=inside, other=0.0)), like), mask=inside)


@triton.jit
def split(weights, rest, master, n):
    at = _places()
    p = tl.load(master + at, mask=at < n, other=0.0)
    tl.store(weights + at, _upper(p), mask=at < n)
    tl.store(rest + at, _lower(p), mask=at < n)


@triton.jit
def join(master, weights, rest, n):
    at = _places()
    p = _joined(tl.load(weights + at, mask=at < n, other=0), tl.load(rest + at, mask=at < n, other=0))
    tl.store(master + at, p, mask=at < n)


@triton.jit
def encode(codes, scales, values, n):
    at = _places()
    _keep(codes, scales, at, n, tl.load(values + at, mask=at < n, other=0.0))


@triton.jit
def decode(values, codes, scales, n):
    at = _places()
    tl.store(values + at, _moment(codes, scales, at, n), mask=at < n)


@triton.jit
def _joined(upper, lower):
    """A master copy of its halves, both int16."""
    return ((upper.to(tl.int32) << 16) + lower.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _upper(p):
    return tl.where(p != p, 0x7FC0, (p.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16)


@triton.jit
def _lower(p):
    return tl.where(p != p, 0, p.to(tl.int32, bitcast=True)).to(tl.int16)


@triton.jit
def _moment(values, scales, at, n):
    """A moment in fp32: of fp32, of the bits of bf16, or of codes where there are scales."""
    x = tl.load(values + at, mask=at < n, other=0)
    if scales is not None:
        groups = _group_places()
        scale = _of_scale(tl.load(scales + groups, mask=groups < n // _GROUP, other=0).to(tl.int32) & 0xFFFF)[:, None]
        code = tl.reshape(x.to(tl.int32), (_GROUPS, _GROUP))
        if x.dtype == tl.uint8:
            root = code.to(tl.float32) * (scale * _ROOT_STEP)
            found = root * root
        else:
            y = tl.where(code < 0, -code, code).to(tl.float32) * _STEP
            size = tl.div_rn(y, 2.0 - y) * scale
            found = tl.where(code < 0, -size, size)
        wide = tl.reshape(found, (_SIZE,))
    elif x.dtype == tl.int16:
        wide = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x
    return wide


@triton.jit
def _keep(values, scales, at, n, x):
    """Writes a moment: the inverse of ``_moment``, with rounding."""
    if scales is not None:
        x = tl.reshape(x, (_GROUPS, _GROUP))
        if values.dtype.element_ty == tl.uint8:
            x = tl.sqrt_rn(x)
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        scale = _scale(tl.reduce(size, 1, _larger))
        valid = (scale != 0) & (scale != _NAN_SCALE)
        value = tl.where(valid, _of_scale(scale), 1.0)
        inverse = tl.where(valid, tl.div_rn(tl.full((_GROUPS,), 1.0, tl.float32), value), 0.0)
        part = size.to(tl.float32, bitcast=True) * inverse[:, None]
        if values.dtype.element_ty == tl.uint8:
            code = tl.maximum(_code(part * _SECOND, _SECOND), 1)
        else:
            code = _code(tl.div_rn(part + part, 1.0 + part) * _FIRST, _FIRST)
            code = tl.where(bits < 0, -code, code)
        code = tl.reshape(tl.where(valid[:, None], code, 0), (_SIZE,))
        groups = _group_places()
        tl.store(scales + groups, scale.to(tl.int16), mask=groups < n // _GROUP)
        tl.store(values + at, code.to(values.dtype.element_ty), mask=at < n)
    elif values.dtype.element_ty == tl.int16:
        tl.store(values + at, _rounded(x, tl.bfloat16), mask=at < n)
    else:
        tl.store(values + at, x, mask=at < n)


@triton.jit
def _scale(largest):
    """The codes of scales, int32, of the bits of the largest size of each group."""
    code = ((largest + 0xFFF + ((largest >> 13) & 1)) >> 13) - _BELOW
    code = tl.minimum(tl.maximum(code, 1), _NAN_SCALE - 1)
    return tl.where(largest == 0, 0, tl.where(largest > 0x7F800000, _NAN_SCALE, code))


@triton.jit
def _of_scale(code):
    """The values of scales, fp32, of their codes."""
    bits = tl.where(code == 0, 0, tl.where(code == _NAN_SCALE, 0x7FC00000, (code + _BELOW) << 13))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _code(x, largest: tl.constexpr):
    """``x``, at least 0, to nearest, ties to even, as int32; ``largest`` of what is larger or no number."""
    return (tl.where(x < largest, x, largest) + _ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS


@triton.jit
def _group_places():
    """Indices of the scales of this program's elements."""
    return tl.program_id(0).to(tl.int64) * _GROUPS + tl.arange(0, _GROUPS)


@triton.jit
def _places():
    """Indices of this program's elements."""
    return tl.program_id(0).to(tl.int64) * _SIZE + tl.arange(0, _SIZE)


@triton.jit
def _as_read(g, rounding: tl.constexpr):
    """A gradient as fp32, rounded to bf16 on the way if ``rounding``."""
    g = _wide(g)
    if rounding:
        g = (_rounded(g, tl.bfloat16).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return g


@triton.jit
def _wide(x):
    """A number widened to fp32. By hand from bf16: Triton's interpreter has no denormals of it."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _rounded(x, like: tl.constexpr):
    """The bits, as int16, of fp32 ``x`` rounded to bf16 or fp16, to nearest, ties to even; NaNs as everywhere."""
    if like == tl.float16:
        return tl.where(x != x, 0x7E00, x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)).to(tl.int16)
    bits = x.to(tl.int32, bitcast=True)  # by hand: Triton's interpreter cuts off
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _fold(g):
    """The sum of squares in double, by halves; a sum of two has only one order."""
    d = g.to(tl.float64)
    d = d * d
    for level in tl.static_range(_LEVELS):
        d = tl.reduce(tl.reshape(d, (2, _SIZE >> (level + 1))), 0, _plus)
    return tl.reduce(d, 0, _plus)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)
