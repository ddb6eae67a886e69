"""What an engine predicts of a step, on a machine that it is told of, beside what the step then does."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import pytest
from bench.prediction_run import bytes_of_a_repeat

import penstock
from penstock.engine import repeats
from penstock.engine.dealt import repeat_of_all
from penstock.hardware.crossing import crossing_of
from penstock.hardware.machine import Device, Drive, Host, Machine
from penstock.hardware.profiles import save_profile
from penstock.planner.update_mode import seconds_back
from penstock.ranks.group import Ranks
from penstock.schedule.ir.lanes import LOCAL_LANES
from penstock.schedule.place import FP32
from tests.machines import measured_here
from tests.models import MODELS, PLAIN
from tests.planner.test_update_mode import MIB, forced, open_question
from tests.questions import searched
from tests.training import assert_same, budget, run_steps, steps_of, wrap

T = TypeVar("T")


def machine(folder: Path, **changes: Any) -> Machine:
    """A machine of round figures with its drive in ``folder``."""
    drive = Drive(path=str(folder), read=1e9, write=5e8, read_both=8e8, write_both=4e8, free=10**12)
    return replace(
        Machine(
            name="round figures",
            host=Host(cores=2, memory=2**34, lockable=2**34, copy=1e10, optimizer={"adamw.fp32": 1e8}),
            device=Device(
                name="cpu", kind="cpu", memory=2**34, flops={"fp32": 1e11}, copy=1e10,
                h2d=1e10, d2h=1e10, h2d_both=1e10, d2h_both=1e10,
            ),
            drives=(drive,),
            overhead=1e-5,
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("where", [{}, {"weights": "host", "state": "host"}, {"state": "host", "activations": "disk"}])
def test_bytes_are_predicted_exactly_and_memory_is_not_exceeded(
    tmp_path: Path, schedule: Literal["vertical", "horizontal"], where: dict[str, Any]
) -> None:
    case = PLAIN
    places = budget(tmp_path / "store", **where)
    with wrap(case, places, schedule=schedule, plan=machine(tmp_path), clip_grad_norm=1e9) as engine:
        stats = [engine.step(micro_batches) for micro_batches in steps_of(case, 2, lengths=(12, 12))][-1]
        prediction = engine.prediction
        assert prediction is not None
        assert prediction.bytes_per_lane() == stats.bytes_moved
        moved = dict.fromkeys(LOCAL_LANES, 0)
        for event in engine.trace:
            moved[event.lane] += event.bytes
        assert moved == stats.bytes_moved
        assert prediction.time >= prediction.lower_bound > 0
        for tier in ("device", "host"):
            assert prediction.peak(0)[tier] <= engine.plan.schedule.peak_bytes(tier)
            assert stats.peak_bytes[tier] <= engine.plan.schedule.peak_bytes(tier)


def test_a_shorter_micro_batch_moves_less_than_was_planned_for_the_longest(tmp_path: Path) -> None:
    case = PLAIN
    (step,) = steps_of(case, 1, lengths=(12, 8))
    where = budget(tmp_path / "store", activations="host")
    with wrap(case, where, plan=machine(tmp_path), clip_grad_norm=1e9, delay=0.0, recompute=True) as engine:
        stats = engine.step(step)
        assert engine.prediction is not None
        planned = engine.prediction.bytes_per_lane()
    less = {lane for lane in planned if stats.bytes_moved[lane] < planned[lane]}
    assert less == {"h2d", "d2h"}
    assert all(stats.bytes_moved[lane] <= planned[lane] for lane in planned)


def test_a_stored_profile_is_used_by_default_and_no_profile_predicts_nothing(tmp_path: Path) -> None:
    case = PLAIN
    (step,) = steps_of(case, 1)
    with wrap(case, budget(tmp_path / "a", weights="disk", state="disk")) as engine:
        engine.step(step)
        assert engine.prediction is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        save_profile(measured_here(machine(tmp_path / "b")))
        with wrap(case, budget(tmp_path / "b", weights="disk", state="disk")) as engine:
            engine.step(step)
            assert engine.prediction is not None


def test_where_the_simulator_is_not_built_a_plan_is_made_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (step,) = steps_of(PLAIN, 1)
    monkeypatch.setattr("penstock.engine.resources.why_none", lambda: "it is not built")
    with wrap(PLAIN, budget(tmp_path, weights="disk", state="disk"), plan=machine(tmp_path)) as engine:
        engine.step(step)
        assert engine.prediction is None
    assert "the plan is made without predictions: it is not built" in caplog.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("delay", [0, 0.3])
@pytest.mark.parametrize("weights", ["disk", "host"])
def test_a_step_that_is_run_twice_is_expected_to_take_two_runs(
    tmp_path: Path, weights: Literal["disk", "host"], delay: float
) -> None:
    """Before the second, weights in memory that the first has stepped are read from disk, where they are at home."""
    case, scale = MODELS["skips"], 1.0
    steps = [[one] * 2 for one in case.micro_batches(3)]
    scaled = replace(case, loss_fn=lambda model, micro_batch: case.loss_fn(model, micro_batch) * scale)
    settings: dict[str, Any] = {"clip_grad_norm": 1e-3, "delay": delay, "plan": machine(tmp_path)}
    with wrap(scaled, budget(tmp_path / "early", weights=weights), speculate=True, **settings) as engine:
        engine.prepare(steps[0])
        plan, prediction, store = engine.plan, engine.prediction, engine.inside.resources.commits.store
        assert prediction is not None
        assert store is not None
        assert engine.expected_runs == 1.05, "nothing is known yet"
        back, whole = plan.taken_back_bytes, FP32 * sum(group.numel for group in plan.program.groups)
        assert (back == 0) == (weights == "disk")
        assert (back == whole) == (weights == "host" and not delay), "what is left to the next step is as it was"
        engine.step(steps[0])
        before = store.stats.bytes_read
        over = engine.step(steps[1])
        assert over.repeats == 1
        assert engine.expected_runs == 2
        assert engine.expected_seconds == pytest.approx(2 * prediction.time + back / 1e9 + back / 1e10)
        run, again = prediction.bytes_per_lane(), bytes_of_a_repeat(plan)
        assert over.bytes_moved == {lane: count + again[lane] for lane, count in run.items()}
        assert store.stats.bytes_read - before == over.bytes_moved["read"]
        scale = 1e-9
        within = engine.step(steps[2])
        assert within.bytes_moved == run
        assert engine.expected_seconds == pytest.approx((5 * prediction.time + 2 * back / 1e9 + 2 * back / 1e10) / 3)


def test_a_step_has_its_prediction_until_the_next_one_is_planned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planned anew since more steps are over the limit than the plan was made for."""
    monkeypatch.setattr(repeats, "WINDOW", 2)
    case = MODELS["skips"]
    step = [case.micro_batches(1)[0]] * 2
    with wrap(case, budget(tmp_path / "store"), clip_grad_norm=1e-3, plan=machine(tmp_path)) as engine:
        engine.step(step)
        plan, before = engine.plan, engine.prediction
        assert before is not None
        engine.step(step)
        assert engine.plan is plan
        assert engine.prediction is before
        assert engine.expected_seconds == pytest.approx(before.time * engine.expected_runs)
        engine.step(step)
        assert engine.plan is not plan


