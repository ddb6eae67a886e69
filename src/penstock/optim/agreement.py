"""Compares the bits of a device's optimizer steps with the host's, by taking some on both.

They should: both are ``formula``, in operations that round once (docs/numerics.md). If they do not, the numbers depend
on where a plan puts the optimizer state, and it has to say so.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from penstock.optim import kernels
from penstock.optim.codes import FORMS, Codes, Moment, zero_moment
from penstock.optim.formula import FIRST_HALVES, KINDS, Hyper, Kind

_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
PRECISIONS: dict[str, tuple[tuple[torch.dtype, torch.dtype | None], ...]] = {
    "fp32": ((_FP32, None),),
    "bf16": ((_BF16, _FP32), (_BF16, torch.int16)),
    "fp16": ((_FP16, _FP32),),
}
"""Name -> the dtypes of weights and rest, one after the other."""
_MADE: tuple[tuple[torch.dtype, torch.dtype | None], ...] = ((_BF16, None),)
"""Dtypes of an update of matrices, which stands where weights do, and of the rest beside it: there is none."""

_N = 1 << 15
_STEPS = 3
_MAGNITUDES = (-42.0, 8.0)
"""powers of ten between which gradients and weights are: from far below the normal numbers to far above any weight"""


def other_bits(
    device: torch.device,
    kinds: Iterable[Kind] = KINDS,
    precisions: Iterable[str] = tuple(PRECISIONS),
    moments: Iterable[str] = tuple(FORMS),
    *,
    step: Callable[..., None] = kernels.step,
) -> tuple[str, ...]:
    """The optimizers whose steps on a device differ from the host's in any bit.

    ``"adamw.bf16"``: with moments in fp32; ``"adamw.bf16.int8"``: in 8 bits. ``step``: what the device is asked with,
    as ``kernels.step``. A difference between NaNs is none.
    """
    cpu = torch.device("cpu")
    return tuple(
        name
        for name, kind, precision, dtypes in _each(kinds, precisions, moments)
        if any(
            not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            for mine, theirs in zip(
                _taken(kind, precision, dtypes, cpu, kernels.step),
                _taken(kind, precision, dtypes, device, step),
                strict=True,
            )
        )
    )


def digests(threads: int) -> dict[str, str]:
    """A checksum of what some steps on the CPU leave, by ``"adamw.bf16"``: to compare with another process's."""
    cpu, found = torch.device("cpu"), {}
    for name, kind, precision, dtypes in _each(KINDS, PRECISIONS, FORMS):
        digest = hashlib.blake2b(digest_size=16)
        for tensor in _taken(kind, precision, dtypes, cpu, partial(kernels.step, threads=threads)):
            digest.update(tensor.view(torch.uint8).numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


def _each(
    kinds: Iterable[Kind], precisions: Iterable[str], moments: Iterable[str]
) -> Iterator[tuple[str, Kind, str, tuple[torch.dtype, ...]]]:
    """Name, kind, precision and the moments' dtypes of all that differ."""
    names = tuple(moments)
    for kind in kinds:
        count = Hyper(kind=kind, lr=0.0).moments
        for precision in precisions:
            for name in names if count else names[:1]:
                suffix = "" if name == "fp32" or not count else f".{name}"
                yield f"{kind}.{precision}{suffix}", kind, precision, FORMS[name][:count]


def _taken(
    kind: Kind, precision: str, dtypes: tuple[torch.dtype, ...], device: torch.device, step: Callable[..., None]
) -> list[torch.Tensor]:
    """All of the state after a few steps on a device, in each of a precision's forms, on the CPU, NaNs made alike."""
    hyper = Hyper(kind=kind, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    found: list[torch.Tensor] = []
    for form in _MADE if kind in FIRST_HALVES else PRECISIONS[precision]:
        generator = torch.Generator().manual_seed(0)
        weights, rest = _state(_values(generator), *form, device)
        moments = tuple(zero_moment(dtype, _N, device) for dtype in dtypes)
        for count in range(1, _STEPS + 1):
            grad = _values(generator).to(device)
            step(hyper, count, grad=grad, weights=weights, rest=rest, moments=moments, grad_scale=0.37)
        found += [t.cpu() for t in (weights, rest, *_tensors(moments)) if t is not None]
    return [t.masked_fill_(t.isnan(), 0.0) for t in found]


def _state(
    master: torch.Tensor, weights: torch.dtype, rest: torch.dtype | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and rest that have a master copy, on a device."""
    if rest is None:
        return master.to(device, weights), None
    w, r = torch.zeros(_N, dtype=weights), master
    if rest == torch.int16:
        r = torch.empty(_N, dtype=rest)
        kernels.split(w, r, master)
    return w.to(device), r.to(device)


def _tensors(moments: tuple[Moment, ...]) -> Iterator[torch.Tensor]:
    for moment in moments:
        yield from (moment.codes, moment.scales) if isinstance(moment, Codes) else (moment,)


def _values(generator: torch.Generator) -> torch.Tensor:
    low, high = _MAGNITUDES
    sizes = 10 ** (torch.rand(_N, generator=generator, dtype=torch.float64) * (high - low) + low)
    signs = torch.randint(0, 2, (_N,), generator=generator) * 2 - 1
    return (sizes * signs).float()
