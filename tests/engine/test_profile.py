"""What ``wrap`` does on a machine, or with a directory, that nobody has measured: a short measurement, kept."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.doctor import examine, optimizer
from penstock.engine import profile
from penstock.engine.device import name_of
from penstock.engine.profile import profile_of
from penstock.hardware import system
from penstock.hardware.drives import together
from penstock.hardware.machine import Between, Drive, Machine
from penstock.hardware.profiles import find_profile, profile_folder, save_profile
from tests.accelerator import DEVICE
from tests.engine.test_prediction import machine
from tests.machines import drive, measured_here
from tests.models import PLAIN
from tests.training import assert_same, budget, run_steps, steps_of, wrap

CPU, RATE = torch.device("cpu"), "adamw.fp32"
CASE = PLAIN


@pytest.fixture(autouse=True)
def nobody_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PENSTOCK_MEASURE")
    monkeypatch.setattr(profile, "UNKEPT", {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Nothing is measured, and what was to be is noted: a call, its directories, and numbers of ranks."""
    found: list[tuple[str, Any]] = []

    def all_of_it(
        paths: Sequence[Path],
        effort: examine.Effort,
        where: torch.device,
        working: object,
        ranks: Sequence[int],
        only: str,
    ) -> Machine:
        assert (effort, only) == (examine.BRIEF, RATE)
        found.append(("all", (list(paths), tuple(ranks))))
        torch.rand(5)
        between = tuple(Between(ranks=count, bandwidth=1e9, latency=1e-4) for count in ranks)
        drives = tuple(drive(path=str(path)) for path in paths)
        return measured_here(replace(machine(Path("/")), drives=drives, between=between))

    def more(
        known: Machine, paths: Sequence[Path], effort: examine.Effort, working: object, ranks: Sequence[int]
    ) -> tuple[tuple[Drive, ...], tuple[Between, ...]]:
        assert effort is examine.BRIEF
        found.append(("more", (list(paths), tuple(ranks))))
        between = tuple(Between(ranks=count, bandwidth=1e9, latency=1e-4) for count in ranks)
        return tuple(drive(path=str(path), read=7e9) for path in paths), between

    monkeypatch.setattr(examine, "examine", all_of_it)
    monkeypatch.setattr(examine, "more_of", more)
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "measured" in record.getMessage()]


