"""The context of one run of a step: what it needs to know besides the schedule, and what it finds out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from penstock.errors import NonFiniteError
from penstock.optim.formula import Hyper
from penstock.optim.norm import clip_scale
from penstock.tape.groups import ParamGroup


class Verdict(Enum):
    """The verdict on a step by the norm of its gradients."""

    WITHIN = "within"
    """whatever was stepped was stepped with the right factor"""
    OVER = "over"
    """some of it was stepped before the factor was known, and should have been clipped"""
    NOT_FINITE = "not finite"


@dataclass(frozen=True, kw_only=True)
class Update:
    """The numbers that the gradients of one step are stepped with."""

    count: int
    """the optimizer's step number, from 1: skipped steps do not count"""
    hypers: tuple[Hyper, ...]
    missed: Mapping[str, int] = field(default_factory=dict)
    """by name, how many updates a parameter has been passed over in, if any"""
    touched: set[int] = field(default_factory=set)
    """ids of the parameters that have received a gradient; grows while their step runs"""
    grad_scale: float = 1.0
    """the factor of gradients"""

    def missed_after(self, groups: Sequence[ParamGroup]) -> dict[str, int]:
        """``missed`` once this update is counted: parameters without a gradient have been passed over once more."""
        over = [s.name for g in groups for s in g.slices if s.trainable and id(s.parameter) not in self.touched]
        return {**self.missed, **{name: self.missed.get(name, 0) + 1 for name in over}}


@dataclass(kw_only=True)
class StepContext:
    """One run of a step. What follows ``partials`` is found out."""

    step: int
    update: Update
    """its ``grad_scale`` is that of the loss until the norm is known, unless this is a repeat"""
    repeats: bool = False
    """True if a run before has found the factor of the gradients, which is right from the start"""
    clip: float | None = None
    loss_scale: float = 1.0
    left: Update | None = None
    """the update of the step before, if it has delayed chunks that this one is to step"""
    completed: Callable[[], None] | None = None
    """called when they are stepped and at home, before any of this step is written to disk"""
    partials: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    norm: float | None = None
    """global gradient norm, unscaled; None until it is known"""
    verdict: Verdict | None = None
    failure: NonFiniteError | None = None
    """the error for which the step must not count; it goes on to its end, for the step before, and changes nothing"""

    @property
    def idle(self) -> bool:
        """True if nothing of this step is to be stepped."""
        return self.verdict not in (None, Verdict.WITHIN) or self.failure is not None

    def judge(self, norm: float, *, speculative: bool) -> None:
        """The norm is known. ``speculative``: whether anything was stepped before it was."""
        self.norm = norm
        if not math.isfinite(norm):
            self.verdict = Verdict.NOT_FINITE
        elif not self.repeats and speculative and self.clip_factor() < 1.0:
            self.verdict = Verdict.OVER
        else:
            self.verdict = Verdict.WITHIN
        if not self.repeats and self.verdict is not Verdict.NOT_FINITE:
            self.update = replace(self.update, grad_scale=self.clip_factor() / self.loss_scale)

    def clip_factor(self) -> float:
        """The factor by which the norm of gradients, known and finite, is within the limit; 1 without a limit."""
        assert self.norm is not None
        return 1.0 if self.clip is None else clip_scale(self.norm, self.clip)
