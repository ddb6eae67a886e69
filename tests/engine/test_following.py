"""An engine whose drive becomes another one in mid-run changes its plan, once, and no bit; and nothing makes it swing.

What lanes do is made up here (``planner/test_following`` is about what real ones tell); a step of such a small model
takes less than any search, so a change pays over longer than it usually has to.
"""

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.config.endurance import Endurance
from penstock.engine import following, planning, probing
from penstock.errors import ConfigError
from penstock.hardware.machine import Between, Machine
from penstock.planner.following import WINDOW, Seen, corrected
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.program import Program
from penstock.shape.model import StageTimes
from tests.engine.test_prediction import machine
from tests.models import TIED
from tests.other_plans import other_plans
from tests.ranks.worlds import together
from tests.training import Result, assert_same, budget, result_of, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = TIED
STEPS = steps_of(CASE, 9, lengths=(8, 6))
TIGHT = {"weights": None, "state": None, "durability": "none", "device": "500KB", "host": "1.1MB"}
SLOW = 50.0


@dataclass(kw_only=True)
class Drive:
    """A drive that takes ``pace`` times as long as at first, whatever the real one does; all else is as predicted.
    ``noise``: of reads and of writes, in each step. ``stage``: seconds that a stage of the model is taken to compute
    for, of which on a busy machine there might be so many that no drive bounds a step."""

    pace: float = 1.0
    noise: float = 0.0
    stage: float = 1e-3
    believed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "write"), 1.0), init=False)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        rng = random.Random(1)

        def factors(seen: Seen, contention: object) -> dict[str, float]:
            return {key: self.pace / self.believed[key] * math.exp(rng.gauss(0, self.noise)) for key in self.believed}

        def correct(known: Machine, by: dict[str, float]) -> Machine:
            self.believed = {key: before * by[key] for key, before in self.believed.items()}
            return corrected(known, by)

        patch.setattr(Seen, "factors", factors)
        patch.setattr(Seen, "shares", lambda seen: {"read": 0.5, "write": 0.5})

        def timed(tape: object, program: Program, *others: object) -> StageTimes:
            each = (self.stage,) * len(program.stages)
            return StageTimes(forward=each, backward=each)

        patch.setattr(probing, "time_stages", timed)
        patch.setattr(planning, "corrected", correct)
        patch.setattr(following, "HORIZON", 10**9)


def changes(result: Result) -> list[int]:
    """The steps that had another plan than the one before."""
    return [stats.step for stats in result.stats if stats.plan_change is not None]


def run(folder: Path, slow: range = range(0), **settings: Any) -> Result:
    """All steps, of which ``slow`` meet a slow drive."""
    folder.mkdir(exist_ok=True)
    drive, known = Drive(), machine(folder)
    with pytest.MonkeyPatch.context() as patch:
        drive.install(patch)
        with wrap(CASE, budget(folder / "store", **TIGHT), plan=known, clip_grad_norm=None, **settings) as engine:
            results = []
            for i, micro_batches in enumerate(STEPS):
                drive.pace = SLOW if i in slow else 1.0
                results.append(engine.step(micro_batches))
            return result_of(engine, results)


def test_the_plan_follows_a_drive_that_becomes_slow_once_and_changes_no_bit(tmp_path: Path) -> None:
    steady = run(tmp_path / "steady")
    assert changes(steady) == []
    found = run(tmp_path / "slow", slow=range(3, len(STEPS)))
    (step,) = changes(found)
    assert 3 < step <= 3 + 3 + 1
    said = str(found.stats[step - 1].plan_change)
    assert said.startswith("reads at 20 MB/s, 1,000 predicted; writes at 10 MB/s, 500 predicted: ")
    assert "s a step predicted" in said
    assert found.stats[step - 1].bytes_moved["read"] < found.stats[0].bytes_moved["read"]
    assert_same(found, steady)


def test_one_slow_step_is_no_other_drive(tmp_path: Path) -> None:
    assert changes(run(tmp_path, slow=range(4, 5))) == []


def test_noise_changes_no_plan_and_a_drive_that_is_fast_again_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive, known, steps = Drive(noise=0.1), machine(tmp_path), steps_of(CASE, 9)
    drive.install(monkeypatch)
    with wrap(CASE, budget(tmp_path / "store", **TIGHT), plan=known, clip_grad_norm=None) as engine:

        def changed(count: int) -> list[int]:
            found = [engine.step(steps[i % len(steps)]).plan_change for i in range(count)]
            return [i for i, change in enumerate(found) if change is not None]

        for pace, another in ((1.0, False), (SLOW, True), (1.0, True)):
            drive.pace = pace
            assert bool(changed(WINDOW + 2)) == another
            assert changed(20) == []


@pytest.mark.parametrize("settings", [{"replan": False}, {"overlap": False}])
def test_a_plan_that_is_not_to_change_does_not(settings: dict[str, Any], tmp_path: Path) -> None:
    assert changes(run(tmp_path, slow=range(3, len(STEPS)), **settings)) == []


