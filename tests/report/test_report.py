"""The report without a browser: what its pages say and draw, its other forms, and its errors."""

import base64
import builtins
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main
from penstock.cli.environment import write_environment
from penstock.cli.report import Arguments, gather
from penstock.cli.run_folder import RUN_LOCK
from penstock.cli.words import read_words
from penstock.engine.trace import MemorySample, TraceEvent, TraceWriter
from penstock.errors import ConfigError
from penstock.report import colors, prediction
from penstock.report.causes import measured_bars
from penstock.report.chrome import chrome_trace
from penstock.report.colors import GROUPS
from penstock.report.columns import Columns
from penstock.report.curves import curves_of, line_of
from penstock.report.html import in_script
from penstock.report.metrics_file import StepMetrics
from penstock.report.picture import draw
from penstock.report.prediction import Prediction, parse_prediction
from penstock.report.run_page import run_page
from penstock.report.sentence import bottleneck, format_long_time, format_time, listed, measured_bottleneck, verdict
from penstock.report.series import last_of_each_moment
from penstock.report.simulated_page import simulated_page
from penstock.report.trace_file import Ran
from penstock.report.waits import held_up
from penstock.schedule.check.late import late_moves
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.references import LANE_OF
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.ir.worlds import World
from penstock.sim.cause import Cause
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.conftest import Campaign
from tests.reports import offload_schedule, ran_as, simulated, write_lines, write_run

# ---- what a measured op waited for

SCHEDULE = """\
schedule s micro-batches 1 chunk 0
pool one host 1 x 8
RW0.0@F0 take a=one write a
UW0.0@F0 after RW0.0@F0 read a give a
RW1.0@F1 take b=one write b
UW1.0@F1 after RW1.0@F1 read b give b
F0m0 after UW0.0@F0
F1m0 after UW1.0@F1
"""


def _ran(*rows: tuple[str, Lane, float, float]) -> list[Ran]:
    return [Ran(id=name, lane=lane, start=start, end=end, nbytes=0) for name, lane, start, end in rows]


def test_a_measured_op_waited_for_the_last_of_what_the_schedule_asks() -> None:
    ops = _ran(
        ("RW0.0@F0", "read", 0.0, 1.0),
        ("UW0.0@F0", "h2d", 1.001, 3.0),
        ("RW1.0@F1", "read", 3.001, 4.0),
        ("UW1.0@F1", "h2d", 4.0, 5.0),
        ("F0m0", "compute", 3.0, 9.0),
        ("F1m0", "compute", 9.001, 10.0),
    )
    bars = {bar.id: bar for bar in measured_bars(ops, parse_schedule(SCHEDULE))}
    assert bars["UW0.0@F0"].cause == Cause("RW0.0@F0")
    assert bars["RW1.0@F1"].cause == Cause("UW0.0@F0", pool="one")
    assert bars["RW1.0@F1"].waited == pytest.approx(2.001)
    assert bars["F0m0"].cause == Cause("UW0.0@F0")
    assert bars["F1m0"].cause is None  # all it needs was there: its lane was busy until it began
    assert bars["F1m0"].waited == pytest.approx(0.001)
    assert all(not bar.cause for bar in measured_bars(ops, None))


def test_measured_causes_are_those_of_the_simulation_where_a_lane_does_one_op_at_a_time() -> None:
    """A run that follows the simulation to the microsecond waited for what the simulation says, or for its equal."""
    schedule = offload_schedule()
    simulation = simulate(World.of(schedule), Costs(name="plain", seconds=lambda op: 0.001 + op.nbytes / 1e9))
    timed = list(simulation.timed(0))
    end_of = {t.op.id: t.end for t in timed}
    bars = {bar.id: bar for bar in measured_bars(ran_as(simulation), schedule)}
    compared = 0
    for t in timed:
        if t.waited > 1e-5:
            found, said = bars[t.op.id].cause, t.cause
            assert found is not None
            assert said is not None
            assert end_of[found.op] == pytest.approx(end_of[said.op], abs=1e-5), t.op.id
            assert bars[t.op.id].waited == pytest.approx(t.waited)
            compared += 1
    assert compared > 20


