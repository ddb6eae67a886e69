"""The live view of a run on a terminal, drawn with rich."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from penstock.cli.showing.console import console
from penstock.cli.showing.display import Display, write_now
from penstock.cli.showing.meter import Meter
from penstock.cli.showing.screen import screen


class TerminalDisplay(Display):
    """Redraws one screenful; what is said stays above it. Drawn by rich's thread, so time goes on during a step."""

    def __init__(self, out: TextIO) -> None:
        self.console = console(out)
        self._live: Live | None = None
        self._notice = ""
        self._step_began = 0.0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def working(self, text: str) -> Iterator[Callable[[str], None]]:
        start = time.perf_counter()
        with self.console.status(Text(text)) as status:  # no markup: it may name a folder
            yield lambda how_far: status.update(Text(f"{text}: {how_far}"))
        self.console.print(f"[green]✓[/] {escape(text)} [dim]{time.perf_counter() - start:.1f} s[/]")

    def begin(self, meter: Meter) -> None:
        self._step_began = time.perf_counter()
        self._live = Live(console=self.console, get_renderable=lambda: self._draw(meter), refresh_per_second=4)
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
        write_now(1, "\nStopped at once, in the middle of a step.\n")

    def _draw(self, meter: Meter) -> RenderableType:
        waited = time.perf_counter() - self._step_began
        return screen(meter, self.console.width, waited=waited, notice=self._notice)


@contextmanager
def bar(out: TextIO) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes, rate and time left, gone when it is over. Yields what draws so many bytes of so many."""
    columns = (BarColumn(32), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(out), transient=True) as progress:
        task = progress.add_task("bytes", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
