"""A run's figures so far, kept for the displays, the metrics and the closing summary. Plain numbers, no drawing."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from penstock.cli.showing.yardstick import Yardstick
from penstock.config import Tier, format_size
from penstock.config.sizes import three_digits
from penstock.planner.plan import Plan
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.state.stats import StepStats

_RECENT = 10  # steps that rates and the time left are taken from
_DAY = 86400.0
LINKS: tuple[Lane, ...] = ("h2d", "d2h", "read", "write")


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Figures that are known before the first step. ``given``: the budget, in bytes, of the tiers that have one.
    ``ranks``: the number that train together, on so many ``hosts``; all figures of memory and links are then one
    rank's.

    ``first``: steps that an earlier stretch of the run has already done, of the ``steps`` in all. ``yardstick``: what
    the machine can do and bear.
    """

    steps: int
    first: int = 0
    parameters: int
    given: Mapping[Tier, int]
    ranks: int = 1
    hosts: int = 1
    yardstick: Yardstick = field(default_factory=Yardstick)

    @property
    def given_bytes(self) -> int:
        return sum(self.given.values())


@dataclass(frozen=True, kw_only=True)
class LaneUse:
    """A lane over the last steps: bytes per second, and the share of time that it was busy.

    ``of_peak``: of what the link was measured to do, the share that it did; None: not a link, or not measured.
    """

    sustained: float
    busy: float
    of_peak: float | None = None


