"""The figures that a step reports."""

from dataclasses import dataclass, field
from typing import Any

from penstock.config import Tier
from penstock.schedule.ir.lanes import Lane


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """The figures of one step. Bytes and seconds; lanes are those of ``penstock.schedule.ir.lanes``."""

    step: int
    """1 for the first"""
    loss: float
    """mean over all items of all micro-batches"""
    grad_norm: float
    """global L2 norm before clipping"""
    tokens: int
    seconds: float
    lr: float
    """the learning rate of the first param group"""
    clipped: bool
    skipped: bool
    """true if a gradient overflowed, so that nothing was updated"""
    loss_scale: float
    repeats: int = 0
    """runs of the step besides the one that counts: it was over the limit of the norm, or not finite"""
    non_finite: str | None = None
    """the gradient that was infinite or NaN, if one was"""
    labels: str | None = None
    """the labels that the loss is the mean over, as found from the model: ``"all"``, ``"but the first"`` of a row
    (it compares each position with the next label), or ``"rows"`` as such; None where that was not asked"""
    flops: float = 0.0
    """FLOP that the model computes for all micro-batches, forward and backward, a multiplication and an addition as
    two; without what is computed a second time. Counted in the probe: model FLOPs utilisation is this over time and
    peak
    """
    plan_change: str | None = None
    """the reason for another plan than that of the step before: what the machine does now, and what changes; None: the
    plan is the same"""
    bytes_written: int = 0
    """to disk since the step before: state, saved activations, gradients, commits"""
    bytes_moved: dict[Lane, int] = field(default_factory=dict)
    lane_seconds: dict[Lane, float] = field(default_factory=dict)
    """time in which each lane had an op under way, of all runs of the step"""
    peak_bytes: dict[Tier, int] = field(default_factory=dict)
    """per tier"""

    def numbers(self) -> dict[str, Any]:
        """All but lanes and memory, as a commit keeps it: ``StepStats(**numbers)`` has them again."""
        return {key: value for key, value in vars(self).items() if not isinstance(value, dict)}
