"""``penstock reshard``: the run goes on with the same bits, and what is interrupted anywhere loses nothing."""

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from penstock.cli import main
from penstock.cli.claim import claimed
from penstock.cli.run_folder import settings_of
from penstock.cli.run_record import Resharding, RunRecord
from penstock.errors import ConfigError
from penstock.state.values import committed
from penstock.store import Layout, Store, packed
from tests import warm
from tests.conftest import Campaign
from tests.patience import PATIENCE
from tests.runs import write_run

STRANDS = ("--strands", "4", "--batch.sequences", "16")
KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.cli import main
from tests.faults import intercepted
last, count = int(sys.argv.pop(1)), 0
def hook(call, go):
    global count
    count += 1
    if count == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return go()
with intercepted(Path("run"), hook):
    code = main()
print("calls", count)
sys.exit(code)
"""

UNEVEN = "8 micro-batches cannot be shared evenly by 3 ranks"
FULL = """
import errno, sys
from pathlib import Path
from penstock.cli import main
from tests.faults import error, intercepted
def hook(call, go):
    return error(errno.ENOSPC)(call, go) if call.name == "posix_fallocate" else go()
with intercepted(Path("run"), hook):
    sys.exit(main())
"""


def penstock(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    with chdir(folder), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def losses(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [[line["step"], line["loss"], line["grad_norm"]] for line in lines]


def parameters(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    disk = folder / "run" / "store"
    with committed([[disk]] if ranks == 1 else [[disk / f"rank-{rank}"] for rank in range(ranks)]) as found:
        assert found.step == 1
        return {name: found.values.parameter(name) for name in found.values.parameters}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one process, in four strands, after one of its steps."""
    folder = tmp_path_factory.mktemp("begun")
    write_run(folder, run=Path("run"))
    done = penstock(folder, "train", "config.yaml", *STRANDS, "--steps", "1")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_is_cut_for_other_ranks_and_back(begun: Path, tmp_path: Path) -> None:
    wanted = parameters(begun, 1)
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    for ranks in (4, 2, 1):
        done = penstock(tmp_path, "reshard", "run", "--ranks", str(ranks))
        assert done.returncode == 0, done.stderr
        assert f"--nproc-per-node {ranks}" in done.stdout or ranks == 1
        found = parameters(tmp_path, ranks)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        names = {f"rank-{rank}" for rank in range(ranks)}
        assert {path.name for path in (tmp_path / "run" / "store").iterdir() if path.is_dir()} == (
            names if ranks > 1 else set()
        )
    shutil.copytree(begun, tmp_path / "other")
    for folder in (tmp_path, tmp_path / "other"):
        done = penstock(folder, "resume", "run", "--steps", "2")
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == losses(tmp_path / "other")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "8"], "strands=4 with 8 ranks: must be 8 times a power of two"),
        (["--ranks", "3", "--strands", "3"], f"batch: {UNEVEN}: give another --ranks, as a run keeps its batch\n"),
        (["--ranks", "0"], "--ranks 0: must be from 1"),
        (["--ranks", "2", "--cp", "4"], "cp=4: 2 ranks cannot share sequences 4 by 4: give --cp 1, or another divisor"),
        (["--undo", "--ranks", "2"], "--undo leaves the run as it was: leave the other options out"),
        ([], "penstock reshard: it needs --ranks. Try: penstock reshard --help"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(begun: Path, words: list[str], said: str) -> None:
    before = (begun / "run" / "run.json").read_bytes()
    done = penstock(begun, "reshard", "run", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert (begun / "run" / "run.json").read_bytes() == before


@pytest.mark.parametrize("copies", [1, 2])
def test_other_ranks_are_told_to_cut_a_run_only_where_it_can_be_cut(begun: Path, copies: int) -> None:
    asked, said = replace(settings_of(begun / "run"), copies=copies), "has the state of one process: this is 4 ranks"
    with pytest.raises(ConfigError, match=said) as refused, claimed(asked, "resume", ranks=4):
        pass
    assert ("or cut it for these: penstock reshard" in str(refused.value)) == (copies == 1)


def test_ranks_of_several_hosts_become_as_many_on_one(begun: Path, tmp_path: Path) -> None:
    """Whose stores have been copied here: on one host ranks may have other directories, and share its drives."""
    wanted = parameters(begun, 1)
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2").returncode == 0
    run = tmp_path / "run"
    record = RunRecord.read(run)
    assert record is not None
    replace(record, hosts=2).write(run)
    done = penstock(tmp_path, "reshard", "run", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert "goes on with 2 ranks: torchrun --nproc-per-node 2" in done.stdout
    assert RunRecord.read(run) == record
    found = parameters(tmp_path, 2)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("setting", ["schedule: horizontal", "sync_buffers: mean"])
def test_settings_that_a_pipeline_cannot_have_are_refused_before_anything_changes(
    begun: Path, tmp_path: Path, setting: str
) -> None:
    """Else the run would have no settings to go on with: its old stores were gone, and it was never finished."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    key, path = setting.split(":")[0], tmp_path / "run" / "config.yaml"
    lines = path.read_text().splitlines()[:-1]  # without the digest, as by hand
    path.write_text("\n".join(setting if line.startswith(f"{key}:") else line for line in lines) + "\n")
    before = (tmp_path / "run" / "run.json").read_bytes()
    done = penstock(tmp_path, "reshard", "run", "--ranks", "2", "--pipeline")
    assert done.returncode == 2
    assert f"{key}=" in done.stderr
    assert "is not for the ranks of a pipeline (pipeline=2)" in done.stderr
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert not list((tmp_path / "run" / "store").glob("*-*"))
    assert (tmp_path / "run" / "store" / "manifest.json").exists()


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process, in two strands, which has a snapshot and no stores."""
    folder = tmp_path_factory.mktemp("in_memory")
    places = ("--budget.disk", "null", "--budget.weights", "host", "--budget.state", "host", "--budget.host", "64MiB")
    assert main(["train", str(write_run(folder, run=folder / "run")), "--strands", "2", "--steps", "1", *places]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("had", "words", "said"),
    [
        ({}, ("--ranks", "1"), "one process can go on: penstock resume RUN\n"),
        ({}, ("--ranks", "3", "--pipeline"), "3 -m penstock resume RUN --pipeline 3\n"),
        ({"pipeline": 2, "schedule": "1f1b"}, ("--ranks", "1"), "resume RUN --pipeline 1 --schedule vertical\n"),
        (
            {"pipeline": 2},
            ("--ranks", "2"),
            "2 ranks can go on: torchrun --nproc-per-node 2 -m penstock resume RUN --p",
        ),
        ({"pipeline": 2, "stage": 1}, ("--ranks", "2", "--pipeline"), "a pipeline of 2 ranks can go on"),
        ({"cp": 2}, ("--ranks", "1", "--cp", "1"), "one process can go on: penstock resume RUN --cp 1\n"),
        ({"pipeline": 2}, ("--ranks", "4"), "strands=2 of its steps, which stay as they are. 1 or 2 can: torchrun"),
    ],
    ids=str,
)
def test_those_who_can_go_on_from_a_snapshot_are_told_with_which_settings(
    in_memory: Path,
    had: Mapping[str, object],
    words: Sequence[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In another layout than the run has: the settings that the advice leaves out would be those of that one."""
    run = shutil.copytree(in_memory, tmp_path / "run")
    lines = (run / "config.yaml").read_text().splitlines()[:-1]  # without the digest, as by hand
    kept = [line for line in lines if line.partition(":")[0] not in had]
    (run / "config.yaml").write_text("\n".join([*kept, *(f"{key}: {value}" for key, value in had.items())]) + "\n")
    capsys.readouterr()
    assert main(["reshard", str(run), *words]) == 2
    assert said in capsys.readouterr().err.replace(str(run), "RUN")


def test_what_is_not_this_runs_stays_where_it_is(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    store = tmp_path / "run" / "store"
    shutil.copytree(store, tmp_path / "aside")
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2").returncode == 0
    shutil.move(store / "rank-0", tmp_path / "foreign")
    shutil.rmtree(store)
    shutil.copytree(tmp_path / "aside", store)
    shutil.copy(begun / "run" / "run.json", tmp_path / "run" / "run.json")
    shutil.move(tmp_path / "foreign", store / "rank-0")
    (store / "resharded").mkdir()
    (store / "resharded" / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    refused = penstock(tmp_path, "reshard", "run", "--ranks", "2")
    assert refused.returncode == 2
    assert "rank-0 holds the state of another run" in refused.stderr
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before
    shutil.rmtree(store / "rank-0")
    done = penstock(tmp_path, "reshard", "run", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert (store / "resharded" / "notes.txt").read_text() == "mine"
    for rank in range(2):
        manifest = json.loads((store / f"rank-{rank}" / "manifest.json").read_text())
        assert manifest["body"]["directories"] == [str(store / f"rank-{rank}")]


def test_ranks_that_share_sequences_become_one_process(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    before = settings_of(tmp_path / "run")
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2", "--cp", "2").returncode == 0
    assert settings_of(tmp_path / "run").cp == 2
    refused = penstock(tmp_path, "reshard", "run", "--ranks", "1")
    assert refused.returncode == 2
    assert "cp=2: one process cannot share sequences 2 by 2: give --cp 1" in refused.stderr
    assert penstock(tmp_path, "reshard", "run", "--ranks", "1", "--cp", "1").returncode == 0
    assert settings_of(tmp_path / "run") == before
    found = parameters(tmp_path, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in parameters(begun, 1).items())


def test_an_interrupted_pipeline_is_left_one_by_the_command_that_is_named(begun: Path, tmp_path: Path) -> None:
    """The old number alone would cut its state for ranks that share it."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2", "--pipeline").returncode == 0
    before, record = settings_of(tmp_path / "run"), RunRecord.read(tmp_path / "run")
    assert record is not None
    interrupted = replace(record, resharding=Resharding(ranks=1, strands=4, replaces=()))
    interrupted.write(tmp_path / "run")
    refused = penstock(tmp_path, "verify", "run")
    assert "Finish it: penstock reshard run --ranks 1 --strands 4, or leave it" in refused.stderr
    assert refused.stderr.endswith("as it was: penstock reshard run --undo\n")
    done = penstock(tmp_path, "reshard", "run", "--undo")
    assert done.stdout == "run is one of a pipeline of 2 ranks: it is left as it was\n"
    assert (settings_of(tmp_path / "run"), RunRecord.read(tmp_path / "run")) == (before, record)
    assert penstock(tmp_path, "verify", "run").returncode == 0


def test_what_was_left_beside_the_old_stores_goes_with_them(begun: Path, tmp_path: Path) -> None:
    """Scratch of a step that was killed, and a store whose removal was."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    store = tmp_path / "run" / "store"
    (store / "scratch").mkdir()
    Store.create([store / "scratch"], Layout.build([("gradients", 4096, 1)]), model={}, passing=True).close()
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2").returncode == 0
    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    replace(record, ranks=1, resharding=Resharding(ranks=2, strands=4, replaces=("gone",), pipeline=False)).write(
        tmp_path / "run"
    )
    (store / "penstock.store.partial").write_bytes(bytes(4096))
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2").returncode == 0
    assert sorted(path.name for path in store.iterdir()) == ["rank-0", "rank-1"]


def test_a_rank_may_have_a_drive_of_its_own(begun: Path, tmp_path: Path) -> None:
    """A new store is made on the drive that it is to have: none can be moved to another one."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as drive:
        (tmp_path / "run" / "store" / "rank-1").symlink_to(drive)
        done = penstock(tmp_path, "reshard", "run", "--ranks", "2")
        assert done.returncode == 0, done.stderr
        assert (Path(drive) / "penstock.store").exists()
        found, wanted = parameters(tmp_path, 2), parameters(begun, 1)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_file_of_ones_own_among_new_stores_is_kept(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    store = tmp_path / "run" / "store"
    staged = store / "rank-1" / f"resharded-{record.id[:8]}"
    staged.mkdir(parents=True)
    (staged / "note").write_text("mine")
    done = penstock(tmp_path, "reshard", "run", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in store.rglob("note")] == ["mine"]
    found, wanted = parameters(tmp_path, 2), parameters(begun, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_new_stores_are_missed_where_their_drive_is(begun: Path, tmp_path: Path) -> None:
    """Without them the command would be over, and never put them in their place."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2").returncode == 0
    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    interrupted = replace(record, ranks=1, resharding=Resharding(ranks=2, strands=4, replaces=("gone",)))
    interrupted.write(tmp_path / "run")
    drive = tmp_path / "run" / "store" / "rank-1"
    drive.rename(tmp_path / "unmounted")
    refused = penstock(tmp_path, "reshard", "run", "--ranks", "2")
    assert refused.returncode == 1
    assert "rank-1 lacks its part of the new state, which was whole: is the drive mounted?" in refused.stderr
    assert RunRecord.read(tmp_path / "run") == interrupted
    (tmp_path / "unmounted").rename(drive)
    assert penstock(tmp_path, "reshard", "run", "--ranks", "2").returncode == 0
    assert RunRecord.read(tmp_path / "run") == record


def test_a_refusal_for_want_of_room_advises_what_the_command_can_have(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps its slots and its directories."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(packed, "free_bytes", lambda path: 4096)
    refused = penstock(tmp_path, "reshard", "run", "--ranks", "2")
    assert refused.returncode == 1
    assert refused.stderr.endswith("4 KiB are free: free some space (what is there stays until this is whole)\n")


@pytest.mark.parametrize("fault", ["full", "damaged", "in the way"])
def test_what_fails_is_taken_back(begun: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    store = tmp_path / "run" / "store"
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    data = store / "penstock.store"
    if fault == "damaged":
        data.write_bytes(bytes(byte ^ 1 for byte in before[data]))
    words = ["reshard", "run", "--ranks", "2"]
    if fault == "in the way":
        (store / "rank-1").write_bytes(b"a file")
    failed = warm.run(["-c", FULL, *words], cwd=tmp_path) if fault == "full" else penstock(tmp_path, *words)
    assert failed.returncode == 1, failed.stderr
    said = {"full": "free some space", "damaged": "damaged", "in the way": "rank-1 is not a directory"}
    assert said[fault] in failed.stderr
    if fault == "in the way":
        (store / "rank-1").unlink()
    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    assert record.resharding is None
    data.write_bytes(before[data])
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_what_is_interrupted_anywhere_is_finished(begun: Path, tmp_path: Path, campaign: Campaign) -> None:
    wanted, rng, undone = parameters(begun, 1), Random(0), 0
    last = 1 << 30
    for case in range(campaign.cases(2, 60)):
        folder = tmp_path / str(case)
        shutil.copytree(begun, folder)
        old, new = (1, 2) if case % 2 == 0 else (2, 4)  # rank-0 is then in the place of rank-0
        if old == 2:
            assert penstock(folder, "reshard", "run", "--ranks", "2").returncode == 0
        words = ["reshard", "run", "--ranks", str(new)]
        at = str(rng.randint(1, last) if case else last)
        found = warm.run(["-c", KILLED, at, *words], cwd=folder, timeout=PATIENCE)
        if case == 0:
            last = int(found.stdout.split()[-1])
            assert found.returncode == 0, found.stderr
        else:
            assert found.returncode == -signal.SIGKILL, found.stderr
        record = RunRecord.read(folder / "run")
        assert record is not None
        if record.resharding is not None:
            refused = penstock(folder, "resume", "run")
            assert refused.returncode == 1
            assert "penstock reshard was interrupted" in refused.stderr
        if record.resharding is not None and not record.resharding.replaces and rng.random() < 0.5:
            assert penstock(folder, "reshard", "run", "--ranks", str(old)).returncode == 0
            undone += 1
            ranks = old
        else:
            done = penstock(folder, *words)
            assert done.returncode == 0, done.stderr
            ranks = new
        kept = parameters(folder, ranks)
        assert all(torch.equal(kept[name], tensor) for name, tensor in wanted.items())
        names = [path.name for path in (folder / "run" / "store").rglob("*")]
        assert not [name for name in names if name.startswith("resharded") or name.endswith(".partial")]
        shutil.rmtree(folder)
    campaign.found(f"{case} reshards killed at one of {last} system calls, {undone} of them undone: no byte was lost")
