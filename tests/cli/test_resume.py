"""``penstock resume``: whose run it goes on with, what it keeps, and what it leaves alone."""

import errno
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.cli import main, settings
from penstock.cli.account import Account
from penstock.cli.metrics import MetricsFile
from penstock.data.identity import Identity
from penstock.state.stats import StepStats
from penstock.store import successor
from penstock.store.directory import LOCK
from penstock.store.making import BESIDE
from penstock.store.manifest import DATA
from penstock.store.store import Store
from tests import warm
from tests.faults import Nth, error, intercepted
from tests.runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")


def _numbers(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"], m.get("validation_loss")) for m in lines]


def test_a_run_goes_on_from_its_folder_wherever_that_is_now(
    config: Path, tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(config), "--run", "run", "--steps", "2"]) == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["resume", "moved", "--steps", "4"]) == 0
    assert _numbers(Path("moved")) == _numbers(whole_run)
    resumed = settings.load(Path("moved/config.yaml"))
    assert (resumed.run, resumed.budget.disk, resumed.steps) == ("moved", "moved/store", 4)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_data_have_been_moved_goes_on_with_the_same_ones_alone(
    config: Path, tmp_path: Path, whole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    assert main(["train", str(config), "--steps", "2"]) == 0
    (moved := text.rename(tmp_path / "elsewhere.txt"))
    (other := tmp_path / "other.txt").write_text(moved.read_text().swapcase())
    shutil.copy(moved, read_otherwise := tmp_path / "elsewhere.jsonl")
    capsys.readouterr()
    for words, says in (
        ([], "text.txt' matches no file (relative to"),
        ([], "If it has been moved, give data.sources with the place that it has now"),
        (["--data.sources", str(read_otherwise)], f"was started with data.sources='{text}', not '{read_otherwise}'"),
        (["--data.sources", str(other)], f"{other} has changed since (other bytes)"),
        (["--data.sources", str(moved), "--data.sequence_length", "64"], "was started with data.sequence_length=32"),
    ):
        assert main(["resume", str(run), "--steps", "4", *words]) == 2
        assert says in capsys.readouterr().err
    assert main(["resume", str(run), "--steps", "4", "--data.sources", str(moved)]) == 0
    assert _numbers(run) == _numbers(whole_run)
    assert settings.load(run / "config.yaml").data.sources == str(moved)


def test_a_run_in_tiles_goes_on_to_the_same_bits_and_exports_the_models_own_names(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are 11 of the 32 tokens of both sequences of a micro-batch."""
    monkeypatch.chdir(tmp_path)
    for run, steps in (("whole", "2"), ("run", "1")):
        words = ["--run", run, "--budget.disk", f"{run}/store", "--steps", steps, "--mlp_tile", "22"]
        assert main(["train", str(config), *words]) == 0
    assert main(["resume", "run", "--steps", "2"]) == 0
    assert settings.load(Path("run/config.yaml")).mlp_tile == 22
    assert _numbers(Path("run"))[-1] == _numbers(Path("whole"))[-1]
    for run in ("whole", "run"):
        assert main(["export", run, f"{run}-out"]) == 0
    files = [Path(f"{run}-out/model.safetensors") for run in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()
    model = AutoModelForCausalLM.from_pretrained("run-out")
    assert load_file(files[1]).keys() >= {name for name, _ in model.named_parameters()}


def test_what_cannot_be_resumed_says_why(
    config: Path, a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for words, says in (
        ([], "takes one run's folder, and was given none"),
        (["a", "b"], "was given a and b"),
        ([str(tmp_path / "nowhere")], "nowhere does not exist: give the folder of a run"),
        ([str(config)], "config.yaml is a file: give the folder of a run"),
        ([str(tmp_path / "empty")], "it has no config.yaml"),
        ([str(a_run), "--run", "other"], "--run other: penstock resume goes on in"),
        ([str(a_run), "--seed", "1"], "see the same text"),
        (
            [str(a_run), "--steps", "4", "--optimizer.name", "lion"],
            "was started with optimizer.name='adamw', not 'lion'",
        ),
        (
            [str(a_run), "--steps", "4", "--data.packing", "false"],
            "was started with data.packing='continuous', not false:",
        ),
        ([str(a_run), "--steps", "4", "--precision", "bf16"], "was started with precision='fp32', not 'bf16'"),
    ):
        capsys.readouterr()
        assert main(["resume", *words]) == 2
        err = capsys.readouterr().err
        assert says in err
        assert "Traceback" not in err


def test_a_resumption_that_fails_leaves_the_settings_that_the_run_had(a_run: Path) -> None:
    before = (a_run / "config.yaml").read_bytes()
    assert main(["resume", str(a_run), "--steps", "4", "--optimizer.name", "sgd"]) != 0
    assert (a_run / "config.yaml").read_bytes() == before
    assert main(["resume", str(a_run), "--steps", "4"]) == 0


def test_a_resumption_on_other_data_is_refused_and_changes_no_record(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the run's own account of its data is gone, or is that of other data, its last commit says what they were;
    and a run whose data are those goes on."""
    run, text = tmp_path / "run", tmp_path / "text.txt"
    identity = run / "data.json"
    assert main(["train", str(config), "--steps", "1"]) == 0
    own, given = identity.read_bytes(), text.read_text()
    others = replace(Identity.from_json(own.decode()), settings={}).to_json()

    def records() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in run.iterdir() if path.suffix in (".json", ".yaml", ".jsonl")}

    identity.unlink()
    text.write_text(given.replace("turbines", "turbinas"))
    for _ in range(2):
        before = records()
        capsys.readouterr()
        assert main(["resume", str(run), "--steps", "2"]) == 2
        assert "at a place in other data" in capsys.readouterr().err
        assert records() == before
        identity.write_text(others)
    text.write_text(given)
    assert main(["resume", str(run), "--steps", "2"]) == 0
    assert f"{identity} is of other data than the run's last commit" in caplog.text
    assert main(["verify", str(run)]) == 0


def test_a_run_goes_on_with_its_moments_in_another_form(
    config: Path, a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once. Where the new state was not put in its place to the end, the next start does that, and no other
    command touches it."""
    run = a_run

    def resumed(*words: str) -> list[str]:
        caplog.clear()
        assert main(["resume", str(run), *words]) == 0
        return [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]

    (said,) = resumed("--steps", "4", "--optimizer.moments", "int8")
    assert "moments are converted from fp32 to int8, " in said
    assert settings.load(run / "config.yaml").optimizer.moments == "int8"
    assert resumed("--steps", "5") == []
    hook = Nth(0, error(errno.EIO), lambda call: call.name == "rename" and "penstock.store.next/" in call.path)
    with intercepted(run, hook):
        assert main(["resume", str(run), "--steps", "6", "--optimizer.moments", "fp32"]) == 1
    for words in (["verify", str(run)], ["export", str(run), str(tmp_path / "out")], ["train", str(config)]):
        capsys.readouterr()
        assert main(words) != 0
        assert "go on with" in capsys.readouterr().err
    assert resumed("--steps", "6", "--optimizer.moments", "fp32") == []
    assert [step for step, *_ in _numbers(run)] == [1, 2, 3, 4, 5, 6]
    assert main(["verify", str(run)]) == 0


def test_what_ranks_have_converted_is_put_in_its_place_for_all_of_them_by_whoever_starts_their_run(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by another number of ranks, which is refused then; until then no other command touches it."""
    assert main(["reshard", str(a_run), "--ranks", "2", "--strands", "2"]) == 0
    stores = [[a_run / "store" / f"rank-{rank}"] for rank in range(2)]
    for (path,) in stores:
        shutil.copytree(path, successor.staged([path])[0])
    successor.decide(stores[0][0])

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) != 0
        return capsys.readouterr().err

    for words in (["verify", str(a_run)], ["export", str(a_run), "out"], ["reshard", str(a_run), "--ranks", "1"]):
        assert "rank-0: penstock was stopped as it put the converted state in its place" in refused(*words)
    assert "has the state of 2 ranks: this is one process" in refused("resume", str(a_run))
    assert {item.name for (path,) in stores for item in path.iterdir()} <= {*BESIDE, LOCK, DATA}
    assert main(["verify", str(a_run)]) == 0


@pytest.mark.parametrize("words", [["resume"], ["train", "--overwrite"]])
def test_a_run_that_is_under_way_is_refused_and_not_touched(
    words: list[str], config: Path, a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run
    names = ("config.yaml", "metrics.jsonl", "data.json", "trace.json")
    before = {name: (run / name).read_bytes() for name in names}
    (prepared,) = (run / "data").glob("*/train-0.tokens")
    text = np.memmap(prepared, dtype="<u2", mode="r")
    tokens = np.array(text)
    target = [str(run), "--steps", "4"] if words == ["resume"] else [str(config)]
    with Store.open([run / "store"]):
        assert main([words[0], *target, *words[1:]]) == 1
    assert "is in use by process" in capsys.readouterr().err
    assert {name: (run / name).read_bytes() for name in names} == before
    assert np.array_equal(text, tokens), "the text that the run under way has mapped"


def test_metrics_hold_each_step_once_and_in_order_after_a_kill(config: Path, tmp_path: Path, whole_run: Path) -> None:
    """What was reported and not durable is done again; a kill may also tear the last line."""
    assert main(["train", str(config), "--steps", "2"]) == 0
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    later = json.dumps(json.loads(lines[1]) | {"step": 3, "loss": 99.0})
    path.write_text("\n".join([*lines, later, later[:40]]))
    assert main(["resume", str(tmp_path / "run"), "--steps", "4"]) == 0
    assert _numbers(tmp_path / "run") == _numbers(whole_run)
    assert not list((tmp_path / "run").glob("*.partial"))


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went on after two steps, and has done three. Copy it; it is shared."""
    folder = tmp_path_factory.mktemp("on")
    assert main(["train", str(write_run(folder)), "--steps", "2"]) == 0
    assert main(["resume", str(folder / "run"), "--steps", "3"]) == 0
    return folder / "run"


@pytest.mark.parametrize(("kept", "gone"), [(0, 2), (1, 1)])
def test_lines_of_metrics_that_are_gone_are_said_to_be(
    kept: int, gone: int, gone_on: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But for that of the last step, which is made again of its commit, also where it was cut. The commit has no
    line of those before the run went on, which are flushed by then."""
    run = Path(shutil.copytree(gone_on, tmp_path / "run"))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:kept]) + lines[kept][:40] * kept)
    caplog.clear()
    assert main(["resume", str(run), "--steps", "4"]) == 0
    (said,) = [message for message in caplog.messages if "metrics.jsonl" in message]
    assert f"lacks the lines of {gone} of the 3 steps that are done" in said


