"""The link between hosts, which the ranks on them measure where no profile tells of it."""

import logging
import os
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock import cli
from penstock.doctor import between, examine
from penstock.engine import profile as of_engines
from penstock.errors import ConfigError
from penstock.hardware import system
from penstock.hardware.machine import Machine, Network
from penstock.hardware.profiles import find_profile, save_profile
from tests.doctor.test_doctor import measure_little
from tests.machines import measured_here
from tests.models import PLAIN
from tests.questions import DRIVE, MACHINE
from tests.ranks.worlds import World, pipeline, together
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine's, which tells nothing of other hosts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PENSTOCK_MEASURE")
    found = measured_here(replace(MACHINE, drives=(replace(DRIVE, path=str(tmp_path)),)))
    save_profile(found)
    return found


def measure_for_a_moment(patch: pytest.MonkeyPatch) -> None:
    """Rates say nothing here, and any plan will do."""
    measure_little(patch)
    patch.setattr("penstock.planner.search.SIMULATIONS", 1)
    for name in ("BRIEF", "QUICK"):
        patch.setattr(examine, name, replace(getattr(examine, name), seconds=0.001))


def on_a_host(mesh: DeviceMesh) -> None:
    """Each rank on one of its own, as torchrun says it."""
    os.environ["GROUP_RANK"] = str(mesh.get_rank())


def steps_of_engines(mesh: DeviceMesh, folder: Path | None, count: int = 1) -> Any:
    """Predicted seconds of a step in each of so many, losses, random numbers from then on, and what was said."""
    on_a_host(mesh)
    said, handler = list[str](), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    torch.manual_seed(0)
    predicted, losses = [], []
    with pytest.MonkeyPatch.context() as patch:
        measure_for_a_moment(patch)
        for _ in range(count):
            with wrap(PLAIN, budget(folder), mesh=mesh, plan="auto") as engine:
                losses.append(engine.step(PLAIN.micro_batches(2, seed=0)).loss)
                predicted.append(None if engine.prediction is None else engine.prediction.time)
    return predicted, losses, torch.rand(1).item(), said


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("ranks", [together, pipeline])
def test_hosts_measure_their_link_once_and_steps_are_predicted_by_it(
    ranks: Any, profile: Machine, tmp_path: Path
) -> None:
    one, other = ranks(2, steps_of_engines, tmp_path, 2)
    assert one[0] == other[0]
    assert all(seconds > 0 for seconds in one[0])
    assert [sum("measured what 2 hosts send each other" in line for line in said) for *_, said in (one, other)] == [
        1,
        0,
    ]
    found = find_profile([tmp_path], kind="cpu")
    assert found is not None
    assert found.nic is not None
    assert replace(found, nic=None, file="") == replace(profile, file="")


def test_ranks_without_a_disk_keep_their_link_beside_the_drives_that_are_known(
    profile: Machine, tmp_path: Path
) -> None:
    one, other = together(2, steps_of_engines, None)
    assert one[0] == other[0]
    assert all(one[0])
    found = find_profile(kind="cpu")
    assert found is not None
    assert found == find_profile([tmp_path], kind="cpu") == replace(profile, nic=found.nic)
    assert found.nic is not None


