"""What a run has shown so far, kept for the displays, the metrics and the last words. Plain numbers, no drawing."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from penstock.config import Tier
from penstock.run.stats import StepStats
from penstock.schedule.op import LOCAL_LANES, Lane

_RECENT = 10  # steps that rates and the time left are taken from


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known before the first step. ``given``: the budget, in bytes, of the tiers that have one.

    ``first``: steps that an earlier stretch of the run has already done, of the ``steps`` in all.
    """

    steps: int
    first: int = 0
    parameters: int
    given: Mapping[Tier, int]

    @property
    def given_bytes(self) -> int:
        return sum(self.given.values())


@dataclass(frozen=True, kw_only=True)
class LaneUse:
    """A lane over the last steps: bytes per second while busy, over all, and the share of time it was busy."""

    rate: float
    sustained: float
    busy: float


@dataclass(kw_only=True)
class Meter:
    """Collects steps. Rates are over the last ten, peaks and totals over the whole run.

    ``state_bytes`` and ``disk_bytes`` are the plan's: all of the state, and what of it is kept on disk. ``predicted``
    is its step time and ``bottleneck`` what was predicted to bound it, if it was planned for a machine. All are known
    once the first step has been planned.
    """

    outline: Outline
    state_bytes: int = 0
    disk_bytes: int = 0
    predicted: float | None = None
    bottleneck: str = ""
    step_seconds: list[float] = field(default_factory=list)
    """of the steps under that plan, without the one that made it and warmed up"""
    planning: bool = True
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    validated_at: int = 0
    peak: dict[Tier, int] = field(default_factory=dict)
    moved: dict[Lane, int] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    recent: deque[StepStats] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def planned(self, state_bytes: int, disk_bytes: int) -> None:
        """Take in the training plan's sizes."""
        self.state_bytes, self.disk_bytes = state_bytes, disk_bytes

    def forecast(self, seconds: float, bottleneck: str) -> None:
        """Take in what was predicted of the steps that follow."""
        self.predicted, self.bottleneck = seconds, bottleneck
        self.planning = True
        self.step_seconds.clear()

    def add(self, stats: StepStats, validation: float | None = None) -> None:
        """Take in a step, and the held-out loss after it if there was an evaluation."""
        if not self.planning:
            self.step_seconds.append(stats.seconds)
        self.planning = False
        self.losses.append(stats.loss)
        if validation is not None:
            self.validation.append(validation)
            self.validated_at = self.done
        for tier, used in stats.peak_bytes.items():
            self.peak[tier] = max(used, self.peak.get(tier, 0))
        for lane, count in stats.bytes_moved.items():
            self.moved[lane] = self.moved.get(lane, 0) + count
        self.tokens += stats.tokens
        self.seconds += stats.seconds
        self.recent.append(stats)

    @property
    def done(self) -> int:
        """Steps done, with those of earlier stretches."""
        return self.outline.first + len(self.losses)

    @property
    def last(self) -> StepStats:
        return self.recent[-1]

    @property
    def tokens_per_second(self) -> float:
        return sum(s.tokens for s in self.recent) / max(sum(s.seconds for s in self.recent), 1e-9)

    @property
    def seconds_left(self) -> float:
        """Steps to go at the median pace of the last ones."""
        return (self.outline.steps - self.done) * median(s.seconds for s in self.recent)

    @property
    def peak_bytes(self) -> int:
        """Peak of the tiers that have a budget, added up."""
        return sum(self.peak.get(tier, 0) for tier in self.outline.given)

    def lanes(self) -> dict[Lane, LaneUse]:
        """Use of each lane that did anything in the last steps."""
        total = max(sum(s.seconds for s in self.recent), 1e-9)
        uses: dict[Lane, LaneUse] = {}
        for lane in LOCAL_LANES:
            moved = sum(s.bytes_moved.get(lane, 0) for s in self.recent)
            busy = sum(s.lane_seconds.get(lane, 0.0) for s in self.recent)
            if moved or busy:
                uses[lane] = LaneUse(rate=moved / max(busy, 1e-9), sustained=moved / total, busy=busy / total)
        return uses


def metrics_of(stats: StepStats, validation: float | None) -> dict[str, Any]:
    """The line of ``metrics.jsonl`` for a step."""
    line: dict[str, Any] = {
        "step": stats.step,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "tokens": stats.tokens,
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens / max(stats.seconds, 1e-9),
        "bytes_moved": dict(stats.bytes_moved),
        "lane_seconds": dict(stats.lane_seconds),
        "peak_bytes": dict(stats.peak_bytes),
        "clipped": stats.clipped,
        "skipped": stats.skipped,
        "repeats": stats.repeats,
        "loss_scale": stats.loss_scale,
    }
    return line if validation is None else {**line, "validation_loss": validation}
