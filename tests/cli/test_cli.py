"""The command line around an engine: words, folders, signals, and what the displays say."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock import cli
from penstock.cli import main
from penstock.cli.arguments import TrainArguments
from penstock.cli.disk_summary import allowed_per_day
from penstock.cli.metrics import MetricsFile, metrics_of, with_figures
from penstock.cli.settings import dump
from penstock.cli.showing.display import PlainDisplay, choose_display, clock, step_notes, wear
from penstock.cli.showing.meter import Meter, Outline
from penstock.cli.showing.screen import screen, sparkline
from penstock.cli.showing.summary import closing
from penstock.cli.showing.terminal import TerminalDisplay
from penstock.cli.showing.yardstick import Yardstick, yardstick
from penstock.cli.words import read_words
from penstock.config import (
    Endurance,
    Tier,
    TrainConfig,
)
from penstock.config.sizes import format_flops
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.report.sentence import LANE_NAMES, LANE_WORDS, share_of_life
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.state.stats import StepStats
from penstock.store.layout import Layout
from penstock.store.store import Store
from tests.engine.test_prediction import machine
from tests.runs import settings_for

MIB = 1024**2


def _stats(**changes: Any) -> StepStats:
    stats = StepStats(
        step=1,
        loss=8.0,
        grad_norm=2.0,
        lr=1e-3,
        tokens=512,
        seconds=2.0,
        clipped=False,
        skipped=False,
        loss_scale=1.0,
        bytes_moved={"read": 10**9, "write": 5 * 10**8, "compute": 0},
        lane_seconds={"read": 1.0, "write": 1.0, "compute": 1.9},
        peak_bytes={"device": 60 * MIB, "host": 20 * MIB},
    )
    return replace(stats, **changes)


def _meter(steps: int = 10) -> Meter:
    given: Mapping[Tier, int] = {"device": 64 * MIB, "host": 24 * MIB}
    return Meter(
        outline=Outline(steps=steps, parameters=45_000_000, given=given), state_bytes=704 * MIB, disk_bytes=500 * MIB
    )


def _terminal(width: int = 100) -> tuple[TerminalDisplay, io.StringIO]:
    out = io.StringIO()
    display = TerminalDisplay(out)
    display.console = Console(file=out, force_terminal=True, width=width, color_system=None)
    return display, out


def test_words_become_arguments() -> None:
    arguments = read_words(TrainArguments, ["--optimizer.lr", "-1", "c.yaml", "--overwrite", "--run=a=b"])
    assert arguments.config == Path("c.yaml")
    assert arguments.settings == (("optimizer.lr", "-1"), ("run", "a=b"))
    assert arguments.start == "overwrite"
    assert not arguments.print_config


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "none"),
        (["a.yaml", "b.yaml"], "a.yaml and b.yaml"),
        (["a.yaml", "--steps"], "--steps needs a value"),
        (["a.yaml", "--overwite"], "or did you mean --overwrite?"),
        (["a.yaml", "--steps", "--overwrite"], "--steps needs a value"),
        (["a.yaml", "--resume", "--overwrite"], "one of them"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_words(TrainArguments, words)


def test_version_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock 0.")
    assert main(["train", "--help"]) == 0
    assert "--optimizer.lr" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "there is no command trian; did you mean train? (penstock takes init, train," in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_character_that_the_output_does_not_have_ends_no_command(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of runs has dashes, and a name in it that is not UTF-8."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    run = Path(os.fsdecode(bytes(tmp_path) + b"/\xe9"))
    run.mkdir()
    (run / "config.yaml").write_text(dump(settings_for(tmp_path / "run")))
    assert main(["runs", str(tmp_path)]) == 0
    assert b"not begun" in out.getvalue()


def test_torch_is_not_loaded_before_a_run_is_to_begin() -> None:
    """How its threads wait is settled when it is loaded, and neither ``--version`` nor what only looks at runs should
    take seconds."""
    looking = "penstock.cli.runs, penstock.cli.report, penstock.cli.init"
    code = (
        f"import sys, penstock.cli as c, {looking}; assert c.main(['--version']) == 0; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_mistake_in_the_settings_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tmp_path / "missing.yaml")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "missing.yaml" in err


@pytest.mark.parametrize(
    "words",
    [["report", "{loop}"], ["plan", "{config}", "--budget.disk", "{loop}"], ["train", "{config}", "--run", "{loop}"]],
)
def test_a_loop_of_links_is_said(
    config: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (loop := tmp_path / "loop").symlink_to("loop")
    assert main([word.format(loop=loop, config=config) for word in words]) in (1, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{loop}: Too many levels of symbolic links (ELOOP): remove the link" in err


def test_metrics_are_a_line_a_step_at_once_and_always_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with MetricsFile(tmp_path) as metrics:
        metrics.write(metrics_of(_stats(step=1), 7.5))
        metrics.write(metrics_of(_stats(step=2, grad_norm=float("inf"), skipped=True), None))
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # before it is closed
    assert lines[0]["validation_loss"] == 7.5
    assert lines[0]["bytes_moved"]["read"] == 10**9
    assert lines[0]["tokens_per_second"] == 256
    assert lines[1]["grad_norm"] is None
    assert lines[1]["skipped"]


def test_the_meter_adds_up(tmp_path: Path) -> None:
    meter = _meter()
    meter.add(_stats(loss=8.0, seconds=2.0, peak_bytes={"device": 9, "host": 1}))
    meter.add(_stats(loss=7.0, seconds=4.0, peak_bytes={"device": 3, "host": 5}), validation=7.5)
    assert meter.peak == {"device": 9, "host": 5}
    assert meter.peak_bytes == 14
    assert meter.moved["read"] == 2 * 10**9
    assert meter.tokens_per_second == 1024 / 6
    assert meter.seconds_left == 8 * 3.0
    assert meter.lanes()["read"].sustained == 2 * 10**9 / 6
    assert "h2d" not in meter.lanes()


def _measured() -> Meter:
    """A meter after two steps on a machine that was measured, planned and predicted."""
    given: Mapping[Tier, int] = {"device": 64 * MIB, "host": 24 * MIB}
    yardstick = Yardstick(flops=4e12, peak=5e12, links={"read": 1e9, "h2d": 1e9}, rated=86400e9, assumed=True)
    meter = Meter(outline=Outline(steps=10, parameters=45_000_000, given=given, yardstick=yardstick))
    meter.planned_peak, meter.disk_bytes = {"device": 62 * MIB, "host": 22 * MIB}, 500 * MIB
    meter.forecast(1.6, "Compute is the bottleneck.")
    meter.add(_stats(flops=1e12, bytes_written=10**9, clipped=True), None, {"compute": 1.0, "read": 0.5})
    meter.add(_stats(flops=3e12, bytes_written=10**9, repeats=1), 7.5, {"compute": 2.0, "write": 0.1})
    return meter


def test_the_meter_holds_a_run_against_what_the_machine_can_do_and_bear() -> None:
    meter = _measured()
    assert meter.flops_per_second == 1e12
    assert (meter.mfu, meter.of_product) == (0.2, 0.25)
    assert meter.lanes()["read"].of_peak == 0.5
    assert meter.lanes()["write"].of_peak is None, "it was not measured"
    assert list(meter.links()) == ["read", "write"]
    assert meter.held_up == pytest.approx({"compute": 0.75, "read": 0.125, "write": 0.025})
    assert meter.drive_days == 2.0, "86,400 GB at a GB every two seconds"
    assert (meter.written, meter.clipped, meter.repeated, meter.skipped) == (2 * 10**9, 1, 1, 0)
    plain = _meter()
    plain.add(_stats(bytes_written=10**9))
    assert (plain.mfu, plain.of_product, plain.drive_days, plain.lanes()["read"].of_peak) == (None,) * 4


def test_a_share_of_what_drives_bear_is_said_in_figures_that_are_read() -> None:
    shares = (0.0, 9.4e-10, 1e-5, 0.0123, 0.123)
    assert [share_of_life(share) for share in shares] == ["0%", "under 0.001%", "0.001%", "1.2%", "12%"]


def test_the_metrics_have_all_that_is_shown_with_units_in_the_names() -> None:
    meter = _measured()
    line = with_figures(metrics_of(meter.last, 7.5), meter, meter.held[-1])
    assert json.loads(json.dumps(line)) == {
        "step": 1,
        "loss": 8.0,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "tokens": 512,
        "seconds": 2.0,
        "tokens_per_second": 256.0,
        "flops": 3e12,
        "bytes_written": 10**9,
        "bytes_moved": {"read": 10**9, "write": 5 * 10**8, "compute": 0},
        "lane_seconds": {"read": 1.0, "write": 1.0, "compute": 1.9},
        "peak_bytes": {"device": 60 * MIB, "host": 20 * MIB},
        "clipped": False,
        "skipped": False,
        "repeats": 1,
        "loss_scale": 1.0,
        "validation_loss": 7.5,
        "tflops_per_second": 1.5,
        "mfu": 0.3,
        "share_of_product": 0.375,
        "gb_per_second": {"read": 0.5, "write": 0.25},
        "share_of_peak": {"read": 0.5},
        "held_up_seconds": {"compute": 2.0, "write": 0.1},
        "planned_peak_bytes": {"device": 62 * MIB, "host": 22 * MIB},
        "disk_bytes": 500 * MIB,
        "predicted_seconds": 1.6,
        "seconds_left": 16.0,
        "drive_days": 2.0,
        "steps_clipped": 1,
        "steps_skipped": 0,
        "steps_repeated": 1,
    }


def test_the_last_words_say_how_fast_it_was_and_what_the_drives_went_through(tmp_path: Path) -> None:
    of_both = "MFU 20% of the maker's 5 TFLOP/s, 25% of a large product's 4 TFLOP/s"
    text = closing(_measured(), own_bytes=MIB, folder=tmp_path, trace=None, stopped=False)
    assert f"speed    256 tokens/s, 1 TFLOP/s, {of_both}; 1 clipped; 1 run twice" in text
    assert "drives   1.86 GiB written, 0.0023% of the 78.6 TiB that they are assumed to bear" in text


def test_a_rate_that_no_model_reaches_was_measured_on_a_busy_machine(tmp_path: Path) -> None:
    meter = _measured()
    slow = replace(meter.outline.yardstick, flops=0.5e12, peak=None)
    meter.outline = replace(meter.outline, yardstick=slow)
    text = closing(meter, own_bytes=MIB, folder=tmp_path, trace=None, stopped=False)
    why = "the machine was busy when it was measured (penstock doctor measures it anew)"
    assert f"1 TFLOP/s, above a large product's {format_flops(0.5e12)}: {why}; 1 clipped" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_keeps_its_lines_and_its_width(width: int) -> None:
    """Whatever happens in a step: nothing wraps, and no line comes or goes."""

    def lines(meter: Meter) -> list[str]:
        console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
        with console.capture() as captured:
            console.print(screen(meter, width, waited=1.0))
        return captured.get().splitlines()

    first = lines(_measured())
    for words in ("256 tokens/s  1 TFLOP/s, MFU 20%", "1.6 s predicted (-20%)", "compute 75%", "disk read 12%"):
        assert any(words in line for line in first), words
    assert any("1.86 GiB written, new drives last 2 days (assumed)" in line for line in first)
    meter = _measured()
    for step in range(3, 9):
        changes = {"skipped": step == 5, "clipped": step != 5, "loss": 10.0 ** (6 - step), "loss_scale": 2.0**-20}
        meter.add(_stats(step=step, seconds=900.0 / step, **changes), 1.25, {"compute": 800.0 / step})
        drawn = lines(meter)
        assert len(drawn) == len(first)
        assert max(map(len, drawn)) <= width
        assert drawn[0].startswith(f"step {step}/10")


@pytest.mark.parametrize("steps", [4, 123_456])
@pytest.mark.parametrize("seconds", [None, 0.1, 500.0])
def test_how_far_a_run_is_takes_one_line_in_any_columns(steps: int, seconds: float | None) -> None:
    meter = _meter(steps)
    if seconds is not None:
        meter.add(_stats(seconds=seconds))
    for width in range(10, 125, 3):
        console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
        with console.capture() as text:
            console.print(screen(meter, width, waited=1.0))
        first, *others = text.get().splitlines()
        assert first.startswith(f"step {meter.done}/"[:9]), (width, first)
        assert not others or others[0].startswith("loss"), (width, others[0])
        assert width < 50 or first.rstrip().endswith(("left", "so far")), (width, first)


@pytest.mark.parametrize("width", [40, 63, 64])
def test_in_few_columns_the_live_view_has_all_of_its_numbers(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(screen(_measured(), width, waited=1.0))
    lines = captured.get().splitlines()
    tables = lines[next(n for n, line in enumerate(lines) if line.startswith("lane ")) :]
    assert len(tables) > 5
    assert not [line for line in tables if "…" in line]
    assert max(map(len, tables)) <= width


def test_every_lane_has_words() -> None:
    assert set(LANE_NAMES) == set(LANE_WORDS) == set(LANES)


@pytest.mark.parametrize("lane", LANES)
def test_the_live_view_has_words_for_whatever_lane_held_a_step_up(lane: Lane) -> None:
    meter = _meter()
    meter.add(_stats(bytes_moved={lane: 10**9}, lane_seconds={lane: 1.0}), None, {lane: 2.0})
    console = Console(file=io.StringIO(), width=120, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(screen(meter, 120, waited=1.0))
    lines = captured.get().splitlines()
    words = re.search(r"held up by +█+ +([a-z ]+) 100%", "\n".join(lines))
    assert words is not None
    (row,) = (line for line in lines if line.startswith(f"{words[1]} "))
    assert " 50% " in row


def test_the_drives_life_is_as_told_as_profiled_or_assumed(tmp_path: Path) -> None:
    config = settings_for(tmp_path)
    two = replace(config, budget=replace(config.budget, disk=(tmp_path / "a", Path("/dev/shm/b"))))
    same = replace(config, budget=replace(config.budget, disk=(tmp_path / "a", tmp_path / "b")))
    profile = machine(tmp_path)
    rated = replace(profile, drives=tuple(replace(drive, tbw=600.0, kind="ssd") for drive in profile.drives))
    size = shutil.disk_usage(tmp_path).total
    least = min(size, shutil.disk_usage("/dev/shm").total)

    def life(config: TrainConfig, machine: Machine | None) -> tuple[float | None, bool]:
        found = yardstick(config, machine, kind="cpu")
        return found.rated, found.assumed

    assert life(replace(two, drive_tbw=100.0), rated) == (2e14, False)
    assert life(config, rated) == (6e14, False)
    assert life(config, None) == (0.3 * 365 * 5 * size, True)
    assert life(two, None) == (2 * 0.3 * 365 * 5 * least, True)
    assert life(replace(same, drive_tbw=100.0), rated) == (1e14, False), "one drive"
    assert life(same, None) == (0.3 * 365 * 5 * size, True)
    assert life(replace(config, budget=replace(config.budget, disk=None)), None) == (None, False)
    memory = replace(profile, drives=tuple(replace(drive, kind="tmpfs") for drive in profile.drives))
    assert life(config, memory) == (None, False)
    assert yardstick(config, rated, kind="cpu", hosts=2).rated == 12e14, "of both hosts, each of which has such drives"
    assert yardstick(config, memory, kind="cpu", hosts=2).rated is None


def test_what_a_run_writes_a_day_is_shown_beside_what_it_may_and_said_once_where_it_is_more() -> None:
    """The first step does not count: it writes the model. Of one that commits now and then a whole interval has to be
    known."""
    allowed = 86400e6  # a megabyte a second; a step of two seconds writes three
    given: Mapping[Tier, int] = {"device": 64 * MIB, "host": 24 * MIB}
    meters = [Meter(outline=Outline(steps=40, parameters=45, given=given, yardstick=Yardstick(allowed=allowed * by)))
              for by in (1.0, 1.0, 2.0)]  # fmt: skip
    said: list[list[str | None]] = [[], [], []]
    for step in range(1, 31):
        for meter, lines, least in zip(meters, said, (0.0, 40.0, 0.0), strict=True):
            meter.add(_stats(step=step, bytes_written=10**9 if step == 1 else 3 * 10**6))
            lines.append(meter.wears(least))
    assert [step for step, text in enumerate(said[0], start=1) if text] == [11]
    assert [step for step, text in enumerate(said[1], start=1) if text] == [21]
    assert not any(said[2])
    assert said[0][10] is not None
    assert "the run writes 121 GiB a day, 1.5 times the 80.5 GiB that budget.endurance allows" in said[0][10]
    for text in (wear(meters[0]), closing(meters[0], own_bytes=1, folder=Path("r"), trace=None, stopped=False)):
        assert ", 121 GiB a day of the 80.5 GiB allowed" in text
    assert "a day" not in wear(_measured())


def test_what_a_run_may_write_a_day_follows_its_stripe(tmp_path: Path) -> None:
    config = settings_for(tmp_path)
    endurance = Endurance(per_day="1TB")
    two = replace(config, budget=replace(config.budget, disk=(tmp_path / "a", Path("/dev/shm/b")), endurance=endurance))
    same = replace(two, budget=replace(two.budget, disk=(tmp_path / "a", tmp_path / "b")))
    assert allowed_per_day(config.budget, 1) is None
    assert allowed_per_day(two.budget, 1) == 2e12
    assert allowed_per_day(two.budget, 2, hosts=2) == 4e12  # each host has two drives
    assert allowed_per_day(replace(two.budget, disk=(tmp_path / "a",)), 2) == 1e12  # two ranks that share a drive
    assert allowed_per_day(same.budget, 1) == 2e12, "of drives that are not here nobody knows that they are one"
    for path in same.budget.disk_paths:
        path.mkdir()
    assert allowed_per_day(same.budget, 1) == 1e12
    made = Store.create(same.budget.disk_paths, Layout.build([("a", 1, 1)]), model={}, weights=(3, 1))
    made.close()
    assert allowed_per_day(same.budget, 1) == pytest.approx(2e12 / 3)


def test_plain_lines_say_what_the_live_view_says() -> None:
    out = io.StringIO()
    plain = PlainDisplay(out)
    terminal, drawn = _terminal()
    meter = _meter()
    for display in (plain, terminal):
        display.begin(meter)
    meter.add(_stats(loss=8.25, clipped=True), validation=7.5)
    for display in (plain, terminal):
        display.update()
        display.end()
    for text in (out.getvalue(), drawn.getvalue()):
        for part in ("1/10", "8.2500", "7.5000", "clipped", "256 tokens/s", "read", "0.50", "60 MiB", "64 MiB", "0:18"):
            assert part in text, part


def test_a_plain_step_is_a_line_and_what_it_takes_of_the_machine_is_said_now_and_then() -> None:
    """Below the first step, the last one, and after 30 seconds; a line fits 120 columns."""
    out, seconds = io.StringIO(), [100.0]
    display = PlainDisplay(out, lambda: seconds[0])
    meter = _measured()
    display.begin(meter)
    said: dict[int, list[str]] = {}
    for step, passed in ((3, 0.0), (4, 29.0), (5, 2.0), (6, 29.0)):
        seconds[0] += passed
        meter.add(_stats(step=step), None, {"compute": 1.5, "read": 0.25})
        before = len(out.getvalue())
        display.update()
        said[step] = out.getvalue()[before:].splitlines()
    before = len(out.getvalue())
    display.end()
    last = out.getvalue()[before:].splitlines()
    display.end()
    assert [len(lines) for lines in said.values()] == [5, 1, 5, 1]
    assert last[0].startswith("  memory device 60 MiB (planned 62 MiB, given 64 MiB)")
    assert [line.split()[0] for line in last] == ["memory", "speed", "links", "drives"]
    assert all(len(line) <= 120 for lines in (*said.values(), last) for line in lines)
    for part in ("step  6/10", "loss 8.0000", "norm 2", "lr 1.00e-03", "256 tokens/s", "2 s (plan 1.6 s)"):
        assert part in said[6][0], part
    assert said[6][0].endswith("held up by compute 75%  0:08 left")
    assert out.getvalue().count("memory") == 3, "nothing is said twice"


def test_what_counts_in_the_whole_run_counts_what_came_before_a_resumption(tmp_path: Path) -> None:
    whole = _measured()
    with MetricsFile(tmp_path) as metrics:
        metrics.write(metrics_of(_stats(clipped=True, bytes_written=5), None))
        metrics.write(metrics_of(_stats(step=2, skipped=True, repeats=1, bytes_written=7), None))
        metrics.write(metrics_of(_stats(step=3, repeats=2), None))
    with MetricsFile(tmp_path, done=2) as metrics:  # a kill has undone the third
        whole.go_on(metrics.earlier())
    assert (whole.clipped, whole.skipped, whole.repeated, whole.written) == (2, 1, 1, 2 * 10**9 + 12)
    assert len(whole.losses) == 2, "but losses and rates are of this stretch"


def test_the_live_view_shows_the_first_step_before_there_are_numbers_and_the_notice() -> None:
    display, drawn = _terminal()
    display.begin(_meter())
    display.notice("Stopping after this step.")
    display.update()
    assert "first step" in drawn.getvalue()
    assert "Stopping after this step." in drawn.getvalue()
    display.end()


def test_a_locale_without_a_names_characters_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a word that Python could not read, and of a name in a run's settings that it cannot look up."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")

    def lookup(words: Sequence[str]) -> int:
        "runs/lé".encode("ascii")
        return 0

    monkeypatch.setitem(cli.COMMANDS, "runs", lookup)
    for words, name in ((["runs", "runs/l\udcc3\udca9"], r"'runs/l\udcc3\udca9'"), (["runs"], r"'runs/l\xe9'")):
        assert main(words) == 2
        said = f"penstock: {name} has a character that is none in this locale, where names of files are in ascii: set "
        assert capsys.readouterr().err.startswith(said)


def test_a_terminal_shows_the_name_of_a_folder_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that rich has a picture or a colour for."""
    out, name = io.StringIO(), "runs/a:fire:b [red]"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    display = TerminalDisplay(out)
    display.say(name)
    with display.working(f"Disk {name}") as note:
        note(name)
    assert "\N{FIRE}" not in out.getvalue()
    assert out.getvalue().count(name) >= 3


