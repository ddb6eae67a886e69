"""What one step needs to know besides the schedule, and what it finds out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import NonFiniteError
from penstock.optim.formula import Hyper
from penstock.optim.norm import clip_scale
from penstock.tape.groups import ParamGroup


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first gradient in the order of the backward that is infinite or NaN."""

    parameter: str
    stage: int
    block: str
    micro_batch: int

    def __str__(self) -> str:
        return f"the gradient of {self.parameter} ({self.block}, micro-batch {self.micro_batch})"


@dataclass(kw_only=True)
class StepContext:
    """What one step needs to know besides the schedule, and what it finds out."""

    step: int
    count: int
    """the optimizer's step number, from 1: skipped steps do not count"""
    hypers: tuple[Hyper, ...]
    clip: float | None
    loss_scale: float
    partials: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    norm: float | None = None
    """global gradient norm, unscaled; None until it is known"""
    grad_scale: float = 1.0
    skip: bool = False
    missed: Mapping[str, int] = field(default_factory=dict)
    """by name, how many updates a parameter has been passed over in, if any"""
    touched: set[int] = field(default_factory=set)
    """ids of the parameters that have received a gradient"""
    updating: bool = False
    """whether any of the state may have been changed by this step"""
    in_memory: bool = False
    """... of the state that lives in memory, of which there is no other copy"""
    finishing: bool = False
    """whether any of it may have been changed by what the step before has left"""
    previous: "StepContext | None" = None
    """the step before, if it has delayed chunks that this one is to step"""
    commit: Callable[[], None] | None = None
    """makes the step before durable, once its delayed chunks are stepped"""
    complete: bool = True
    """whether the step before is"""
    known: bool = False
    """whether ``grad_scale`` is right from the start: the step runs again, after one that has found the norm"""
    repeat: bool = False
    """whether the step has to run again, because what it has written did not know the norm"""
    search: bool = False
    """whether to look for the gradient that is infinite or NaN, and to change nothing"""
    found: NonFinite | None = None
    failure: NonFiniteError | None = None
    """why the step must not count; it goes on to its end, for the sake of the step before, and changes nothing"""

    @property
    def idle(self) -> bool:
        """Whether nothing of this step is to be stepped."""
        return self.skip or self.repeat or self.search or self.failure is not None

    def missed_after(self, groups: Sequence[ParamGroup]) -> dict[str, int]:
        """``missed`` once this update is counted: parameters without a gradient have been passed over once more."""
        over = [s.name for g in groups for s in g.slices if s.trainable and id(s.parameter) not in self.touched]
        return {**self.missed, **{name: self.missed.get(name, 0) + 1 for name in over}}

    def clip_factor(self) -> float:
        """What gradients are multiplied by so that their norm, which is known and finite, is within the limit."""
        assert self.norm is not None
        return 1.0 if self.clip is None else clip_scale(self.norm, self.clip)