def test_nothing_is_measured_where_nothing_may_be(
    profile: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a measurement change a loss, or a random number."""
    measured = together(2, steps_of_engines, tmp_path / "a")
    monkeypatch.setenv("PENSTOCK_MEASURE", "never")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other cache"))
    save_profile(profile)
    found = together(2, steps_of_engines, tmp_path / "b")
    assert [rank[:3] for rank in found] == [([None], losses, drawn) for _, losses, drawn, _ in measured]
    assert any("does not tell how fast hosts send to each other" in line for line in found[0][3])
    known = find_profile([tmp_path], kind="cpu")
    assert known is not None
    assert known.nic is None


def a_host_with_little_memory(mesh: DeviceMesh, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank():
            patch.setattr(system, "look", lambda look=system.look: replace(look(), available=1 << 30))
        return steps_of_engines(mesh, folder)


def test_no_host_with_little_memory_measures(profile: Machine, tmp_path: Path) -> None:
    for predicted, _, _, said in together(2, a_host_with_little_memory, tmp_path):
        assert predicted == [None]
        assert not any("measured what" in line for line in said)
    found = find_profile([tmp_path], kind="cpu")
    assert found is not None
    assert found.nic is None


def nothing_can_be_kept(mesh: DeviceMesh, folder: Path) -> Any:
    def refuse(_: Machine) -> Path:
        raise ConfigError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_engines, "save_profile", refuse)
        return steps_of_engines(mesh, folder, 2)


def test_a_link_that_cannot_be_kept_is_measured_once_in_a_process(profile: Machine, tmp_path: Path) -> None:
    one, other = together(2, nothing_can_be_kept, tmp_path)
    assert one[0] == other[0]
    assert all(one[0])
    assert [line.rpartition(", ")[2] for line in one[3] if "measured what" in line] == ["not kept (no room)"]


def failing(mesh: DeviceMesh, folder: Path, where: str, error: Exception) -> Any:
    def fails(*_: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank():
            patch.setattr(between, where, fails)
        return steps_of_engines(mesh, folder, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [together, pipeline])
@pytest.mark.parametrize("where", ["_lanes", "_exchanging"])
def test_ranks_train_without_a_link_that_one_cannot_measure(
    ranks: Any, where: str, profile: Machine, tmp_path: Path
) -> None:
    one, other = ranks(2, failing, tmp_path, where, MemoryError("there is none"))
    assert one[0] == other[0] == [None, None]
    assert one[1] == other[1]
    words = "what 2 hosts send each other could not be measured: rank 1: MemoryError: there is none"
    assert [said.count(words) for *_, said in (one, other)] == [2, 0]
    assert any(line.startswith("nothing is predicted: ") for line in one[3])
    assert find_profile([tmp_path], kind="cpu") == profile


def test_each_rank_of_a_pipeline_says_why_a_measurement_has_failed(profile: Machine, tmp_path: Path) -> None:
    one, other = World(2, failing, tmp_path, "_calls", ArithmeticError("it is Monday"), axis="pp").outcomes()
    assert (one.kind, other.kind) == ("RankError", "ArithmeticError")
    assert one.said.startswith("rank 1 ")
    assert "has failed: ArithmeticError: it is Monday" in one.said


def the_last_two(mesh: DeviceMesh, folder: Path) -> Any:
    members = [mesh.size() - 2, mesh.size() - 1]
    pipeline = DeviceMesh("cpu", members, mesh_dim_names=("pp",))
    found = steps_of_engines(pipeline, folder) if mesh.get_rank() in members else None
    mesh.get_group().barrier().wait()
    return found


def test_a_pipeline_of_some_processes_measures_without_the_others(profile: Machine, tmp_path: Path) -> None:
    none, one, other = together(3, the_last_two, tmp_path)
    assert none is None
    assert one[0] == other[0]
    assert all(one[0])


def doctor(mesh: DeviceMesh, hosts: int, folder: Path, *words: str) -> tuple[int, str, Network | None]:
    """Exit code, errors, and the link in the profile that is stored."""
    rank = mesh.get_rank()
    started = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": mesh.size(), "LOCAL_WORLD_SIZE": mesh.size() // hosts}
    started |= {"GROUP_WORLD_SIZE": hosts, "GROUP_RANK": rank * hosts // mesh.size(), "TORCHELASTIC_RUN_ID": 0}
    os.environ |= {name: str(value) for name, value in started.items()} | {"MASTER_ADDR": "x", "MASTER_PORT": "1"}
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache {rank}")
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as said:
        measure_for_a_moment(patch)
        patch.setattr(examine, "examine", lambda *_: measured_here(replace(MACHINE, name=f"host {rank}", drives=())))
        code = cli.main(["doctor", *words])
        found = find_profile(kind="cpu")
        assert found is None or found.name == f"host {rank}"
        return code, said.getvalue(), None if found is None else found.nic


def test_doctor_on_several_hosts_measures_their_link_and_stores_it_on_each(tmp_path: Path) -> None:
    (*one, link), (*other, same) = together(2, doctor, 2, tmp_path, "--quick")
    assert one == other == [0, ""]
    assert isinstance(link, Network)
    assert link == same


def test_doctor_is_started_once_on_each_host(tmp_path: Path) -> None:
    for code, said, link in together(2, doctor, 1, tmp_path, "--quick"):
        assert (code, link) == (2, None)
        assert said.endswith("2 ranks: each measures all of its host. Start one on each (penstock doctor)\n")


def with_a_folder_less(mesh: DeviceMesh, folder: Path) -> tuple[int, str, Network | None]:
    path = folder / "missing" if mesh.get_rank() else folder
    return doctor(mesh, 2, folder, "--quick", "--path", str(path))


def test_what_one_host_cannot_measure_ends_the_measurement_of_all(tmp_path: Path) -> None:
    one, other = together(2, with_a_folder_less, tmp_path)
    assert one[0] == other[0] == 2
    assert f"{tmp_path / 'missing'} does not exist" in other[1]
    assert f"rank 1: {tmp_path / 'missing'} does not exist" in one[1]


def test_a_known_link_is_left_alone(profile: Machine, tmp_path: Path) -> None:
    save_profile(replace(profile, nic=Network(bandwidth=1e8, latency=1e-3)))
    one, other = together(2, steps_of_engines, tmp_path)
    assert not any("measured" in line for line in one[3] + other[3])
    assert one[0] == other[0]
    assert all(one[0])
