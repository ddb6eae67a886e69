"""``penstock train`` on several ranks: the numbers of one process, one folder, one story."""

import filecmp
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.patience import PATIENCE, until
from tests.ranks.launched import Launched, launched
from tests.runs import write_run_of_three_blocks as write_run

STRANDS = ("--strands", "2", "--batch.sequences", "8")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run: Path) -> list[Any]:
    """What no number of ranks changes."""
    keys = ("step", "loss", "grad_norm", "validation_loss", "data_tokens", "loss_tokens", "lr", "clipped")
    return [[line.get(key) for key in keys] for line in lines(run)]


def penstock(folder: Path, *words: str | Path) -> str:
    done = warm.run(["-m", "penstock", *words], cwd=folder, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(size: int, folder: Path, *words: str) -> None:
    for code, _, errors in launched(size, words, folder):
        assert code == 0, errors


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of one process."""
    folder = tmp_path_factory.mktemp("alone")
    penstock(folder, "train", write_run(folder), *STRANDS)
    penstock(folder, "export", "run", "out")
    return folder


STOPPED = """
import os, signal, sys
from penstock.cli import main
from penstock.engine.engine import Engine
step = Engine.step
def stopped(engine, *args, **given):
    if (engine.step_count, os.environ["RANK"]) in ((0, "1"), (2, "0")):
        os.kill(os.getpid(), signal.SIGTERM if engine.step_count == 0 else signal.SIGKILL)
    return step(engine, *args, **given)
Engine.step = stopped
sys.exit(main())
"""


def test_two_ranks_do_what_one_process_does_and_go_on(alone: Path, tmp_path: Path) -> None:
    """One of them is asked to end, and both do after the same step; one is killed in a step, and the other says so."""
    write_run(tmp_path, run=tmp_path / "run")
    ended = Launched(2, ["-c", STOPPED, "train", "config.yaml", *STRANDS], tmp_path).outcomes()
    assert [code for code, _, _ in ended] == [128 + signal.SIGTERM] * 2
    assert "Stopped after step 1 of 4" in ended[0][1]
    assert "torchrun --nproc-per-node 2 -m penstock resume" in ended[0][1]
    refused = warm.run(["-m", "penstock", "resume", "run"], cwd=tmp_path, timeout=PATIENCE)
    assert refused.returncode == 2
    assert "has the state of 2 ranks" in refused.stderr
    killed, (code, _, errors) = Launched(2, ["-c", STOPPED, "resume", "run"], tmp_path).outcomes()
    assert (killed[0], code) == (-signal.SIGKILL, 1)
    assert "penstock, rank 1: rank 0 was killed" in errors
    (code, said, errors), (other, quiet, _) = launched(2, ["train", "config.yaml", *STRANDS, "--resume"], tmp_path)
    assert (code, other, quiet) == (0, 0, ""), errors
    assert "to 2 ranks; what follows is of the first" in said
    assert numbers(tmp_path / "run") == numbers(alone / "run")
    penstock(tmp_path, "export", "run", "out")
    names = sorted(path.name for path in (alone / "out").iterdir())
    assert filecmp.cmpfiles(alone / "out", tmp_path / "out", names, shallow=False) == (names, [], [])
    assert "Every checksum is right." in penstock(tmp_path, "verify", "run")
    penstock(tmp_path, "report", "run")
    assert "rank 0 of 2" in (tmp_path / "run" / "report.html").read_text()


def test_ranks_that_share_each_sequence_do_what_one_process_does(alone: Path, tmp_path: Path) -> None:
    """All are dealt the same micro-batches, of which the largest that fit are found for a span of the tokens."""
    config = write_run(tmp_path, run=tmp_path / "run")
    trained(2, tmp_path, "train", str(config), *STRANDS, "--cp", "2", "--micro_batch_size", "null")
    found, wanted = lines(tmp_path / "run"), lines(alone / "run")
    for key in ("loss", "grad_norm", "validation_loss"):
        of_all = [line[key] for line in wanted if line.get(key) is not None]
        assert [line[key] for line in found if line.get(key) is not None] == pytest.approx(of_all, rel=1e-4), key
    for key in ("data_tokens", "loss_tokens"):
        assert [line[key] for line in found] == [line[key] for line in wanted]


@pytest.mark.campaign
def test_ranks_that_each_have_all_of_the_state_do_the_same(alone: Path, tmp_path: Path) -> None:
    """Any of their stores has it: one whose drive is damaged is named."""
    write_run(tmp_path, run=tmp_path / "run")
    words = ["train", "config.yaml", *STRANDS, "--stage", "0", "--delay", "0"]
    ended = Launched(2, ["-c", STOPPED, *words], tmp_path).outcomes()
    assert [code for code, _, _ in ended] == [128 + signal.SIGTERM] * 2
    for code, _, errors in launched(2, ["train", "config.yaml", *STRANDS, "--stage", "3", "--resume"], tmp_path):
        assert code in (1, 2)
        assert "has all of the state" in errors
        assert "with stage=0 if it had that" in errors
    killed, (code, _, errors) = Launched(2, ["-c", STOPPED, "resume", "run"], tmp_path).outcomes()
    assert (killed[0], code) == (-signal.SIGKILL, 1)
    assert "Every checksum is right." in penstock(tmp_path, "verify", "run")
    store = tmp_path / "run" / "store" / "rank-1" / "penstock.store"
    shutil.copy(store, tmp_path / "whole")
    store.write_bytes(bytes(byte ^ 1 for byte in store.read_bytes()))
    damaged = warm.run(["-m", "penstock", "verify", "run"], cwd=tmp_path, timeout=PATIENCE)
    assert damaged.returncode != 0
    assert "rank-1" in damaged.stdout + damaged.stderr
    shutil.copy(tmp_path / "whole", store)
    penstock(tmp_path, "reshard", "run", "--ranks", "1")
    penstock(tmp_path, "reshard", "run", "--ranks", "2")
    assert "Every checksum is right." in penstock(tmp_path, "verify", "run")
    trained(2, tmp_path, "resume", "run")
    assert numbers(tmp_path / "run") == numbers(alone / "run")
    penstock(tmp_path, "export", "run", "out")
    names = sorted(path.name for path in (alone / "out").iterdir())
    assert filecmp.cmpfiles(alone / "out", tmp_path / "out", names, shallow=False) == (names, [], [])


MISSING = """
import os, sys
from penstock.cli import main
sys.exit(3 if os.environ["RANK"] == "1" else main())
"""


def test_who_is_missing_is_said_when_torchrun_ends_those_that_wait(tmp_path: Path) -> None:
    write_run(tmp_path, run=tmp_path / "run")
    world = Launched(2, ["-c", MISSING, "train", "config.yaml", *STRANDS], tmp_path)
    until(lambda: world.store.check(["attempt-0/here/0"]))
    world.processes[0].send_signal(signal.SIGTERM)
    since = time.monotonic()
    (code, said, errors), (missing, _, _) = world.outcomes()
    assert time.monotonic() - since < 5
    assert (code, missing, said) == (1, 3, "")
    assert errors == "penstock, rank 0: ended by SIGTERM before all 2 ranks had joined, without rank 1\n"
    assert not (tmp_path / "run").exists()


def test_what_one_rank_finds_wrong_all_say(alone: Path, tmp_path: Path) -> None:
    write_run(tmp_path, run=tmp_path / "run")
    found = launched(2, ["train", "config.yaml", "--batch.sequences", "6"], tmp_path)
    assert [code for code, _, _ in found] == [2, 2]
    for _, _, errors in found:
        said = "3 micro-batches cannot be shared evenly by 2 ranks: give a batch of a multiple of 4 sequences"
        assert f": batch: {said}\n" in errors
    assert not (tmp_path / "run").exists()
    refused = warm.run(["-m", "penstock", "train", "config.yaml", "--strands", "3"], cwd=tmp_path, timeout=PATIENCE)
    assert "strands=3 with 1 rank: must be 1 times a power of two" in refused.stderr
    assert not (tmp_path / "run").exists()
    found = launched(2, ["train", alone / "config.yaml", *STRANDS], tmp_path)
    assert [code for code, _, _ in found] == [2, 1]
    for rank, (_, _, errors) in enumerate(found):
        assert f"penstock, rank {rank}: " in errors
        assert "the folder already holds" in errors
        assert len(errors.splitlines()) == 1


def test_what_a_start_has_made_is_taken_back_by_all(tmp_path: Path) -> None:
    """What does not fit in smaller pieces either is found out when all have their stores."""
    write_run(tmp_path, run=tmp_path / "run")
    words = ["train", "config.yaml", *STRANDS, "--micro_batch_size", "4", "--budget.device", "300KiB"]
    for code, _, errors in launched(2, words, tmp_path):
        assert code == 2
        assert "budget" in errors
    assert not (tmp_path / "run").exists()


IN_MEMORY = ("--budget.disk", "null", "--budget.weights", "host", "--budget.state", "host", "--budget.host", "64MiB")
OFTEN = """
import os, signal, sys
from penstock.cli import main
from penstock.cli.run_snapshots import RunSnapshots
from penstock.engine.engine import Engine
seconds = 1e9 if os.environ["RANK"] == "1" else 1e-9
RunSnapshots.of = staticmethod(lambda _, folder, ranks: RunSnapshots(folder, ranks, seconds=seconds))
step = Engine.step
def stopped(engine, *args, **given):
    if (engine.step_count, os.environ["RANK"]) == (2, "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(engine, *args, **given)
Engine.step = stopped
sys.exit(main())
"""


def test_ranks_without_a_disk_go_on_from_the_snapshot_in_their_runs_folder(alone: Path, tmp_path: Path) -> None:
    """One is killed; the same number of them goes on, and so does one process."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    write_run(tmp_path, run=run)
    words = ["train", "config.yaml", "--batch.sequences", "8", *IN_MEMORY]
    (code, said, errors), killed = Launched(2, ["-c", OFTEN, *words], tmp_path).outcomes()
    assert (code, killed[0]) == (1, -signal.SIGKILL)
    assert "penstock, rank 0: rank 1 was killed" in errors
    assert "a snapshot in the run's folder every 5 min or step" in said
    assert [path.name for path in run.glob("snapshot-*")] == ["snapshot-2"]
    shutil.copytree(run, copy)
    refused = warm.run(["-m", "penstock", "reshard", "run", "--ranks", "1"], cwd=tmp_path, timeout=PATIENCE)
    assert "From its snapshot one process can go on: penstock resume run\n" in refused.stderr
    no_more = (
        "3 ranks cannot share the 4 micro-batches and strands=2 of its steps, which stay as they are. 1 or 2 can: "
    )
    no_more += "torchrun --nproc-per-node 2 -m penstock resume "
    refused = warm.run(["-m", "penstock", "reshard", "run", "--ranks", "3"], cwd=tmp_path, timeout=PATIENCE)
    assert no_more in refused.stderr
    for code, _, errors in launched(3, ["resume", "run", "--strands", "3"], tmp_path):
        assert code in (1, 2)
        assert no_more in errors
    trained(2, tmp_path, *words, "--resume")
    penstock(tmp_path, "resume", "copy")
    for folder in (run, copy):
        assert numbers(folder) == numbers(alone / "run")
        assert [path.name for path in folder.glob("snapshot-*")] == ["snapshot-4"]
        assert "Every checksum is right." in penstock(tmp_path, "verify", folder)
    assert (copy / "snapshot-4" / "snapshot.json").exists()
    penstock(tmp_path, "export", "run", "out")
    names = sorted(path.name for path in (alone / "out").iterdir())
    assert filecmp.cmpfiles(alone / "out", tmp_path / "out", names, shallow=False) == (names, [], [])
    (run / "snapshot-4" / "rank-1" / "penstock.snapshot").unlink()
    damaged = warm.run(["-m", "penstock", "verify", "run"], cwd=tmp_path, timeout=PATIENCE)
    assert damaged.returncode == 1
    assert "rank-1" in damaged.stderr
