"""What a run keeps beside its store: whatever of it changes is named, and neither trained on nor exported."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.kept_files import KEPT, KeptFile, KeptFiles, kept_of
from penstock.cli.metrics import MetricsFile
from penstock.cli.run_record import RunRecord
from penstock.errors import ConfigError, StoreError
from penstock.store.owner import RUN_FILE
from penstock.store.packed import store_error
from tests.faults import FullDisk, Nth, error, intercepted
from tests.runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    """One bit of a file is another one; size and times are as they were."""
    before, times = path.read_bytes(), path.stat()
    changed = bytearray(before)
    changed[place] ^= 4
    path.write_bytes(changed)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    yield
    path.write_bytes(before)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _kept(run: Path) -> list[Path]:
    """All files of a run that decide what it is, but for its store."""
    own = {"metrics.jsonl", "trace.json", "prediction.json", "run.lock"}
    return sorted(p for p in run.rglob("*") if p.is_file() and p.parent != run / "store" and p.name not in own)


def _numbers(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], m["loss"], m["grad_norm"]) for m in lines]


def test_the_files_are_those_that_one_expects(a_run: Path) -> None:
    endings = {p.suffix for p in _kept(a_run)}
    assert {".tokens", ".ends", ".xxh3", ".json", ".yaml"} <= endings
    names = {p.name for p in _kept(a_run)}
    assert {"config.json", "tokenizer.json", "generation_config.json", "penstock.json", "data.json", KEPT} <= names


def test_one_bit_of_any_file_is_named_by_whoever_reads_it(
    a_run: Path, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed as from a copy: what is damaged stops the run, or does not matter, which its numbers show."""
    rng = random.Random(5)
    stopped = set()
    for path in _kept(a_run):
        place = rng.randrange(path.stat().st_size) if path.stat().st_size else None
        if place is None:
            continue
        with flipped(path, place):
            capsys.readouterr()
            verified = main(["verify", str(a_run)])
            said = capsys.readouterr()
            if path.parent.name == "model" or path.is_relative_to(a_run / "data") or path.name in (KEPT, "data.json"):
                assert verified == 1, path
                assert str(path) in said.out, path
            if path.parent.name == "model" or path.name in (KEPT, "config.yaml"):
                assert main(["export", str(a_run), str(tmp_path / "out")]) in (1, 2), path
                assert str(path) in capsys.readouterr().err, path
            copy = shutil.copytree(a_run, tmp_path / "copy")
            resumed = main(["resume", str(copy), "--steps", "4"])
            said = capsys.readouterr()
            if resumed:
                stopped.add(path.name)
                assert "Traceback" not in said.err
                assert "copy" in said.err
            else:
                unread = path.suffix == ".tokens" or path.name == "environment.json"  # which a start writes anew
                assert unread, f"{path}: only what this step does not read may be another"
                assert _numbers(copy) == _numbers(whole_run)
            shutil.rmtree(copy)
    assert {"config.json", "tokenizer.json", "generation_config.json", KEPT, "config.yaml", "data.json"} <= stopped
    assert main(["verify", str(a_run)]) == 0
    assert main(["resume", str(a_run), "--steps", "4"]) == 0
    assert _numbers(a_run) == _numbers(whole_run)


def test_what_was_prepared_is_made_again_where_all_of_it_is_gone(a_run: Path, whole_run: Path) -> None:
    shutil.rmtree(a_run / "data")
    assert main(["resume", str(a_run), "--steps", "4"]) == 0
    assert _numbers(a_run) == _numbers(whole_run)
    assert main(["verify", str(a_run)]) == 0


def test_what_was_made_again_otherwise_is_refused(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained,) = (a_run / "data").glob("tokenizer-*")
    shutil.rmtree(trained)
    trained.mkdir()
    shutil.copytree(a_run / "model", trained, dirs_exist_ok=True)
    text = json.loads((trained / "tokenizer_config.json").read_text())
    (trained / "tokenizer_config.json").write_text(json.dumps({**text, "model_max_length": 7}))
    assert main(["resume", str(a_run), "--steps", "4"]) == 1
    assert f"{trained / 'tokenizer_config.json'} is not what the run wrote there" in capsys.readouterr().err


def test_a_file_that_is_gone_is_named(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a_run / "model" / "generation_config.json").unlink()
    for words in (["resume", str(a_run), "--steps", "4"], ["export", str(a_run), str(a_run / "out")]):
        assert main(words) == 1
        assert "generation_config.json cannot be read: No such file" in capsys.readouterr().err
    assert main(["verify", str(a_run)]) == 1
    assert "generation_config.json cannot be read" in capsys.readouterr().out


