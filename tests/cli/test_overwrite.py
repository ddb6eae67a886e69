"""``penstock train --overwrite``: what can be refused is refused while the run that is to be replaced is there."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main, removal
from penstock.cli.run_folder import RUN_LOCK, ahead_folder
from tests.runs import write_text

_RENAME = Path.rename
pytestmark = pytest.mark.usefixtures("one_thread")


def _files(run: Path) -> dict[str, bytes]:
    """Contents of all that is in a run's folder, by name, but for its lock."""
    found = (path for path in run.rglob("*") if path.is_file() and path.name != RUN_LOCK)
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def _losses(run: Path) -> list[Any]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.sources", "nowhere.txt"], "matches no file"),
        (["--data.sources", "{tmp}/torn.jsonl"], "line 2: this is not JSON"),
        (["--data.sources", "{tmp}/few.txt"], "lower it, raise data.tokenizer.train.sample"),
        (["--model.config", "{{model_type: llama, vocab_size: 10}}"], "vocab"),
        (["--budget.device", "100KiB"], "budget.device=100KiB is too small"),
        (["--budget.host", "1KiB"], "budget.host=1KiB is too small"),
        (["--budget.disk", "/proc/x"], "of disk are needed"),
    ],
)
def test_a_start_that_is_refused_leaves_the_run_that_it_was_to_replace(
    flags: list[str], said: str, config: Path, a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn.jsonl").write_text('{"text": "hello"}\nnot json\n')
    (tmp_path / "few.txt").write_text("a b c d\n" * 5)
    before = _files(a_run)
    assert main(["train", str(config), "--overwrite", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    assert said in capsys.readouterr().err
    assert _files(a_run) == before


def test_data_that_were_made_ahead_are_the_new_runs(config: Path, a_run: Path, tmp_path: Path) -> None:
    """They are those that a run in a folder of its own has made, whose numbers it has; nothing else is left."""
    other = write_text(tmp_path / "other.txt", 1200)
    flags = ["--data.sources", str(other), "--steps", "2"]
    old = {path.name for path in (a_run / "data").iterdir()}
    assert main(["train", str(config), "--overwrite", *flags]) == 0
    assert main(["train", str(config), "--run", str(tmp_path / "fresh"), *flags]) == 0
    assert _losses(a_run) == _losses(tmp_path / "fresh")
    names = {str(path.relative_to(a_run)) for path in a_run.rglob("*")}
    assert names == {str(path.relative_to(tmp_path / "fresh")) for path in (tmp_path / "fresh").rglob("*")}
    assert old.isdisjoint(path.name for path in (a_run / "data").iterdir())
    assert main(["verify", str(a_run)]) == 0


def test_a_start_that_is_killed_ahead_leaves_the_run_and_the_next_one_clears_up(
    config: Path, a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, torn = _files(a_run), tmp_path / "torn.jsonl"
    torn.write_text('{"text": "hello"}\nnot json\n')
    with monkeypatch.context() as patch:
        patch.setattr(removal, "take_back_ahead", lambda folder: None)  # as if killed there
        assert main(["train", str(config), "--overwrite", "--data.sources", str(torn)]) == 2
    assert ahead_folder(a_run).is_dir()
    assert _files(a_run) == before
    assert main(["resume", str(a_run), "--steps", "4"]) == 0
    assert main(["train", str(config), "--overwrite", "--steps", "1"]) == 0
    assert not ahead_folder(a_run).exists()


def test_a_start_that_is_killed_as_it_replaces_is_done_again(
    config: Path, a_run: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file or folder that is put in its place."""
    for number in range(3):
        calls: list[Path] = []

        def rename(path: Path, target: Path, number: int = number, calls: list[Path] = calls) -> Path:
            if ahead_folder(a_run) in path.parents and target.parent in (a_run, a_run / "data"):
                calls.append(path)
                if len(calls) > number:
                    raise KeyboardInterrupt
            return _RENAME(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            assert main(["train", str(config), "--overwrite"]) != 0
        assert len(calls) == number + 1
        assert main(["train", str(config), "--resume"]) == 0
        assert _losses(a_run) == _losses(whole_run)
        assert not ahead_folder(a_run).exists()
