"""Signals to a real ``penstock train``: the first ends it after its step, the second at once; both lose nothing."""

import json
import os
import re
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.engine.engine import Engine
from penstock.state.stats import StepStats
from penstock.store import Store
from tests.conftest import Campaign
from tests.faults import Call, Go, fill, intercepted
from tests.patience import until
from tests.runs import write_run
from tests.victims import Victims, victims_of_one_thread

pytestmark = pytest.mark.usefixtures("one_thread")

SENT: dict[str, tuple[signal.Signals, signal.Signals | None]] = {
    "SIGHUP": (signal.SIGHUP, None),
    "SIGTERM twice": (signal.SIGTERM, signal.SIGTERM),
    "SIGINT": (signal.SIGINT, None),
    "SIGTERM": (signal.SIGTERM, None),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGHUP, then SIGTERM": (signal.SIGHUP, signal.SIGTERM),
}
IN_EVERY_SUITE = ("SIGHUP", "SIGTERM twice")


def _command(words: list[str], folder: Path, ready: Connection) -> None:
    """``penstock WORDS``, with what it says in files. While there is a file ``hold`` no step ends, nor a call on its
    disk that is made during a step; ``held`` is there as soon as such a call waits."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup hand it on ignored
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)

    in_step = False
    whole_step = Engine.step

    def wait(call: Call, go: Go) -> Any:
        while (folder / "hold").exists() and in_step:
            (folder / "held").touch()
            time.sleep(0.005)
        return go()

    def step(*arguments: Any, **more: Any) -> StepStats:
        nonlocal in_step
        in_step = True
        stats = whole_step(*arguments, **more)
        in_step = False
        while (folder / "hold").exists():
            time.sleep(0.005)
        return stats

    with intercepted(folder / "run" / "store", wait), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step)
        ready.send(None)
        sys.exit(main(words))


def _numbers(run: Path) -> list[tuple[Any, ...]]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in lines]


def _settings(folder: Path, run: Path) -> tuple[Path, Path]:
    """A settings file, and the run's folder that it names."""
    return write_run(folder, run=run, lines=400), run


def _check_resumed(config: Path, run: Path, folder: Path) -> None:
    """Two steps more, and every step has its line, with the numbers of a run that was never stopped."""
    with Store.open([run / "store"]) as store:
        last = store.last_commit()
    assert last is not None
    steps = str(last["step"] + 2)
    assert main(["resume", str(run), "--steps", steps]) == 0
    words = [
        "train",
        str(config),
        "--evaluate",
        "null",
        "--data.validation",
        "null",
        "--steps",
        steps,
        "--run",
        str(folder / "whole"),
    ]
    assert main([*words, "--budget.disk", str(folder / "whole" / "store")]) == 0
    assert _numbers(run) == _numbers(folder / "whole")


@pytest.mark.parametrize("sent", SENT)
def test_a_signal_ends_a_run_and_nothing_is_lost(sent: str, tmp_path: Path, campaign: Campaign) -> None:
    if sent not in IN_EVERY_SUITE and not campaign.full:
        pytest.skip("make faults sends it")
    first, second = SENT[sent]
    config, run = _settings(tmp_path, tmp_path / "run")

    def send(pid: int) -> None:
        until(lambda: len(_numbers(run)) >= 2)
        if second is not None:  # in the middle of a step, which cannot end before it
            (tmp_path / "hold").touch()
            until((tmp_path / "held").exists)
        os.kill(pid, first)
        if second is not None:
            until(lambda: "Stopping after this step" in (tmp_path / "err").read_text())
            if signal.SIGHUP in (first, second):  # a terminal that hangs up sends several, which are one request
                time.sleep(1.5)
            os.kill(pid, second)

    words = ["train", str(config), "--evaluate", "null", "--data.validation", "null", "--steps", "1000"]
    with victims_of_one_thread():
        code = Victims("", 0).call(_command, words, tmp_path, meanwhile=send)
    assert code == 128 + (second or first)
    said = (tmp_path / "out").read_text() + (tmp_path / "err").read_text()
    assert "Traceback" not in said
    done = len(_numbers(run))
    with Store.open([run / "store"]) as store:
        last = store.last_commit()
    assert last is not None
    assert done <= last["step"] <= done + 1 if second else last["step"] == done
    assert ("in the middle of a step" if second else f"Stopped after step {done} of 1000") in said

    _check_resumed(config, run, tmp_path)
    campaign.found(f"{sent} after step {done}: exit code {code}, resumed after step {last['step']} bit-equal")


@pytest.mark.parametrize("trace", [0, 1000])
def test_a_run_whose_folder_is_on_a_full_disk_says_so_and_goes_on(
    trace: int, small_disk: Path, tmp_path: Path, campaign: Campaign
) -> None:
    """Its metrics and its trace grow: no step is lost for it, nor a line that a commit holds."""
    if trace and not campaign.full:
        pytest.skip("make faults does it")
    config, run = _settings(tmp_path, small_disk / "run")
    words = [
        "train",
        str(config),
        "--evaluate",
        "null",
        "--data.validation",
        "null",
        "--steps",
        "15",
        "--trace_steps",
        str(trace),
    ]

    def crowd(pid: int) -> None:
        until(lambda: len(_numbers(run)) >= 2)
        fill(small_disk / "hog")

    with victims_of_one_thread():
        code = Victims("", 0).call(_command, words, tmp_path, meanwhile=crowd)
    said = (tmp_path / "err").read_text()
    assert code == 0
    assert "Traceback" not in said
    full = "No space left on device.*free some space"
    assert re.search(rf"training goes on, and its metrics wait in memory: .*{run}/metrics\.jsonl.*{full}", said)
    assert not trace or re.search(
        rf"the trace ends after \d+ steps, and training goes on: .*{run}/trace\.json.*{full}", said
    )
    (small_disk / "hog").unlink()
    _check_resumed(config, run, tmp_path)
    campaign.found(
        f"a full ext4 under a run's own files (trace_steps={trace}): named, and the run ends with all of its steps"
    )
