"""Plans and predictions of several ranks: one plan for all, bytes as they move, and a line where nothing is known."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from penstock.hardware.machine import Between, Machine
from tests.models import MODELS
from tests.questions import DRIVE, MACHINE
from tests.ranks.test_copies import copies_of
from tests.ranks.worlds import pipeline, together
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["llama"]
BETWEEN = Between(ranks=2, bandwidth=1e8, latency=1e-3)


def machine(folder: Path) -> Machine:
    return replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), between=(BETWEEN,))


def planned(mesh: DeviceMesh, folder: Path, known: Machine | None) -> dict[str, Any]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    with wrap(CASE, budget(folder), mesh=mesh, clip_grad_norm=1.0, plan=known) as engine:
        engine.step(CASE.micro_batches(2, seed=mesh.get_rank()))
        stats = engine.step(CASE.micro_batches(2, seed=mesh.get_rank()))
        prediction = engine.prediction
        return {
            "time": None if prediction is None else prediction.time,
            "bytes": None if prediction is None else dict(prediction.bytes_per_lane()),
            "bound": None if prediction is None else prediction.lower_bound,
            "moved": dict(stats.bytes_moved),
            "settings": engine.plan.settings,
            "said": said,
        }


def test_all_ranks_have_rank_0_s_plan_and_one_prediction_whose_bytes_move(tmp_path: Path) -> None:
    one, other = together(2, planned, tmp_path, machine(tmp_path))
    assert one["settings"] == other["settings"]
    assert one["time"] == other["time"] >= one["bound"] > 0
    for rank in (one, other):
        for lane in ("net", "h2d", "d2h"):
            assert rank["bytes"][lane] == rank["moved"][lane] > 0


def test_a_profile_that_does_not_tell_is_said_once_and_nothing_is_predicted(tmp_path: Path) -> None:
    one, other = together(2, planned, tmp_path, replace(machine(tmp_path), between=()))
    assert one["time"] is other["time"] is None
    assert sum("nothing is predicted" in line for line in one["said"] + other["said"]) == 1


def predicted(mesh: DeviceMesh, folder: Path) -> Any:
    with wrap(CASE, budget(folder), mesh=mesh, clip_grad_norm=1.0, plan=machine(folder)) as engine:
        engine.step(CASE.micro_batches(4))
        stats, own, found = engine.step(CASE.micro_batches(4)), engine.plan.schedule, engine.prediction
        assert found is not None
        mine = found.world.ranks[mesh.get_rank()]
        moved = {lane: (stats.bytes_moved[lane], mine.bytes_per_lane()[lane]) for lane in ("send", "h2d", "d2h", "net")}
        return str(mine) == str(own), moved, found.time, found.lower_bound, engine.plan.settings.delay


def test_what_is_predicted_of_a_pipeline_is_the_very_world_that_runs(tmp_path: Path) -> None:
    """Each rank's own schedule, in one world, and the same on all."""
    found = pipeline(2, predicted, tmp_path)
    for is_own, moved, time, bound, _ in found:
        assert is_own
        assert all(done == said > 0 for done, said in moved.values())
        assert time > bound > 0
    assert len({(time, delay) for _, _, time, _, delay in found}) == 1


def planned_in_copies(mesh: DeviceMesh, folder: Path, known: Machine) -> dict[str, Any]:
    return planned(copies_of(mesh), folder, known)


def test_what_two_copies_take_is_predicted_too_with_the_bytes_between_them(tmp_path: Path) -> None:
    found = together(4, planned_in_copies, tmp_path, machine(tmp_path))
    for rank in found:
        assert rank["settings"] == found[0]["settings"]
        assert rank["time"] == found[0]["time"] >= rank["bound"] > 0
        assert rank["bytes"]["net"] == rank["moved"]["net"] > 0
        assert not any("nothing is predicted" in line for line in rank["said"])
