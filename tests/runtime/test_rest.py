"""What a step leaves to the next one is done by itself in the order that the schedule's ops are sure of."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from penstock.schedule.check.late import late_chunks
from penstock.schedule.ir.ops import Schedule
from tests.models import PLAIN
from tests.training import Result, assert_same_state, budget, run_steps, steps_of, train, wrap

CASE, STEPS = PLAIN, steps_of(PLAIN, 2)
CLIP = 1.0


@cache
def built() -> Schedule:
    with TemporaryDirectory() as folder, wrap(CASE, budget(Path(folder)), delay=0.5, clip_grad_norm=CLIP) as engine:
        engine.step(STEPS[0])
        return engine.plan.schedule


@cache
def wanted() -> Result:
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder, "store")), STEPS, delay=0.0, clip_grad_norm=CLIP)


def roundabout() -> Schedule:
    """Weights go home when an op that comes after the step has read them: that it comes after the step is not said."""
    late = [op for op in built().ops if op.id.kind == "WW" and {other.kind for other in op.after} >= {"OP", "UW"}]
    assert late
    return replace(
        built(),
        ops=tuple(
            replace(op, after=tuple(other for other in op.after if other.kind != "OP")) if op in late else op
            for op in built().ops
        ),
    )


def lane_by_lane() -> Schedule:
    """A schedule, listed in another order than it can run in: each lane's is as it was."""
    return by_lane(built(), "write", "cpu", "d2h", "h2d", "compute", "read")


def by_lane(schedule: Schedule, *lanes: str) -> Schedule:
    return replace(schedule, ops=tuple(sorted(schedule.ops, key=lambda op: lanes.index(op.lane))))


def gradients_on_disk() -> Schedule:
    """What is left waits on disk; the ops that write gradients there are listed before those that read them."""
    settings = {"delay": 0.5, "clip_grad_norm": CLIP}
    with TemporaryDirectory() as folder, wrap(CASE, budget(Path(folder), gradients="disk"), **settings) as engine:
        engine.step(STEPS[0])
        assert late_chunks(engine.plan.schedule)
        return by_lane(engine.plan.schedule, "d2h", "write", "read", "h2d", "compute", "cpu")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("own", [roundabout, lane_by_lane, gradients_on_disk])
def test_what_is_committed_at_the_end_is_the_step(own: object, overlap: bool, tmp_path: Path) -> None:
    assert callable(own)
    schedule = replace(own(), fixed=())
    with wrap(CASE, budget(tmp_path), schedule=schedule, clip_grad_norm=CLIP, overlap=overlap) as engine:
        for step in STEPS:
            engine.step(step)
    with wrap(CASE, budget(tmp_path), delay=0.0, clip_grad_norm=CLIP) as engine:
        assert engine.step_count == len(STEPS)
        assert_same_state(run_steps(engine, []).state, wanted().state)
