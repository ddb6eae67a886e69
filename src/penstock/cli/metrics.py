"""``metrics.jsonl``: the numbers of each step, once, whatever ends the run. docs/training.md says what each key is.

    a kill         a line is with the system when its step is done, and outlives the process
    a power cut    lines that are not flushed yet are in each commit too, and are filled in from there
    between them   the line of the step that was committed last is made of what its commit has (``loop.report_last``)
    a stop         the evaluation after the step that was the last is made up for when the run goes on, too

A flush comes after 32 lines, after 24 KiB of them (a commit holds 64 KiB of what is beside its arrays) or after 10 s.
A disk that is full or fails ends no run, whose steps need none of this: lines wait in memory until it takes them.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock import files
from penstock.cli.run_folder import METRICS
from penstock.cli.showing.meter import LINKS, Meter
from penstock.errors import StoreError
from penstock.report.metrics_file import lines_until, merged
from penstock.schedule.ir.lanes import Lane
from penstock.state.stats import StepStats
from penstock.store.journal import Journal

log = logging.getLogger("penstock")

VALIDATION = "validation_loss"

METRICS_KEY = "metrics"
"""Key of the lines that are not flushed in a position of ``Engine.step``, which each commit has."""

STEP_KEY = "step_metrics"
"""Key of what a step's data add to its line (``Step.metrics``) in the position of that step."""

_LINES, _BYTES, _SECONDS = 32, 24 << 10, 10.0


class MetricsFile:
    """One line of JSON per step, with the system as soon as the step is done. Adds to what is there."""

    def __init__(self, folder: Path, *, done: int = 0, committed: Sequence[str] = ()) -> None:
        """``done``: steps that the run goes on after. Lines of later ones are dropped: they will be done again.
        ``committed``: lines that the last commit has, of which the file may lack some.

        Raises:
            ConfigError: the lines that are there cannot be read.
            StoreError: the disk is full or fails.
        """
        path = folder / METRICS
        lines, unreadable = lines_until(path, done)
        if unreadable:
            log.warning("%s: lines that cannot be read are dropped: %d", path, unreadable)
        lines = merged(lines, committed, done)
        last = json.loads(lines[-1]) if lines else {}
        self.last, self.evaluated = int(last.get("step", 0)), VALIDATION in last
        """The last step that has a line, and True if that has the loss of an evaluation."""
        self.missing = done - len(lines)
        """Steps that the run goes on after and that have no line."""
        text = "".join(f"{line}\n" for line in lines)
        if (path.read_bytes() if path.exists() else b"") != text.encode():
            files.replace(path, text)
        self.path, self._done = path, done
        self._file = Journal(path, "a")
        self._file.flush()  # what is there was perhaps written by a run that was killed before it could
        files.sync_folder(folder)
        self._flushed = time.monotonic()
        self._unflushed: list[str] = []
        self._waiting, self._failing = 0, False  # of these, the last ones: those that the disk has not taken

    @property
    def unflushed(self) -> list[str]:
        """The lines that a power cut may take, without their ends, for the commit of the next step. Where the disk
        takes none, the last that a commit has room for."""
        sizes = accumulate(len(line) for line in reversed(self._unflushed))
        count = min(sum(1 for size in sizes if size <= _BYTES), _LINES)
        return self._unflushed[len(self._unflushed) - count :]

    def earlier(self) -> Iterator[Mapping[str, Any]]:
        """The lines of the steps that the run goes on after."""
        return map(json.loads, lines_until(self.path, self._done)[0])

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a line. A number that JSON has no word for (an overflowed norm) becomes null."""
        self._unflushed.append(json.dumps(_finite(metrics), allow_nan=False))
        self._waiting += 1
        full = len(self._unflushed) >= _LINES or sum(map(len, self._unflushed)) >= _BYTES
        self._to_disk(flush=full or time.monotonic() - self._flushed >= _SECONDS)

    def _to_disk(self, *, flush: bool) -> None:
        """Hand the lines that wait to the system. Where it does not take them they go on waiting, which is said."""
        try:
            if self._waiting:
                self._file.write("".join(f"{line}\n" for line in self._unflushed[-self._waiting :]))
                self._waiting = 0
            if flush:
                self._file.flush()
                self._unflushed, self._flushed = [], time.monotonic()
            self._failing = False
        except StoreError as error:
            if not self._failing:
                log.warning("training goes on, and its metrics wait in memory: %s", error)
            self._failing = True

    def close(self) -> None:
        """Lines that the disk does not take now are lost, which is said."""
        with closing(self._file):
            if self._unflushed:
                self._to_disk(flush=True)
            if self._waiting:
                log.warning("%s lacks the lines of the last %d steps: the disk took none", self.path, self._waiting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def add_to_last(folder: Path, done: int, found: Mapping[str, Any]) -> None:
    """Add what was found out about step ``done`` to its line, which is the last one. No ``MetricsFile`` is open.

    Raises:
        OSError: it could not be written; the line is as it was.
    """
    *before, last = lines_until(folder / METRICS, done)[0]
    line = json.dumps({**json.loads(last), **_finite(found)}, allow_nan=False)
    files.replace(folder / METRICS, "".join(f"{text}\n" for text in (*before, line)))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- a line


def metrics_of(stats: StepStats, validation: float | None) -> dict[str, Any]:
    """A line of ``metrics.jsonl``: the figures that a step itself reports, and the held-out loss after it."""
    line: dict[str, Any] = {
        "step": stats.step,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "tokens": stats.tokens,
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens / max(stats.seconds, 1e-9),
        "tflops_per_second": stats.flops / max(stats.seconds, 1e-9) / 1e12,
        "flops": stats.flops,
        "bytes_written": stats.bytes_written,
        "bytes_moved": dict(stats.bytes_moved),
        "lane_seconds": dict(stats.lane_seconds),
        "peak_bytes": {tier: most for tier, most in stats.peak_bytes.items() if tier != "disk"},  # of memory
        "clipped": stats.clipped,
        "skipped": stats.skipped,
        "repeats": stats.repeats,
        "loss_scale": stats.loss_scale,
    }
    now_and_then = {VALIDATION: validation, "plan_change": stats.plan_change}
    return line | {key: value for key, value in now_and_then.items() if value is not None}


def with_figures(line: Mapping[str, Any], meter: Meter, held: Mapping[Lane, float]) -> dict[str, Any]:
    """The line of the meter's last step, with what the run and the machine say to it."""
    stats, yardstick = meter.last, meter.outline.yardstick
    seconds = max(stats.seconds, 1e-9)
    rates = {lane: moved / seconds for lane, moved in stats.bytes_moved.items() if lane in LINKS}
    rate = stats.flops / seconds
    return {
        **line,
        "mfu": None if yardstick.peak is None else rate / yardstick.peak,
        "share_of_product": None if yardstick.flops is None else rate / yardstick.flops,
        "gb_per_second": {lane: found / 1e9 for lane, found in rates.items()},
        "share_of_peak": {
            lane: found / yardstick.links[lane] for lane, found in rates.items() if lane in yardstick.links
        },
        "held_up_seconds": dict(held),
        "planned_peak_bytes": dict(meter.planned_peak),
        "disk_bytes": meter.disk_bytes,
        "predicted_seconds": meter.predicted,
        "seconds_left": meter.seconds_left,
        "drive_days": meter.drive_days,
        **counted(meter),
    }


def counted(meter: Meter) -> dict[str, int]:
    """The steps so far, of the whole run, that were clipped, skipped or run twice."""
    return {"steps_clipped": meter.clipped, "steps_skipped": meter.skipped, "steps_repeated": meter.repeated}
