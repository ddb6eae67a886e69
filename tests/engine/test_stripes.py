"""Stores over drives that are not equally fast: their shares, by a profile or a measurement, and the same bits."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine import stripes
from penstock.engine.stripes import as_striped, room_beside, users_of, weights_of_rank
from penstock.errors import BudgetError
from penstock.hardware.machine import Drive
from penstock.ranks.group import ALONE
from penstock.state.reshard import reshard
from penstock.store import ALIGN, Layout, Store, packed
from penstock.store.manifest import DATA
from penstock.store.records import RESERVE
from tests.engine.test_prediction import machine
from tests.models import PLAIN
from tests.training import budget, run_steps, steps_of, wrap


def drive(path: Path, rate: float) -> Drive:
    return Drive(path=str(path), read=rate, write=rate, read_both=rate, write_both=rate, free=10**12)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory is on a file system of its own."""
    monkeypatch.setattr(stripes, "file_system", hash)


@pytest.mark.usefixtures("apart", "one_thread")
def test_unequal_drives_have_their_shares_and_the_bits_are_those_of_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, paths = PLAIN, [tmp_path / "fast", tmp_path / "slow"]
    known = machine(tmp_path, drives=(drive(paths[0], 3e9), drive(paths[1], 1e9)))
    steps = steps_of(case, 3)
    with wrap(case, budget(tmp_path / "one", activations="disk")) as engine:
        plain = run_steps(engine, steps)
    places = replace(budget(tmp_path / "one", activations="disk"), disk=paths)
    with caplog.at_level(logging.INFO, "penstock"), wrap(case, places, plan=known, recompute=True) as engine:
        run_steps(engine, steps[:2])
        commits = engine.inside.resources.commits
        assert commits.store is not None
        assert commits.store.weights == (3, 1)
        runner = engine.inside.planning.runner
        assert runner is not None
        assert runner.scratch is not None
        assert runner.scratch.weights == (3, 1)  # waiting gradients and saved activations lie as the state does
        assert engine.inside.resources.machine is not None
        assert [each.weight for each in engine.inside.resources.machine.drives] == [3, 1]
    assert f"striping 3:1 over {paths[0]}, {paths[1]}" in caplog.text
    with wrap(case, places, plan=machine(tmp_path, drives=(drive(paths[0], 1e9), drive(paths[1], 1e9)))) as engine:
        assert engine.inside.resources.machine is not None
        assert [each.weight for each in engine.inside.resources.machine.drives] == [3, 1]  # for ever
        resumed = run_steps(engine, steps[2:])
    assert resumed.losses == plain.losses[2:]
    for name, tensor in plain.state.items():
        assert (resumed.state[name] == tensor).all(), name
    new = [tmp_path / "c", tmp_path / "d"]
    reshard([paths], [new], names=[new], strands=1, weights=[(1, 2)])
    with wrap(case, replace(places, disk=new)) as engine:
        commits = engine.inside.resources.commits
        assert commits.store is not None
        assert commits.store.weights == (1, 2)
        again = run_steps(engine, [])
    for name, tensor in plain.state.items():
        assert (again.state[name] == tensor).all(), name


def test_directories_of_one_file_system_are_one_drive(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    assert weights_of_rank(paths, [drive(paths[0], 3e9), drive(paths[1], 1e9)], 0, 1) == ()


@pytest.mark.usefixtures("apart")
def test_equal_drives_and_one_drive_are_striped_as_they_always_were(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    assert weights_of_rank(paths, [drive(paths[0], 3e9), drive(paths[1], 2.9e9)], 0, 1) == ()
    assert weights_of_rank(paths[:1], [drive(paths[0], 3e9)], 0, 1) == ()


@pytest.mark.usefixtures("apart")
def test_each_rank_has_the_weights_of_its_own_drives(tmp_path: Path) -> None:
    """Which are dealt to them as the directories are."""
    drives = [drive(tmp_path / str(n), rate) for n, rate in enumerate((4e9, 1e9, 2e9, 3e9))]
    paths = [Path(each.path) for each in drives]
    assert weights_of_rank(paths[0::2], drives, 0, 2) == (2, 1)
    assert weights_of_rank(paths[1::2], drives, 1, 2) == (1, 3)


@pytest.mark.usefixtures("apart")
def test_drives_that_nobody_has_measured_are_measured_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / "a", tmp_path / "b" / "rank-0"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
    paths[0].mkdir()
    asked = []

    def pace(folder: Path) -> float:
        asked.append(folder)
        return {paths[0]: 2e9, paths[1].parent: 1e9}[folder]

    monkeypatch.setattr(stripes, "pace", pace)
    (tmp_path / "b").mkdir(exist_ok=True)
    with caplog.at_level(logging.INFO, "penstock"):
        assert weights_of_rank(paths, (), 0, 1) == (2, 1)
    assert asked == [paths[0], tmp_path / "b"]  # a directory that is not there yet is measured where it will be
    assert (
        f"measured for a moment, as no machine profile has these drives (penstock doctor): {paths[0]} 2,000 MB/s"
        in (caplog.text)
    )


def test_a_machine_without_a_store_stays_as_it_is(tmp_path: Path) -> None:
    assert as_striped(None, None, 1) is None
    known = machine(tmp_path)
    assert as_striped(known, None, 1) is known


@pytest.mark.usefixtures("one_thread")
def test_a_plan_takes_no_more_of_a_drive_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for scratch space was looked for when it was made: by then another plan, which needs none, was not taken."""
    case, known = PLAIN, machine(tmp_path, drives=(drive(tmp_path, 1e12),))
    steps = steps_of(case, 1)
    forced = budget(tmp_path / "a", activations="disk")
    with wrap(case, forced, plan=known) as engine:
        run_steps(engine, steps)
        scratch = engine.inside.planning.runner.scratch  # type: ignore[union-attr]
        assert scratch is not None
        needed, request = scratch.layout.nbytes, engine.inside.planning.request
        assert request.store_bytes <= sum(file.nbytes for file in engine.inside.resources.commits.store.files.files)  # type: ignore[union-attr]
        assert engine.inside.resources.disk_free(request) > request.store_bytes + needed  # type: ignore[operator]
    monkeypatch.setattr(packed, "free_bytes", lambda path: 2 * RESERVE + needed // 2)
    with wrap(case, forced, plan=known) as engine, pytest.raises(BudgetError, match=r"of disk are needed .* are free"):
        engine.step(steps[0])
    with wrap(case, budget(tmp_path / "a"), plan=known) as engine:
        run_steps(engine, steps)
        settings = engine.plan.settings
        assert engine.inside.planning.request.scratch_bytes(settings) <= needed // 2


def test_what_is_free_on_a_drive_is_dealt_to_all_that_have_directories_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(packed, "free_bytes", lambda path: 2 * (2 * RESERVE + 30 * ALIGN))
    with Store.create(paths, Layout.build([("x", ALIGN, 1)]), model={}, weights=(2, 1)) as store:
        assert users_of(store, ALONE) == (2, 2)
        assert room_beside(store, [path / "scratch" for path in paths], (2, 2)) == 60 * ALIGN, "evenly, as only so"
        (paths[0] / "scratch").mkdir()
        (paths[0] / "scratch" / DATA).write_bytes(bytes(30 * ALIGN))
        assert room_beside(store, [path / "scratch" for path in paths], (2, 2)) == 90 * ALIGN, "what is there goes"