def test_a_machine_without_a_profile_is_measured_once_said_in_a_line_and_changes_no_bit(
    tmp_path: Path, asked: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    found, drawn = {}, []
    for name, plan in {"planned": "auto", "not": None}.items():
        torch.manual_seed(7)
        with wrap(CASE, budget(tmp_path / name, weights="disk", state="disk"), plan=plan) as engine:
            drawn.append(torch.rand(3))
            found[name] = run_steps(engine, steps_of(CASE, 2))
            assert (engine.prediction is None) == (plan is None)
    assert profile_of([tmp_path / "later"], CPU, RATE) is not None
    assert asked == [("all", ([tmp_path], ()))]
    (said,), (kept,) = lines(caplog), profile_folder().iterdir()
    assert re.fullmatch(
        rf"measured this machine in \d+\.\d s, kept as {re.escape(str(kept))}; penstock doctor measures more closely",
        said,
    )
    assert caplog.records[0].levelno == logging.WARNING, "who has set up no logging sees it, too"
    assert_same(found["planned"], found["not"])
    assert torch.equal(*drawn), "what the caller draws next is what it would be without"


def test_only_what_no_profile_has_is_measured(tmp_path: Path, asked: list[tuple[str, Any]]) -> None:
    """The machine is known: only the drive of a directory on another file system is measured; what was known stays as
    it was."""
    known = measured_here(machine(tmp_path, between=(Between(ranks=2, bandwidth=3e9, latency=1e-5),)))
    save_profile(known)
    other = Path("/dev/shm/not-made-yet")
    found = profile_of([tmp_path / "run", other], CPU, RATE)
    assert asked == [("more", ([Path("/dev/shm")], ()))]
    (own,) = known.drives
    assert found == replace(known, drives=(replace(own, path=str(tmp_path / "run")), drive(path=str(other), read=7e9)))
    assert profile_of([other, tmp_path / "run"], CPU, RATE) == replace(found, drives=found.drives[::-1])
    assert profile_of([other], CPU, RATE) == replace(found, drives=found.drives[1:])
    assert len(asked) == 1, "it was stored"


def test_directories_of_one_file_system_are_one_drive_to_measure(tmp_path: Path, asked: list[tuple[str, Any]]) -> None:
    found = profile_of([tmp_path / "a", tmp_path / "b"], CPU, RATE)
    assert asked == [("all", ([tmp_path], ()))]
    assert found is not None
    assert [each.path for each in found.drives] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert together(found.drives) == together([drive()])
    assert find_profile([tmp_path / "a", tmp_path / "b"], kind="cpu") == found
    alone = find_profile([tmp_path / "a"], kind="cpu")
    assert alone is not None
    assert together(alone.drives) == together([drive()]), "what is stored is the drive's"


def test_what_ranks_send_each_other_is_measured_where_a_profile_does_not_tell(
    tmp_path: Path, asked: list[tuple[str, Any]]
) -> None:
    save_profile(measured_here(machine(tmp_path)))
    found = profile_of([tmp_path], CPU, RATE, ranks=2)
    assert asked == [("more", ([], (2,)))]
    assert found is not None
    assert [one.ranks for one in found.between] == [2]
    assert profile_of([tmp_path], CPU, RATE, ranks=2) == found
    assert profile_of([tmp_path], CPU, RATE) == found
    assert len(asked) == 1


def test_what_a_run_without_a_disk_measures_leaves_the_drives_known(
    tmp_path: Path, asked: list[tuple[str, Any]]
) -> None:
    """A newer profile without drives would be that of a machine that has none."""
    known = measured_here(machine(tmp_path))
    save_profile(known)
    found = profile_of([], CPU, RATE, ranks=2)
    assert asked == [("more", ([], (2,)))]
    assert found is not None
    assert found == replace(known, between=found.between) == find_profile() == find_profile([tmp_path])
    assert [one.ranks for one in found.between] == [2]
    (kept,) = profile_folder().iterdir()
    save_profile(replace(known, drives=(drive(path=str(tmp_path), mount="/gone"),)))
    kept.unlink()
    assert profile_of([], CPU, RATE, ranks=2) == replace(found, drives=()), "a drive that is gone is of no use"


@pytest.mark.accelerator
def test_an_optimizer_that_a_profile_has_not_seen_on_the_device_is_measured_there(
    tmp_path: Path, asked: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_one(where: torch.device, *effort: object, threads: int, only: str) -> dict[str, float]:
        asked.append(("steps", only))
        return {only: 5e9}

    monkeypatch.setattr(optimizer, "steps", of_one)
    known, where = measured_here(machine(tmp_path)), torch.device(DEVICE, 0)
    device = replace(known.device, name=name_of(where), kind="cuda", optimizer={"adamw.bf16": 1e9})
    known = replace(known, device=device)
    save_profile(known)
    assert profile_of([tmp_path], where, "adamw.bf16") == known
    halves = [tmp_path / "a", tmp_path / "b"]
    before = profile_of(halves, where, "adamw.bf16")
    found = profile_of(halves, where, "lion.bf16")
    assert asked == [("more", ([], ())), ("steps", "lion.bf16")]
    assert found is not None
    assert found.device.optimizer == {"adamw.bf16": 1e9, "lion.bf16": 5e9}
    assert before is not None
    assert found.drives == before.drives, "a drive that directories share is not divided once more"
    assert profile_of(halves, where, "lion.bf16") == found
    assert len(asked) == 2


def test_a_home_that_cannot_be_written_costs_a_process_one_measurement(
    tmp_path: Path, asked: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    for name in ("a", "a"):
        with wrap(CASE, budget(tmp_path / name, weights="disk", state="disk")) as engine:
            engine.step(steps_of(CASE, 1)[0])
            assert engine.prediction is not None
    assert len(asked) == 1
    (said,) = lines(caplog)
    assert "not kept (the profile cannot be stored in " in said


@pytest.mark.parametrize("error", [OSError(5, "the drive failed"), RuntimeError("CUDA out of memory"), MemoryError()])
def test_what_cannot_be_measured_is_said_and_training_goes_on_without_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fails(*_: object) -> Machine:
        raise error

    monkeypatch.setattr(examine, "examine", fails)
    with wrap(CASE, budget(tmp_path / "store", weights="disk", state="disk")) as engine:
        engine.step(steps_of(CASE, 1)[0])
        assert engine.prediction is None
    assert lines(caplog) == [f"this machine has no profile for this run, and could not be measured: {error}"]
    assert not profile_folder().exists()


def test_a_file_system_without_room_to_measure_in_breaks_nothing(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert profile_of([small_disk / "run"], CPU, RATE) is None
    (said,) = lines(caplog)
    assert "the file system is full" in said
    assert [path.name for path in small_disk.iterdir()] == ["lost+found"]


def test_nothing_is_measured_where_memory_is_short_or_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    there = system.look()
    with monkeypatch.context() as patch:
        patch.setattr(system, "look", lambda: replace(there, available=profile.LEAST - 1))
        assert profile_of([tmp_path], CPU, RATE) is None
    assert "with less than 2 GiB of memory available it is not measured" in lines(caplog)[0]
    monkeypatch.setenv("PENSTOCK_MEASURE", "never")
    assert profile_of([tmp_path], CPU, RATE) is None
    assert not asked
    monkeypatch.setenv("PENSTOCK_MEASURE", "no")
    with pytest.raises(penstock.ConfigError, match="PENSTOCK_MEASURE='no': must be 'never', or not set"):
        profile_of([tmp_path], CPU, RATE)