KILLED = """
import os, signal, sys
from penstock.cli import account, main

class Killed(account.MetricsFile):
    def write(self, metrics):
        if metrics["step"] == 3 and sys.argv[1] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(metrics)
        if metrics["step"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

account.MetricsFile = Killed
main(sys.argv[2:])
"""


_UNKNOWN = {"mfu", "share_of_product", "gb_per_second", "share_of_peak", "held_up_seconds", "planned_peak_bytes"}
_UNKNOWN |= {"disk_bytes", "predicted_seconds", "seconds_left", "drive_days"}
_UNKNOWN |= {"bytes_written", "bytes_moved", "lane_seconds", "peak_bytes"}
"""Keys of a step's line that cannot be made again of its commit."""


@pytest.mark.parametrize(("moment", "delay"), [("before", "0"), ("after", "0.5")])
def test_a_run_killed_around_a_line_of_its_metrics_has_them_all_in_the_end(
    moment: str, delay: str, config: Path, tmp_path: Path, whole_run: Path
) -> None:
    """Before it, the step may be durable and its line not there; after it, with a delay, the other way round. The step
    is the one that is clipped, and run twice."""
    whole = _numbers(whole_run)
    killed = warm.run(["-c", KILLED, moment, "train", config, "--delay", delay])
    assert killed.returncode == -signal.SIGKILL
    assert len(_numbers(tmp_path / "run")) == (2 if moment == "before" else 3)
    if delay == "0":
        words = ["--steps", "3", "--evaluate", "null"]  # as it would be after the last step
        assert main(["resume", str(tmp_path / "run"), *words]) == 0, "the step that the kill came after is done"
        assert _numbers(tmp_path / "run") == whole[:3]
        first, _, made = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        of_step = json.loads((whole_run / "metrics.jsonl").read_text().splitlines()[2])
        assert (of_step["clipped"], of_step["repeats"]) == (True, 1)
        assert first.keys() - made.keys() == _UNKNOWN, "what docs/training.md says that such a line lacks"
        exact = {"data_tokens", "loss_tokens", "data_passes", "truncated_tokens", "flops", "tokens"}
        exact |= {"steps_clipped", "steps_skipped", "steps_repeated", "clipped", "skipped", "repeats"}
        assert {key: made[key] for key in exact} == {key: of_step[key] for key in exact}
    assert main(["resume", str(tmp_path / "run"), "--steps", "4", "--evaluate", "{every: 2, batches: 1}"]) == 0
    assert _numbers(tmp_path / "run") == whole


