"""The timeline as a picture for documents: SVG or PNG, drawn by matplotlib."""

import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO, StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import files
from penstock.config import TIERS, Tier, format_size
from penstock.errors import ConfigError, ScheduleError
from penstock.report.causes import sides_of
from penstock.report.colors import GROUP_OF, GROUPS, OTHER, Group
from penstock.report.prediction import Prediction
from penstock.report.series import Bar, Curve, Side, rows_of
from penstock.report.trace_file import MeasuredStep
from penstock.schedule.ir.lanes import LANES
from penstock.schedule.ir.text import op_id

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _TRACK, _BUDGET, _PREDICTED = "#161b22", "#5a6472", "#f3f5f7", "#a3195b", "#b3541e"
_ROW, _GAP = 1.0, 0.45
_GRAIN = 1600
"""Lengths that can be told apart in the picture's width."""

_LONG_NUMBER = re.compile(r"(\d\.\d\d)\d+")
"""A hundredth of a point is finer than any screen."""


def draw(
    path: Path,
    prediction: Prediction | None,
    step: MeasuredStep,
    budget: Mapping[Tier, int],
    write: Callable[[Path, str | bytes], None] = files.write_named,
) -> None:
    """Write the timeline to ``path``, whose ending says what it is (``.svg``, ``.png``): lanes above, memory below.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            f"{path.name}: a picture needs matplotlib, which is not installed: pip install 'penstock[report]'"
        ) from error
    sides = sides_of(prediction, step)
    end = max(side.end for side in sides)
    tiers = [tier for tier in TIERS if any(amount for _, amount in step.memory.get(tier, ()))]
    used = {bar.lane for side in sides for bar in side.bars}
    lanes = [lane for lane in LANES if lane in used]
    with rc_context({"font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        heights = [0.32 * len(sides) * len(lanes) + 0.2, *([0.9] * len(tiers))]
        figure = Figure(figsize=(10, sum(heights) + 1.0), layout="constrained")
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        _draw_lanes(axes[0], sides, lanes, end)
        for ax, tier in zip(axes[1:], tiers, strict=True):
            _draw_memory(ax, sides, tier, budget.get(tier), end)
        factor, unit = (1.0, "s") if end >= 1 else (1e3, "ms")
        axes[-1].set_xlim(0, end)
        axes[-1].xaxis.set_major_formatter(lambda x, _: f"{x * factor:g} {unit}")
        for ax in axes:
            ax.tick_params(length=0, colors=_MUTED)
            for spine in ax.spines.values():
                spine.set_visible(False)
        _legend(figure, {_group(bar) for side in sides for bar in side.bars}, len(sides) > 1)
        if path.suffix == ".svg":
            text = StringIO()
            figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
            write(path, _LONG_NUMBER.sub(r"\1", text.getvalue()))
        else:
            pixels = BytesIO()
            figure.savefig(pixels, format="png", dpi=200, facecolor="white")
            write(path, pixels.getvalue())


def _draw_lanes(ax: "Axes", sides: Sequence[Side], lanes: Sequence[str], end: float) -> None:
    """A row per lane and side, the prediction above; a bar per op, its id as the title where the format has one."""
    y, marks = 0.0, []
    for lane in lanes:
        for side in sides:
            rows = rows_of([bar for bar in side.bars if bar.lane == lane])
            ax.broken_barh([(0, end)], (y - _ROW, _ROW), facecolors=_TRACK, linewidth=0)
            for i, row in enumerate(rows):
                low = y - _ROW + i * _ROW / len(rows)
                spans, colors = _merged(row, end / _GRAIN)
                _draw_bars(ax, spans, colors, low, low + _ROW / len(rows))
            marks.append((y - _ROW / 2, side.name if len(sides) > 1 else ""))
            y -= _ROW + 0.08
        middle = y + (_ROW + 0.08) * len(sides) - _ROW / 2
        ax.text(
            -0.085, middle, lane, transform=ax.get_yaxis_transform(), weight="bold", ha="right", va="center", color=_INK
        )
        y -= _GAP
    ax.set_ylim(y + _GAP, 0.1)
    ax.set_yticks([at for at, _ in marks], [text for _, text in marks])
    ax.tick_params(labelbottom=False)


def _draw_bars(
    ax: "Axes", spans: Sequence[tuple[float, float]], colors: Sequence[str], low: float, high: float
) -> None:
    """All bars of one colour as one path: a third of the size in an SVG."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    for color in dict.fromkeys(colors):
        boxes = [(start, start + length) for (start, length), own in zip(spans, colors, strict=True) if own == color]
        corners = [((a, low), (b, low), (b, high), (a, high), (a, low)) for a, b in boxes]
        codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(boxes)
        outline = Outline([corner for box in corners for corner in box], codes)
        ax.add_patch(PathPatch(outline, facecolor=color, linewidth=0, snap=False))


