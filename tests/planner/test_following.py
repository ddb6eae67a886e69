"""What steps tell of the machine: simulated on one that is another than was predicted, they tell which lane and by how
much, by rates that then predict them; noise tells nothing."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from penstock.engine.following import Following, Lens, Searched
from penstock.hardware.drives import together
from penstock.hardware.machine import Drive, Host, Machine
from penstock.planner.costs import contention, machine_costs
from penstock.planner.following import (
    KEYS,
    MATTERS,
    PATIENCE,
    WINDOW,
    Deviations,
    Seen,
    corrected,
    corrected_times,
)
from penstock.planner.plan import Plan
from penstock.runtime.streams import Mark
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN, Whole
from penstock.shape.model import StageTimes
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate
from tests.machines import gpu
from tests.programs import transformer

MB = 10**6
PROGRAM = transformer(6)
STAGES = len(PROGRAM.stages)


def machine(read: float = 400, write: float = 200, *, duplex: bool = True) -> Machine:
    """A machine whose processor computes, with a drive of so many MB/s."""
    both = 1.0 if duplex else 0.5
    drive = Drive(
        path="/d",
        read=read * MB,
        write=write * MB,
        read_both=both * read * MB,
        write_both=both * write * MB,
        free=10**12,
    )
    return Machine(
        name="made up",
        host=Host(cores=2, memory=2**34, lockable=2**34, copy=1e10, optimizer={"adamw.fp32": 3e7}),
        device=gpu(kind="cpu", flops={"fp32": 1e11}, copy=1e10, h2d=2e9, d2h=2e9, h2d_both=1e9, d2h_both=1e9),
        drives=(drive,),
        contention={"compute+read": 0.2, "cpu+read": 0.3, "compute+cpu": 0.5, "cpu+compute": 0.4, "read+compute": 0.1},
        overhead=1e-6,
    )


@cache
def plan() -> Plan:
    """A step with everything on disk."""
    count = len(PROGRAM.groups)
    settings = Settings(
        micro_batches=2, chunk=4 * ALIGN, form=Format.of("fp32", 2), depths=Depths(), wait=False,
        place=Placement(weights=("disk",) * count, state=("disk",) * count, gradients="host", activations="host"),
    )  # fmt: skip
    return Plan(program=PROGRAM, settings=settings, schedule=lower_step("vertical", PROGRAM, settings))


def times(scale: float = 1.0) -> StageTimes:
    """Stage times of the order of what the drive takes."""
    return StageTimes(forward=(scale * 2e-4,) * STAGES, backward=(scale * 5e-4,) * STAGES)


def world() -> World:
    return World.of(plan().schedule)


def ran(on: Machine, stages: StageTimes) -> Simulation:
    """A step on a machine."""
    return simulate(world(), machine_costs(on, PROGRAM, plan().settings.form, stages, "adamw.fp32"))


def seen(step: Simulation, prediction: Simulation, noise: float = 0.0, rng: random.Random | None = None) -> Seen:
    """A step as one that was predicted otherwise. ``noise``: of how long all of it takes."""
    pace = math.exp(rng.gauss(0, noise)) if rng is not None else 1.0
    ops = plan().schedule.ops
    marks = {
        op.id: Mark(lane=op.lane, start=pace * start, end=pace * end, moved=op.nbytes)
        for op, start, end in zip(ops, step.starts[0], step.ends[0], strict=True)
    }
    return Lens(plan(), prediction).look(marks)


def pairs(of: Machine) -> dict[tuple[str, str], float]:
    return {(str(a), str(b)): c for (a, b), c in contention(of, together(of.drives)).items()}


def factors(step: Seen, by: Machine) -> dict[str, float]:
    return step.factors(contention(by, together(by.drives)))


def slower_drive(of: Machine, times: float) -> Machine:
    """A machine whose drive goes at a part of its rate, and so takes less from the other lanes."""
    return corrected(of, {"read": times, "write": times})


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("drive", [1.0, 4.0, 0.25])
@pytest.mark.parametrize("compute", [1.0, 1.5])
def test_a_step_tells_which_lane_is_another_and_rates_that_predict_it(
    duplex: bool, drive: float, compute: float
) -> None:
    known = machine(duplex=duplex)
    real, stages = slower_drive(known, drive), times(compute)
    step = ran(real, stages)
    found = factors(seen(step, ran(known, times())), known)
    expected = {"read": drive, "write": drive, "h2d": 1.0, "d2h": 1.0, "cpu": 1.0}
    expected |= dict.fromkeys(("forward", "backward", "ends"), compute)
    assert found == {key: pytest.approx(value, rel=0.08) for key, value in expected.items()}
    believed = corrected(known, found)
    again = ran(believed, corrected_times(times(), found, PROGRAM.stages))
    assert again.time == pytest.approx(step.time, rel=0.03)
    assert factors(seen(step, again), believed) == {key: pytest.approx(1.0, rel=0.05) for key in expected}


def test_lanes_that_wait_for_a_slow_drive_are_not_slow() -> None:
    """Though the step takes three times as long, and each of its ops begins later."""
    known = machine()
    step, prediction = ran(slower_drive(known, 4.0), times()), ran(known, times())
    assert step.time > 2 * prediction.time
    found = factors(seen(step, prediction), known)
    assert {key for key, factor in found.items() if abs(math.log(factor)) > math.log(1.1)} == {"read", "write"}


def test_updates_that_are_made_orthogonal_have_a_pace_of_their_own() -> None:
    known, settings = machine(), plan().settings
    whole = Whole(flop=10**6, scratch=0)
    program = replace(PROGRAM, groups=tuple(replace(g, whole=whole) if g.trainable else g for g in PROGRAM.groups))
    schedule = lower_step("vertical", program, settings)
    muons = replace(plan(), program=program, schedule=schedule)

    def step(rate: float) -> Simulation:
        stages = replace(times(), orthogonal=rate)
        costs = machine_costs(known, program, settings.form, stages, "adamw.fp32")
        return simulate(World.of(schedule), costs)

    half = step(5e8)
    marks = {
        op.id: Mark(lane=op.lane, start=start, end=end, moved=op.nbytes)
        for op, start, end in zip(schedule.ops, half.starts[0], half.ends[0], strict=True)
    }
    found = factors(Lens(muons, step(1e9)).look(marks), known)
    assert found["orthogonal"] == pytest.approx(2.0, rel=0.08)
    assert found["forward"] == pytest.approx(1.0, rel=0.08)
    believed = corrected_times(replace(times(), orthogonal=1e9), found, program.stages)
    assert believed.orthogonal == pytest.approx(5e8, rel=0.08)


def test_a_shorter_micro_batch_moves_less_and_its_lane_is_not_fast() -> None:
    known = machine()
    prediction = ran(known, times())
    ops = plan().schedule.ops
    half = {op.id: 0.5 if op.id.kind in ("SC", "LC") else 1.0 for op in ops}
    marks = {
        op.id: Mark(
            lane=op.lane, start=start, end=start + half[op.id] * (end - start), moved=int(half[op.id] * op.nbytes)
        )
        for op, start, end in zip(ops, prediction.starts[0], prediction.ends[0], strict=True)
    }
    found = factors(Lens(plan(), prediction).look(marks), known)
    assert found["h2d"] == pytest.approx(1.0, rel=0.05)


def steps(
    real: Machine, known: Machine, noise: float, seed: int
) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    rng, step, prediction = random.Random(seed), ran(real, times()), ran(known, times())
    while True:
        one = seen(step, prediction, noise, rng)
        yield factors(one, known), one.shares()


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.15])
def test_noise_is_no_deviation_and_another_disk_is_one_within_as_many_steps_as_count(noise: float) -> None:
    known, told = machine(), Deviations()
    steady = steps(known, known, noise, seed=1)
    for _ in range(100):
        told.add(*next(steady))
        assert not told.off()
    slow = steps(slower_drive(known, 4.0), known, noise, seed=2)
    for _ in range(WINDOW - 1):
        told.add(*next(slow))
    told.add(*next(slow))
    assert {"read", "write"} <= told.off().keys()
    assert told.middle()["read"] == pytest.approx(4.0, rel=0.1 + 2 * noise)


def learned(drive: Sequence[float], known: Machine) -> list[tuple[int, float]]:
    """The steps after which a drive that takes ``drive`` times as long was found to be another one, and the times as
    long that it takes by all that is known then."""
    told, found, believed = Deviations(), list[tuple[int, float]](), known
    for i, pace in enumerate(drive):
        step = seen(ran(slower_drive(known, pace), times()), ran(believed, times()))
        told.add(factors(step, believed), step.shares())
        if told.off():
            believed = corrected(believed, told.middle())
            found.append((i, known.drives[0].read / believed.drives[0].read))
            told.clear()
    return found


def test_the_step_in_which_a_drive_becomes_slow_does_not_count_as_how_slow_it_is() -> None:
    """The middle of the last three steps is learned: with one from before among them, that was the half-slow one."""
    assert learned([1, 1, 1, 1, 2.2, 4, 4, 4, 4, 4, 4], machine()) == [(6, pytest.approx(4.0, rel=0.08))]


def test_rates_learned_while_a_slow_drive_still_let_bursts_through_are_corrected() -> None:
    (first, half), (second, whole) = learned([1, 1, 1, 2, 2.5, 3, *[4.0] * 20], machine())
    assert (first, half) == (5, pytest.approx(2.5, rel=0.08))
    assert second <= first + 2 * WINDOW
    assert whole == pytest.approx(4.0, rel=0.08)


def test_a_drive_that_has_become_fast_is_found_though_it_is_hardly_busy_any_more() -> None:
    """Compute bounds the step, and the drive is busy for less than 5% of it from then on."""
    known, told = machine(), Deviations()
    prediction = ran(known, times(10))
    step = seen(ran(slower_drive(known, 1 / 20), times(10)), prediction)
    read = 1 << KEYS.index("read")
    assert sum(seconds for of, seconds in step.together.items() if of & read) < MATTERS * step.seconds
    for _ in range(WINDOW):
        told.add(factors(step, known), step.shares())
    assert {"read", "write"} <= told.off().keys()
    assert told.middle()["read"] == pytest.approx(1 / 20, rel=0.1)


def test_noise_of_each_lane_by_itself_is_hardly_ever_a_deviation() -> None:
    """And what is learned of it is no more than the noise."""
    rng, told, found = random.Random(1), Deviations(), list[float]()
    for _ in range(1000):
        told.add({key: math.exp(rng.gauss(0, 0.1)) for key in KEYS}, dict.fromkeys(KEYS, 0.5))
        found += told.off().values()
    assert len(found) <= 5
    assert all(abs(math.log(factor)) < 0.3 for factor in found)


def test_a_lane_that_was_irregular_by_another_plan_is_looked_at_anew() -> None:
    """Few reads of a drive that lets bursts through take anything from half to twice as long; many do not."""
    following, one, rng = Following(), {"read": 0.5}, random.Random(1)
    for _ in range(20):
        assert following.learn([({"read": math.exp(rng.gauss(0, 0.5))}, one)]) is None
    following.changed()
    found = [following.learn([({"read": 1.26}, one)]) for _ in range(WINDOW)]
    assert found == [None] * (WINDOW - 1) + [({"read": pytest.approx(1.26)}, {"read": pytest.approx(1.26)})]


@pytest.mark.parametrize("seen", [{}, {"write": 2.2}])
def test_plans_of_which_each_promises_more_than_the_other_change_ever_more_rarely(seen: dict[str, float]) -> None:
    """Each shows another rate: a drive's writes are fast while they are few."""
    following, settings = Following(), plan().settings
    found = Searched(settings=settings, seconds=0.0, now=1.0, then=0.8)
    changes = list[int]()
    for step in range(400):
        following.learn([({"read": 1.0}, {"read": 0.5})])
        if step == (changes or [-1])[-1] + 1:
            following.corrected(seen if len(changes) % 2 else {key: 1 / factor for key, factor in seen.items()})
        if following.is_due(1.0):
            following.searched(found)
            following.changed()
            changes.append(step)
    waits = [b - a for a, b in itertools.pairwise(changes)]
    assert changes[:2] == [0, 1]
    assert waits[1:] == [2 * WINDOW * 2**i for i in range(len(waits) - 1)]
    assert len(waits) > 4
    for _ in range(PATIENCE[1]):
        following.learn([({"read": 1.0}, {"read": 0.5})])
    following.corrected({})
    assert following.is_due(1.5)  # another machine, after it was the same for long: at once


