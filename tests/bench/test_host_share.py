"""``bench.host_share`` at a small size: every op is run and counted, and what is slower than required is said."""

from dataclasses import replace

import pytest
import torch
from bench.host_share import HAND_OVERS, Found, Planned, Round, Taken, cut, held_up, measure, schedule_of, table

import penstock
from penstock.config import Budget
from penstock.planner.ask import PlanReport
from penstock.shape.huggingface import model_shape
from penstock.sim.simulate import simulate


def test_the_step_is_as_large_as_it_says() -> None:
    schedule = schedule_of("disk", layers=2, micro_batches=8)
    steps = [op.id.group for op in schedule.ops if op.id.kind == "OP"]
    blocks = [group for group in set(steps) if steps.count(group) == 64]
    assert len(blocks) == 2
    assert len([op for op in schedule.lanes["compute"] if op.id.kind == "F"]) == 8 * 3
    assert all(schedule.lanes[lane] for lane in ("compute", "h2d", "d2h", "read", "write", "cpu"))


def test_every_case_is_measured_beside_the_yardstick() -> None:
    schedules = {"host": schedule_of("host", layers=1, micro_batches=2)}
    found = measure(schedules, {"processor": torch.device("cpu")}, rounds=2)
    assert found.ops == {"host, processor": len(schedules["host"].ops)}
    assert len(found.rounds) == 2
    for one in found.rounds:
        assert one.cases.keys() == found.ops.keys()
        for taken in (one.hand_over, one.call, *one.cases.values()):
            assert taken.seconds > 0
            assert taken.processor > 0


def planned(blocks: int) -> PlanReport:
    """A plan for the shipped profile of an H100."""
    budget = Budget(device="70GiB", host="900GiB", state="host")
    model = model_shape("qwen3-8b").with_layers(blocks)
    return penstock.plan(model, machine="h100-80g", budget=budget, micro_batch_size=1, micro_batches=1)


def taken(microseconds: float) -> Taken:
    return Taken(seconds=microseconds * 1e-6, processor=microseconds * 2e-6)


def rounds_of(*pairs: tuple[float, float]) -> Found:
    """The seconds of one case: a hand-over, and an op right after it."""
    rounds = [Round(hand_over=taken(yard), call=taken(1), cases={"a": taken(op)}) for yard, op in pairs]
    return Found(ops={"a": 100}, rounds=rounds)


def test_a_slow_spell_of_the_machine_is_none_of_the_ops() -> None:
    found = rounds_of((5, 10), (50, 100), (6, 12))
    assert found.ratio("a") == pytest.approx(2)
    assert found.missed() == []
    slow = rounds_of((5, 16), (5, 15.1), (5, 10))
    assert slow.ratio("a") > HAND_OVERS
    (said,) = slow.missed()
    assert said.startswith("a: an op takes 3.02 hand-overs")
    assert "**3.02** NOT MET" in table(slow, ())


def test_the_share_is_that_of_the_ops_in_the_step() -> None:
    step = Planned(
        model="m", where="on disk", tokens=8, how="as planned", ops=10_000, seconds=2.0, held=0.3, required=0.05
    )
    assert step.share(2.0) == pytest.approx(10_000 * 2 * 5e-6 / 2.0)
    assert step.missed(2.0)
    assert not replace(step, seconds=2.01).missed(2.0)
    assert "| 5.00% NOT MET | < 5% | 15.00% |" in table(rounds_of((5, 10)), [step])


def test_the_profiles_share_is_what_its_costs_of_an_op_take_of_the_prediction() -> None:
    """Without them compute is predicted to take so much less."""
    choice = planned(blocks=2).forecast.choice
    request, schedule = choice.request, choice.plan.schedule
    machines = [
        replace(choice.question.machine, overhead=overhead, interpreter=interpreter)
        for overhead, interpreter in ((2e-5, 5e-5), (0.0, 0.0))
    ]
    work = [
        simulate(request.world(schedule), replace(choice.question, machine=machine).costs_of(request)).work(0)
        for machine in machines
    ]
    assert held_up(schedule, machines[0]) == pytest.approx(work[0]["compute"] - work[1]["compute"])


def test_a_plan_is_cut_in_as_many_chunks_as_asked() -> None:
    """The plan's step takes longer for it: its ops have a cost each."""
    blocks = 4
    report = planned(blocks=blocks)
    few, many = cut(report, chunks=1), cut(report, chunks=64)
    assert len(many[0].ops) - len(few[0].ops) >= 63 * 3 * blocks
    assert many[1] > few[1] > 0