def _group(bar: Bar) -> Group:
    try:
        return GROUP_OF[op_id(bar.id).kind]
    except ScheduleError:
        return OTHER


def _merged(row: Sequence[Bar], grain: float) -> tuple[list[tuple[float, float]], list[str]]:
    """(start, length) and colour of each bar to draw: neighbours of one colour closer than ``grain`` are one bar."""
    spans: list[tuple[float, float]] = []
    colors: list[str] = []
    for bar in row:
        color = _group(bar).light
        if colors and colors[-1] == color and bar.start - sum(spans[-1]) < grain:
            spans[-1] = (spans[-1][0], bar.end - spans[-1][0])
        else:
            spans.append((bar.start, max(bar.end - bar.start, grain)))
            colors.append(color)
    return spans, colors


def _draw_memory(ax: "Axes", sides: Sequence[Side], tier: Tier, budget: int | None, end: float) -> None:
    ax.set_facecolor(_TRACK)
    top = 0.0
    for side in sides:
        if not (curve := _coarse(side.memory.get(tier, ()), end / _GRAIN)):
            continue
        times = [*(time for time, _ in curve), side.end]
        amounts: list[float] = [amount for _, amount in curve]
        amounts.append(amounts[-1])
        top = max(top, *amounts)
        if side.name == "predicted":
            ax.step(times, amounts, where="post", color=_PREDICTED, linestyle="--", linewidth=0.9, zorder=3)
        else:
            ax.fill_between(times, amounts, step="post", color="#14679f", alpha=0.18, linewidth=0)
            ax.step(times, amounts, where="post", color="#14679f", linewidth=0.9)
    if budget and budget < 3 * top:
        ax.axhline(budget, color=_BUDGET, linestyle=":", linewidth=1.2)
        ax.text(end, budget, f"budget {format_size(budget)} ", color=_BUDGET, ha="right", va="bottom", fontsize=8)
        top = max(top, budget)
    ax.set_ylim(0, top * 1.265)
    ax.set_yticks([0, top])
    ax.yaxis.set_major_formatter(lambda y, _: format_size(y) if y else "0")
    ax.set_title(f"{tier} memory", loc="left", fontsize=9, color=_INK, pad=3)


def _coarse(curve: Curve, grain: float) -> list[tuple[float, int]]:
    """The curve with at most three points in each ``grain``: its lowest, its highest and its last amount there."""
    points: list[tuple[float, int]] = []
    for _, group in groupby(curve, key=lambda point: point[0] // grain):
        part = list(group)
        if len(part) > 3:
            extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])} - {part[-1]}
            part = [*sorted(extremes), part[-1]]
        points += part
    return points


def _legend(figure: Any, used: set[Group], both: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=group.light, label=group.name) for group in GROUPS if group in used]
    if both:
        handles.append(Line2D([], [], color=_PREDICTED, linestyle="--", label="memory predicted"))
        handles.append(Line2D([], [], color="#14679f", label="memory measured"))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=8.5, handlelength=1.1)