def test_an_account_that_is_whole_and_not_the_runs_is_refused(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files and their account were replaced together: the commit says that they are others."""
    config = a_run / "model" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    (trained,) = (a_run / "data").glob("tokenizer-*")
    others = [path for path in (a_run / "data").iterdir() if path != trained]
    KeptFiles.of(a_run, a_run / "data", [a_run / "model", trained, *others]).write(a_run)
    for words in (["resume", str(a_run), "--steps", "4"], ["export", str(a_run), str(a_run / "out")]):
        assert main(words) == 1
        assert f"{a_run / KEPT} is not that of the run whose state is in the store" in capsys.readouterr().err
    (a_run / KEPT).unlink()
    assert main(["resume", str(a_run), "--steps", "4"]) == 1
    assert "is gone, which says what the run's files have to be" in capsys.readouterr().err
    assert main(["verify", str(a_run)]) == 1


@pytest.mark.parametrize("vouched", [None, "0" * 32])
def test_an_account_that_is_gone_is_missed(tmp_path: Path, vouched: str | None) -> None:
    with pytest.raises(StoreError, match="is gone"):
        kept_of(tmp_path, vouched)


def test_an_account_names_each_file_once_and_in_order() -> None:
    a, b = (KeptFile(name=name, nbytes=1, digest="0") for name in "ab")
    assert KeptFiles(files=(a, b)).digest != KeptFiles(files=(a,)).digest
    for wrong in ((b, a), (a, a)):
        with pytest.raises(AssertionError):
            KeptFiles(files=wrong)


@pytest.mark.parametrize("prepared", ["run/data", "run", "run/other", "run/data/shared", ".", "elsewhere"])
def test_each_kept_file_is_found_by_its_name_wherever_prepared_data_are(tmp_path: Path, prepared: str) -> None:
    run, place = tmp_path / "run", tmp_path / prepared
    folders = [run / "model", place / "0123456789abcdef"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.json").write_text(folder.name)
    kept = KeptFiles.of(run, place, folders)
    assert [file.nbytes for file in kept.below("model").files] == [len("model")]
    assert list(kept.damage(run, place)) == []
    (folders[1] / "a.json").write_text("")
    assert len(list(kept.damage(run, place))) == 1


def test_shared_prepared_data_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path)
    shared = tmp_path / "shared"
    words = ["--data.prepared", str(shared), "--evaluate", "null"]
    assert main(["train", str(config), "--steps", "1", *words]) == 0
    (tokens,) = shared.glob("*/train-0.tokens")
    (sums,) = shared.glob("*/train-0.xxh3")
    (tokenizer,) = shared.glob("tokenizer-*/tokenizer.json")
    for path in (tokens, sums, tokenizer):
        with flipped(path, 10):
            capsys.readouterr()
            assert main(["verify", str(tmp_path / "run")]) == 1
            assert str(path) in capsys.readouterr().out
            if path != tokens:
                assert main(["resume", str(tmp_path / "run"), "--steps", "2"]) == 1
                assert str(path) in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run"), "--steps", "2"]) == 0


def test_shared_prepared_data_are_those_that_the_settings_name_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was moved with them, or copied, goes on with what came with it."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    config = write_run(Path(), run=Path("run"))
    few = ["--data.prepared", "shared", "--budget.disk", "store", "--evaluate", "null"]
    assert main(["train", str(config), "--steps", "1", *few]) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "c")
    monkeypatch.chdir(tmp_path / "c")
    assert main(["verify", "run"]) == 0
    assert main(["resume", "run", "--steps", "2"]) == 0
    monkeypatch.chdir(tmp_path / "b")
    (sums,) = Path("shared").glob("*/train-0.xxh3")
    with flipped(sums, 10):
        assert main(["verify", "run"]) == 1
        assert str(sums) in capsys.readouterr().out
        assert main(["resume", "run", "--steps", "2"]) == 1
    assert main(["resume", "run", "--steps", "2"]) == 0


def test_settings_changed_by_hand_say_so(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = a_run / "config.yaml"
    settings.write_text(settings.read_text().replace("steps: 3", "steps: 4"))
    assert main(["resume", str(a_run)]) == 2
    assert "or by hand if the file's last line is removed as well" in capsys.readouterr().err
    settings.write_text("".join(settings.read_text().splitlines(keepends=True)[:-1]))
    assert main(["resume", str(a_run)]) == 0
    assert len(_numbers(a_run)) == 4


def test_every_bit_of_the_settings_last_line_counts(a_run: Path) -> None:
    """No single bit makes the line one that was removed by hand."""
    from penstock.cli.run_folder import settings_of

    settings = a_run / "config.yaml"
    text = settings.read_bytes()
    first = text.rstrip().rindex(b"\n")
    for place in range(first, len(text)):
        changed = bytearray(text)
        changed[place] ^= 1 << place % 8
        settings.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            settings_of(a_run)


# ---- the numbers of the steps


def _line(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.0 / step, "seconds": 0.1, "tokens": 5}


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_that_a_power_cut_took_are_filled_in_from_the_commit(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as metrics:
        for step in range(1, 41):
            metrics.write(_line(step))
        unflushed = list(metrics.unflushed)
    assert [json.loads(line)["step"] for line in unflushed] == list(range(33, 41)), "32 lines, then a flush"
    whole = (tmp_path / "metrics.jsonl").read_text()
    lines = whole.splitlines()
    for kept in range(32, 41):  # what was flushed is there; of the others as much as the power cut has left, torn
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:kept]) + "\n" + (lines[kept][:9] if kept < 40 else ""))
        MetricsFile(tmp_path, done=40, committed=unflushed).close()
        assert (tmp_path / "metrics.jsonl").read_text() == whole
    MetricsFile(tmp_path, done=36, committed=unflushed).close()
    assert _steps(tmp_path) == list(range(1, 37)), "later ones are done again"


def test_lines_are_flushed_before_they_are_too_many_for_a_commit(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as metrics:
        for step in range(1, 100):
            metrics.write({**_line(step), "text": "x" * 3000})
            assert sum(map(len, metrics.unflushed)) <= 24 << 10
            assert len(metrics.unflushed) < 32


def test_lines_wait_for_a_disk_that_is_full_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(full=False)
    with intercepted(tmp_path, disk), MetricsFile(tmp_path) as metrics:
        metrics.write(_line(1))
        disk.full = True
        for step in range(2, 101):
            metrics.write({**_line(step), "text": "x" * 1000})
            kept = [json.loads(line)["step"] for line in metrics.unflushed]
            assert kept == list(range(max(step - len(kept) + 1, 1), step + 1)), "the last ones are for the commit"
            assert sum(map(len, metrics.unflushed)) <= 24 << 10
        assert _steps(tmp_path) == [1], "no half of a line"
        assert caplog.text.count("training goes on, and its metrics wait in memory: ") == 1
        assert "free some space" in caplog.text
        disk.full = False
        metrics.write(_line(101))
        assert not metrics.unflushed
    assert _steps(tmp_path) == list(range(1, 102))


def test_lines_that_a_disk_never_takes_are_said_to_be_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with intercepted(tmp_path, FullDisk(full=True)), MetricsFile(tmp_path) as metrics:
        metrics.write(_line(1))
        metrics.write(_line(2))
    assert "lacks the lines of the last 2 steps" in caplog.text
    assert _steps(tmp_path) == []


def test_a_line_of_a_commit_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the last commit has a line that is not a step's metrics"):
        MetricsFile(tmp_path, done=3, committed=["{}"])


@pytest.mark.parametrize(("name", "read"), [(KEPT, KeptFiles.read), (RUN_FILE, RunRecord.read)])
def test_a_damaged_account_says_what_to_do(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    (tmp_path / name).write_text("{")
    with pytest.raises(StoreError, match=f"{name} is damaged.*Put it back from a copy"):
        read(tmp_path)


def test_a_file_that_cannot_be_read_says_what_the_system_has_said(tmp_path: Path) -> None:
    """An error of ours on the way keeps that, and one that the system knows nothing of says what it is."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(b"{}")
    kept = KeptFiles(files=(KeptFile(name="model/config.json", nbytes=2, digest="0" * 32),))
    with intercepted(tmp_path, Nth(0, error(errno.EIO), lambda call: call.name == "read")):
        (said,) = kept.damage(tmp_path, tmp_path / "data")
    assert said == f"{tmp_path}/model/config.json cannot be read: Input/output error"
    ours = store_error("what was done", OSError(errno.ENOSPC, "No space"))
    assert (str(ours), ours.errno, ours.strerror) == ("what was done", errno.ENOSPC, "No space")
    assert (str(StoreError("why")), StoreError("why").strerror) == ("why", "why")
