"""The trace: what a run really did, op by op, as a file that opens in Perfetto and in ``chrome://tracing``.

The executor hands over one list of ``TraceEvent`` and one of ``MemorySample`` per step; the writer streams them.
The file is the array form of the Chrome trace format ("Trace Event Format", ph X, C, i and M), which viewers load
even if the closing bracket is missing: a run that is killed leaves a trace of all its finished steps.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.config import TIERS, Tier
from penstock.errors import StoreError
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.store.journal import Journal

_PROCESS = 1
_ROWS_PER_LANE = 16  # thread ids reserved for one lane, so that its rows stay together when it has several
_MICRO = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """One op as it ran. ``start`` and ``end`` are seconds of ``time.perf_counter`` since the run began.

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
    """Bytes in use on one tier from ``time`` (seconds since the run began) on."""

    time: float
    tier: Tier
    bytes: int


class TraceWriter:
    """Streams steps into ``path``: one row per lane in the order of ``LANES``, one counter per tier.

    For one calling thread.
    A lane that keeps several requests in flight gets a row for each (``read``, ``read 2``), because the viewers
    draw overlapping events of one row wrongly. ``steps`` limits how many steps are kept, the first ones; None
    keeps all. Viewers take about a million events: 500 steps of 2,000 ops.
    """

    def __init__(self, path: Path, *, steps: int | None = None) -> None:
        self.path = path
        self.written = 0
        self._limit = steps
        self._busy_until: dict[Lane, list[float]] = {}
        self._file = Journal(path, "w")
        self._file.write("[\n" + _metadata("process_name", 0, name="penstock"))

    def step(self, events: Sequence[TraceEvent], samples: Sequence[MemorySample] = ()) -> None:
        """Append one step; a no-op once ``steps`` of them are written.

        Raises:
            StoreError: the disk is full or fails.
        """
        if self._limit is not None and self.written >= self._limit:
            return
        self.written += 1
        lines = [self._slice(e) for e in sorted(events, key=lambda e: e.start)]
        lines += [_counter(s) for s in samples]
        if events:
            lines.append(_marker(f"step {events[0].step}", min(e.start for e in events)))
        self._file.write("".join(lines))

    def close(self) -> None:
        if not self._file.closed:
            with suppress(StoreError):  # viewers do without; an error on the way out must not hide the one before
                self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _slice(self, e: TraceEvent) -> str:
        row, opened = self._row(e)
        name = json.dumps(e.op)
        return opened + (
            f',\n{{"ph":"X","pid":{_PROCESS},"tid":{row},"name":{name},"cat":"{e.lane}","ts":{e.start * _MICRO:.3f},'
            f'"dur":{(e.end - e.start) * _MICRO:.3f},"args":{{"step":{e.step},"bytes":{e.bytes}}}}}'
        )

    def _row(self, e: TraceEvent) -> tuple[int, str]:
        """The first row of the event's lane that is free at its start, and the lines that introduce a new row."""
        rows = self._busy_until.setdefault(e.lane, [])
        first = (LANES.index(e.lane) + 1) * _ROWS_PER_LANE
        free = next((i for i, until in enumerate(rows) if until <= e.start), len(rows))
        if free < len(rows):
            rows[free] = e.end
            return first + free, ""
        assert free < _ROWS_PER_LANE, f"lane {e.lane} has more than {_ROWS_PER_LANE} ops at once"
        rows.append(e.end)
        name = e.lane if free == 0 else f"{e.lane} {free + 1}"
        row = first + free
        return row, ",\n" + _metadata("thread_name", row, name=name) + ",\n" + _metadata(
            "thread_sort_index", row, sort_index=row
        )


def _metadata(kind: str, row: int, **args: str | int) -> str:
    return json.dumps({"ph": "M", "pid": _PROCESS, "tid": row, "name": kind, "args": args})


def _counter(s: MemorySample) -> str:
    assert s.tier in TIERS
    return (
        f',\n{{"ph":"C","pid":{_PROCESS},"name":"{s.tier} bytes","ts":{s.time * _MICRO:.3f},'
        f'"args":{{"in use":{s.bytes}}}}}'
    )


def _marker(name: str, time: float) -> str:
    return f',\n{{"ph":"i","s":"p","pid":{_PROCESS},"tid":0,"name":"{name}","ts":{time * _MICRO:.3f}}}'
