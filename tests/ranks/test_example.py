"""The example, as torchrun starts it; and torchrun itself: who is killed is started again, and all go on."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import penstock
from penstock.errors import ConfigError
from tests import warm
from tests.patience import PATIENCE
from tests.ranks.launched import Launched
from tests.warm_shell import commands

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_example_runs_and_goes_on(tmp_path: Path) -> None:
    for steps, done in (("1", [1]), ("2", [2])):
        words = [ROOT / "examples" / "ranks.py", "--disk", "run", "--steps", steps]
        (code, said, errors), (other, quiet, _) = Launched(2, words, tmp_path).outcomes()
        assert (code, other, quiet) == (0, 0, ""), errors
        assert [int(step) for step in re.findall(r"^step (\d+)", said, re.MULTILINE)] == done


def test_a_rank_that_is_killed_is_started_again_and_all_go_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "wait").touch()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--max-restarts", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # torchrun leaves its folder of logs there
    with (
        TemporaryDirectory() as folder,
        commands(Path(folder)) as place,  # with the python that the ranks are started by
        warm.start(
            [*torchrun, "--no-python", place / "python", "tests/ranks/restarted.py", disk, "4"],
            cwd=ROOT,
            env=environment,
        ) as run,
    ):
        while not ((disk / "two-0").exists() and (disk / "two-1").exists()):
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        workers = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True)
        os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
        (disk / "wait").unlink()
        said, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, errors
    assert said.splitlines() == ["step 1", "step 2", "step 3", "step 4"]


def test_who_was_not_started_by_torchrun_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK is not set: start this with torchrun --nproc-per-node N"):
        penstock.torchrun_mesh()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "first", "RANK='first' in the environment is not a number from 0 to 1: leave it to torchrun"),
        ("RANK", "2", "RANK='2' in the environment is not a number from 0 to 1"),  # it would be waited for
        ("WORLD_SIZE", "0", "WORLD_SIZE='0' in the environment is not a number from 1: leave it to torchrun"),
        ("LOCAL_WORLD_SIZE", "", "LOCAL_WORLD_SIZE='' in the environment is not a number from 1 to 2"),
        ("MASTER_PORT", "99999", "MASTER_PORT='99999' in the environment is not a number from 1 to 65535"),
    ],
)
def test_what_torchrun_does_not_set_is_told(name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for key, text in (given | {name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        penstock.torchrun_mesh("cpu")
