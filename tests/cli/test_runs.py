"""``penstock runs`` lists what a folder has and compares what it is given, without changing anything."""

import errno
import fcntl
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.cells import cell_len

from penstock.cli import main
from penstock.cli.run_figures import read_run
from penstock.cli.run_folder import RUN_LOCK
from penstock.cli.runs import difference_rows
from penstock.cli.settings import dump
from penstock.config import Budget
from penstock.errors import StoreError
from penstock.store.directory import DirectoryLock, is_locked
from tests.reports import BUDGET
from tests.runs import settings_for


def made(folder: Path, *, done: int, steps: int = 4, lr: float = 1e-3, **more: Any) -> Path:
    """A run's folder after so many steps."""
    folder.mkdir(parents=True)
    config = settings_for(folder, budget=Budget(**BUDGET, disk=folder / "store"), steps=steps)
    config = replace(config, optimizer=replace(config.optimizer, lr=lr))
    (folder / "config.yaml").write_text(dump(config))
    lines = [
        {
            "step": n,
            "loss": 8.0 / n,
            "seconds": 10.0 if n == 1 else 2.0,
            "tokens": 512,
            "bytes_written": 1 << 20,
            **more,
        }
        for n in range(1, done + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    assert main(["runs", *map(str, words)]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_runs_are_listed_with_how_far_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "whole", done=4)
    made(tmp_path / "group" / "half", done=2, steps=1000, validation_loss=3.5)
    made(tmp_path / "new", done=0)
    out, err = said(capsys, tmp_path)
    assert err == ""
    rows = {line.split()[0].removeprefix(f"{tmp_path}/"): line.split()[1:] for line in out.splitlines()[1:]}
    name = read_run(tmp_path / "whole").config.model.name
    assert rows["whole"][:6] == [name, "complete", "4", "2.0000", "–", "256"], "the first step's time does not count"
    assert rows["group/half"][:8] == [name, "stopped", "2", "of", "1,000", "4.0000", "3.5000", "256"]
    assert rows["new"][:3] == [name, "not", "begun"]


def test_runs_behind_links_are_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a link leads back to a folder that it is in."""
    made(tmp_path / "elsewhere" / "one", done=2)
    made(tmp_path / "runs" / "two", done=2)
    (tmp_path / "runs" / "one").symlink_to(tmp_path / "elsewhere" / "one")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs")
    out, err = said(capsys, tmp_path / "runs", "--json")
    assert err == ""
    assert sorted(run["folder"] for run in json.loads(out)) == [str(tmp_path / "runs" / n) for n in ("one", "two")]


def test_a_link_hides_no_run_that_is_there_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Be it a link to the run, to what is above it, or one from so far below that nothing behind it is looked at."""
    runs = [made(tmp_path / place, done=2) for place in ("newest", "z/x/one")]
    (tmp_path / "latest").symlink_to("newest")
    (tmp_path / "a" / "b").mkdir(parents=True)
    for place in ("a/all", "a/b/all"):
        (tmp_path / place).symlink_to(tmp_path / "z")
    out, _ = said(capsys, tmp_path, "--json")
    assert sorted(run["folder"] for run in json.loads(out)) == [str(run) for run in runs]


def test_what_is_in_a_run_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", done=2)
    made(run / "kept" / "before", done=2)
    out, _ = said(capsys, tmp_path, "--json")
    assert [found["folder"] for found in json.loads(out)] == [str(run)]


def test_a_line_of_the_list_is_one_on_a_terminal_whatever_a_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plain", "a\nb", "\x1b[31mred", "\u65e5\u672c"):
        made(tmp_path / name, done=2)
    out, _ = said(capsys, tmp_path)
    _, *lines = out.splitlines()
    assert len(lines) == 4
    assert len({cell_len(line) for line in lines}) == 1, "columns begin below each other"
    assert "\x1b" not in out
    assert "a\\nb" in out


def test_a_run_that_a_process_has_is_training_and_goes_on(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", done=2)
    lock = DirectoryLock(folder, name=RUN_LOCK)
    assert read_run(folder).state == "training"
    lock.release()
    assert read_run(folder).state == "stopped"


def test_a_look_at_a_run_keeps_no_process_from_having_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks has the lock for an instant, which whoever starts waits for."""
    folder = made(tmp_path / "run", done=2)
    DirectoryLock(folder, name=RUN_LOCK).release()
    looking = (folder / RUN_LOCK).open()
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("penstock.store.directory.time.sleep", lambda seconds: looking.close())
    lock = DirectoryLock(folder, name=RUN_LOCK)
    assert looking.closed
    lock.release()


def test_a_lock_that_cannot_be_looked_at_is_said_and_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / RUN_LOCK).touch()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(StoreError, match=f"{RUN_LOCK}: cannot tell if a process has this lock: No locks available"):
        is_locked(tmp_path, name=RUN_LOCK)


def test_runs_are_compared_by_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = made(tmp_path / "one", done=4, mfu=0.25, peak_bytes={"host": 3 << 20})
    other = made(tmp_path / "other", done=2, lr=2e-3)
    out, _ = said(capsys, one, other, "--compare")
    settings, figures = (
        {line.split("  ")[0]: line.split("  ")[1:] for line in part.splitlines()} for part in out.split("\n\n")
    )
    assert settings.keys() == {"settings that differ", "optimizer.lr"}, "where the run's own folder is does not count"
    rows = {name: [cell.strip() for cell in cells if cell.strip()] for name, cells in figures.items()}
    assert rows["steps"] == ["4", "2 of 4"]
    assert rows["loss of the last step"] == ["2.0000", "4.0000"]
    assert rows["loss of step 2"] == ["4.0000", "4.0000"]
    assert rows["MFU"] == ["25%", "–"]
    assert rows["host memory, peak"] == ["3 MiB", "0 B"]
    assert rows["written to drives"] == ["4 MiB", "2 MiB"]
    found = json.loads(said(capsys, one, other, "--json")[0])
    assert {run["folder"]: run["settings"]["optimizer.lr"] for run in found} == {str(one): 1e-3, str(other): 2e-3}


def test_a_setting_that_is_null_is_as_good_as_one_that_is_not_there() -> None:
    runs = [
        Mock(settings={"steps": 3, "evaluate": None}),
        Mock(settings={"evaluate.every": 2, "evaluate.batches": None}),
    ]
    assert list(difference_rows(runs)) == [["steps", "3", "–"], ["evaluate.every", "–", "2"]]


def test_what_cannot_be_shown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist: give a folder" in said(capsys, tmp_path / "none", code=2)[1]
    (tmp_path / "LOOP").symlink_to("LOOP")
    assert "LOOP is a link that leads nowhere: give a folder" in said(capsys, tmp_path / "LOOP", code=2)[1]
    assert "there is no run in" in said(capsys, tmp_path, code=2)[1]
    made(tmp_path / "good", done=1)
    assert "--compare needs two runs or more, and there is 1 in" in said(capsys, tmp_path, "--compare", code=2)[1]
    (made(tmp_path / "bad", done=1) / "config.yaml").write_text("steps: [")
    out, err = said(capsys, tmp_path, code=1)
    assert "good" in out
    assert f"not shown: {tmp_path / 'bad'}" in err
