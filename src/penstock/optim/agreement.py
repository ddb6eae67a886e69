"""Compares the bits of a device's optimizer steps with the host's, by taking some on both.

They should: both are ``formula``, in operations that round once (docs/numerics.md). If they do not, the numbers depend
on where a plan puts the optimizer state, and it has to say so.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args

import torch

from penstock.optim import kernels
from penstock.optim.formula import Hyper, Kind

KINDS: tuple[Kind, ...] = get_args(Kind)
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name -> dtype of the copy beside the master; None: there is none."""

_N = 1 << 16
_STEPS = 3
_MAGNITUDES = (-42.0, 8.0)
"""powers of ten between which gradients and weights are: from far below the normal numbers to far above any weight"""


def other_bits(
    device: torch.device,
    kinds: Iterable[Kind] = KINDS,
    precisions: Iterable[str] = tuple(PRECISIONS),
    *,
    step: Callable[..., None] = kernels.step,
) -> tuple[str, ...]:
    """The optimizers, as ``"adamw.bf16"``, whose steps on a device differ from the host's in any bit.

    ``step``: what the device is asked with, as ``kernels.step``. A difference between NaNs is none.
    """
    cpu = torch.device("cpu")
    return tuple(
        f"{kind}.{precision}"
        for kind in kinds
        for precision in precisions
        if any(
            not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            for mine, theirs in zip(
                _taken(kind, PRECISIONS[precision], cpu, kernels.step),
                _taken(kind, PRECISIONS[precision], device, step),
                strict=True,
            )
        )
    )


def digests(threads: int) -> dict[str, str]:
    """A checksum of what some steps on the CPU leave, by ``"adamw.bf16"``: to compare with another process's."""
    cpu, found = torch.device("cpu"), {}
    for kind in KINDS:
        for precision, dtype in PRECISIONS.items():
            digest = hashlib.blake2b(digest_size=16)
            for tensor in _taken(kind, dtype, cpu, partial(kernels.step, threads=threads)):
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
            found[f"{kind}.{precision}"] = digest.hexdigest()
    return found


def _taken(
    kind: Kind, out_dtype: torch.dtype | None, device: torch.device, step: Callable[..., None]
) -> list[torch.Tensor]:
    """Master, moments and copy after a few steps on a device, on the CPU, NaNs made alike."""
    generator = torch.Generator().manual_seed(0)
    hyper = Hyper(kind=kind, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master = _values(generator).to(device)
    moments = tuple(torch.zeros(_N, device=device) for _ in range(hyper.moments))
    out = None if out_dtype is None else torch.empty(_N, dtype=out_dtype, device=device)
    for count in range(1, _STEPS + 1):
        grad = _values(generator).to(device)
        step(hyper, count, grad=grad, master=master, moments=moments, out=out, grad_scale=0.37)
    found = [t.cpu() for t in (master, *moments, out) if t is not None]
    return [t.masked_fill_(t.isnan(), 0.0) for t in found]


def _values(generator: torch.Generator) -> torch.Tensor:
    low, high = _MAGNITUDES
    sizes = 10 ** (torch.rand(_N, generator=generator, dtype=torch.float64) * (high - low) + low)
    signs = torch.randint(0, 2, (_N,), generator=generator) * 2 - 1
    return (sizes * signs).float()
