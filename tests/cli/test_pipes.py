"""A pipe in place of a file of a run's folder: a command says that it is none, and does not wait for its other end."""

import os
import shutil
import signal
from pathlib import Path
from types import FrameType

import pytest

from penstock.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

_SECONDS = 60


def _waits(signum: int, frame: FrameType | None) -> None:
    raise AssertionError("the command waits for somebody to write into the pipe")


def test_no_command_waits_for_a_pipe_that_lies_in_the_folder_of_a_run(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file, unless nothing depends on that."""
    read = {"metrics.jsonl": ["resume", "report"], "trace.json": ["report"], "prediction.json": ["report"]}
    paths = sorted(path for path in a_run.rglob("*") if path.is_file() and "lock" not in path.name)
    before = signal.signal(signal.SIGALRM, _waits)
    try:
        for name in (path.relative_to(a_run) for path in paths):
            copy = Path(shutil.copytree(a_run, tmp_path / "copy"))
            (copy / name).unlink()
            os.mkfifo(copy / name)
            for command in read.get(name.name, ["verify", "resume"]):
                signal.alarm(_SECONDS)
                code = main([command, str(copy), *(["--steps", "4"] if command == "resume" else [])])
                said = "".join(capsys.readouterr())
                assert name.name == "environment.json" or (code != 0 and name.stem in said), (name, command, said)
            shutil.rmtree(copy)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("size", ["0", "²"])
def test_a_terminal_of_no_size_gets_all_that_is_said(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs set COLUMNS to 0 for a size that they do not know."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, size)
    assert main(["simulate", "1f1b"]) == 0
    assert "1f1b: 4 ranks" in capsys.readouterr().out