def test_a_steps_time_is_divided_among_the_lanes_that_held_it_up() -> None:
    """Back from the end: F1m0, F0m0, its weights, their read. The second read cost nothing: compute went on."""
    ops = _ran(
        ("RW0.0@F0", "read", 0.0, 1.0),
        ("UW0.0@F0", "h2d", 1.5, 3.0),
        ("RW1.0@F1", "read", 3.0, 4.0),
        ("UW1.0@F1", "h2d", 4.0, 5.0),
        ("F0m0", "compute", 3.0, 9.0),
        ("F1m0", "compute", 9.0, 10.0),
    )
    schedule = parse_schedule(SCHEDULE)
    assert held_up(ops, schedule) == {"compute": 7.0, "h2d": 1.5, "read": 1.0}
    slow = _ran(
        ("RW0.0@F0", "read", 0.0, 1.0),
        ("UW0.0@F0", "h2d", 1.0, 3.0),
        ("RW1.0@F1", "read", 3.0, 8.0),
        ("UW1.0@F1", "h2d", 8.0, 9.0),
        ("F0m0", "compute", 3.0, 4.0),
        ("F1m0", "compute", 9.0, 10.0),
    )
    assert held_up(slow, schedule) == {"compute": 1.0, "h2d": 3.0, "read": 6.0}
    assert held_up((), schedule) == {}


def test_what_held_a_step_up_adds_up_to_the_step() -> None:
    """In a run that follows its simulation every moment has a cause."""
    schedule = offload_schedule()
    simulation = simulated(schedule, seed=3)
    found = held_up(ran_as(simulation), schedule)
    assert sum(found.values()) == pytest.approx(simulation.end(0), rel=1e-3)
    assert set(found) >= {"compute", "read"}


# ---- what a page is made of


def _change_metrics(folder: Path, name: str, values: Sequence[Any]) -> None:
    """Give each step of a run a value of its own."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [line | {name: value} for line, value in zip(lines, values, strict=True)])


def _figures(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>([^<]+)</dt><dd>(.*?)</dd>", page))


def _rows(page: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cells."""
    found = (re.findall(r">([^<>]+)</t[hd]>", line) for line in page.splitlines())
    return {row[0]: row[1:] for row in found if row}


def _unpacked(page: str) -> tuple[dict[str, Any], Any]:
    """The facts of a page, and a function that reads a column."""
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)
    packed = re.search(r'<script type="text/plain" id="columns">(.*?)</script>', page, re.DOTALL)
    assert found
    assert packed
    raw = zlib.decompress(base64.b64decode(packed[1]))
    return json.loads(found[1]), lambda at: np.frombuffer(raw, dtype=f"<{at[0]}", count=at[2], offset=at[1])


def test_columns_come_back_aligned() -> None:
    put = Columns()
    places = [put.add("u4", [1, 2, 3]), put.add("f8", [0.5]), put.add("i4", [-1]), put.add("f8", [])]
    raw = zlib.decompress(base64.b64decode(put.text()))
    assert all(at % 8 == 0 for _, at, _ in places)
    assert [np.frombuffer(raw, f"<{k}", n, at).tolist() for k, at, n in places] == [[1, 2, 3], [0.5], [-1], []]


def test_a_page_holds_every_op_of_both_sides_in_stretches_that_never_overlap(tmp_path: Path) -> None:
    write_run(tmp_path)
    report = gather(tmp_path, 2)
    facts, column = _unpacked(run_page(report))
    assert report.prediction is not None
    assert [side["name"] for side in facts["sides"]] == ["predicted", "measured"]
    for side in facts["sides"]:
        ids = [facts["names"][i] for i in column(side["id"])]
        assert sorted(ids) == sorted(op.id for op in report.prediction.schedule.ops)
        start, end = column(side["start"]), column(side["end"])
        for _, low, high in side["stretches"]:
            assert (end[low : high - 1] <= start[low + 1 : high] + 2.1e-9).all()
    predicted = facts["sides"][0]
    by_name = dict(zip([facts["names"][i] for i in column(predicted["id"])], column(predicted["end"]), strict=True))
    assert by_name == {
        op.id: end for op, end in zip(report.prediction.schedule.ops, report.prediction.ops.end, strict=True)
    }


