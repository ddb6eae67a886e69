"""Ops in time as the page has them: columns, sorted so that each stretch of a lane never overlaps itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config import Tier
from penstock.documents.chrome import free_row
from penstock.report.columns import Columns, Names
from penstock.report.trace_file import Ran
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.sim.cause import Cause

Curve = Sequence[tuple[float, int]]
"""(time since the step's start, amount of memory taken from then on)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar(Ran):
    """One op to draw. ``waited``: time that its lane stood idle before it; ``cause``: what for, None if that is not
    known."""

    waited: float = 0.0
    cause: Cause | None = None


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the steps that are drawn together: ops in any order, and the memory that they take."""

    name: str
    bars: Sequence[Bar]
    memory: Mapping[Tier, Curve]

    @property
    def end(self) -> float:
        return max((bar.end for bar in self.bars), default=0.0)


def series(side: Side, put: Columns, names: Names) -> Mapping[str, Any]:
    """Put one side's ops and memory curves into columns; returns what the page's script reads them by.

    A lane with several ops in flight becomes several stretches of the columns, ``[lane, from, to]``, in each of which
    ops follow each other.
    """
    stretches: list[tuple[Lane, list[Bar]]] = []
    for lane in LANES:
        stretches += [(lane, row) for row in rows_of([bar for bar in side.bars if bar.lane == lane])]
    ordered = [bar for _, row in stretches for bar in row]
    edges = np.cumsum([0, *(len(row) for _, row in stretches)]).tolist()
    causes = [bar.cause or Cause("") for bar in ordered]
    return {
        "name": side.name,
        "stretches": [[LANES.index(lane), edges[i], edges[i + 1]] for i, (lane, _) in enumerate(stretches)],
        "id": put.add("u4", [names[bar.id] for bar in ordered]),
        "start": put.add("f8", [bar.start for bar in ordered]),
        "end": put.add("f8", [bar.end for bar in ordered]),
        "bytes": put.add("f8", [bar.nbytes for bar in ordered]),
        "waited": put.add("f8", [bar.waited for bar in ordered]),
        "cause": put.add("i4", [names[cause.op] if cause.op else -1 for cause in causes]),
        "rank": put.add("i4", [cause.rank for cause in causes]),
        "pool": put.add("i4", [names[cause.pool] if cause.pool else -1 for cause in causes]),
        "memory": {
            tier: [put.add("f8", [t for t, _ in points]), put.add("f8", [amount for _, amount in points])]
            for tier, points in ((tier, last_of_each_moment(curve)) for tier, curve in side.memory.items())
        },
    }


def rows_of(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Ops by start, each in the first row that is free by then; a lane that does one thing at a time has one row."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        place = free_row([row[-1].end for row in rows], bar.start)
        if place == len(rows):
            rows.append([])
        rows[place].append(bar)
    return rows


def last_of_each_moment(curve: Curve) -> list[tuple[float, int]]:
    """A curve without the values that last no time, but for its highest one: what is drawn, and its peak.

    Of several values at one moment the last is kept, and before it the highest if that is higher.
    """
    points: list[tuple[float, int]] = []
    i = 0
    while i < len(curve):
        j = i
        while j + 1 < len(curve) and curve[j + 1][0] == curve[i][0]:
            j += 1
        highest = max(amount for _, amount in curve[i : j + 1])
        if highest > curve[j][1]:
            points.append((curve[i][0], highest))
        if not points or points[-1] != curve[j]:
            points.append(curve[j])
        i = j + 1
    return points
