"""``penstock verify``: what is whole is said to be, what is damaged is named, what is in use is left alone."""

import os
import pty
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.run_folder import settings_of
from penstock.cli.run_record import Pending, RunRecord
from penstock.cli.settings import dump
from penstock.config import Budget
from penstock.data.identity import Identity
from penstock.state.slots import Slots
from penstock.store.layout import Layout
from penstock.store.owner import Owner
from penstock.store.store import DATA, Store
from tests import warm
from tests.runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("verify")
    config = write_run(folder)
    assert main(["train", str(config), "--steps", "3", "--evaluate", "null"]) == 0
    return folder / "run"


def _flip(run: Path, name: str, slot: int, byte: int = 0) -> None:
    """Change one bit of an extent: again, and it is as it was."""
    with Store.open([run / "store"]) as store:
        offset = store.layout[name].address(0, 4096, slot) + byte
    with (run / "store" / DATA).open("r+b") as file:
        file.seek(offset)
        bits = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([bits ^ 8]))


def _slot(run: Path, name: str) -> int:
    with Store.open([run / "store"]) as store:
        return Slots(store).current(name)


MUON = ("--optimizer.name", "muon", "--optimizer.adamw.lr", "1e-3")


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("words", [(), MUON], ids=["adamw", "muon"])
def test_state_that_takes_less_memory_is_read_and_damage_in_it_is_named(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(write_run(tmp_path)), "--steps", "2", "--optimizer.moments", "int8", *words]) == 0
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    with Store.open([run / "store"]) as store:
        parts = sorted(e.name for e in store.layout.extents if e.name.startswith("moment"))
    for name in (parts[0], parts[-1]):
        _flip(run, name, _slot(run, name))
        assert main(["verify", str(run)]) == 1
        assert name in capsys.readouterr().out
        _flip(run, name, _slot(run, name))


@pytest.mark.parametrize("inside", ["", "store"])
def test_a_whole_run_is_said_to_be_whole(trained: Path, inside: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["verify", str(trained / inside)]) == 0
    said = capsys.readouterr()
    assert f"{trained / 'store'}: read " in said.out
    assert "of step 3, the last commit" in said.out
    assert "Every checksum is right." in said.out
    assert not said.err


def test_every_damage_is_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = ("moment0.1", "weights.2")
    with Store.open([trained / "store"]) as store:
        assert set(damaged) <= {extent.name for extent in store.layout.extents}
    for name in damaged:
        _flip(trained, name, _slot(trained, name))
    capsys.readouterr()
    try:
        assert main(["verify", str(trained)]) == 1
    finally:
        for name in damaged:
            _flip(trained, name, _slot(trained, name))
    said = capsys.readouterr()
    lines = [line for line in said.out.splitlines() if line.startswith("damaged: ")]
    assert len(lines) == 2
    for name, line in zip(damaged, lines, strict=True):
        assert name in line
        assert str(trained / "store" / DATA) in line
    assert "2 places are damaged" in said.err
    assert "every checksum" not in said.out.lower()
    assert main(["verify", str(trained)]) == 0