def test_ops_of_a_trace_that_touch_share_a_row_though_its_times_are_rounded(tmp_path: Path) -> None:
    write_run(tmp_path)
    for step in (1, 2, 3):
        facts, _ = _unpacked(run_page(gather(tmp_path, step)))
        rows = [facts["lanes"][lane] for lane, _, _ in facts["sides"][1]["stretches"]]
        assert [rows.count(lane) for lane in ("compute", "h2d", "d2h", "cpu")] == [1, 1, 1, 1]
        assert rows.count("write") <= 2, "as many as there are workers"


def test_a_page_says_bytes_exactly_and_errors_relative_to_the_measurement(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = run_page(gather(tmp_path, 2))
    rows = _rows(page)
    assert rows["read"][2] == "exact"
    predicted, measured = (simulated(offload_schedule(), n, scale=1.0 + 0.05 * n).busy(0)["compute"] for n in (0, 2))
    assert rows["compute"][5] == f"{100 * (predicted / measured - 1):.1f}%"
    assert "device memory taken, peak" in page
    assert "of 1\u00a0MiB, predicted" in page


def test_a_first_step_that_nothing_was_left_to_was_to_move_what_it_moved(tmp_path: Path) -> None:
    schedule = offload_schedule(delay=0.5)
    assert late_moves(schedule)
    write_run(tmp_path, schedule=schedule)
    moved = []
    for step in (1, 2):
        rows = _rows(run_page(gather(tmp_path, step)))
        assert rows["write"][2] == rows["read"][2] == "exact"
        moved.append(rows["write"][0])
    assert moved[0] != moved[1]


def test_a_prediction_whose_schedule_waits_for_itself_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = parse_schedule("""\
schedule s micro-batches 1 chunk 0
pool one host 2 x 8
RG0.0 after WG0.0 take b=one write b
OP0.0 after RG0.0 read b give b
WG0.0 after OP0.0 take a=one read a give a
""")
    made = write_run(tmp_path)
    text = json.loads(made.to_json())
    text["schedule"], text["ops"] = (
        str(schedule),
        {k: [0.0] * 3 for k in ("start", "end", "waited")} | {"cause": [""] * 3},
    )
    source = Path(prediction.__file__)
    optimized = ModuleType("optimized")  # as python -O has it, without assertions
    monkeypatch.setitem(sys.modules, "optimized", optimized)
    exec(compile(source.read_text(), source, "exec", optimize=1), vars(optimized))
    for parse in (parse_prediction, optimized.parse_prediction):
        with pytest.raises(ConfigError, match=r"prediction\.json: schedule: "):
            parse(json.dumps(text))


def test_a_page_without_a_prediction_says_so_and_one_of_another_schedule_too(tmp_path: Path) -> None:
    write_run(tmp_path / "a", predict=False)
    alone = run_page(gather(tmp_path / "a", None))
    assert "the measurement alone" in alone
    assert [side["name"] for side in _unpacked(alone)[0]["sides"]] == ["measured"]
    write_run(tmp_path / "b")
    other = Prediction.of(simulated(offload_schedule(4), 0))
    (tmp_path / "b" / "prediction.json").write_text(other.to_json())
    assert "of another schedule" in run_page(gather(tmp_path / "b", None))


def test_steps_that_a_prediction_is_not_of_are_shown_alone(tmp_path: Path) -> None:
    """The plan was changed, or its rates were corrected: by default a step is shown that has what is beside it."""
    write_run(tmp_path, steps=4)
    later = Prediction.of(simulated(offload_schedule(), 0), first=3)
    (tmp_path / "prediction.json").write_text(later.to_json())
    by_default, third, second = (gather(tmp_path, step) for step in (None, 3, 2))
    assert by_default.step.step >= 3
    for page in (by_default, third):
        assert page.prediction == later
    assert second.prediction is None
    said = run_page(second)
    assert "is of steps from 3 on" in said
    assert [side["name"] for side in _unpacked(said)[0]["sides"]] == ["measured"]
    assert "is of steps from" not in run_page(third)


def test_a_prediction_is_compared_with_the_steps_that_it_is_of(tmp_path: Path) -> None:
    """As in a run's last words: not with those that had another plan, nor with the one that made it."""
    write_run(tmp_path, steps=6)
    _change_metrics(tmp_path, "seconds", (9.0, 8.0, 8.0, 9.0, 2.0, 2.0))
    for first, words in ((4, "; 2 s of the 2 since step 4, 3 s predicted (+50.0%)"), (6, "")):
        later = replace(Prediction.of(simulated(offload_schedule(), 0), first=first), time=3.0)
        (tmp_path / "prediction.json").write_text(later.to_json())
        assert f"8 s<small>median of 5 after the first{words}</small>" in run_page(gather(tmp_path, None)).replace(
            "\xa0", " "
        )


def test_the_predicted_time_of_each_step_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    _change_metrics(tmp_path, "predicted_seconds", (2.0, 2.0, 3.5))
    curve = next(curve for curve in gather(tmp_path, None).curves if curve.key == "seconds")
    assert {line.name: line.points for line in curve.lines}["predicted"] == [(1, 2.0), (2, 2.0), (3, 3.5)]


def test_a_page_of_a_cut_trace_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    path = tmp_path / "trace.json"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    page = run_page(gather(tmp_path, None))
    assert "trace.json was cut off in step 1" in page
    assert "of another schedule" not in page
    assert "up to the cut" in page


@pytest.mark.parametrize("share", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("predict", [True, False])
def test_a_part_of_a_step_is_compared_with_nothing(tmp_path: Path, share: float, predict: bool) -> None:
    """No bottleneck, no error, no share, no bound, no memory, whether the cut is among the ops or among the memory."""
    write_run(tmp_path, steps=1, predict=predict)
    path = tmp_path / "trace.json"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(share * len(raw))])
    page = run_page(gather(tmp_path, 1)).partition("<details>")[0].partition("<body>")[2]  # without the settings' names
    assert "Step 1 was cut" in page
    for word in ("bottleneck", "too high", "too low", "error", "%", "predicted", "bound", "share", "memory taken"):
        assert word not in page, word


