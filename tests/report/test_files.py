"""What the report reads: predictions, traces and metrics, whole, cut off and damaged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.trace import TraceWriter
from penstock.errors import ConfigError
from penstock.report.metrics_file import read_metrics
from penstock.report.prediction import Prediction, parse_prediction
from penstock.report.trace_file import MeasuredStep, Ran, choose_step, read_trace, read_traces
from tests.reports import BUDGET, offload_schedule, simulated, write_step

# ---- the prediction's file


def _prediction() -> Prediction:
    return Prediction.of(simulated(offload_schedule(), 0), budget=BUDGET)


def test_a_prediction_comes_back_from_its_text() -> None:
    prediction = _prediction()
    assert parse_prediction(prediction.to_json()) == prediction


def test_a_prediction_agrees_with_its_simulation() -> None:
    schedule = offload_schedule()
    simulation = simulated(schedule, 0)
    prediction = Prediction.of(simulation, budget=BUDGET)
    assert prediction.time == simulation.time
    assert prediction.lower_bound == simulation.lower_bound
    assert prediction.bytes_per_lane == schedule.bytes_per_lane()
    assert prediction.peak == {tier: max(n for _, n in curve) for tier, curve in prediction.memory.items()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(version=1), "version 2"),
        (lambda r: r.pop("time"), "'time'"),
        (lambda r: r.update(mood="good"), "'mood'"),
        (lambda r: r.update(time="1"), "time must be"),
        (lambda r: r.update(time=-1), "time must be"),
        (lambda r: r["ops"]["start"].pop(), "one for each op"),
        (lambda r: r["ops"]["start"].__setitem__(3, "1"), "ops.start[3] must be a number"),
        (lambda r: r["memory"]["device"][1].__setitem__(1, -1), "memory.device must be"),
        (lambda r: r["ops"]["end"].__setitem__(3, -1.0), "ops.end must be"),
        (lambda r: r["ops"]["end"].__setitem__(-1, 0), "no earlier"),
        (lambda r: r["ops"]["cause"].__setitem__(0, 7), "ops.cause"),
        (lambda r: r["ops"].pop("waited"), "ops lacks 'waited'"),
        (lambda r: r["busy"].update(warp=1.0), "busy must be"),
        (lambda r: r["budget"].update(device=1.5), "budget.device"),
        (lambda r: r["memory"].update(device=[[0, 1, 2]]), "memory.device"),
        (lambda r: r.update(schedule="F0m0"), "schedule"),
        (lambda r: r.update(schedule=None), "schedule"),
        (
            lambda r: r.update(schedule=r["schedule"].replace("give A0m0", "give A9m9", 1)),
            "gives back A9m9, which is not taken",
        ),
        (
            lambda r: r.update(schedule=r["schedule"].replace("pool stage_in", "pool elsewhere", 1)),
            "from pool stage_in, which does not exist",
        ),
    ],
)
def test_a_prediction_that_was_changed_is_refused_by_key(change: Any, says: str) -> None:
    record = json.loads(_prediction().to_json())
    change(record)
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_prediction(json.dumps(record))


def test_a_prediction_that_was_cut_off_is_refused() -> None:
    text = _prediction().to_json()
    with pytest.raises(ConfigError, match="cut off"):
        parse_prediction(text[: len(text) // 2])


# ---- the trace's file


def _trace(path: Path, steps: int = 2, first: int = 1) -> None:
    with TraceWriter(path) as writer:
        for step in range(first, first + steps):
            write_step(writer, simulated(offload_schedule(1), step), step, at=3.0 * step)


def test_a_trace_comes_back_op_by_op(tmp_path: Path) -> None:
    _trace(tmp_path / "trace.json")
    simulation = simulated(offload_schedule(1), 2)
    _, second = read_trace(tmp_path / "trace.json")
    ran = {op.id: op for op in second.ops}
    assert second.step == 2
    assert second.whole
    assert set(ran) == set(simulation.world.ranks[0].by_id)
    origin = min(simulation.starts[0])
    for timed in simulation.timed(0):
        op = ran[timed.op.id]
        assert (op.lane, op.nbytes) == (timed.op.lane, timed.op.nbytes)
        assert op.start == pytest.approx(timed.start - origin, abs=2e-9 + 1e-6)
        assert op.end == pytest.approx(timed.end - origin, abs=2e-9 + 1e-6)
    assert second.peak["host"] == simulation.peak(0)["host"]
    assert second.busy["compute"] == pytest.approx(simulation.busy(0)["compute"], abs=1e-4)


def test_a_trace_cut_anywhere_is_read_up_to_the_cut(tmp_path: Path) -> None:
    whole, cut = tmp_path / "trace.json", tmp_path / "cut.json"
    _trace(whole)
    raw = whole.read_bytes()
    first, second = read_trace(whole)
    marks = [match.end() for match in re.finditer(rb'"name":"step \d+","ts":[\d.]+\}', raw)]
    for at in [*range(0, len(raw), 997), *(mark + by for mark in marks for by in (-30, -2, -1, 0, 1))]:
        cut.write_bytes(raw[:at])
        steps = read_trace(cut)
        done = sum(at >= mark for mark in marks)
        assert [step.whole for step in steps][:done] == [True] * done
        assert steps[:1] == ([first] if done else steps[:1]) or steps[0].file == "cut.json"
        assert all(not step.whole for step in steps[done:])
        for step, full in zip(steps, (first, second), strict=False):
            assert {op.id for op in step.ops} <= {op.id for op in full.ops}


def test_damage_in_the_middle_of_a_trace_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _trace(path)
    lines = path.read_text().splitlines()
    for number, text, says in (
        (9, '{"ph": "X"', "line 10: not JSON"),
        (9, '{"ph":"X","name":"F0m0","cat":"warp","ts":1,"dur":1,"args":{"step":1,"bytes":0}},', "line 10.*no lane"),
        (9, '{"ph":"X","name":"F0m0","cat":"compute","dur":1,"args":{"step":1,"bytes":0}},', "line 10.*'ts'"),
        (0, '{"traceEvents":[', "first line"),
    ):
        path.write_text("\n".join([*lines[:number], text, *lines[number + 1 :]]))
        with pytest.raises(ConfigError, match=says):
            read_trace(path)


def test_of_a_step_done_again_after_a_resumption_the_later_one_counts(tmp_path: Path) -> None:
    _trace(tmp_path / "trace.json", steps=3)
    _trace(tmp_path / "trace-from-3.json", steps=2, first=3)
    steps = read_traces(tmp_path)
    assert [(step.step, step.file) for step in steps] == [
        (1, "trace.json"),
        (2, "trace.json"),
        (3, "trace-from-3.json"),
        (4, "trace-from-3.json"),
    ]


def _step(number: int, time: float, *, whole: bool = True) -> MeasuredStep:
    op = Ran(id="F0m0", lane="compute", start=0.0, end=time, nbytes=0)
    return MeasuredStep(step=number, ops=(op,), memory={}, whole=whole, file="trace.json")


def test_the_step_shown_is_the_median_of_the_whole_ones() -> None:
    steps = [_step(1, 9.0), _step(2, 3.0), _step(3, 4.0), _step(4, 0.1, whole=False)]
    assert choose_step(steps, None).step == 3
    assert choose_step(steps, 4).step == 4
    assert choose_step(steps[3:], None).step == 4
    with pytest.raises(ConfigError, match="steps 1 to 4"):
        choose_step(steps, 5)


def test_metrics_are_read_up_to_a_cut_and_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = '{"step": %d, "loss": %s, "seconds": 1.5, "tokens": 8}\n'
    path.write_text(line % (1, 3.0) + line % (2, "null") + line % (2, 2.0) + (line % (3, 1.0))[:20])
    assert [(m.step, m.loss) for m in read_metrics(path)] == [(1, 3.0), (2, 2.0)]
    path.write_text("{}\n" + line % (1, 3.0))
    with pytest.raises(ConfigError, match=r"line 1: .*: remove the line"):
        read_metrics(path)
    assert read_metrics(tmp_path / "none") == []
