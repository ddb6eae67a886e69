"""What ``fused`` runs on a GPU, in Triton's language: each program takes one ``BLOCK`` of elements.

Values are [BLOCK] numbers, arguments are pointers to [n] where nothing else is said. ``rounding``: gradients are
rounded to bf16 as they are read. ``like``: the dtype, bf16 or fp16, of what is written as the int16 of its bits.
"""

import triton
import triton.language as tl

from penstock.optim.norm import BLOCK

_SIZE = tl.constexpr(BLOCK)
_LEVELS = tl.constexpr(BLOCK.bit_length() - 1)


@triton.jit
def step(
    grad,
    master,
    first,
    second,
    out,
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
    like: tl.constexpr,
):
    """``formula``, line by line. ``like``: the dtype of ``out``, whose bits are written as int16."""
    at = _places()
    inside = at < n
    g = _as_read(tl.load(grad + at, mask=inside, other=0.0), rounding)
    if squares is not None:
        tl.store(squares + tl.program_id(0), _fold(g))
    g = g * grad_scale
    p = tl.load(master + at, mask=inside, other=0.0)
    if kind == "adamw":
        p = p * decay
    elif kind != "lion":
        g = g + p * l2
    if kind == "sgd":
        p = p - g * rate
    else:
        m = tl.load(first + at, mask=inside, other=0.0)
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
        else:
            m = m + (g - m) * weight1
            v = tl.load(second + at, mask=inside, other=0.0)
            v = v * beta2 + (g * weight2) * g
            p = p - tl.div_rn(m * rate, tl.sqrt_rn(v) * root + eps)
            tl.store(second + at, v, mask=inside)
        tl.store(first + at, m, mask=inside)
    tl.store(master + at, p, mask=inside)
    if out is not None:
        tl.store(out + at, _rounded(p, like), mask=inside)


@triton.jit
def squares(grad, squares, rounding: tl.constexpr):
    tl.store(squares + tl.program_id(0), _fold(_as_read(tl.load(grad + _places()), rounding)))


@triton.jit
def cast(dst, src, n, like: tl.constexpr):
    at = _places()
    inside = at < n
    tl.store(dst + at, _rounded(_wide(tl.load(src + at, mask=inside, other=0.0)), like), mask=inside)


@triton.jit
def _places():
    """Where this program's elements are."""
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
    """The same number in fp32. By hand from bf16: Triton's interpreter has no denormals of it."""
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
