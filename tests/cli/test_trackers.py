"""Trackers: what ``report_to`` names gets every step's numbers, goes on with the same run, and cannot end it."""

import json
import logging
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cli.trackers import tracking
from penstock.cli.trackers.tracking import Trackers, named, start_trackers
from penstock.errors import ConfigError
from tests.runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of two steps in two stretches, in the place of another run. All trackers have it;
    nothing goes to a network."""
    folder = tmp_path_factory.mktemp("tracked")
    words, resumed = ["train", str(write_run(folder))], ["resume", str(folder / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{folder}/mlruns")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its databases need more than mlflow-skinny
        assert main([*words, "--steps", "1", "--report_to", "tensorboard"]) == 0
        assert main([*words, "--steps", "1", "--report_to", "[tensorboard, mlflow, wandb]", "--overwrite"]) == 0
        assert main([*resumed, "--steps", "2"]) == 0
        yield folder / "run"


def _metrics(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def _assert_logged(found: Mapping[tuple[str, int], float], run: Path) -> None:
    """Losses, rates and what the machine did, of every step and as the metrics have them."""
    for step, line in _metrics(run).items():
        assert found["train/loss", step] == pytest.approx(line["loss"], rel=1e-6)
        assert found["train/learning_rate", step] == pytest.approx(line["lr"], rel=1e-6)
        assert found["system/bytes_moved/read", step] == pytest.approx(line["bytes_moved"]["read"], rel=1e-6)
        assert (("eval/loss", step) in found) == ("validation_loss" in line)


def _from_tensorboard(run: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert "settings/text_summary" in events.Tags()["tensors"]
    return {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def test_tensorboard_has_every_step_also_of_a_resumed_run(tracked: Path) -> None:
    assert set(_metrics(tracked)) == {1, 2}
    _assert_logged(_from_tensorboard(tracked), tracked)
    assert len(list((tracked / "tensorboard").iterdir())) == 2, "one of each stretch: an earlier run's is gone with it"


def test_steps_that_a_kill_has_undone_are_not_shown(tmp_path: Path) -> None:
    """Three were logged when it was killed, and the last commit was that of the first."""
    for done, values in ((0, [1.0, 2.0, 3.0]), (1, [20.0])):
        trackers = start_trackers(["tensorboard"], tmp_path, {"seed": 0}, done=done)
        for step, loss in enumerate(values, start=done + 1):
            trackers.log(step, {"loss": loss})
        trackers.close("failed")
    assert _from_tensorboard(tmp_path) == {("train/loss", 1): 1.0, ("train/loss", 2): 20.0}


def test_mlflow_has_every_step_in_one_run_that_says_how_it_ended(tracked: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("penstock")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["optimizer.lr"] == "0.003"
    found = {
        (key, m.step): m.value for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key)
    }
    _assert_logged(found, tracked)


def test_wandb_has_every_step_and_goes_on_under_its_id(tracked: Path) -> None:
    ids = json.loads((tracked / "trackers.json").read_text())
    stretches = sorted((tracked / "wandb").glob("offline-run-*"))
    assert [folder.name.rsplit("-", 1)[1] for folder in stretches] == [ids["wandb"]] * 2
    _assert_logged(dict(_from_wandb(stretches)), tracked)


def _from_wandb(folders: list[Path]) -> Iterator[tuple[tuple[str, int], float]]:
    """What offline runs hold for the next ``wandb sync``."""
    from wandb.proto import wandb_internal_pb2

    for folder in folders:
        for data in _records(next(folder.glob("*.wandb")).read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for key, value in values.items():
                if key.startswith(("train/", "eval/", "system/")):
                    yield (key, values["_step"]), value


def _records(file: bytes) -> Iterator[bytes]:
    """The records of a log as LevelDB has it: blocks of 32 KiB, in which each piece of a record has a head of checksum,
    length and kind (1: whole, 2: first, 3: middle, 4: last). The file's own head is the first 7 bytes of a block."""
    record, at = b"", 7
    while at + 7 <= len(file):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", file, at + 4)
        record += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


class _Failing:
    """Breaks in its second step."""

    def __init__(self) -> None:
        self.logged = 0

    def start(self, run: tracking.Tracked) -> str:
        return "x"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged += 1
        if self.logged == 2:
            raise ConnectionError("the server is gone")

    def close(self, ending: tracking.Ending) -> None:
        raise AssertionError("it has failed before")


def test_a_tracker_that_fails_is_said_once_and_training_goes_on(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = _Failing()
    monkeypatch.setitem(tracking.ADAPTERS, "wandb", lambda: failing)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        assert main(["train", str(path), "--steps", "3", "--report_to", "[wandb, tensorboard]"]) == 0
    said = [message for message in caplog.messages if "wandb" in message]
    assert said == ["wandb failed, and the run no longer logs to it: the server is gone. Training goes on"]
    assert failing.logged == 2
    _assert_logged(_from_tensorboard(tmp_path / "run"), tmp_path / "run")


def test_a_tracker_that_cannot_start_is_refused_before_the_run(
    path: Path, a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(_Failing):
        def start(self, run: tracking.Tracked) -> str:
            raise ConnectionError("no such server")

    monkeypatch.setitem(tracking.ADAPTERS, "mlflow", Refusing)  # type: ignore[attr-defined]
    assert main(["train", str(path), "--run", str(tmp_path / "new"), "--report_to", "mlflow"]) == 2
    assert "report_to: mlflow cannot start: no such server" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    before = (a_run / "config.yaml").read_bytes()
    assert main(["resume", str(a_run), "--steps", "4", "--report_to", "mlflow"]) == 2
    assert (a_run / "config.yaml").read_bytes() == before, "a run that is refused keeps its settings"


def test_a_tracker_without_its_package_is_refused_at_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # type: ignore[arg-type]
    assert main(["train", str(path), "--report_to", "mlflow"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "report_to: mlflow needs the package mlflow, which is not installed: pip install mlflow" in said.err
    assert not (tmp_path / "run").exists()


def test_numbers_have_the_names_that_hugging_face_gives_them() -> None:
    line = {"step": 3, "loss": 1.5, "lr": 0.1, "validation_loss": 2, "mfu": None, "clipped": True, "a": {"read": 7}}
    assert dict(named(line)) == {
        "train/loss": 1.5,
        "train/learning_rate": 0.1,
        "eval/loss": 2.0,
        "system/clipped": 1.0,
        "system/a/read": 7.0,
    }


def test_no_tracker_leaves_nothing(tmp_path: Path) -> None:
    trackers = start_trackers((), tmp_path, {}, done=0)
    trackers.log(1, {"loss": 1.0})
    trackers.close("done")
    assert trackers == Trackers()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"wandb": 1}'])
def test_names_of_a_run_that_cannot_be_read_are_said_to_be(tmp_path: Path, text: str) -> None:
    (tmp_path / "trackers.json").write_text(text)
    with pytest.raises(ConfigError, match=r"trackers\.json, which says what trackers call the run, cannot be read: "):
        start_trackers([], tmp_path, {}, done=0)
