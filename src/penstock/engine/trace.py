"""The trace: what a run really did, op by op, as a file that opens in Perfetto and in ``chrome://tracing``.

The executor hands over one list of ``TraceEvent`` and one of ``MemorySample`` per step; the writer streams them.
The file is the array form of the Chrome trace format ("Trace Event Format", ph X, C, i and M), which viewers load
even if the closing bracket is missing: a run that is killed leaves a trace of all its finished steps.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.config import Tier
from penstock.documents.chrome import BEGIN, END, Process
from penstock.errors import StoreError
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.store.journal import Journal

log = logging.getLogger("penstock")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """One op as it ran. ``start`` and ``end`` are seconds of ``time.perf_counter`` since the engine was made.

    ``op`` is the op's id in the schedule; ``bytes`` what it moved over its lane (0 for compute).
    """

    step: int
    op: str
    lane: Lane
    start: float
    end: float
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Bytes in use on one tier from ``time`` (seconds since the engine was made) on."""

    time: float
    tier: Tier
    bytes: int


class TraceWriter:
    """Streams steps into ``path``: one row per lane in the order of ``LANES``, one counter per tier.

    For one calling thread.
    A lane that keeps several requests in flight gets a row for each (``read``, ``read 2``), because the viewers
    draw overlapping events of one row wrongly. ``steps`` limits how many steps are kept, the first ones; None
    keeps all. Viewers take about a million events: 500 steps of 2,000 ops. On a disk that is full or fails the trace
    ends, with a warning, and nothing else does.
    """

    def __init__(self, path: Path, *, steps: int | None = None) -> None:
        self.written = 0
        self._limit = steps
        self._process = Process(1, "penstock", LANES)
        self._file = Journal(path, "w")
        self._write(BEGIN + ",\n".join(self._process.begin()))

    def step(self, events: Sequence[TraceEvent], samples: Sequence[MemorySample] = ()) -> None:
        """Append one step; a no-op once ``steps`` of them are written."""
        if self._file.closed or (self._limit is not None and self.written >= self._limit):
            return
        self.written += 1
        records: list[str] = []
        for e in sorted(events, key=lambda e: e.start):
            records += self._process.slice(e.lane, e.op, e.start, e.end, step=e.step, bytes=e.bytes)
        records += [self._process.counter(f"{s.tier} bytes", s.time, s.bytes) for s in samples]
        if events:
            records.append(self._process.instant(f"step {events[0].step}", min(e.start for e in events)))
        self._write("".join(f",\n{record}" for record in records))

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except StoreError as error:
            log.warning("the trace ends after %d steps, and training goes on: %s", max(self.written - 1, 0), error)
            self._file.close()

    def close(self) -> None:
        if not self._file.closed:
            self._write(END)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