def test_a_step_that_waits_for_the_norm_is_run_once(tmp_path: Path) -> None:
    case = MODELS["skips"]
    with wrap(case, budget(tmp_path), speculate=False, clip_grad_norm=1e-3, plan=machine(tmp_path)) as engine:
        assert engine.step(case.micro_batches(2)).clipped
        assert engine.prediction is not None
        assert engine.plan.taken_back_bytes == 0
        assert engine.expected_seconds == engine.prediction.time


def test_predicting_changes_no_bit(tmp_path: Path) -> None:
    case = MODELS["skips"]
    losses = []
    for plan in (None, machine(tmp_path)):
        with wrap(case, budget(tmp_path / f"store{len(losses)}", weights="disk", state="disk"), plan=plan) as engine:
            losses.append([engine.step(micro_batches).loss for micro_batches in steps_of(case, 2)])
    assert losses[0] == losses[1]


def test_the_profile_decides_who_rounds_gradients_and_changes_no_bit(tmp_path: Path) -> None:
    case, steps = PLAIN, steps_of(PLAIN, 2)
    fast = machine(tmp_path)
    slow_link = replace(fast, device=replace(fast.device, d2h=1e6, d2h_both=1e6))
    found = {}
    for side, known in {"device": slow_link, "host": fast}.items():
        rate = 1e8 if side == "device" else 1e5
        plan = replace(known, crossing=replace(crossing_of(known), grad_bf16=rate))
        where = budget(tmp_path / side, weights="disk", state="disk")
        with wrap(case, where, plan=plan, grad_dtype="bf16", clip_grad_norm=1e9) as engine:
            found[side] = run_steps(engine, steps)
            assert engine.plan.settings.cast == side
            assert engine.prediction is not None
            planned = {op.id: op.nbytes for op in engine.plan.schedule.lanes["d2h"]}
            traced = {event.op: event.bytes for event in engine.trace if event.op.startswith("DG")}
            assert traced == {name: planned[name] for name in traced}
            assert len(traced) == sum(name.startswith("DG") for name in planned) > 0
    assert_same(found["device"], found["host"])


def test_a_plan_that_is_no_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match="plan='fast': must be 'auto'"):
        wrap(PLAIN, budget(tmp_path), plan="fast")


def test_a_run_whose_drives_would_not_last_is_refused_before_its_first_step(tmp_path: Path) -> None:
    case = PLAIN
    places = replace(budget(tmp_path / "store"), endurance=penstock.Endurance(tbw="1MB", days=10))
    (step,) = steps_of(case, 1)
    with wrap(case, places, plan=machine(tmp_path)) as engine:
        with pytest.raises(penstock.BudgetError, match=r"wears its drives too fast: .* allows 97\.7 KiB a day\. What"):
            engine.prepare(step)
        assert engine.step_count == 0


def test_of_a_pipeline_the_slowest_rank_says_how_long_a_step_is_taken_back() -> None:
    """And all ranks run it again if any has stepped before the norm was known."""
    kept = forced(open_question(), speculate=True, delay=0.0)
    kept = forced(kept, budget=replace(kept.request.budget, weights="host", host=64 * MIB))
    early, late = searched(kept).plan, searched(forced(kept, speculate=False)).plan
    own = seconds_back(early, kept.machine)
    assert own > 0

    class Two(Ranks):
        def __init__(self, other: float | None) -> None:
            self.other = other

        def gather_objects(self, what: str, value: T) -> list[T]:
            return [value, cast(T, self.other)]

    assert repeat_of_all(Two(2 * own), early, kept.machine) == 2 * own
    assert repeat_of_all(Two(own / 2), early, kept.machine) == own
    assert repeat_of_all(Two(own), late, kept.machine) == repeat_of_all(Two(None), early, kept.machine) == own
    assert repeat_of_all(Two(None), late, kept.machine) is None
    assert repeat_of_all(Two(None), early, None) == 0.0
