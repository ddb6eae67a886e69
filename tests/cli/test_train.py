"""``penstock train`` end to end, on a small model whose state is on disk: files, numbers, signals, resuming."""

import json
import signal
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main, settings
from penstock.config import LrScheduleConfig, OptimizerConfig, Override
from penstock.config.optimizer import SGD
from penstock.engine import planning
from penstock.engine.engine import Engine
from penstock.engine.following import Searched
from penstock.hardware.profiles import save_profile
from penstock.planner.following import Deviations
from penstock.planner.plan import Plan
from penstock.planner.question import Question
from penstock.report.prediction import parse_prediction
from penstock.schedule.program import ALIGN
from tests import warm
from tests.engine.test_prediction import machine
from tests.machines import measured_here
from tests.patience import PATIENCE, until

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def processes_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model this small gains nothing from threads, and on a busy machine they wait for one another."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _numbers(run: Path) -> list[tuple[int, float, float, float]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in _metrics(run)]


def test_a_run_trains_and_leaves_its_files(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", str(config), "--steps", "6", "--speculate", "false"]) == 0
    metrics = _metrics(run)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.1
    assert [m["step"] for m in metrics if "validation_loss" in m] == [2, 4, 6]
    assert [m["lr"] for m in metrics] == pytest.approx([1.5e-3] + [3e-3] * 5)
    assert settings.load(run / "config.yaml").steps == 6
    assert "torch" in json.loads((run / "environment.json").read_text())
    out = capsys.readouterr().out
    assert f"loss     {metrics[0]['loss']:.4f} -> {metrics[-1]['loss']:.4f}" in out
    assert str(run / "trace.json") in out

    moved: dict[str, int] = {}
    for event in json.loads((run / "trace.json").read_text()):
        if event["ph"] == "X" and event["args"]["step"] == 6:
            moved[event["cat"]] = moved.get(event["cat"], 0) + event["args"]["bytes"]
    assert moved == metrics[-1]["bytes_moved"]


def test_a_second_run_in_the_same_folder_is_refused_and_can_replace_the_first(
    config: Path, a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _numbers(a_run)
    assert main(["train", str(config)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert _numbers(a_run) == first
    assert main(["train", str(config), "--steps", "2", "--overwrite"]) == 0
    assert _numbers(a_run) == first[:2]


def test_a_resumed_run_has_the_numbers_of_one_that_never_stopped(config: Path, tmp_path: Path, whole_run: Path) -> None:
    assert main(["train", str(config), "--steps", "1", "--evaluate", "null"]) == 0
    assert main(["train", str(config), "--steps", "4", "--evaluate", "null", "--resume"]) == 0
    assert _numbers(tmp_path / "run") == _numbers(whole_run)
    assert (tmp_path / "run" / "trace-from-2.json").exists()
    assert main(["train", str(config), "--steps", "4", "--evaluate", "null", "--resume"]) == 0, "nothing is left to do"


def test_ctrl_c_ends_after_the_step_and_the_run_can_go_on(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = warm.start(["-m", "penstock.cli", "train", config, "--steps", "10000", "--evaluate", "null"])

    def has_two_steps() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        return (run / "metrics.jsonl").exists() and len(_metrics(run)) >= 2

    until(has_two_steps)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in err
    done = len(_metrics(run))
    assert f"Stopped after step {done} of 10000" in out
    assert json.loads((run / "trace.json").read_text())

    whole = tmp_path / "whole"
    flags = ["--steps", str(done + 2), "--evaluate", "null"]
    assert main(["train", str(config), *flags, "--resume"]) == 0
    assert main(["train", str(config), *flags, "--run", str(whole)]) == 0
    assert _numbers(run) == _numbers(whole)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--budget.device", "64KiB"], 2, "budget"),
        (["--data.sources", "/nowhere/*"], 2, "matches no file"),
        (["--budget.disk", "/nowhere/at/all"], 1, "/nowhere/at"),
        (["--optimizer.lr", "1e30", "--clip_grad_norm", "null", "--steps", "9"], 1, "NaN"),
    ],
)
def test_what_goes_wrong_is_said_in_one_message_and_before_the_first_step_leaves_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, says: str
) -> None:
    assert main(["train", str(config), *flags]) == code
    assert (tmp_path / "run").exists() == (says == "NaN")
    err = capsys.readouterr().err
    assert err.startswith("penstock: ")
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("package", ["transformers", "tokenizers"])
def test_without_the_extra_the_remedy_is_said(config: Path, package: str) -> None:
    code = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "penstock"]:
    del sys.modules[name]
sys.modules[sys.argv[1]] = None
from penstock.cli import main
sys.exit(main(sys.argv[2:]))
"""
    done = warm.run(["-c", code, package, "train", config])
    assert done.returncode == 2
    assert "penstock[hf]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"warmup_share": 0.5}, [0.5, 1, 1, 1]),
        ({"kind": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"kind": "linear", "warmup_steps": 2, "final": 0.5}, [0.5, 1, 1, 0.75]),
        ({"kind": "cosine", "final": 0.0}, [1, 0.853553, 0.5, 0.146447]),
        ({"kind": "wsd", "decay_steps": 2}, [1, 1, 1, 1 - 0.5**0.5]),
        ({"kind": "wsd", "decay_share": 0.5, "decay_shape": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.5]),
        ({"kind": "wsd", "decay_steps": 4, "decay_shape": "cosine", "final": 0.2}, [1, 0.882843, 0.6, 0.317157]),
    ],
)
def test_the_learning_rate_follows_its_schedule(settings: dict[str, Any], factors: list[float]) -> None:
    config = LrScheduleConfig(**settings)
    assert [config.factor(step, 4) for step in range(4)] == pytest.approx(factors, rel=1e-5)
    if config.kind != "constant":
        assert config.factor(4, 4) == pytest.approx(config.final or 0.0)


def test_the_optimizer_is_the_one_that_was_written() -> None:
    config = OptimizerConfig(name="sgd", lr=0.5, momentum=0.9, overrides=(Override(match="bias", weight_decay=0.0),))
    spec = config.spec
    overrides = (Override(match="bias", weight_decay=0.0),)
    assert spec == SGD(lr=0.5, momentum=0.9, overrides=overrides, decay_norms_and_biases=False)


@pytest.mark.usefixtures("one_simulation")
def test_a_stored_profile_brings_a_prediction_and_its_schedule_runs_from_a_file(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_profile(measured_here(machine(tmp_path)))
    flags = ["--plan", "auto", "--steps", "2", "--evaluate", "null"]
    assert main(["train", str(config), *flags]) == 0
    assert "predicted" in capsys.readouterr().out
    prediction = parse_prediction((tmp_path / "run" / "prediction.json").read_text())
    assert prediction.time >= prediction.lower_bound > 0
    traced = {e["name"] for e in json.loads((tmp_path / "run" / "trace.json").read_text()) if e["ph"] == "X"}
    assert traced == {op.id for op in prediction.schedule.ops}
    own = tmp_path / "own.schedule"
    own.write_text(f"# mine\n{prediction.schedule}")
    planned = _numbers(tmp_path / "run")
    assert main(["train", str(config), *flags, "--schedule", str(own), "--overwrite"]) == 0
    assert _numbers(tmp_path / "run") == planned


@pytest.mark.usefixtures("one_simulation")
def test_a_plan_that_follows_the_machine_says_when_and_why(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of plan is said on the line of its step, in its metrics, and in the report; the numbers are those of one
    plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_profile(measured_here(machine(tmp_path)))
    flags = ["--plan", "auto", "--steps", "4", "--evaluate", "null", "--clip_grad_norm", "null"]
    assert main(["train", str(config), *flags, "--replan", "false"]) == 0
    steady = _numbers(tmp_path / "run")
    seen: list[int] = []

    def slow(deviations: Deviations) -> dict[str, float]:
        seen.append(len(seen))
        return {"read": 8.0} if len(seen) == 2 else {}

    def smaller_chunks(question: Question, plan: Plan, *_: object, in_vain: bool) -> Searched:
        settings = replace(plan.settings, chunk=plan.settings.chunk // 2 // ALIGN * ALIGN)
        return Searched(settings=settings, seconds=0.0, now=2.0, then=1.0)

    monkeypatch.setattr(Deviations, "off", slow)
    monkeypatch.setattr(planning, "better", smaller_chunks)
    capsys.readouterr()
    assert main(["train", str(config), *flags, "--overwrite"]) == 0
    assert _numbers(tmp_path / "run") == steady
    (line,) = (line for line in _metrics(tmp_path / "run") if "plan_change" in line)
    why = line["plan_change"]
    assert line["step"] == 4, "the first step of a plan shows nothing"
    assert why.startswith("reads at 125 MB/s, 1,000 predicted: chunks of ")
    assert why.endswith(", 2 s -> 1 s a step predicted")
    assert f"step 4: {why}\n" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert escape(f"The plan changed before step 4: {why}.") in page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no such file"),
        ("schedule s micro-batches 2 chunk 4096\nF0m0 after F1m0\n", "line 2"),
        ("world w ranks 2\nrank 0-1\nschedule s micro-batches 1 chunk 0\nF0m0\n", "is for 2 ranks: this is 1"),
    ],
)
def test_a_schedule_file_that_cannot_be_run_is_refused(
    text: str | None, words: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.schedule"
    if text is not None:
        own.write_text(text)
    assert main(["train", str(config), "--schedule", str(own)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--optimizer.overrides", "{match: nrom, lr: 0}"), "match='nrom' is the first match of no trained parameter"),
        (("--deal", "[1, 2]"), "deal=[1, 2] says how many blocks each rank of a pipeline has, and there is none"),
    ],
)
def test_settings_that_the_model_or_the_ranks_cannot_have_are_refused_before_the_data_are_read(
    words: tuple[str, ...], said: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--data.sources", "gone", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("one_simulation")
def test_a_machine_without_a_profile_is_measured_once_where_it_may_be(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is tests/doctor's; here that it is, and is kept for the next run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.doctor.examine.examine", lambda *_: measured_here(machine(tmp_path)))
    flags = ["--plan", "auto", "--evaluate", "null"]
    assert main(["train", str(config), *flags, "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "has no profile yet, and PENSTOCK_MEASURE=never: nothing is predicted" in said
    assert "measuring it" not in said
    monkeypatch.setenv("PENSTOCK_MEASURE", "no")
    assert main(["train", str(config), *flags, "--steps", "1", "--overwrite"]) == 2
    assert "PENSTOCK_MEASURE='no': must be 'never', or not set" in capsys.readouterr().err
    monkeypatch.delenv("PENSTOCK_MEASURE")
    assert main(["train", str(config), *flags, "--steps", "1", "--overwrite"]) == 0
    assert "measuring it, once" in capsys.readouterr().out
    assert main(["train", str(config), *flags, "--steps", "2", "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert "measuring it" not in said
    assert " predicted (" in said


def test_a_signal_while_what_is_in_memory_goes_to_disk_loses_nothing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine is closed after the last step, which takes long where all state is in memory."""
    close, lost = Engine.close, []

    def closing(engine: Engine) -> None:
        signal.raise_signal(signal.SIGTERM)
        close(engine)

    monkeypatch.setattr(Engine, "close", closing)
    before = signal.signal(signal.SIGTERM, lambda number, frame: lost.append(number))  # else it would end the tests
    try:
        memory = ["--budget.weights", "host", "--budget.state", "host", "--budget.durability", "none"]
        assert main(["train", str(config), "--steps", "1", *memory]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not lost
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "step 1" in capsys.readouterr().out


def test_a_step_that_torchrun_would_not_wait_for_is_said_once(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
    assert main(["train", str(config), "--steps", "2", "--evaluate", "null"]) == 0
    assert caplog.text.count("torchrun kills its ranks 0 s later. Start it with --shutdown-timeout") == 1
