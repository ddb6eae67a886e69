"""Plans and predictions of several ranks: one plan for all, bytes as they move, and a line where nothing is known."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.hardware.machine import Between, Machine
from penstock.planner import dealt
from penstock.planner.dealt import Foreseen, Pace, improved
from penstock.planner.places import Asked
from tests.models import MODELS, PLAIN, Case, causal_lm, llama
from tests.questions import DRIVE, MACHINE
from tests.ranks.test_bits import equal, results
from tests.ranks.test_copies import copies_of
from tests.ranks.worlds import pipeline, sharing, together
from tests.training import budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
WIDE = Case(
    build=lambda: llama(hidden_size=128, intermediate_size=352, num_hidden_layers=6, head_dim=32),
    micro_batch=causal_lm,
    blocks=6,
)
BETWEEN = Between(ranks=2, bandwidth=1e8, latency=1e-3)
any_plan = patch("penstock.planner.search.SIMULATIONS", 1)
"""Within, the first of a search's proposals is the plan: any will do that fits."""


def machine(folder: Path) -> Machine:
    return replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),), between=(BETWEEN,))


def planned(
    mesh: DeviceMesh, folder: Path, known: Machine | None, name: str | None = None, *, alike: bool = False
) -> dict[str, Any]:
    """Of the model of such a ``name``. ``alike``: all ranks have the same micro-batches."""
    case = CASE if name is None else MODELS[name]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    micro_batches = case.micro_batches(2, seed=0 if alike else mesh.get_rank())
    with any_plan, wrap(case, budget(folder), mesh=mesh, plan=known) as engine:
        engine.step(micro_batches)
        stats = engine.step(micro_batches)
        prediction = engine.prediction
        return {
            "time": None if prediction is None else prediction.time,
            "bytes": None if prediction is None else dict(prediction.bytes_per_lane()),
            "bound": None if prediction is None else prediction.lower_bound,
            "compute": None if prediction is None else prediction.work(0)["compute"],
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


def test_what_attention_sends_between_ranks_that_share_each_sequence_is_predicted_as_time(tmp_path: Path) -> None:
    """Once: by a link so slow that computing takes no time beside it."""
    bandwidth = 1e3
    slow = replace(machine(tmp_path), between=(replace(BETWEEN, bandwidth=bandwidth),))
    found = sharing(2, planned, tmp_path, slow, "llama", alike=True)
    for rank in found:
        assert rank["compute"] == pytest.approx(rank["moved"]["compute"] / bandwidth, rel=0.01)
        assert not any("nothing is predicted" in line for line in rank["said"])
        assert rank["time"] == found[0]["time"] >= rank["bound"] > 1
        for lane in ("net", "h2d", "d2h"):
            assert rank["bytes"][lane] == rank["moved"][lane] > 0


def predicted(mesh: DeviceMesh, folder: Path, name: str | None = None, cp: int = 1) -> Any:
    """As ``planned``. ``cp``: ranks that share each sequence at one place of a pipeline."""
    case = CASE if name is None else MODELS[name]
    place = mesh.get_rank() // cp
    if cp > 1:
        mesh = init_device_mesh("cpu", (mesh.size() // cp, cp), mesh_dim_names=("pp", "cp"))
    with any_plan, wrap(case, budget(folder), mesh=mesh, plan=machine(folder)) as engine:
        engine.step(case.micro_batches(4))
        stats, own, found = engine.step(case.micro_batches(4)), engine.plan.schedule, engine.prediction
        assert found is not None
        mine = found.world.ranks[place]
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


def test_so_is_that_of_a_pipeline_whose_ranks_share_each_sequence(tmp_path: Path) -> None:
    found = pipeline(4, predicted, tmp_path, "llama", 2)
    for is_own, moved, time, bound, _ in found:
        assert is_own
        assert all(done == said > 0 for done, said in moved.values())
        assert time == found[0][2] > bound > 0


def found_and_trained(mesh: DeviceMesh | None, folder: Path, known: Machine | None) -> Any:
    """The results of a run with a memory that holds a part of the state; whether its plans are other ones than those by
    preference, and faster."""
    faster = list[bool]()

    def compared(asked: Sequence[Asked], pace: Pace, best: Foreseen) -> Foreseen:
        found = improved(asked, pace, best)
        faster.append(found.seconds < best.seconds)
        return found

    with patch.object(dealt, "improved", compared), patch.object(dealt, "SIMULATED_OPS", 1):  # the first is preferred
        room = {"weights": None, "state": None, "host": "10MiB", "device": "4MiB"}
        with wrap(WIDE, budget(folder, **room), mesh=mesh, clip_grad_norm=0.5, plan=known) as engine:
            found = results(engine, run_steps(engine, steps_of(WIDE, 2, lengths=(12, 8, 8, 12))))
    return found, any(faster)


def test_a_pipeline_whose_plans_were_searched_for_has_the_bits_of_one_process(tmp_path: Path) -> None:
    alone, _ = found_and_trained(None, tmp_path / "alone", None)
    found = pipeline(2, found_and_trained, tmp_path / "several", machine(tmp_path))
    for one, _ in found:
        equal(one, alone)
    assert found[0][1], "rank 0 plans for all"


def planned_in_copies(mesh: DeviceMesh, folder: Path, known: Machine) -> dict[str, Any]:
    return planned(copies_of(mesh), folder, known)


def test_what_two_copies_take_is_predicted_too_with_the_bytes_between_them(tmp_path: Path) -> None:
    found = together(4, planned_in_copies, tmp_path, machine(tmp_path))
    for rank in found:
        assert rank["settings"] == found[0]["settings"]
        assert rank["time"] == found[0]["time"] >= rank["bound"] > 0
        assert rank["bytes"]["net"] == rank["moved"]["net"] > 0
        assert not any("nothing is predicted" in line for line in rank["said"])