@pytest.mark.parametrize("last", [2, 4])
def test_a_run_stopped_before_an_evaluation_makes_up_for_it(
    last: int, config: Path, tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = Account.stepped

    def stopping(self: Account, stats: StepStats, state: int, on_disk: int) -> None:
        stepped(self, stats, state, on_disk)
        if stats.step == last:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Account, "stepped", stopping)
        assert main(["train", str(config)]) == 128 + signal.SIGTERM
    assert _numbers(tmp_path / "run")[-1][-1] is None
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert _numbers(tmp_path / "run") == _numbers(whole_run)


def test_metrics_that_are_kept_are_the_same_bytes_in_the_same_file(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as metrics:
        metrics.write({"step": 1, "loss": 1.0, "seconds": 1.0, "tokens": 1})
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes(), path.stat().st_ino
    MetricsFile(tmp_path, done=1).close()
    assert (path.read_bytes(), path.stat().st_ino) == before
    MetricsFile(tmp_path, done=0).close()
    assert path.read_bytes() == b""


def test_metrics_that_cannot_be_read_are_dropped_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A power cut can leave a block of zeros where lines were."""
    good = [json.dumps({"step": step, "loss": 1.0, "seconds": 1.0, "tokens": 1}) for step in (1, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([good[0], "\0" * 100, good[1], ""]))
    MetricsFile(tmp_path, done=3).close()
    assert path.read_text().splitlines() == good
    assert caplog.messages == [f"{path}: lines that cannot be read are dropped: 1"]
