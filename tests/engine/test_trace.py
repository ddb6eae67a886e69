"""The trace file: valid JSON when closed, loadable when cut off, one row per lane, a counter per tier."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.trace import MemorySample, TraceEvent, TraceWriter
from penstock.schedule.ir.lanes import LANES, Lane
from tests.faults import FullDisk, intercepted


def _event(op: str, lane: Lane, start: float, end: float, step: int = 0) -> TraceEvent:
    return TraceEvent(step=step, op=op, lane=lane, start=start, end=end, bytes=4096)


def _load(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(path.read_text())
    return records


def _rows(records: list[dict[str, Any]]) -> dict[int, str]:
    return {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}


def test_every_event_comes_back_with_its_lane_time_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [_event(f"op{i}.{lane}", lane, i + 0.25, i + 0.75) for i, lane in enumerate(LANES)]
    with TraceWriter(path) as writer:
        writer.step(events)
    records = _load(path)
    rows = _rows(records)
    seen = [
        (r["name"], rows[r["tid"]], r["ts"] / 1e6, (r["ts"] + r["dur"]) / 1e6, r["args"]["bytes"])
        for r in records
        if r["ph"] == "X"
    ]
    assert seen == [(e.op, e.lane, e.start, e.end, e.bytes) for e in events]


def test_rows_stand_in_the_order_of_the_lanes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.step([_event("x", lane, i, i + 1) for i, lane in enumerate(reversed(LANES))])
    records = _load(path)
    order = {r["tid"]: r["args"]["sort_index"] for r in records if r["name"] == "thread_sort_index"}
    rows = _rows(records)
    assert [rows[tid] for tid in sorted(rows, key=lambda tid: order[tid])] == list(LANES)


def test_ops_that_overlap_in_one_lane_never_share_a_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.step([_event("a", "read", 0, 2), _event("b", "read", 1, 3), _event("c", "read", 2, 4)])
        writer.step([_event("d", "read", 3.5, 5, step=1)])
    records = _load(path)
    rows = _rows(records)
    assert [(r["name"], rows[r["tid"]]) for r in records if r["ph"] == "X"] == [
        ("a", "read"),
        ("b", "read 2"),
        ("c", "read"),
        ("d", "read 2"),
    ]


def test_bytes_in_use_are_a_counter_per_tier(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.step([], [MemorySample(time=0.5, tier="host", bytes=7), MemorySample(time=1.0, tier="device", bytes=9)])
    counters = [r for r in _load(path) if r["ph"] == "C"]
    assert [(c["name"], c["ts"], c["args"]["in use"]) for c in counters] == [
        ("host bytes", 0.5e6, 7),
        ("device bytes", 1e6, 9),
    ]


def test_a_trace_cut_off_after_a_step_loads_once_the_bracket_is_added(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.step([_event("a", "cpu", 0, 1)])
    cut = path.read_text()  # what a killed process leaves: viewers add the missing bracket themselves
    writer.close()
    assert [r["name"] for r in json.loads(cut + "]") if r["ph"] == "X"] == ["a"]


def test_only_the_first_steps_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path, steps=2) as writer:
        for step in range(5):
            writer.step([_event(f"s{step}", "cpu", step, step + 1, step)])
    assert [r["name"] for r in _load(path) if r["ph"] == "X"] == ["s0", "s1"]


def test_on_a_full_disk_the_trace_ends_with_its_last_whole_step_and_nothing_else_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk = tmp_path / "trace.json", FullDisk(full=False)
    with intercepted(tmp_path, disk), TraceWriter(path) as writer:
        for step in range(5):
            disk.full = step == 2
            writer.step([_event(f"s{step}", "cpu", step, step + 1, step)])
    assert [r["name"] for r in json.loads(path.read_text() + "]") if r["ph"] == "X"] == ["s0", "s1"]
    assert caplog.text.count("the trace ends after 2 steps, and training goes on: ") == 1


def test_names_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.step([_event('a "quoted"\\name', "cpu", 0, 1)])
    assert [r["name"] for r in _load(path) if r["ph"] == "X"] == ['a "quoted"\\name']
