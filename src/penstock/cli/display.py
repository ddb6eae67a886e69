"""What the user sees of a run: plain lines, and what they have in common with the live view of ``terminal``."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TextIO

from penstock.cli.meter import Meter
from penstock.config import format_size


class Display(Protocol):
    """A view of a run. ``notice`` and ``last_words`` are called in a signal handler, so they may not touch buffers."""

    def say(self, text: str) -> None: ...
    def working(self, text: str) -> AbstractContextManager[None]: ...
    def begin(self, meter: Meter) -> None: ...
    def update(self) -> None: ...
    def end(self) -> None: ...
    def notice(self, text: str) -> None: ...
    def last_words(self) -> None: ...


class PlainDisplay:
    """A line per event and per step, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._meter: Meter | None = None

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.say(f"{text}: {time.perf_counter() - start:.1f} s")

    def begin(self, meter: Meter) -> None:
        self._meter = meter

    def update(self) -> None:
        assert self._meter is not None
        self.say(step_line(self._meter))

    def end(self) -> None:
        self._meter = None

    def notice(self, text: str) -> None:
        write_now(2, f"{text}\n")

    def last_words(self) -> None:
        write_now(2, "Stopped at once, in the middle of a step.\n")


def choose_display(out: TextIO) -> Display:
    """The live view on a terminal that can redraw, else plain lines."""
    if can_redraw(out):
        from penstock.cli.terminal import TerminalDisplay  # rich is only worth importing where it draws

        return TerminalDisplay(out)
    return PlainDisplay(out)


def can_redraw(out: TextIO) -> bool:
    """Whether an output is a terminal on which lines can be drawn again."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def write_now(output: int, text: str) -> None:
    """Write past all buffers, for signal handlers: an output that nobody reads any more must not end the step."""
    with suppress(OSError):
        os.write(output, text.encode())


def step_line(meter: Meter) -> str:
    """A step in one line."""
    s, outline = meter.last, meter.outline
    width = len(str(outline.steps))
    parts = [f"step {meter.done:>{width}}/{outline.steps}", f"loss {s.loss:.4f}", *loss_notes(meter)]
    if s.grad_norm is not None:
        parts.append(f"norm {s.grad_norm:.3g}" + (" clipped" if s.clipped else ""))
    parts += [f"lr {s.lr:.2e}", f"{meter.tokens_per_second:,.0f} tokens/s", f"{s.seconds:.2f} s"]
    rates = [f"{lane} {use.sustained / 1e9:.2f}" for lane, use in meter.lanes().items() if use.rate > 0]
    parts.append(f"GB/s: {' '.join(rates)}")
    for tier, given in outline.given.items():
        parts.append(f"{tier} {format_size(meter.peak.get(tier, 0))} of {format_size(given)}")
    parts.append(f"disk {format_size(meter.disk_bytes)}")
    return "  ".join([*parts, f"{clock(meter.seconds_left)} left"])


def loss_notes(meter: Meter) -> list[str]:
    """What is worth saying beside the loss: held-out loss when there is a new one, a step that was not taken."""
    notes = []
    if meter.validation and meter.validated_at == meter.done:
        notes.append(f"held-out loss {meter.validation[-1]:.4f}")
    if meter.last.repeats and not meter.last.skipped:
        notes.append("done again: the norm was over its limit")
    if meter.last.skipped:
        notes.append(f"skipped: overflow, loss scale now {meter.last.loss_scale:g}")
    return notes


def clock(seconds: float) -> str:
    """``83`` is ``1:23``, ``3723`` is ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fail(text: str) -> None:
    """An error for the user: one message, no traceback."""
    print(f"penstock: {text}", file=sys.stderr, flush=True)