def test_a_page_tells_the_time_of_all_steps_from_that_of_the_one_shown(tmp_path: Path) -> None:
    """The first is what a run's last words say: the median without the step that plans. Each has its own error."""
    prediction = write_run(tmp_path, steps=3)
    lines = [
        {"step": step, "loss": 1.0, "seconds": seconds * prediction.time, "tokens": 8}
        for step, seconds in ((1, 50.0), (2, 2.0), (3, 2.0), (4, 3.0))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    report = gather(tmp_path, 2)
    page = run_page(report).replace("\u00a0", " ")
    figures = _figures(page)
    said = format_time(prediction.time)
    all_steps = (
        f"{format_time(2 * prediction.time)}<small>median of 3 after the first; {said} predicted (-50.0%)</small>"
    )
    assert figures["time of a step"] == all_steps
    error = prediction.time / report.step.time - 1
    assert -0.2 < error < -0.05
    shown = f"{format_time(report.step.time)}<small>from first op to last; {said} predicted ({error:+.1%})</small>"
    assert figures["step 2, op by op"] == shown
    assert f"This step was predicted to take {said}: {-error:.1%} too low." in page
    again = [replace(m, repeats=m.step % 2) for m in report.metrics]
    page = run_page(replace(report, metrics=again)).replace("\u00a0", " ")
    runs = 4 / 3  # 2, 2 and 3 times the prediction for 1, 2 and 1 runs: 2, 1 and 3 for each
    foretold = f"{format_time(runs * prediction.time)} predicted for {runs:.3g} runs (-50.0%)"
    assert f"{format_time(2 * runs * prediction.time)}<small>median of 3 after the first; {foretold}" in page


def test_a_page_says_what_is_written_a_day_beside_what_may_be(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    lines = [
        {"step": step, "loss": 1.0, "seconds": 2.0, "tokens": 8, "bytes_written": written}
        for step, written in ((1, 10**12), (2, 2 * 10**6), (3, 4 * 10**6))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    for allowed, remark in ((None, ""), (2e12, "<small>of 1.82 TiB that budget.endurance allows</small>")):
        page = run_page(replace(gather(tmp_path, 2), allowed=allowed)).replace("\u00a0", " ")
        assert _figures(page)["written per day"] == f"121 GiB{remark}"


EVIL = '</script><script>alert("x")</script ><!-- <script &amp;\u2028'


def test_no_name_can_end_a_script_or_be_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<b>&run"
    write_run(folder, predict=False)
    with TraceWriter(folder / "trace.json") as writer:
        event = TraceEvent(step=1, op=EVIL, lane="compute", start=0.0, end=1.0)
        writer.step([event], [MemorySample(time=0.0, tier="host", bytes=1)])
    page = run_page(gather(folder, None))
    facts, column = _unpacked(page)
    assert facts["names"][column(facts["sides"][0]["id"])[0]] == EVIL
    assert "alert(" in page
    assert "<" not in page.partition('id="facts">')[2].partition("</script>")[0]
    assert "<script>alert(" not in page
    assert "<b>" not in page
    assert page.count("</script>") == 3
    assert json.loads(in_script({EVIL: EVIL})) == {EVIL: EVIL}


def test_a_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = run_page(gather(tmp_path, None))
    links = set(re.findall(r"""(?:https?:)?//[\w.]+\.\w+[^\s"'`)]*""", page))
    assert links == {"http://www.w3.org/2000/svg"}, "the namespace of SVG is a name, nothing else is an address"
    assert not re.search(r"""\b(?:src|href)=["'](?!data:)""", page)


def test_runs_are_drawn_over_one_another_and_told_apart(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_run(tmp_path / name)
    line = {"step": 1, "loss": 9.0, "seconds": 2.0, "tokens": 512, "lr": 1e-3, "grad_norm": 0.5, "mfu": 0.25}
    write_lines(tmp_path / "other" / "metrics.jsonl", [line | {"peak_bytes": {"host": 1024}}])
    page = run_page(gather(tmp_path / "one", 2, [tmp_path / "other"]))
    curves = {curve["key"]: curve for curve in _unpacked(page)[0]["curves"]}
    assert [line["name"] for line in curves["loss"]["lines"]] == ["one", "other", "one, held out", "other, held out"]
    assert curves["tokens"]["lines"][1]["points"] == [[1, 256.0]]
    for key, value in (("lr", 1e-3), ("norm", 0.5), ("mfu", 0.25), ("host-memory", 1024)):
        own, other = curves[key]["lines"]
        assert (own["points"], other["points"]) == ([], [[1, value]])
        assert own["style"] != other["style"]
        assert f'id="{key}"' in page
    assert "product" not in curves, "nobody has measured it"
    for caption in ("Figures of the runs", "Settings that differ", "Settings"):
        assert f"<h2>{caption}</h2>" in page


def test_other_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "a/same", "b/same", "c/another")]
    for folder in folders:
        write_run(folder)
    found = gather(folders[0], 2, folders[1:])
    assert [name for name, _ in found.others] == [str(folders[1].resolve()), str(folders[2].resolve()), "another"]


def test_a_page_tells_settings_machine_and_versions(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert "Machine and versions" not in run_page(gather(tmp_path, 2)), "the run has not noted it"
    (tmp_path / "environment.json").write_text("{")
    assert "Machine and versions" not in run_page(gather(tmp_path, 2))
    write_environment(tmp_path, "the processor", None)
    page = run_page(gather(tmp_path, 2))
    for name, value in (("torch", re.escape(torch.__version__)), ("memory", ".*iB"), ("optimizer.lr", r"0\.001")):
        assert re.search(f'<th scope="row">{re.escape(name)}</th><td>{value}</td>', page)


def test_a_line_of_many_steps_shows_the_usual_value_and_keeps_the_extremes() -> None:
    values: list[tuple[int, float | None]] = [(i, 5.0 + i % 3) for i in range(50_000)]
    values[777] = (777, 1e6)
    values[778] = (778, None)
    line = line_of("loss", "measured", values, 2000)
    assert len(line.points) == len(line.lows) == len(line.highs) == 2000
    assert {value for _, value in line.points} == {6.0}, "one step in a stretch is no usual one"
    assert (line.stretch, min(line.lows), max(line.highs)) == (25, 5.0, 1e6)
    assert line.points == sorted(line.points)
    few = line_of("loss", "measured", values[:10], 2000)
    assert (few.stretch, few.points, few.lows) == (1, values[:10], ())


@pytest.mark.parametrize("stretch", [1, 3])
@given(there=st.lists(st.booleans(), max_size=60))
def test_a_line_has_a_gap_where_values_are_missing_and_nowhere_else(stretch: int, there: list[bool]) -> None:
    there = there[: len(there) // stretch * stretch]
    line = line_of("n", "m", [(i, 1.0 if one else None) for i, one in enumerate(there)], len(there) // stretch or 1)
    parts = [any(there[i : i + stretch]) for i in range(0, len(there), stretch)]
    known = [i for i, one in enumerate(parts) if one]
    assert [step // stretch for step, _ in line.points] == known
    assert list(line.gaps) == [n for n in range(1, len(known)) if known[n] != known[n - 1] + 1]


def test_evaluations_are_circles_unless_they_are_too_many() -> None:
    for count, circles in ((60, True), (61, False), (5000, False)):
        steps = [
            StepMetrics(step=i, loss=1.0, validation=1.0 if i % 2 else None, seconds=1.0, tokens=1)
            for i in range(2 * count)
        ]
        held = curves_of([("run", steps)])[0].lines[1]
        assert (held.name, held.only, held.gaps) == ("held-out loss", circles, [])
        assert len(held.points) == min(count, 1000)


def test_a_page_says_which_steps_were_skipped(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    assert "steps skipped" not in run_page(gather(tmp_path, None))
    _change_metrics(tmp_path, "skipped", (False, True, False))
    _change_metrics(tmp_path, "grad_norm", (1.0, None, 1.0))
    report = gather(tmp_path, None)
    assert "<dt>steps skipped</dt><dd>1<small>a gradient was not finite: 2</small>" in run_page(report)
    many = replace(report, metrics=[replace(report.metrics[1], step=n) for n in range(1, 9)])
    assert "<dd>8<small>a gradient was not finite: the last were 4, 5, 6, 7, 8</small>" in run_page(many)


def test_a_curve_keeps_its_peak_when_it_lasts_no_time() -> None:
    assert last_of_each_moment([(0, 1), (1, 5), (1, 9), (1, 2), (2, 3)]) == [(0, 1), (1, 9), (1, 2), (2, 3)]
    assert last_of_each_moment([(0, 1), (1, 5), (1, 6), (2, 3)]) == [(0, 1), (1, 6), (2, 3)]


def test_ranks_that_do_the_same_share_their_data() -> None:
    schedule = offload_schedule(1)
    world = World(name="same", ranks=(schedule,) * 300, groups={})
    page = simulated_page(
        simulate(world, Costs(name="one", seconds=lambda op: 1.0)), title="same", unit="", costs="one"
    )
    facts, _ = _unpacked(page)
    assert facts["ranks"] == [0] * 300
    assert len(facts["sides"]) == 1
    assert "median of 300" in page


def test_sentences_name_the_bottleneck_and_the_distance_from_the_bound() -> None:
    work: dict[Lane, float] = {"compute": 2.0, "read": 1.0}
    assert bottleneck(2.5, work, {"compute": 2.0, "read": 1.0}) == (
        "Compute is the bottleneck: 80% busy. No order of the same work is faster than 2 s, "
        "and the step takes 1.25 times that."
    )
    assert bottleneck(8.0, work, work).startswith("Waiting is the bottleneck: even compute is busy for only 25%")
    assert bottleneck(8000.0, work, work).endswith("the step takes 4,000 times that.")
    assert measured_bottleneck(1.0, {"net": 0.9}, None) == "Collectives are the bottleneck: 90% busy."
    assert bottleneck(0.0, {}, {}) == "The step has no work in it."
    apart = measured_bottleneck(2.5, work, 2.0)
    assert "80% busy. That is measured. Its lower bound is predicted" in apart
    assert "work takes 2 s. This step took 1.25 times that; the rest is waiting." in apart
    slow = measured_bottleneck(2.62, {"compute": 2.6}, 2.0)
    assert "1.31 times that; compute took 1.3 times that for its own work." in slow
    assert "the machine beats its profile" in measured_bottleneck(2.5, work, 3.0)
    assert verdict(2.0, 2.1) == "This step was predicted to take 2.1 s: 5.0% too high."
    assert verdict(2.0, 1.9) == "This step was predicted to take 1.9 s: 5.0% too low."


def test_every_kind_of_op_has_one_colour_and_the_page_has_those_of_the_picture() -> None:
    kinds = [kind for group in GROUPS for kind in group.kinds]
    assert sorted(kinds) == sorted(LANE_OF)
    simulation = simulated(offload_schedule(1), 1)
    groups = _unpacked(simulated_page(simulation, title="one", unit="s", costs="one"))[0]["groups"]
    assert [(g["name"], g["light"], g["dark"]) for g in groups[:-1]] == [(g.name, g.light, g.dark) for g in GROUPS]
    assert {kind for group in groups for kind in group["kinds"]} == set(LANE_OF)
    assert "#" not in _script("colors.js").partition("RAMP")[0], "the script has no colours of its own for them"


def _script(name: str) -> str:
    return (Path(colors.__file__).parent / "page" / name).read_text()


# ---- the other forms


def test_the_chrome_trace_has_both_sides_as_processes(tmp_path: Path) -> None:
    write_run(tmp_path)
    report = gather(tmp_path, 1)
    assert report.prediction is not None
    records = json.loads(chrome_trace(report.prediction, report.step))
    names = {r["pid"]: r["args"]["name"] for r in records if r["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured, step 1"}
    for pid in names:
        slices = [r for r in records if r["ph"] == "X" and r["pid"] == pid]
        assert len(slices) == len(report.prediction.schedule.ops)
        assert all(r["cat"] for r in slices)
    counters = {(r["pid"], r["name"]) for r in records if r["ph"] == "C"}
    assert {(1, "device bytes"), (2, "host bytes")} <= counters


@pytest.mark.parametrize(
    "words",
    [
        *(("--trace", "trace.json"), ("--trace", "trace-mine.json"), ("--out", "config.yaml"), ("--out", "run.json")),
        *(
            ("--out", RUN_LOCK),
            ("--out", "model/config.json"),
            ("--trace", "../store/penstock.store"),
            ("--out", "../l"),
        ),
    ],
)
def test_a_report_takes_the_place_of_nothing_that_a_run_needs(
    words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_run(run)
    for needed in (run / "model" / "config.json", tmp_path / "store" / "penstock.store"):
        needed.parent.mkdir()
        needed.write_text("needed")
    (tmp_path / "l").symlink_to(run / "config.yaml")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["report", str(run), words[0], str(run / words[1])]) == 2
    assert "is the name of a file of the run itself" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_report_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    write_run(tmp_path)
    for _ in range(2):
        assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html"), "--trace", str(tmp_path / "t")]) == 0
    for _ in range(2):
        assert main(["report", str(tmp_path)]) == 0


def test_report_writes_all_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    svg, png, trace = tmp_path / "t.svg", tmp_path / "t.png", tmp_path / "t.json"
    assert main(["report", str(tmp_path / "run"), "--svg", str(svg), f"--png={png}", "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    for path in (tmp_path / "run" / "report.html", svg, png, trace):
        assert str(path) in said
        assert path.stat().st_size > 1000
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert "budget 1 MiB" in svg.read_text()
    once = svg.read_bytes()
    main(["report", str(tmp_path / "run"), "--svg", str(svg)])
    assert svg.read_bytes() == once, "the same run gives the same picture, so that it can be kept under version control"
    large = replace(gather(tmp_path / "run", None).step, memory={"device": ((0.0, 22 << 30),)})
    draw(svg, None, large, {"device": 24 << 30})
    assert "budget 24 GiB" in svg.read_text()
    assert set(re.findall(r">([^<]* [KMG]iB) *<", svg.read_text())) == {"budget 24 GiB", "24 GiB"}
    draw(svg, None, large, {"device": 80 << 30})
    assert set(re.findall(r">([^<]* [KMG]iB) *<", svg.read_text())) == {"22 GiB"}, "the peak, where no budget is drawn"
    empty = Prediction.of(simulated(parse_schedule("schedule none micro-batches 1 chunk 0\n"), 0))
    draw(svg, replace(empty, memory={"device": ((0.0, 1 << 30),)}), large, {})
    assert "predicted" in svg.read_text(), "beside a prediction of no op at all"


def test_a_picture_without_a_name_is_put_beside_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run)
    for words in (["--svg", str(run)], [str(run), "--svg"], ["--svg", str(run), "--step", "1"]):
        assert list(read_words(Arguments, words).pictures) == [run / "timeline.svg"]
    assert main(["report", "--svg", str(run)]) == 0
    assert f"wrote {run / 'timeline.svg'}" in capsys.readouterr().out
    assert "<svg" in (run / "timeline.svg").read_text()


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    real = builtins.__import__

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["report", str(tmp_path), "--png", str(tmp_path / "t.png")]) == 2
    assert "pip install 'penstock[report]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "was given none"),
        (["a", "b", "c", "d", "e"], "5 runs on one page: at most 4"),
        (["a", "--blue", "red"], "there is no option --blue; penstock report takes --step"),
        (["a", "--step"], "--step needs a value"),
        (["a", "--step", "x"], "--step must be a whole number"),
        (["a", "--png=t.svg"], "must end in .png"),
        (["a", "--png", "t.svg"], "was given a and t.svg"),
        (["a", "--svg", "a.svg", "--svg=b.svg"], "given twice"),
        (["nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_asked_is_an_error(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    assert says in capsys.readouterr().err


def test_folders_without_what_a_report_needs_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error() -> str:
        assert main(["report", str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert "no config.yaml" in error()
    write_run(tmp_path)
    (tmp_path / "trace.json").unlink()
    assert "trace_steps" in error()
    (tmp_path / "trace.json").write_text("[\n")
    assert "cut off before its first op" in (said := error())
    assert "trace_steps" not in said
    write_run(tmp_path)
    (tmp_path / "prediction.json").write_text("{")
    assert "prediction.json is not JSON" in error()
    (tmp_path / "prediction.json").unlink()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "x.html")]) == 2
    said = capsys.readouterr().err
    assert "cannot write" in said
    assert "--out FILE" in said


def test_damage_anywhere_in_a_run_is_an_error_for_people_or_does_no_harm(tmp_path: Path, campaign: Campaign) -> None:
    write_run(tmp_path, schedule=offload_schedule(1, 1), steps=1)
    rng = Random(0)
    errors: list[tuple[str, str]] = []
    cases = campaign.cases(8, 200)  # of each file
    for name in ("trace.json", "metrics.jsonl", "prediction.json"):
        whole = (tmp_path / name).read_bytes()
        for _ in range(cases):
            raw = bytearray(whole)
            at = rng.randrange(len(raw))
            junk = rng.choice([b"NaN", b"-1", b"1e400", b"null", b"[]", b'"', b"{", b"\n", b",", b"\xff"])
            raw[at : at + rng.choice((0, 1, 30))] = junk
            (tmp_path / name).write_bytes(raw)
            try:
                run_page(gather(tmp_path, None))
            except ConfigError as error:
                errors.append((name, str(error)))
        (tmp_path / name).write_bytes(whole)
    assert len(errors) > cases
    assert all(name in text for name, text in errors)


def test_words_become_arguments() -> None:
    arguments = read_words(Arguments, ["run", "--step", "3", "--out=x.html"])
    assert (arguments.folder, arguments.step, arguments.out) == (Path("run"), 3, Path("x.html"))


def test_the_report_needs_no_torch_and_no_matplotlib() -> None:
    modules = "penstock.report.run_page, penstock.report.simulated_page"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_whose_folder_has_a_name_that_is_not_utf8_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(os.fsdecode(bytes(tmp_path) + b"/\xe9 run"))
    write_run(tmp_path / "run")
    (tmp_path / "run").rename(run)
    monkeypatch.chdir(run)
    assert main(["report", "."]) == 0
    assert "<h1>? run</h1>" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (599.0, "599 s"),
        (600.0, "10 min"),
        (7_190.0, "120 min"),
        (172_700.0, "48 hours"),
        (4.1e7, "475 days"),
    ],
)
def test_long_times_are_written_out(seconds: float, said: str) -> None:
    assert format_long_time(seconds) == said


@pytest.mark.parametrize(
    ("numbers", "written"),
    [([], "[]"), ([14, 14, 6, 6], "[14, 14, 6, 6]"), ([9] * 4 + [8] * 3 + [9], "[9 x 4, 8, 8, 8, 9]")],
)
def test_more_than_three_alike_in_a_list_are_one_and_how_many(numbers: list[int], written: str) -> None:
    assert listed(numbers) == written