@pytest.mark.parametrize(
    ("harm", "number"),
    [("torn", 0), ("torn", 1), ("zeroed", 0), ("emptied", 1), ("removed", 0), ("a folder", 1), ("a pipe", 0)],
)
def test_a_commit_record_that_cannot_be_read_is_named(
    trained: Path,
    tmp_path: Path,
    harm: str,
    number: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where it is the one that a power cut could have torn, and all that the other one names is whole."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = run / "store" / f"commit.{number}"
    text = path.read_bytes()
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm == "a pipe":
        os.mkfifo(path)
    elif harm != "removed":
        path.write_bytes({"torn": text[:60] + b" " * 99, "zeroed": bytes(len(text)), "emptied": b""}[harm])
    capsys.readouterr()
    caplog.clear()
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr().out
    assert f"damaged: {path}" in said
    assert "every checksum" not in said.lower()
    assert [str(path) in message for message in caplog.messages] == [True], "it is said once which one counts"
    if harm not in ("a folder", "a pipe"):
        assert main(["resume", str(run), "--steps", "4"]) == 0
        assert main(["verify", str(run)]) == 0


def test_an_account_of_the_data_that_is_gone_or_anothers_is_named(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account = trained / "data.json"
    own = account.read_text()
    others = replace(Identity.from_json(own), settings={}).to_json()

    def dangle() -> None:
        account.symlink_to("nowhere")

    for change, says in (
        (lambda: None, "is gone"),
        (dangle, "is gone"),
        (lambda: account.write_text(others), "is of other data than the last commit"),
    ):
        account.unlink(missing_ok=True)
        change()
        capsys.readouterr()
        assert main(["verify", str(trained)]) == 1
        said = capsys.readouterr().out
        assert f"damaged: {account} {says}" in said
        assert "every checksum" not in said.lower()
        account.unlink(missing_ok=True)
        account.write_text(own)
    assert main(["verify", str(trained)]) == 0


def test_what_the_last_commit_does_not_name_does_not_count(trained: Path) -> None:
    other = 1 - _slot(trained, "weights.2")
    _flip(trained, "weights.2", other)
    assert main(["verify", str(trained)]) == 0
    _flip(trained, "weights.2", other)


def test_a_run_under_way_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open([trained / "store"]):
        assert main(["verify", str(trained)]) == 1
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err


def test_what_cannot_be_verified_says_why(tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    Store.create([tmp_path / "fresh"], Layout.build([("a", 4096, 2)]), model={}).close()
    for words, says in (
        ([], "takes a run's folder or the directories of a store"),
        (["--fast"], "there is no option --fast"),
        ([str(tmp_path / "nowhere")], "nowhere does not exist"),
        ([str(empty)], "it has no config.yaml"),
        ([str(trained), str(empty)], "takes one run's folder"),
        ([str(tmp_path / "fresh")], "nothing has been committed yet: the run has to take its first step"),
    ):
        capsys.readouterr()
        assert main(["verify", *words]) == 2
        assert says in capsys.readouterr().err


def test_a_start_that_was_stopped_before_its_run_had_begun_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it was to replace is there still."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "snapshot-1").mkdir()  # of a run without a disk, or one that has one by now
    config = settings_of(run)
    for disk in (config.budget.disk, None):
        settings = dump(replace(config, budget=Budget(device="1GiB", host="1GiB", disk=disk)))
        RunRecord.of(Owner.new(run), pending=Pending(replaces=(), settings=settings)).write(run)
        for words in (["verify", str(run)], ["export", str(run), str(tmp_path / "out")]):
            assert main(words) == 2
            assert f"{run}: a start was stopped before the run had begun" in capsys.readouterr().err


def test_a_store_that_was_left_within_a_step_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.create([tmp_path / "s"], Layout.build([("a", 4096, 2)]), model={}) as store:
        store.commit({"step": 4, "whole": False, "slots": "0"})
    assert main(["verify", str(tmp_path / "s")]) == 1
    assert "stopped in or before step 5 with state in memory" in capsys.readouterr().err


def test_a_terminal_shows_how_far_it_has_got(trained: Path) -> None:
    terminal, theirs = pty.openpty()
    words, environment = ["-m", "penstock.cli", "verify", trained], os.environ | {"TERM": "xterm"}
    shown = b""
    with warm.start(words, env=environment, given=(theirs, theirs)) as process:
        os.close(theirs)
        try:
            while piece := os.read(terminal, 1 << 16):
                shown += piece
        except OSError:  # EIO: the other end is closed
            pass
        assert process.wait() == 0
    os.close(terminal)
    assert b"MB" in shown or b"MiB" in shown
    assert b"\x1b[" in shown, "drawn in place, which only a terminal is given"
    assert b"Every checksum is right." in shown


def test_a_run_that_has_its_store_in_its_own_folder_is_looked_at_as_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["--steps", "1", "--evaluate", "null", "--budget.disk", str(run)]
    assert main(["train", str(write_run(tmp_path)), *words]) == 0
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    assert f"{run}: read " in capsys.readouterr().out.partition("the last commit")[2]
    with (run / "model" / "config.json").open("a") as file:
        file.write(" ")
    assert main(["verify", str(run)]) == 1
    assert "config.json is not what the run wrote there" in capsys.readouterr().out
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("steps: 1", "steps: 2"))
    assert main(["verify", str(run)]) == 2, "it may be settings that somebody has changed"
    assert "config.yaml is not what the run wrote there" in capsys.readouterr().err
