"""The live view of a run on a terminal, drawn with rich."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.display import clock, loss_notes, write_now
from penstock.cli.meter import Meter
from penstock.config import format_size

_SPARKS = "▁▂▃▄▅▆▇█"


class TerminalDisplay:
    """Redraws one screenful; what is said stays above it. Drawn by rich's thread, so time goes on during a step."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False)
        self._live: Live | None = None
        self._notice = ""
        self._step_began = 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._console.status(text):
            yield
        self._console.print(f"[green]✓[/] {text} [dim]{time.perf_counter() - start:.1f} s[/]")

    def begin(self, meter: Meter) -> None:
        self._step_began = time.perf_counter()
        self._live = Live(console=self._console, get_renderable=lambda: self._draw(meter), refresh_per_second=4)
        self._live.start()

    def update(self) -> None:
        self._step_began = time.perf_counter()
        if self._live is not None:
            self._live.refresh()

    def end(self) -> None:
        if self._live is not None:
            self._notice = ""
            self._live.stop()
            self._live = None

    def notice(self, text: str) -> None:
        self._notice = text  # drawn by the refresh thread: a signal handler must not wait for the console's lock

    def last_words(self) -> None:
        write_now(1, "\x1b[?25h\nStopped at once, in the middle of a step.\n")  # the cursor back first

    def _draw(self, meter: Meter) -> RenderableType:
        parts: list[RenderableType] = [self._head(meter)]
        if meter.losses:
            tables = Table.grid(padding=(0, 4))
            tables.add_row(_lanes(meter), _tiers(meter))
            parts += [_loss(meter), "", tables]
        if self._notice:
            parts.append(Text(self._notice, style="yellow"))
        return Group(*parts)

    def _head(self, meter: Meter) -> RenderableType:
        steps = meter.outline.steps
        head = Table.grid(padding=(0, 2))
        waited = time.perf_counter() - self._step_began
        if not meter.losses:
            left, pace = "", f"first step, {waited:.0f} s so far"
        else:
            left = f"{clock(max(meter.seconds_left - waited, 0))} left"
            pace = f"{meter.tokens_per_second:,.0f} tokens/s"
        bar = ProgressBar(total=steps, completed=meter.done, width=32)
        head.add_row(Text(f"step {meter.done}/{steps}", style="bold"), bar, pace, left)
        return head


class ReadingBar:
    """How much of something has been read."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=None)

    def show(self, done: int, total: int) -> None:
        """Draw ``done`` of ``total`` bytes."""
        self._progress.update(self._task, completed=done, total=total)


@contextmanager
def reading(out: TextIO) -> Iterator[ReadingBar]:
    """A bar with bytes, rate and time left, gone when it is over."""
    columns = (BarColumn(32), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=out, highlight=False), transient=True) as progress:
        yield ReadingBar(progress)


def _loss(meter: Meter) -> RenderableType:
    text = Text.assemble(("loss ", ""), (f"{meter.last.loss:.4f}", "bold"), f"  from {meter.losses[0]:.4f}  ")
    text.append(sparkline(meter.losses, width=32), style="cyan")
    details = [f"lr {meter.last.lr:.2e}"]
    if meter.last.grad_norm is not None:
        details.append(f"norm {meter.last.grad_norm:.3g}" + (" clipped" if meter.last.clipped else ""))
    if meter.validation:
        details.append(f"held-out loss {meter.validation[-1]:.4f}")
    details += [note for note in loss_notes(meter) if not note.startswith("held-out")]
    text.append("  " + "  ".join(details), style="dim")
    return text


def _lanes(meter: Meter) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for name in ("lane", "busy", "GB/s"):
        table.add_column(name, justify="left" if name == "lane" else "right")
    for lane, use in meter.lanes().items():
        table.add_row(lane, f"{use.busy:.0%}", f"{use.sustained / 1e9:.2f}" if use.rate else "")
    return table


def _tiers(meter: Meter) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for name in ("memory", "peak", "given", ""):
        table.add_column(name, justify="right" if name in ("peak", "given") else "left")
    for tier, given in meter.outline.given.items():
        peak = meter.peak.get(tier, 0)
        bar = ProgressBar(total=given, completed=peak, width=16)
        table.add_row(tier, format_size(peak), format_size(given), bar)
    table.add_row("disk", format_size(meter.disk_bytes), "", "")
    return table


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