def test_a_plan_that_does_not_keep_its_promise_is_looked_at_again_soon() -> None:
    following = Following()
    for found in (None, None, plan().settings):  # after searches in vain, whose waits are no longer those that count
        following.searched(Searched(settings=found, seconds=0.0, now=1.68, then=1.35))
    following.learn([({"read": 1.0}, {"read": 0.5})])
    following.corrected({"backward": 1.2})
    assert following.is_due(1.6)


def test_a_lane_that_becomes_fast_is_searched_for_at_once_though_no_step_is_shorter() -> None:
    """A plan for a slow drive hardly uses it, so a fast one shortens none of its steps, but another plan might."""
    following = Following()
    following.searched(Searched(settings=None, seconds=0.0, now=1.0, then=1.0))
    following.corrected({"read": 0.8, "backward": 1.4})
    assert not following.is_due(0.96)
    following.corrected({"read": 0.5, "backward": 0.7})
    assert following.is_due(0.96)
    following.searched(Searched(settings=None, seconds=0.0, now=0.96, then=0.96))
    following.corrected({"read": 1.1})
    assert not following.is_due(0.97)


def test_what_hardly_anything_depends_on_is_not_looked_at() -> None:
    told = Deviations()
    for _ in range(WINDOW):
        told.add({"d2h": 5.0, "read": 1.0}, {"d2h": 0.01, "read": 0.9})
    assert not told.off()
    told.add({"d2h": 5.0, "read": 1.0}, {"d2h": 0.1, "read": 0.9})
    assert told.off() == {"d2h": pytest.approx(5.0)}


def test_corrections_undo_each_other() -> None:
    known = replace(machine(duplex=False))
    slow = corrected(known, {"read": 4.0, "write": 3.0, "cpu": 2.0, "h2d": 1.5, "d2h": 0.5})
    back = corrected(slow, {"read": 1 / 4, "write": 1 / 3, "cpu": 1 / 2, "h2d": 1 / 1.5, "d2h": 2.0})
    assert slow.drives[0].read == pytest.approx(100 * MB)
    assert slow.contention["cpu+read"] == pytest.approx(0.3 / 4)
    assert pairs(back) == pytest.approx(pairs(known))
    assert back.drives[0].write_both == pytest.approx(known.drives[0].write_both)
    assert back.host.optimizer == pytest.approx(known.host.optimizer)