@dataclass(kw_only=True)
class Meter:
    """Collects steps. Rates are over the last ten, peaks and sums over the stretch since the run was begun or resumed,
    but for what counts in the whole run: ``written``, ``clipped``, ``skipped``, ``repeated``.

    ``state_bytes`` and ``disk_bytes`` are of all ranks: all of the state, and what it takes on disk in all slots.
    ``predicted`` is a step's time and ``bottleneck`` what was predicted to bound it, if it was planned for a
    machine. All are known once the first step has been planned, ``planned_peak`` of memory with them.
    """

    outline: Outline
    state_bytes: int = 0
    disk_bytes: int = 0
    planned_peak: Mapping[Tier, int] = field(default_factory=dict)
    predicted: float | None = None
    bottleneck: str = ""
    step_seconds: list[float] = field(default_factory=list)
    """seconds of the steps under that plan, but for the one that made it and warmed up"""
    step_runs: list[int] = field(default_factory=list)
    """runs of each of these"""
    planning: bool = True
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    validated_at: int = 0
    peak: dict[Tier, int] = field(default_factory=dict)
    moved: dict[Lane, int] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    written: int = 0
    """bytes to disk, of all ranks; of steps that a kill has undone it is not known"""
    paced: tuple[int, int, float] = (0, 0, 0.0)
    """steps of this stretch but its first, which begins the run, bytes that they have written, and their seconds"""
    said_to_wear: bool = False
    truncated: int = 0
    """tokens of streamed documents that were left out so far, of a run that could not say so before its first step"""
    flops: float = 0.0
    clipped: int = 0
    skipped: int = 0
    repeated: int = 0
    recent: deque[StepStats] = field(default_factory=lambda: deque(maxlen=_RECENT))
    held: deque[Mapping[Lane, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """seconds that each lane held up each of these steps (``report.waits``)"""

    def go_on(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count the steps that earlier stretches have done, from their lines of ``metrics.jsonl``."""
        for line in lines:
            self._count(
                written=line.get("bytes_written") or 0,
                clipped=bool(line.get("clipped")),
                skipped=bool(line.get("skipped")),
                repeats=line.get("repeats") or 0,
            )

    def planned(self, plan: Plan, state: int, on_disk: int) -> None:
        """Take in the sizes of the training plan, and of the state of all ranks."""
        self.state_bytes, self.disk_bytes = state, on_disk
        self.planned_peak = {"device": plan.device_bytes, "host": plan.host_bytes}

    def forecast(self, seconds: float, bottleneck: str) -> None:
        """Take in what was predicted of the steps that follow."""
        self.predicted, self.bottleneck = seconds, bottleneck
        self.planning = True
        self.step_seconds.clear()
        self.step_runs.clear()

    def add(self, stats: StepStats, validation: float | None = None, held: Mapping[Lane, float] | None = None) -> None:
        """Take in a step, the held-out loss after it if there was an evaluation, and which lanes held it up."""
        if not self.planning:
            self.step_seconds.append(stats.seconds)
            self.step_runs.append(1 + stats.repeats)
        self.planning = False
        if self.losses:
            steps, written, seconds = self.paced
            self.paced = steps + 1, written + stats.bytes_written, seconds + stats.seconds
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
        self.flops += stats.flops
        self._count(written=stats.bytes_written, clipped=stats.clipped, skipped=stats.skipped, repeats=stats.repeats)
        self.recent.append(stats)
        self.held.append(held or {})

    def _count(self, *, written: int, clipped: bool, skipped: bool, repeats: int) -> None:
        self.written += written
        self.clipped += clipped
        self.skipped += skipped
        self.repeated += bool(repeats) and not skipped

    @property
    def done(self) -> int:
        """Steps done, with those of earlier stretches."""
        return self.outline.first + len(self.losses)

    @property
    def last(self) -> StepStats:
        return self.recent[-1]

    @property
    def tokens_per_second(self) -> float:
        return sum(s.tokens for s in self.recent) / self._time

    @property
    def flops_per_second(self) -> float:
        """FLOP of the model: what is computed a second time does not count."""
        return sum(s.flops for s in self.recent) / self._time

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: of the peak that the device's maker states, the share; None: none is known."""
        peak = self.outline.yardstick.peak
        return None if peak is None else self.flops_per_second / peak

    @property
    def of_product(self) -> float | None:
        """The share of the FLOP/s of a large matrix product; None: not measured."""
        product = self.outline.yardstick.flops
        return None if product is None else self.flops_per_second / product

    @property
    def drive_days(self) -> float | None:
        """Days that the drives last from new, at this pace without a break; None: they are not written, or do not
        wear."""
        rated, written = self.outline.yardstick.rated, sum(s.bytes_written for s in self.recent)
        return None if rated is None or not written else rated / (written / self._time) / _DAY

    @property
    def written_per_day(self) -> float | None:
        """Bytes that this stretch writes in a day without a break; None: nothing, or that is not known yet."""
        _, written, seconds = self.paced
        return written / seconds * _DAY if written else None

    def wears(self, least: float) -> str | None:
        """A warning, once, that the run writes more to its drives in a day than it may: after ten steps and ``least``
        seconds at that pace. None: it does not, it is too early to know, or the warning was given before."""
        steps, _, seconds = self.paced
        allowed, written = self.outline.yardstick.allowed, self.written_per_day
        if self.said_to_wear or allowed is None or written is None or written <= allowed:
            return None
        if steps < _RECENT or seconds < least:
            return None
        self.said_to_wear = True
        return (
            f"the run writes {format_size(written)} a day, {three_digits(written / allowed)} times the "
            f"{format_size(allowed)} that budget.endurance allows its drives: it goes on. penstock plan says what "
            "would write less"
        )

    @property
    def held_up(self) -> dict[Lane, float]:
        """The share of the last steps that each lane held them up, the largest first."""
        total: dict[Lane, float] = {}
        for held in self.held:
            for lane, seconds in held.items():
                total[lane] = total.get(lane, 0.0) + seconds
        return dict(sorted(((lane, t / self._time) for lane, t in total.items()), key=lambda item: -item[1]))

    @property
    def _time(self) -> float:
        return max(sum(s.seconds for s in self.recent), 1e-9)

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
        uses: dict[Lane, LaneUse] = {}
        for lane in LANES:
            moved = sum(s.bytes_moved.get(lane, 0) for s in self.recent)
            busy = sum(s.lane_seconds.get(lane, 0.0) for s in self.recent)
            if moved or busy:
                rate, peak = moved / self._time, self.outline.yardstick.links.get(lane)
                uses[lane] = LaneUse(
                    sustained=rate,
                    busy=busy / self._time,
                    of_peak=None if peak is None else rate / peak,
                )
        return uses

    def links(self) -> dict[Lane, LaneUse]:
        """Use of those lanes that move bytes between tiers."""
        return {lane: use for lane, use in self.lanes().items() if lane in LINKS}
