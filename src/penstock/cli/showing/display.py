"""Displays of a run in plain lines, and the texts that these share with the live view of ``terminal``."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TextIO

from penstock.cli.launch import process_count, this_process
from penstock.cli.showing.meter import LaneUse, Meter
from penstock.config import format_size
from penstock.config.sizes import format_flops, three_digits
from penstock.report.sentence import format_long_time, format_time
from penstock.schedule.ir.lanes import Lane


class Display:
    """A view of a run. This class is that of a rank which leaves it to the first one, and shows nothing. ``notice`` and
    ``last_words`` are called in a signal handler, so they may not touch buffers."""

    def say(self, text: str) -> None:
        pass

    def working(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        """Within, something takes a while; what is yielded says how far it is."""
        return nullcontext(self.say)

    def begin(self, meter: Meter) -> None:
        pass

    def update(self) -> None:
        pass

    def end(self) -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def last_words(self) -> None:
        pass


_NOTED_EVERY = 10.0
"""Seconds between the lines that say how far something is that takes a while."""

_FIGURES_EVERY = 30.0
"""Seconds between the lines that say what a run takes of the machine."""


class PlainDisplay(Display):
    """A line per event and per step, for logs and pipes. What the run takes of the machine is said below the first
    step, the last, and now and then in between.

    ``now``: a clock in seconds.
    """

    def __init__(self, out: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._now = now
        self._meter: Meter | None = None
        self._due = 0.0
        self._unsaid = False

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    @contextmanager
    def working(self, text: str) -> Iterator[Callable[[str], None]]:
        start, due = time.perf_counter(), self._now() + _NOTED_EVERY

        def note(how_far: str) -> None:
            nonlocal due
            if self._now() >= due:
                due = self._now() + _NOTED_EVERY
                self.say(f"{text}: {how_far}")

        yield note
        self.say(f"{text}: {time.perf_counter() - start:.1f} s")

    def begin(self, meter: Meter) -> None:
        self._meter = meter
        self._due = self._now()

    def update(self) -> None:
        assert self._meter is not None
        self.say(step_line(self._meter))
        self._unsaid = True
        if self._now() >= self._due:
            self._say_figures(self._meter)

    def end(self) -> None:
        if self._meter is not None and self._unsaid:
            self._say_figures(self._meter)
        self._meter = None

    def _say_figures(self, meter: Meter) -> None:
        for line in figures(meter):
            self.say(f"  {line}")
        self._unsaid = False
        self._due = self._now() + _FIGURES_EVERY

    def notice(self, text: str) -> None:
        write_now(2, f"{text}\n")

    def last_words(self) -> None:
        write_now(2, "Stopped at once, in the middle of a step.\n")


def choose_display(out: TextIO) -> Display:
    """The live view on a terminal that can redraw, else plain lines."""
    if this_process():
        return Display()
    if can_redraw(out):
        from penstock.cli.showing.terminal import TerminalDisplay  # rich is only worth importing where it draws

        return TerminalDisplay(out)
    return PlainDisplay(out)


def can_redraw(out: TextIO) -> bool:
    """True if an output is a terminal on which lines can be drawn again."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def write_now(output: int, text: str) -> None:
    """Write past all buffers, for signal handlers: an output that nobody reads any more must not end the step."""
    with suppress(OSError):
        os.write(output, text.encode())


def step_line(meter: Meter) -> str:
    """A step in one line."""
    s, steps = meter.last, meter.outline.steps
    parts = [f"step {meter.done:>{len(str(steps))}}/{steps}", f"loss {s.loss:.4f}"]
    if meter.validation and meter.validated_at == meter.done:
        parts.append(f"held-out loss {meter.validation[-1]:.4f}")
    parts += step_notes(meter)
    if s.grad_norm is not None:
        parts.append(f"norm {s.grad_norm:.3g}" + (" clipped" if s.clipped else ""))
    planned = "" if meter.predicted is None else f" (plan {format_time(meter.predicted)})"
    parts += [f"lr {s.lr:.2e}", f"{meter.tokens_per_second:,.0f} tokens/s", f"{format_time(s.seconds)}{planned}"]
    if held := meter.held_up:
        lane, share = next(iter(held.items()))
        parts.append(f"held up by {lane} {share:.0%}")
    return "  ".join([*parts, f"{clock(meter.seconds_left)} left"])