def test_what_is_forced_stays(tmp_path: Path) -> None:
    found = run(tmp_path, slow=range(3, len(STEPS)), delay=0.3)
    assert len(changes(found)) == 1
    assert "delay" not in str([s.plan_change for s in found.stats])


def test_a_search_that_costs_more_than_it_promises_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is by what the drive does all the same."""
    known, drive = machine(tmp_path), Drive()
    drive.install(monkeypatch)
    monkeypatch.setattr(following, "HORIZON", 0.001)
    monkeypatch.setattr(following, "search", None)
    with wrap(CASE, budget(tmp_path / "store", **TIGHT), plan=known, clip_grad_norm=None) as engine:
        plan, before = engine.prepare(STEPS[0]), engine.prediction
        drive.pace = 4 * SLOW  # so that the drive bounds the step however slowly the machine computes
        run_steps(engine, STEPS[:5])
        assert engine.plan is plan
        assert before is not None
        assert engine.prediction is not None
        assert engine.prediction.time > 1.5 * before.time


@pytest.mark.parametrize("free", [True, False], ids=["another plan keeps to it", "none does"])
def test_a_plan_that_wears_its_drives_too_fast_is_changed_or_said_once(
    free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No gain in time is worth a change here; steps that were too slow to wear the drive become fast."""
    drive, known = Drive(), corrected(machine(tmp_path), dict.fromkeys(("read", "write"), SLOW))
    drive.install(monkeypatch)
    monkeypatch.setattr(following, "LEAST_GAIN", 2.0)
    where = TIGHT if free else TIGHT | {"weights": "disk", "state": "disk"}
    endurance = Endurance(per_day="1TB")
    with wrap(
        CASE, budget(tmp_path / "store", **where, endurance=endurance), plan=known, clip_grad_norm=None
    ) as engine:
        engine.step(STEPS[0])
        if free:
            plans = other_plans(engine.inside.planning.request, seed=1)
            engine.inside.planning.change(next(plan for plan in plans if set(plan.place.state) == {"disk"}))
        before = [engine.step(STEPS[1]), engine.step(STEPS[2])]
        drive.pace = 1 / SLOW
        after = [engine.step(micro_batches) for micro_batches in STEPS[3:]]
    assert before[-1].bytes_moved["write"] > 0
    changed = [str(stats.plan_change) for stats in after if stats.plan_change is not None]
    said = [record.getMessage() for record in caplog.records if "wears" in record.getMessage()]
    if free:
        (words,), rest = changed, said
        assert after[-1].bytes_moved["write"] < before[-1].bytes_moved["write"]
    else:
        (words,), rest = said, changed
    assert rest == []
    assert "its drives too fast" in words
    assert "budget.endurance allows" in words


def on_a_rank(mesh: DeviceMesh, folder: Path) -> tuple[list[int], list[float]]:
    """Only the second rank's drive becomes slow, on which all state lives."""
    drive, known = Drive(), machine(folder, between=(Between(ranks=2, bandwidth=1e9, latency=1e-5),))
    where = {"weights": None, "state": None, "durability": "none"}
    with pytest.MonkeyPatch.context() as patch:
        drive.install(patch)
        with wrap(CASE, budget(folder / "store", **where), plan=known, mesh=mesh, clip_grad_norm=None) as engine:
            stats, rank = [], mesh.get_rank()
            for i, micro_batches in enumerate(STEPS):
                if i == 1:
                    plans = other_plans(engine.inside.planning.request, seed=1)
                    on_disk = next(plan for plan in plans if set(plan.place.state) == {"disk"})
                    engine.inside.planning.change(on_disk)
                drive.pace = SLOW if i >= 4 and rank == 1 else 1.0
                stats.append(engine.step(micro_batches[rank : rank + 1]))
            return [s.step for s in stats if s.plan_change is not None], [s.loss for s in stats]


def test_all_ranks_change_in_the_same_step_for_the_slowest(tmp_path: Path) -> None:
    (first, losses), (second, others) = together(2, on_a_rank, tmp_path)
    assert first == second
    assert len(first) == 1
    assert losses == others


def test_to_follow_without_anything_to_follow_is_refused(tmp_path: Path) -> None:
    where = budget(tmp_path / "store")
    with pytest.raises(ConfigError, match="replan has no effect with plan=None"):
        wrap(CASE, where, plan=None, replan=True)
    with pytest.raises(ConfigError, match="replan has no effect with overlap=False"):
        wrap(CASE, where, replan=True, overlap=False)
    with wrap(CASE, where) as engine:
        own = parse_schedule(str(engine.prepare(STEPS[0]).schedule))
    with pytest.raises(ConfigError, match="replan has no effect with a schedule of your own"):
        penstock.wrap(CASE.model(), optimizer=penstock.AdamW(lr=1e-3), budget=where, schedule=own, replan=True)