def test_a_terminal_keeps_its_cursor_for_whoever_suspends_or_kills_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    out, meter = io.StringIO(), _meter()
    monkeypatch.setenv("FORCE_COLOR", "1")
    meter.add(_stats())
    display = TerminalDisplay(out)
    with display.working("Planning"):
        pass
    display.begin(meter)
    display.update()
    display.end()
    assert "tokens/s" in out.getvalue()
    assert "\x1b[?25l" not in out.getvalue()


def test_lines_are_plain_without_a_terminal_that_can_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = os.openpty()
    with os.fdopen(primary), os.fdopen(secondary, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        assert isinstance(choose_display(terminal), TerminalDisplay)
        assert isinstance(choose_display(io.StringIO()), PlainDisplay)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(choose_display(terminal), PlainDisplay)


def test_a_step_that_is_skipped_without_a_scaled_loss_speaks_of_none() -> None:
    meter = _meter()
    meter.add(_stats(skipped=True))
    assert step_notes(meter) == ["skipped: a gradient not finite"]


def test_a_skipped_step_is_said_and_does_not_break_the_loss_curve() -> None:
    meter = _meter()
    meter.add(_stats(loss=float("inf"), skipped=True, loss_scale=32768))
    out = io.StringIO()
    display = PlainDisplay(out)
    display.begin(meter)
    display.update()
    assert "skipped: a gradient not finite at a loss scale of 32,768" in out.getvalue(), (
        "the step's, not the next one's"
    )
    assert sparkline(meter.losses, 8) == ""
    assert sparkline([3.0, float("inf"), 1.0], 8) == "█▁"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (83.4, "1:23"), (59.9, "1:00"), (3723, "1:02:03")])
