"""The arithmetic of each optimizer: the definition that every implementation has to give the same bits as.

All of it is fp32, each operation rounded on its own (to nearest, ties to even), in the order written: nothing is
contracted to a fused multiply-add and nothing reassociated. Denormals are kept. g, p, m, v are one element's
gradient, master weight and moments; the other names are the fields of ``Scalars``, computed once per step in double
and rounded to fp32. Every optimizer starts with  g = float(gradient) * grad_scale,  of the gradient after its rounding
to ``grad_dtype``.

| kind | moments | step |
|---|---|---|
| adamw | m, v | p = p·decay;  then as adam without its first line |
| adam | m, v | g = g + l2·p;  m = m + weight1·(g − m);  v = beta2·v + (weight2·g)·g;  p = p − (rate·m) / denominator |
| sgd | | g = g + l2·p;  p = p − rate·g |
| momentum | m | g = g + l2·p;  m = beta1·m + g;  p = p − rate·m |
| nesterov | m | g = g + l2·p;  m = beta1·m + g;  g = g + beta1·m;  p = p − rate·g |
| lion | m | c = beta1·m + weight1·g;  m = beta2·m + weight2·g;  p = p·decay − rate·sign(c) |
| muon | m | m = m + weight1·(g − m);  u = m |
| nesterov-muon | m | m = m + weight1·(g − m);  u = m + weight1·(g − m) |
| orthogonal | | p = p·decay − rate·g |

Muon's step has two halves. The first makes an update u, rounded to bf16, and has no p; ``orthogonal`` makes that
orthogonal, matrix by matrix; the second takes it for its g, with a grad_scale of 1.

denominator = sqrt(v)·root + eps, of the new v;  sign(0) = sign(NaN) = 0.
With t the step's number (from 1):  decay = 1 − lr·weight_decay;  l2 = weight_decay;  weight_i = 1 − beta_i;
rate = lr / (1 − beta1^t) for adam and adamw, lr·ratio for orthogonal, else lr;  root = 1 / sqrt(1 − beta2^t).
The copy in the compute dtype is p rounded to nearest, ties to even; a NaN becomes the positive quiet NaN.

These are the formulas of ``torch.optim`` in its own order, but for one factor: sqrt(v) is multiplied by ``root`` where
torch divides by sqrt(1 − beta2^t). The payload and sign of an fp32 NaN are left open: processors choose differently.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from penstock.config.optimizer import AdjustLr

Kind = Literal["adamw", "adam", "sgd", "momentum", "nesterov", "lion", "muon", "nesterov-muon", "orthogonal"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOMENTS: dict[Kind, int] = {
    "adamw": 2,
    "adam": 2,
    "sgd": 0,
    "momentum": 1,
    "nesterov": 1,
    "lion": 1,
    "muon": 1,
    "nesterov-muon": 1,
    "orthogonal": 0,
}
FIRST_HALVES: frozenset[Kind] = frozenset(("muon", "nesterov-muon"))
"""The kinds that make an update, and step nothing."""


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """One torch param group's settings at one step, as plain numbers. ``betas[0]`` is the momentum of SGD and Muon.

    Of Muon's first half, ``ns_steps`` and ``adjust`` are what ``orthogonal`` is given; of the second, ``ratio`` is what
    multiplies the learning rate of a matrix."""

    kind: Kind
    lr: float
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    ns_steps: int = 0
    adjust: AdjustLr = "original"
    ratio: float = 1.0

    @property
    def moments(self) -> int:
        return MOMENTS[self.kind]

    def second_half(self, ratio: float) -> "Hyper":
        """The hyper-parameters by which Muon applies its update, once that is orthogonal."""
        return Hyper(kind="orthogonal", lr=self.lr, weight_decay=self.weight_decay, ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The factors of a step, in the order of ``struct Scalars`` in ``native/kernels.h``. All are fp32 values."""

    grad_scale: float
    decay: float
    l2: float
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    rate: float
    root: float
    eps: float


def scalars(hyper: Hyper, count: int, grad_scale: float = 1.0) -> Scalars:
    """The scalars of step number ``count`` (from 1)."""
    if count < 1:
        raise ValueError(f"count={count}: steps are numbered from 1")
    beta1, beta2 = hyper.betas
    rate, root = hyper.lr, 1.0
    if hyper.kind in ("adam", "adamw"):
        rate = hyper.lr / (1 - beta1**count)
        root = 1 / math.sqrt(1 - beta2**count)
    if hyper.kind == "orthogonal":
        rate = hyper.lr * hyper.ratio
    return Scalars(
        grad_scale=_fp32(grad_scale),
        decay=_fp32(1 - hyper.lr * hyper.weight_decay),
        l2=_fp32(hyper.weight_decay),
        beta1=_fp32(beta1),
        weight1=_fp32(1 - beta1),
        beta2=_fp32(beta2),
        weight2=_fp32(1 - beta2),
        rate=_fp32(rate),
        root=_fp32(root),
        eps=_fp32(hyper.eps),
    )


def _fp32(value: float) -> float:
    return float(np.float32(value))
