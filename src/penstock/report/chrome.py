"""Prediction and measurement as one Chrome trace, for Perfetto and ``chrome://tracing``: a process for each."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.config import Tier
from penstock.report.causes import measured_bars
from penstock.report.prediction import Prediction, predicted_bars
from penstock.report.series import Bar, rows_of
from penstock.report.trace_file import MeasuredStep
from penstock.schedule.ir.lanes import LANES

_ROWS_PER_LANE = 16  # as in run.trace
_MICRO = 1e6

Curves = Mapping[Tier, Sequence[tuple[float, int]]]


def chrome_trace(prediction: Prediction | None, step: MeasuredStep) -> str:
    """The array form of the Chrome trace format; both processes start at 0."""
    sides: list[tuple[str, Sequence[Bar], Curves]] = []
    if prediction is not None:
        sides.append(("predicted", predicted_bars(prediction), prediction.memory))
    schedule = None if prediction is None else prediction.schedule
    sides.append((f"measured, step {step.step}", measured_bars(step.ops, schedule), step.memory))
    records = [record for i, side in enumerate(sides, start=1) for record in _process(i, *side)]
    return "[\n" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in records) + "\n]\n"


def _process(pid: int, name: str, bars: Sequence[Bar], memory: Curves) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for number, lane in enumerate(LANES, start=1):
        for i, row in enumerate(rows_of([bar for bar in bars if bar.lane == lane])):
            tid = number * _ROWS_PER_LANE + i
            args = {"name": lane if i == 0 else f"{lane} {i + 1}"}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": args}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            for bar in row:
                yield _slice(pid, tid, bar)
    for tier, curve in memory.items():
        for time, amount in curve:
            ts = round(time * _MICRO, 3)
            yield {"ph": "C", "pid": pid, "name": f"{tier} bytes", "ts": ts, "args": {"taken": amount}}


def _slice(pid: int, tid: int, bar: Bar) -> dict[str, Any]:
    args: dict[str, Any] = {"bytes": bar.nbytes, "waited_us": round(bar.waited * _MICRO, 3)}
    if bar.cause:
        args["waited_for"] = bar.cause
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": bar.id,
        "cat": bar.lane,
        "ts": round(bar.start * _MICRO, 3),
        "dur": round((bar.end - bar.start) * _MICRO, 3),
        "args": args,
    }
