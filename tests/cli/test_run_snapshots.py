"""A run without a disk tier keeps snapshots in its folder, and goes on from the last one after a kill."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from penstock.cli import main, run_snapshots
from penstock.cli.run_snapshots import RunSnapshots, snapshots_of, step_kept
from penstock.config import Budget
from penstock.engine.engine import Engine
from penstock.errors import StoreError
from penstock.ranks.group import ALONE
from penstock.store.snapshot import SnapshotReader
from tests.faults import Nth, error, intercepted

pytestmark = pytest.mark.usefixtures("one_thread")

MEMORY = ["--budget.disk", "null", "--budget.weights", "host", "--budget.state", "host", "--budget.host", "64MiB"]


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def killed_after(step: int, words: list[str]) -> None:
    """Run a command that snapshots every step in a process of its own, which is killed when ``step`` is kept."""
    child = os.fork()
    if child:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        return
    try:
        write = RunSnapshots.write

        def write_and_die(self: RunSnapshots, engine: Engine) -> None:
            write(self, engine)
            if engine.step_count == step:
                os.kill(os.getpid(), signal.SIGKILL)

        RunSnapshots.write = write_and_die  # type: ignore[method-assign]
        RunSnapshots.of = staticmethod(lambda _, folder, ranks: RunSnapshots(folder, ranks, seconds=1e-9))  # type: ignore[method-assign]
        main(words)
    finally:
        os._exit(0)


def test_a_run_in_memory_that_is_killed_goes_on_from_its_last_snapshot(
    config: Path, tmp_path: Path, whole_run: Path
) -> None:
    run = tmp_path / "run"
    killed_after(3, ["train", str(config), *MEMORY])
    assert step_kept(run) == 3
    assert main(["resume", str(run)]) == 0
    assert losses(run) == losses(whole_run), "wherever its state is"
    assert [path.name for path in snapshots_of(run)] == ["snapshot-4"]
    assert main(["resume", str(run), "--steps", "5"]) == 0
    assert losses(run)[:4] == losses(whole_run)
    assert losses(run)[4][0] == 5


def test_a_run_in_memory_whose_last_snapshot_could_not_be_written_is_not_complete(
    config: Path,
    tmp_path: Path,
    whole_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(self: RunSnapshots, engine: Engine) -> None:
        raise StoreError("no space left")

    run, words = tmp_path / "run", ["train", str(config), *MEMORY, "--resume"]
    with monkeypatch.context() as patched:
        patched.setattr(RunSnapshots, "write", full)
        assert main(words) == 1
    assert losses(run) == losses(whole_run), "all steps are done, and what they did is nowhere"
    assert main(words) == 0
    assert "what its 4 steps did is lost, and it begins again" in caplog.text
    assert step_kept(run) == 4
    assert losses(run) == losses(whole_run)


def test_a_damaged_snapshot_is_passed_over_and_a_run_may_say_that_it_keeps_none(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["train", str(config), *MEMORY, "--steps", "1", "--evaluate", "null"]
    assert main([*words, "--budget.durability", "none"]) == 0
    assert "a kill costs the whole run" in capsys.readouterr().out
    assert snapshots_of(run) == []
    shutil.copytree(run, tmp_path / "copy")
    for folder in (run, tmp_path / "copy"):
        assert main(["reshard", str(folder), "--ranks", "1"]) == 2
        assert "It has no snapshot to go on from either\n" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert "a snapshot in the run's folder every 5 min or step: a kill costs at most that" in said
    (run / "snapshot-9").mkdir()
    assert step_kept(run) == 1
    assert RunSnapshots.of(Budget(device=1, host=1, disk="d"), run, ALONE) is None
    assert run_snapshots.newest(run) == run / "snapshot-1"
    (run / "snapshot-9").rmdir()
    shutil.copytree(run / "snapshot-1", run / "snapshot-0")
    unread = Nth(0, error(errno.EIO), lambda call: "snapshot-1/" in call.path and call.name in ("open", "read"))
    with intercepted(run, unread, names=True), pytest.raises(StoreError, match="snapshot-1"):
        run_snapshots.newest(run)
    assert run_snapshots.newest(run) == run / "snapshot-1", "the older one was not taken instead, and all is there"
    assert main([*words, "--overwrite", "--budget.durability", "none"]) == 0
    assert snapshots_of(run) == []


def test_a_run_in_memory_is_verified_and_exported_from_its_snapshot_as_it_is_from_a_store(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    few = ["train", str(config), "--steps", "1", "--precision", "bf16", "--evaluate", "null"]
    assert main([*few, "--run", str(disk), "--budget.disk", str(disk / "store")]) == 0
    assert main([*few, *MEMORY]) == 0
    for folder in (disk, run):
        assert main(["export", str(folder), str(folder / "out"), "--dtype", "fp32"]) == 0
    assert (run / "out/model.safetensors").read_bytes() == (disk / "out/model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert "snapshot-1: read" in said
    assert "Every checksum is right." in said
    with SnapshotReader(run / "snapshot-1") as snapshot:
        place = snapshot.layout["weights.0"].offset
    with (run / "snapshot-1/penstock.snapshot").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    assert main(["verify", str(run)]) == 1
    assert "damaged in bytes 0 to" in capsys.readouterr().out
    assert main(["export", str(run), str(run / "again")]) == 1
    assert not (run / "again").exists()
    (run / "snapshot-1/penstock.snapshot").unlink()
    (run / "snapshot-1/snapshot.json").unlink()
    capsys.readouterr()
    assert main(["verify", str(run)]) == 1
    assert f"in a snapshot that cannot be opened. {run / 'snapshot-1'}: " in capsys.readouterr().err
    (run / "snapshot-1").rmdir()
    assert main(["verify", str(run)]) == 2
    assert "neither on disk (budget.disk) nor in a snapshot" in capsys.readouterr().err


def test_a_run_whose_only_snapshot_cannot_be_opened_does_not_begin_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another version has written it, or a drive has failed."""
    run = tmp_path / "run"
    words = ["train", str(config), *MEMORY, "--evaluate", "null"]
    assert main([*words, "--steps", "1"]) == 0
    file = run / "snapshot-1" / "snapshot.json"
    whole, metrics = file.read_bytes(), (run / "metrics.jsonl").read_bytes()
    file.write_bytes(whole[:-20])
    for start in (["resume", str(run)], [*words, "--resume"]):
        assert main([*start, "--steps", "2"]) == 1
        assert f"cannot be opened. {run / 'snapshot-1'}: " in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == metrics
    file.write_bytes(whole)
    assert main([*words, "--resume", "--steps", "2"]) == 0
    assert step_kept(run) == 2
    (run / "snapshot-2" / "snapshot.json").write_bytes(b"")
    assert main([*words, "--overwrite", "--steps", "1"]) == 0
    assert step_kept(run) == 1


def test_what_a_killed_snapshot_left_goes_before_the_next(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed_after(1, ["train", str(config), *MEMORY])
    for left in ("snapshot-1.partial-0123456789ab", "snapshot-2.partial-ba9876543210"):
        (run / left / "snapshot-2").mkdir(parents=True)
        (run / left / "snapshot-2" / "data").write_bytes(bytes(100))
    (run / "snapshot-3.partial-mine").mkdir()
    assert main(["resume", str(run), "--steps", "2"]) == 0
    assert sorted(path.name for path in run.glob("snapshot-*")) == ["snapshot-2", "snapshot-3.partial-mine"]
