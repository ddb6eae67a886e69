"""``metrics.jsonl``: the numbers of each step, once, whatever ends the run.

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
from penstock.cli.showing.metrics import VALIDATION
from penstock.errors import StoreError
from penstock.report.metrics_file import lines_until, merged
from penstock.store.journal import Journal

log = logging.getLogger("penstock")

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
