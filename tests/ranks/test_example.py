"""The example under torchrun: it ends, goes on, and starts again after a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def torchrun(disk: Path, steps: int, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *words]
    example = [str(ROOT / "examples" / "ranks.py"), "--disk", str(disk), "--steps", str(steps)]
    environment = {**os.environ, "TMPDIR": str(disk.parent)}  # torchrun leaves its folder of logs there
    return subprocess.Popen(
        [*command, *example], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def losses(said: str) -> dict[int, str]:
    lines = [line.split() for line in said.splitlines() if line.startswith("step ")]
    return {int(words[1].rstrip(":")): words[3] for words in lines}


def test_a_rank_that_is_killed_is_started_again_and_all_go_on(tmp_path: Path) -> None:
    run = torchrun(tmp_path / "run", 5, "--max-restarts", "1")
    assert run.stdout is not None
    first = run.stdout.readline()
    workers = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    try:
        said, errors = run.communicate(timeout=100)
    finally:
        run.terminate()  # which ends its workers
    assert run.returncode == 0, errors
    assert "continuing the store in" in errors
    found = losses(first + said)
    assert sorted(found) == [1, 2, 3, 4, 5]


def test_who_was_not_started_by_torchrun_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK is not set: start this with torchrun --nproc-per-node N"):
        penstock.torchrun_mesh()
