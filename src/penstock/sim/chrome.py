"""A simulation as a Chrome trace: opens in Perfetto and in ``chrome://tracing``, one process per rank.

The array form of the Trace Event Format: slices (``ph`` X), counters (C) and names (M). Times are microseconds there; a
simulation in other units than seconds is written as if its unit were a second.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.schedule.ir.lanes import LANES, Lane
from penstock.sim.result import Simulation, Timed

_ROWS_PER_LANE = 16  # thread ids kept for one lane, which has several rows if it keeps several ops in flight
_MICRO = 1e6


def write_chrome_trace(simulation: Simulation, path: Path) -> None:
    """Write the trace; raises OSError. Ops of one rank and lane that overlap get a row each."""
    dumps = json.JSONEncoder(separators=(",", ":")).encode
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:  # where the user has said, links and all
        for number, event in enumerate(_events(simulation)):
            file.write(",\n" if number else "[\n")
            file.write(dumps(event))
        file.write("\n]\n")


def _events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    several = len(simulation.world.ranks) > 1
    for rank in range(len(simulation.world.ranks)):
        yield _named(rank, 0, "process_name", name=f"rank {rank}" if several else simulation.world.name)
        yield _named(rank, 0, "process_sort_index", sort_index=rank)
        rows = _Rows(rank)
        for timed in sorted(simulation.timed(rank), key=lambda timed: timed.start):
            yield from rows.slice(timed)
        for tier, curve in simulation.memory(rank).items():
            if any(amount for _, amount in curve):
                for time, amount in _last_of_each_moment(curve):
                    yield {
                        "ph": "C",
                        "pid": rank,
                        "name": tier,
                        "ts": round(time * _MICRO, 3),
                        "args": {"held": amount},
                    }


def _named(rank: int, row: int, kind: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": kind, "args": args}


def _last_of_each_moment(curve: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    for i, point in enumerate(curve):
        if i + 1 == len(curve) or curve[i + 1][0] > point[0]:
            yield point


class _Rows:
    """The rows (threads) of one rank: viewers draw events of one row that overlap wrongly."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._until: dict[Lane, list[float]] = {}

    def slice(self, timed: Timed) -> Iterator[dict[str, Any]]:
        op, lane = timed.op, timed.op.lane
        until = self._until.setdefault(lane, [])
        at = next((i for i, end in enumerate(until) if end <= timed.start), len(until))
        row = (LANES.index(lane) + 1) * _ROWS_PER_LANE + at
        if at == len(until):
            until.append(timed.end)
            yield _named(self._rank, row, "thread_name", name=lane if at == 0 else f"{lane} {at + 1}")
            yield _named(self._rank, row, "thread_sort_index", sort_index=row)
        until[at] = timed.end
        start, end = round(timed.start * _MICRO, 3), round(timed.end * _MICRO, 3)
        yield {
            "ph": "X",
            "pid": self._rank,
            "tid": row,
            "name": op.id,
            "cat": lane,
            "ts": start,
            "dur": round(end - start, 3),
            "args": dict(_details(timed)),
        }


def _details(timed: Timed) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if timed.op.nbytes:
        found["bytes"] = timed.op.nbytes
    if timed.waited > 0:
        found |= {"waited": timed.waited, "for": timed.cause}
    return found
