"""The curves of a run over its steps, and of others over them: what the page's script draws."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from penstock.config import Tier
from penstock.report.metrics_file import StepMetrics

MOST_RUNS = 4
"""Runs on one page: of more the lines could not be told apart."""
_POINTS = 1000
"""Points that a line is drawn through at most, more than a chart has pixels."""
_CIRCLES = 60
"""Evaluations that are drawn as circles at most; of more, a line."""

Points = list[tuple[int, float]]
Unit = Literal["plain", "time", "amount", "share"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a curve's chart. ``style``: its class in the page's style sheet. ``only``: points with no line through
    them. ``stretch``: the number of steps that a point is the median of; where that is more than one, ``lows`` and
    ``highs`` are the extremes of each. ``gaps``: the points, by their index, before which values are missing."""

    name: str
    style: str
    points: Points
    only: bool = False
    stretch: int = 1
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    gaps: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A chart of lines over the steps. ``key``: its place in the page. ``from_zero``: whether its scale begins
    there."""

    key: str
    title: str
    unit: Unit
    lines: tuple[Line, ...]
    from_zero: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Run = tuple[str, Sequence[StepMetrics]]
"""A run's name, and its steps"""


def curves_of(runs: Sequence[Run]) -> list[Curve]:
    """The curves that have any points. ``runs``: the one of the page first, whose predicted seconds are drawn, too."""
    foretold = line_of("predicted", "predicted", [(m.step, m.predicted) for m in runs[0][1]])
    found = [
        Curve(key="loss", title="Loss", unit="plain", lines=(*_lines(runs, "loss", lambda m: m.loss), *_held(runs))),
        Curve(
            key="seconds",
            title="Time of each step",
            unit="time",
            lines=(*_lines(runs, "measured", lambda m: m.seconds), foretold),
            from_zero=True,
        ),
        _plain("tokens", "Tokens per second", runs, lambda m: m.tokens / m.seconds if m.seconds > 0 else None),
        _plain("mfu", "MFU", runs, lambda m: m.mfu, unit="share"),
        _plain("product", "Share of a large product's FLOP/s", runs, lambda m: m.share_of_product, unit="share"),
        _plain("lr", "Learning rate", runs, lambda m: m.lr),
        _plain("norm", "Gradient norm, before clipping", runs, lambda m: m.norm),
        *(_memory(tier, runs) for tier in ("device", "host")),
    ]
    return [curve for curve in found if any(line.points for line in curve.lines)]


def _plain(
    key: str, title: str, runs: Sequence[Run], value: Callable[[StepMetrics], float | None], *, unit: Unit = "plain"
) -> Curve:
    return Curve(key=key, title=title, unit=unit, lines=_lines(runs, "measured", value), from_zero=True)


def _memory(tier: Tier, runs: Sequence[Run]) -> Curve:
    title = f"{tier.capitalize()} memory of each step, peak"
    return _plain(f"{tier}-memory", title, runs, lambda m: m.peak.get(tier) or None, unit="amount")


def _lines(runs: Sequence[Run], name: str, value: Callable[[StepMetrics], float | None]) -> tuple[Line, ...]:
    return tuple(
        line_of(name if len(runs) == 1 else run, _style("measured", n), [(m.step, value(m)) for m in metrics])
        for n, (run, metrics) in enumerate(runs)
    )


def _held(runs: Sequence[Run]) -> tuple[Line, ...]:
    lines = []
    for n, (run, metrics) in enumerate(runs):
        found = [(m.step, m.validation) for m in metrics if m.validation is not None]
        name = "held-out loss" if len(runs) == 1 else f"{run}, held out"
        lines.append(replace(line_of(name, _style("held", n), found), only=len(found) <= _CIRCLES))
    return tuple(lines)


def _style(kind: str, run: int) -> str:
    return kind if run == 0 else f"{kind} other{run}"


def line_of(name: str, style: str, values: Sequence[tuple[int, float | None]], limit: int = _POINTS) -> Line:
    """A line through the steps that have a value; of more than ``limit``, through the median of each stretch of them.

    ``values``: of each step, in order; None is a gap in the line.
    """
    stretch = max(-(-len(values) // limit), 1)
    points: Points = []
    lows, highs, gaps = [], [], []
    missing = False
    for first in range(0, len(values), stretch):
        part = values[first : first + stretch]
        known = [value for _, value in part if value is not None]
        if not known:
            missing = True
            continue
        if missing and points:
            gaps.append(len(points))
        missing = False
        points.append((part[len(part) // 2][0], median(known)))
        lows.append(min(known))
        highs.append(max(known))
    if stretch == 1:
        return Line(name=name, style=style, points=points, gaps=gaps)
    return Line(name=name, style=style, points=points, stretch=stretch, lows=lows, highs=highs, gaps=gaps)
