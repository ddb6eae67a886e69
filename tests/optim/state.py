"""Optimizer state in every form that a step takes, to compare the implementations with."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.optim import fallback
from penstock.optim.codes import Codes, Moment, zero_moment
from penstock.optim.formula import FIRST_HALVES, Kind

FP32, BF16, FP16, INT16 = torch.float32, torch.bfloat16, torch.float16, torch.int16

Form = tuple[torch.dtype, torch.dtype | None]
"""dtypes of weights and rest"""
WHOLE: Form = (FP32, None)
SPLIT: Form = (BF16, INT16)
BESIDE: Form = (BF16, FP32)
BESIDE_FP16: Form = (FP16, FP32)
FORMS = (WHOLE, SPLIT, BESIDE, BESIDE_FP16)
MADE: Form = (BF16, None)
"""The layout of the first half of Muon's step, whatever the precision: an update is made, and no master copy is
there."""


def form_for(kind: Kind, form: Form) -> Form:
    """The form that a kind of step takes where others take ``form``."""
    return MADE if kind in FIRST_HALVES else form


EIGHT_BIT = torch.int8
"""as a dtype of moments: codes, int8 of a first moment and uint8 of a second one"""
MOMENT_DTYPES = (FP32, BF16, EIGHT_BIT)

SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-40, 1.1754942e-38, 3.4028235e38, -3.4028235e38)


@dataclass(frozen=True, kw_only=True)
class State:
    """What a step changes."""

    weights: torch.Tensor
    rest: torch.Tensor | None
    moments: tuple[Moment, ...]

    @classmethod
    def of(cls, master: torch.Tensor, moments: tuple[torch.Tensor, ...], form: Form, dtype: torch.dtype) -> "State":
        """A state with these fp32 values, as far as its form can hold them; new memory on the CPU."""
        weights, rest = master.clone(), None
        if form == MADE:
            weights = torch.zeros(len(master), dtype=BF16)
        elif form != WHOLE:
            weights, rest = (torch.zeros(len(master), dtype=d) for d in form if d is not None)
            (rest.copy_(master) if rest.dtype == FP32 else fallback.split(weights, rest, master))
        kept = tuple(zero_moment(moment_dtype(i, dtype), len(master)) for i in range(len(moments)))
        for moment, values in zip(kept, moments, strict=True):
            if isinstance(moment, Codes):
                fallback.encode(moment, values)
            else:
                fallback.cast(moment, values)
        return cls(weights=weights, rest=rest, moments=kept)

    def __getitem__(self, part: slice) -> dict[str, Any]:
        """Some elements, as arguments of a step."""
        return {
            "weights": self.weights[part],
            "rest": None if self.rest is None else self.rest[part],
            "moments": tuple(m[part] for m in self.moments),
        }

    def to(self, device: str) -> "State":
        return State(
            weights=self.weights.to(device),
            rest=None if self.rest is None else self.rest.to(device),
            moments=tuple(
                Codes(codes=m.codes.to(device), scales=m.scales.to(device)) if isinstance(m, Codes) else m.to(device)
                for m in self.moments
            ),
        )

    def tensors(self) -> list[torch.Tensor]:
        """All that is in memory, on the CPU."""
        flat = [t for m in self.moments for t in ((m.codes, m.scales) if isinstance(m, Codes) else (m,))]
        return [t.cpu() for t in (self.weights, self.rest, *flat) if t is not None]


def moment_dtype(index: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a first (0) or a second (1) moment."""
    return torch.uint8 if (index, dtype) == (1, EIGHT_BIT) else dtype


def values(rng: np.random.Generator, n: int, wild: bool) -> torch.Tensor:
    """Everyday numbers; when wild, of all magnitudes, and one in eight is zero, infinite, NaN, denormal or huge."""
    x = rng.standard_normal(n)
    if wild:
        with np.errstate(over="ignore"):
            x = (x * 10.0 ** rng.uniform(-46, 39, n)).astype(np.float32)
        x = np.where(rng.random(n) < 0.125, rng.choice(np.array(SPECIAL, np.float32), n), x)
    return torch.from_numpy(x.astype(np.float32))


def assert_same_bits(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal bit by bit; of an fp32 NaN only that it is one, since processors choose its sign and payload."""
    for a, b in zip(got, expected, strict=True):
        bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[a.itemsize]
        same = a.view(bits) == b.view(bits)
        if a.dtype == FP32:
            same |= a.isnan() & b.isnan()
        assert a.dtype == b.dtype, f"{a.dtype} is not {b.dtype}"
        assert same.all(), f"{a[~same][:4]} is not {b[~same][:4]}"