def test_times_are_clock_times(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_last_words_are_complete(tmp_path: Path) -> None:
    meter = _meter()
    meter.add(_stats(loss=8.0))
    meter.add(_stats(loss=6.0))
    meter.truncated = 1234
    text = closing(meter, own_bytes=MIB, folder=tmp_path, trace=tmp_path / "trace.json", stopped=True)
    for part in (
        "Stopped after step 2 of 10",
        "8.0000 -> 6.0000",
        "1,234 tokens left out, of documents longer than a sequence",
        "704 MiB",
        "8.0x the memory given",
        "88 MiB given, 80 MiB taken",
        "device 60 MiB of 64 MiB",
        str(tmp_path / "trace.json"),
    ):
        assert part in text, part
    assert "draws it on one page\n" in text, "nothing was predicted"
    meter.forecast(1.0, "Compute is the bottleneck.")
    text = closing(meter, own_bytes=MIB, folder=tmp_path, trace=tmp_path / "trace.json", stopped=True)
    assert "draws it on one page, beside what was predicted" in text


def test_the_bottleneck_in_the_last_words_is_said_of_the_forecast_and_not_of_what_was_measured(tmp_path: Path) -> None:
    meter = _meter()
    meter.forecast(1.0, "Compute is the bottleneck.")
    meter.add(_stats())
    meter.add(_stats(seconds=2.0))
    lines = closing(meter, own_bytes=MIB, folder=tmp_path, trace=None, stopped=False).splitlines()
    at = lines.index("step     2 s, median of 1; 1 s predicted (-50%)")
    assert lines[at + 1] == "forecast Compute is the bottleneck."


def test_one_step_is_said_to_be_one_and_an_error_of_none_has_no_minus(tmp_path: Path) -> None:
    meter = _meter()
    meter.add(_stats())
    meter.forecast(1.0, "Compute is the bottleneck.")
    assert ", in 1 step, " in closing(meter, own_bytes=MIB, folder=tmp_path, trace=None, stopped=False)
    meter.add(_stats())
    meter.add(_stats(seconds=1.004))
    assert "1 s predicted (+0%)" in closing(meter, own_bytes=MIB, folder=tmp_path, trace=None, stopped=False)


def test_a_run_that_keeps_nothing_is_not_said_to_go_on(tmp_path: Path) -> None:
    meter = _meter()
    meter.add(_stats())
    last_words = partial(closing, meter, own_bytes=MIB, folder=tmp_path / "a run", trace=tmp_path / "t", stopped=True)
    assert f"the state intact: penstock resume '{tmp_path}/a run' goes on" in last_words()
    assert f"penstock report '{tmp_path}/a run' draws" in last_words()
    assert "goes on" not in last_words(kept=False)
    assert "there is nothing to go on from" in last_words(kept=False)
    meter.outline = replace(meter.outline, steps=1)
    assert "goes on" not in last_words(), "it was the last step"


def test_brackets_in_what_is_done_are_shown() -> None:
    display, drawn = _terminal()
    with display.working("Disk /mnt/a[/b]: reading") as note:
        note("half of [it]")
    assert "Disk /mnt/a[/b]: reading" in drawn.getvalue()


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_no_file_that_a_command_opens_has_the_number_of_a_standard_stream_that_was_closed(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    child = os.fork()
    if not child:
        code = 99
        with suppress(BaseException):
            for number in closed:
                os.close(number)
                setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as Python does where it starts so
            code = main(["train", str(tmp_path / "no.yaml")])
            code += 10 * (os.open(tmp_path, os.O_RDONLY) in closed)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_working_directory_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "the working directory cannot be told" in capsys.readouterr().err
