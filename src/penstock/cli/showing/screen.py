"""The live view as one drawing of a meter: the same lines at the same places from step to step."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.showing.display import clock, counts, speed, step_notes, step_time, wear
from penstock.cli.showing.meter import Meter
from penstock.config import format_size
from penstock.report.sentence import LANE_NAMES
from penstock.schedule.ir.lanes import LANES, Lane

_SPARKS = "▁▂▃▄▅▆▇█"
_LABEL = 12
"""Columns of the words at the left."""

_LEAST_BAR = 5
"""Columns of the shortest bar that is drawn."""

_BESIDE = 104
"""Columns from which the two tables stand side by side."""

_BARS = 64
"""Columns from which they have bars: in fewer the numbers need the room."""

_PALETTE = "green cyan blue magenta red yellow bright_blue bright_magenta bright_cyan bright_green"
_COLORS: Mapping[Lane, str] = dict(zip(LANES, _PALETTE.split(), strict=True))


def screen(meter: Meter, width: int, *, waited: float, notice: str = "") -> RenderableType:
    """The whole view in ``width`` columns. ``waited``: seconds since the last step; ``notice``: a line below all."""
    width = min(width, 120)
    parts: list[RenderableType] = [_progress(meter, width, waited)]
    if meter.losses:
        parts += [_words(meter, width), "", _tables(meter, width)]
    if notice:
        parts.append(Text(notice, style="yellow"))
    return Group(*parts)


def _progress(meter: Meter, width: int, waited: float) -> RenderableType:
    """One line: a bar where the numbers leave room for one."""
    steps = meter.outline.steps
    step, share = f"step {meter.done:,}/{steps:,}", f"{meter.done / steps:.0%}"
    if meter.losses:
        left = f"{clock(max(meter.seconds_left - waited, 0))} left"
    else:
        left = f"first step, {waited:.0f} s so far"
    room = min(max(width - 52, 10), width - len(f"{step}    {share}  {left}"))
    if room < _LEAST_BAR:
        return Text(f"{step}  {share}  {left}", no_wrap=True, overflow="ellipsis")
    row = Table.grid(padding=(0, 2))
    row.add_row(Text(step, style="bold"), _bar(meter.done / steps, room, "bold"), share, left)
    return row


def _words(meter: Meter, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 0))
    table.add_column(width=_LABEL, style="dim")
    table.add_column(width=width - _LABEL, no_wrap=True, overflow="ellipsis")
    last = meter.last
    loss = Text.assemble((f"{last.loss:.4f}", "bold"), "  ")
    loss.append(sparkline(meter.losses, width=24), style="cyan")
    loss.append(f"  from {meter.losses[0]:.4f}")
    if meter.validation:
        loss.append(f"  held-out loss {meter.validation[-1]:.4f}")
    step = [f"lr {last.lr:.2e}"]
    if last.grad_norm is not None:
        step.append(f"norm {last.grad_norm:.3g}" + (" clipped" if last.clipped else ""))
    table.add_row("loss", loss)
    table.add_row("step", "  ".join([*step, *counts(meter), *step_notes(meter)]))
    table.add_row("speed", f"{meter.tokens_per_second:,.0f} tokens/s  {speed(meter)}")
    table.add_row("time", step_time(meter))
    table.add_row("held up by", _held_up(meter, width - _LABEL))
    table.add_row("drives", f"{format_size(meter.disk_bytes)} taken, {wear(meter)}")
    return table


def _held_up(meter: Meter, width: int) -> Text:
    """The step's time as a bar, divided among the lanes that held it up, and the larger shares in words."""
    shares = [(lane, share) for lane, share in meter.held_up.items() if share >= 0.005]
    room = 20 if width < 90 else 40
    bar = Text()
    for lane, share in shares:
        bar.append("█" * round(share * room), style=_COLORS[lane])
    bar.append("░" * max(room - len(bar), 0), style="dim")
    for lane, share in shares[:3]:
        bar.append("  ").append(LANE_NAMES[lane], style=_COLORS[lane]).append(f" {share:.0%}")
    return bar


def _tables(meter: Meter, width: int) -> RenderableType:
    if width < _BARS:
        return Group(_lanes(meter, bar=0), "", _tiers(meter, bar=0))
    if width < _BESIDE:
        return Group(_lanes(meter), "", _tiers(meter, bar=16))
    both = Table.grid(padding=(0, 4))
    both.add_row(_lanes(meter), _tiers(meter, bar=14))
    return both


def _lanes(meter: Meter, *, bar: int = 10) -> RenderableType:
    table = _table("lane", "busy", "GB/s", "of peak", bar=bar)
    for lane, use in meter.lanes().items():
        rate = f"{use.sustained / 1e9:.2f}" if use.sustained and lane != "compute" else ""
        share = use.of_peak if lane != "compute" else meter.of_product
        drawn: RenderableType = "" if share is None else _bar(min(share, 1.0), bar, _COLORS[lane])
        of_peak = "" if share is None else f"{share:.0%}"
        cells = (Text(LANE_NAMES[lane], style=_COLORS[lane]), f"{use.busy:.0%}", rate, of_peak, drawn)
        table.add_row(*cells[: len(table.columns)])
    return table


def _tiers(meter: Meter, *, bar: int) -> RenderableType:
    table = _table("memory", "peak", "planned", "given", bar=bar)
    for tier, given in meter.outline.given.items():
        peak, planned = meter.peak.get(tier, 0), meter.planned_peak.get(tier, 0)
        drawn = _bar(min(peak / given, 1.0) if given else 0.0, bar, "green")
        cells = (tier, format_size(peak), format_size(planned), format_size(given), drawn)
        table.add_row(*cells[: len(table.columns)])
    return table


def _table(*names: str, bar: int) -> Table:
    """A table with a column of words, columns of numbers, and where there is room for a ``bar`` one for that."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    if bar:
        table.add_column("", no_wrap=True)
        table.columns[0].min_width = _LABEL
    return table


def _bar(share: float, width: int, style: str) -> ProgressBar:
    return ProgressBar(total=1.0, completed=share, width=width, complete_style=style, finished_style=style)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values' course in at most ``width`` characters, each the mean of a stretch of the finite ones."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(max(means) - min(means), 1e-12)
    return "".join(_SPARKS[min(int((m - low) / span * len(_SPARKS)), len(_SPARKS) - 1)] for m in means)
