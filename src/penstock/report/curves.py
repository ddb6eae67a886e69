"""The curves of a run over its steps, and of others over them: what the page's script draws."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.config import Tier
from penstock.report.metrics_file import StepMetrics

MOST_RUNS = 4
"""Runs on one page: of more the lines could not be told apart."""
_POINTS = 2000
"""Steps that a curve is drawn through at most; of more, the lowest and the highest of each stretch."""

Points = list[tuple[int, float]]
Unit = Literal["plain", "time", "amount", "share"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a curve's chart. ``style``: its class in the page's style sheet. ``only``: points with no line through
    them."""

    name: str
    points: Points
    style: str
    only: bool = False


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
    foretold = Line(name="predicted", points=thinned([(m.step, m.predicted) for m in runs[0][1]]), style="predicted")
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
        Line(
            name=name if len(runs) == 1 else run,
            points=thinned([(m.step, value(m)) for m in metrics]),
            style=_style("measured", n),
        )
        for n, (run, metrics) in enumerate(runs)
    )


def _held(runs: Sequence[Run]) -> tuple[Line, ...]:
    return tuple(
        Line(
            name="held-out loss" if len(runs) == 1 else f"{run}, held out",
            points=[(m.step, m.validation) for m in metrics if m.validation is not None],
            style=_style("held", n),
            only=True,
        )
        for n, (run, metrics) in enumerate(runs)
    )


def _style(kind: str, run: int) -> str:
    return kind if run == 0 else f"{kind} other{run}"


def thinned(points: Sequence[tuple[int, float | None]], limit: int = _POINTS) -> Points:
    """The points that have a value; of more than ``limit``, the lowest and the highest of each stretch of steps."""
    known = [(step, value) for step, value in points if value is not None]
    if len(known) <= limit:
        return known
    stretch = -(-2 * len(known) // limit)
    kept: set[tuple[int, float]] = set()
    for i in range(0, len(known), stretch):
        part = known[i : i + stretch]
        kept |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
    return sorted(kept)