def figures(meter: Meter) -> list[str]:
    """A run's use of the machine, in lines: memory against the plan, speed, links against their peak, drives."""
    memory = [
        f"{tier} {format_size(meter.peak.get(tier, 0))} (planned {format_size(meter.planned_peak.get(tier, 0))}, "
        f"given {format_size(given)})"
        for tier, given in meter.outline.given.items()
    ]
    held = ", ".join(f"{lane} {share:.0%}" for lane, share in meter.held_up.items() if share >= 0.005)
    rates = [speed(meter), f"held up by {held}" if held else "", *counts(meter)]
    links = ", ".join(_link(lane, use) for lane, use in meter.links().items())
    return [
        "memory " + ", ".join(memory),
        "speed  " + "  ".join(rate for rate in rates if rate),
        "links  " + f"GB/s (of peak): {links or 'none used'}",
        f"drives {format_size(meter.disk_bytes)} taken, {wear(meter)}",
    ]


def _link(lane: Lane, use: LaneUse) -> str:
    of_peak = "" if use.of_peak is None else f" ({use.of_peak:.0%})"
    return f"{lane} {use.sustained / 1e9:.2f}{of_peak}"


def speed(meter: Meter) -> str:
    """FLOP/s of the model, and MFU; where the maker's peak is not known, the share of a large product's if that is."""
    share = ""
    if meter.mfu is not None:
        share = f", MFU {meter.mfu:.0%}"
    elif meter.of_product is not None:
        share = f", {meter.of_product:.0%} of a large product's rate"
    return f"{format_flops(meter.flops_per_second)}{share}"


def step_time(meter: Meter) -> str:
    """The time of the last step, and what was predicted; the error is relative to the measurement, as everywhere."""
    seconds = format_time(meter.last.seconds)
    if meter.predicted is None:
        return f"{seconds} a step"
    error = 100 * (meter.predicted / meter.last.seconds - 1)
    return f"{seconds} a step, {format_time(meter.predicted)} predicted ({error:+z.0f}%)"


def wear(meter: Meter) -> str:
    """Bytes that the run has written, and how long new drives last at this pace, in words."""
    text = f"{format_size(meter.written)} written{a_day(meter)}"
    if (days := meter.drive_days) is None:
        return text
    assumed = " (assumed)" if meter.outline.yardstick.assumed else ""
    return f"{text}, new drives last {format_long_time(86400 * days)}{assumed}"


def a_day(meter: Meter) -> str:
    """Bytes written in a day beside those allowed, where there is a limit; begins with a comma, or is empty."""
    allowed, written = meter.outline.yardstick.allowed, meter.written_per_day
    if allowed is None or written is None:
        return ""
    return f", {format_size(written)} a day of the {format_size(allowed)} allowed"


def counts(meter: Meter) -> list[str]:
    """The numbers of steps of the run that were clipped, skipped, or run twice; those that are 0 are left out."""
    found = {"clipped": meter.clipped, "skipped": meter.skipped, "run twice": meter.repeated}
    return [f"{count} {what}" for what, count in found.items() if count]


def step_notes(meter: Meter) -> list[str]:
    """Remarks on a step that was done twice or skipped; none on others."""
    notes = []
    if meter.last.repeats and not meter.last.skipped:
        notes.append("done again: the norm was over its limit")
    if meter.last.skipped:
        scaled = meter.last.loss_scale != 1  # in fp16 alone
        notes.append(
            "skipped: a gradient not finite" + f" at a loss scale of {three_digits(meter.last.loss_scale)}" * scaled
        )
    return notes


def clock(seconds: float) -> str:
    """``83`` is ``1:23``, ``3723`` is ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fail(text: str) -> None:
    """An error for the user: one message, no traceback."""
    whose = f", rank {this_process()}" if process_count() > 1 else ""
    print(f"penstock{whose}: {text}", file=sys.stderr, flush=True)
