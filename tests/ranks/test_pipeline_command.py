"""``penstock train`` with ``pipeline``: from one command, killed and gone on with, the numbers of one process; what is
not for a pipeline is refused by name before anything is read."""

import filecmp
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.hardware.machine import Network
from penstock.hardware.profiles import save_profile
from penstock.report.prediction import read_prediction
from tests import warm
from tests.machines import measured_here
from tests.patience import PATIENCE
from tests.questions import DRIVE, MACHINE
from tests.ranks.launched import Launched, launched
from tests.ranks.test_command import IN_MEMORY, OFTEN, STOPPED, lines, numbers, penstock, trained
from tests.runs import settings_for
from tests.runs import write_run_of_three_blocks as write_run

BATCH = ("--batch.sequences", "8")
MORE = (*BATCH, "--evaluate", "null")
"""What pipelines evaluate those beside each other compare."""
PIPELINE = ("--pipeline", "2")


def refused(folder: Path, *words: str) -> str:
    done = warm.run(["-m", "penstock", *words], cwd=folder, timeout=PATIENCE)
    assert done.returncode == 2
    return done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of one process."""
    folder = tmp_path_factory.mktemp("alone")
    penstock(folder, "train", write_run(folder), *MORE)
    penstock(folder, "export", "run", "out")
    return folder


def same_export(one: Path, other: Path) -> None:
    names = sorted(path.name for path in (one / "out").iterdir())
    assert filecmp.cmpfiles(one / "out", other / "out", names, shallow=False) == (names, [], [])


def test_a_pipeline_does_what_one_process_does_and_goes_on(alone: Path, tmp_path: Path) -> None:
    """It is asked to end, and does so after a step; one rank is killed within one; then it goes on to its end, in turn,
    or as one process does. Others than began it are refused, and told what to do."""
    write_run(tmp_path, run=tmp_path / "run")
    begin = ["train", "config.yaml", *MORE, *PIPELINE]
    ended = Launched(2, ["-c", STOPPED, *begin], tmp_path).outcomes()
    assert [code for code, _, _ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert "Stopped after step 1 of 4" in ended[0][1]
    shares = refused(tmp_path, "resume", "run")
    assert "pipeline=2 is of several processes, and this is one: start them with torchrun" in shares
    assert "has the state of a pipeline of 2 ranks: this is one" in refused(
        tmp_path, "resume", "run", "--pipeline", "1"
    )
    for code, _, errors in launched(2, ["resume", "run", "--pipeline", "1"], tmp_path):
        assert code in (1, 2)
        assert "has the state of a pipeline of 2 ranks: this is 2 ranks. Go on as it began: torchrun" in errors
        assert "--pipeline 2, or cut it for these: penstock reshard" in errors
    killed, (code, _, errors) = Launched(2, ["-c", STOPPED, "resume", "run"], tmp_path).outcomes()
    assert (killed[0], code) == (-signal.SIGKILL, 1)
    assert "penstock, rank 1: rank 0 was killed" in errors
    shutil.copytree(tmp_path, tmp_path / "copy")
    again = [*begin, "--schedule", "zero-bubble", "--resume"]
    (code, said, errors), (other, quiet, _) = launched(2, again, tmp_path)
    assert (code, other, quiet) == (0, 0, ""), errors
    assert "to 2 ranks; what follows is of the first" in said
    assert "Every checksum is right." in penstock(tmp_path, "verify", "run")
    penstock(tmp_path, "report", "run")
    assert "rank 0 of a pipeline of 2" in (tmp_path / "run" / "report.html").read_text()
    copy = tmp_path / "copy"
    penstock(copy, "reshard", "run", "--ranks", "1")
    cut = penstock(copy, "reshard", "run", "--ranks", "3", "--pipeline")
    assert "goes on with a pipeline of 3 ranks: torchrun --nproc-per-node 3" in cut
    penstock(copy, "reshard", "run", "--ranks", "1")
    penstock(copy, "resume", "run")
    for folder in (tmp_path, copy):
        assert numbers(folder / "run") == numbers(alone / "run")
        penstock(folder, "export", "run", "out")
        same_export(alone, folder)
    state = {line["disk_bytes"] for line in lines(tmp_path / "run")}
    assert state == {line["disk_bytes"] for line in lines(alone / "run")}


@pytest.mark.campaign
def test_a_pipeline_without_a_disk_goes_on_from_its_snapshot_and_so_does_one_process(
    alone: Path, tmp_path: Path
) -> None:
    write_run(tmp_path, run=tmp_path / "run")
    words = ["train", "config.yaml", *MORE, *PIPELINE, *IN_MEMORY]
    (code, _, errors), killed = Launched(2, ["-c", OFTEN, *words], tmp_path).outcomes()
    assert (code, killed[0]) == (1, -signal.SIGKILL)
    assert "penstock, rank 0: rank 1 was killed" in errors
    assert [path.name for path in (tmp_path / "run").glob("snapshot-*")] == ["snapshot-2"]
    shutil.copytree(tmp_path, tmp_path / "copy")
    trained(2, tmp_path, *words, "--resume")
    penstock(tmp_path / "copy", "resume", "run", "--pipeline", "1")
    for folder in (tmp_path, tmp_path / "copy"):
        assert numbers(folder / "run") == numbers(alone / "run")
        penstock(folder, "export", "run", "out")
        same_export(alone, folder)


ON_THE_HOST = ("--budget.weights", "host", "--budget.state", "host", "--budget.host", "64MiB")
SETTINGS: dict[str, tuple[str, ...]] = {
    "commits now and then": ("--budget.durability", "interval", "--budget.interval", "2", *ON_THE_HOST),
    "delay": ("--delay", "0.5"),
    "in loops, depth first": ("--schedule", "interleaved-1f1b"),
    "split backwards": ("--schedule", "zero-bubble"),
    "early": ("--speculate", "true"),
    "bf16": ("--precision", "bf16", "--grad_dtype", "bf16"),
    "strands": ("--strands", "4"),
    "muon": ("--optimizer", "{name: muon, lr: 3e-3, adamw: {lr: 3e-3}}"),
    "moments": ("--optimizer.moments", "int8"),
    "pieces": ("--mlp_tile", "8", "--attention_heads", "1", "--loss_tile", "16"),
    "whole logits": ("--loss_tile", "null"),
    "compiled": ("--compile", "true"),
    "documents apart": ("--data.packing", "true"),
    "padded": ("--data.packing", "false"),
    "the cut is the plan's": ("--micro_batch_size", "null"),
    "one slot": ("--budget.slots", "1"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_a_run_are_those_of_one_process(what: str, tmp_path: Path) -> None:
    found = []
    for name, words in (("one", ()), ("pipeline", PIPELINE)):
        write_run(tmp_path, run=tmp_path / name)
        if words:
            trained(2, tmp_path, "train", "config.yaml", *MORE, *SETTINGS[what], *words)
        else:
            own = () if "--schedule" in SETTINGS[what] else SETTINGS[what]  # one process has no such order
            penstock(tmp_path, "train", "config.yaml", *MORE, *own)
        penstock(tmp_path, "export", name, f"{name}-out")
        found.append(numbers(tmp_path / name))
    assert found[0] == found[1]
    names = sorted(path.name for path in (tmp_path / "one-out").iterdir())
    same = filecmp.cmpfiles(tmp_path / "one-out", tmp_path / "pipeline-out", names, shallow=False)
    assert same == (names, [], [])


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", ["zero-bubble", "1f1b"])
def test_a_pipeline_in_turn_does_what_one_process_does_and_is_cut_as_it_needs(
    schedule: str, alone: Path, tmp_path: Path
) -> None:
    """Its stores can be cut for one process, which goes on above, and those of one process for it."""
    write_run(tmp_path, run=tmp_path / "run")
    words = [*MORE, *PIPELINE, "--schedule", schedule]
    ended = Launched(2, ["-c", STOPPED, "train", "config.yaml", *words], tmp_path).outcomes()
    assert [code for code, _, _ in ended] == [128 + signal.SIGTERM] * 2, ended
    for ranks in ("3", "1", "2"):
        penstock(tmp_path, "reshard", "run", "--ranks", ranks, *(["--pipeline"] if ranks != "1" else []))
    trained(2, tmp_path, "resume", "run")
    assert numbers(tmp_path / "run") == numbers(alone / "run")
    penstock(tmp_path, "export", "run", "out")
    same_export(alone, tmp_path)


@pytest.mark.parametrize(
    "schedule", ["zero-bubble", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("vertical", "1f1b"))]
)
def test_a_run_is_predicted_and_has_the_same_numbers(
    schedule: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned for a machine, by the simulation of all ranks' steps; of which the report has the first rank's. What is
    predicted of the others' orders is in ``test_prediction``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drive = replace(DRIVE, path=str(tmp_path))
    save_profile(measured_here(replace(MACHINE, drives=(drive,), network=Network(bandwidth=1e8, latency=1e-4))))
    write_run(tmp_path, run=tmp_path / "run")
    words = ["train", "config.yaml", *MORE, *PIPELINE, "--plan", "auto", "--schedule", schedule]
    (code, said, errors), (other, _, _) = launched(2, words, tmp_path)
    assert (code, other) == (0, 0), errors
    assert "a step predicted" in said
    assert numbers(tmp_path / "run") == numbers(alone / "run")
    prediction = read_prediction(tmp_path / "run" / "prediction.json")
    assert prediction is not None
    last = lines(tmp_path / "run")[-1]
    assert last["bytes_moved"]["send"] == (1 + last["repeats"]) * prediction.bytes_per_lane["send"] > 0
    penstock(tmp_path, "report", "run")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"pipeline": 0}, "pipeline=0: must be at least 1"),
    "copies": ({"copies": 2}, "a pipeline has one copy of the state"),
    "stage": ({"stage": 0}, "stage=0 is not for the ranks of a pipeline"),
    "buffers": ({"sync_buffers": "mean"}, "sync_buffers='mean' is not for the ranks of a pipeline"),
    "horizontal": ({"schedule": "horizontal"}, "schedule='horizontal' is not for the ranks of a pipeline"),
    "own schedule": ({"schedule": Path("own.txt")}, "a schedule of your own"),
    "replan": ({"replan": True}, "replan=True is not for the ranks of a pipeline"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_a_pipeline_has_no_use_for_are_refused_by_name(what: str, tmp_path: Path) -> None:
    changes, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        settings_for(tmp_path / "run", **{"pipeline": 2, **changes})


def test_processes_that_are_no_such_pipeline_are_told_at_once(tmp_path: Path) -> None:
    write_run(tmp_path, run=tmp_path / "run")
    said = "start them with torchrun --nproc-per-node N, or leave pipeline out"
    assert said in refused(tmp_path, "train", "config.yaml", *PIPELINE)
    for code, _, errors in launched(2, ["train", "config.yaml", "--pipeline", "3"], tmp_path):
        assert code == 2
        assert "pipeline=3: 2 ranks cannot be pipelines of as many each: start a multiple of 3" in errors
    assert not (tmp_path / "run").exists()


def test_pipelines_beside_each_other_do_what_one_process_does_and_go_on(tmp_path: Path) -> None:
    """Two of two ranks, gone on with; and cut for one process, which goes on from there. ``test_beside`` kills one."""
    (tmp_path / "alone").mkdir()
    more = (*BATCH, "--evaluate.every", "1")
    penstock(tmp_path / "alone", "train", write_run(tmp_path / "alone"), *more, "--strands", "2", "--steps", "2")
    penstock(tmp_path / "alone", "export", "run", "out")
    write_run(tmp_path, run=tmp_path / "run")
    begin = ["train", "config.yaml", *more, *PIPELINE]
    trained(4, tmp_path, *begin, "--steps", "1")
    assert "has the state of 2 pipelines of 2 ranks: this is one" in refused(
        tmp_path, "resume", "run", "--pipeline", "1"
    )
    for code, _, errors in launched(2, ["resume", "run"], tmp_path):
        assert code in (1, 2)
        assert "has the state of 2 pipelines of 2 ranks: this is a pipeline of 2 ranks. Go on as it began" in errors
    shutil.copytree(tmp_path, tmp_path / "copy")
    trained(4, tmp_path, "resume", "run", "--steps", "2")
    assert "Every checksum is right." in penstock(tmp_path, "verify", "run")
    penstock(tmp_path, "report", "run")
    copy = tmp_path / "copy"
    again = penstock(copy, "reshard", "run", "--ranks", "4", "--pipeline")
    assert "goes on with a pipeline of 4 ranks: torchrun --nproc-per-node 4" in again
    penstock(copy, "reshard", "run", "--ranks", "1")
    penstock(copy, "resume", "run", "--steps", "2")
    for folder in (tmp_path, copy):
        assert numbers(folder / "run") == numbers(tmp_path / "alone" / "run")
    penstock(tmp_path, "export", "run", "out")
    same_export(tmp_path / "alone", tmp_path)
