"""How durable a run is where its settings do not say: every step, unless that costs over a tenth of its time."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.config import Budget, Precision
from penstock.engine.due import Due
from penstock.planner.ask import report
from penstock.planner.durability import TOO_MUCH, kill_seconds, weigh
from tests.conftest import Campaign
from tests.planner.test_search import MIB, task
from tests.questions import DRIVE, MACHINE


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(1, 1000), st.floats(0.1, 60), st.floats(0, 100))
def test_by_the_clock_a_kill_costs_no_more_than_was_asked_for(asked: float, step: float, writing: float) -> None:
    """A step and writing the state twice may take longer, and are the limit then. Of the first commit it is not known
    yet how long its writing takes."""
    clock = Clock()
    due = Due(steps=None, seconds=asked, clock=clock)
    last, begun, written, commits = (
        0.0,
        0.0,
        None,
        0,
    )  # the moment that the last commit names, and when the next one is written

    def commit() -> None:
        nonlocal last, written, commits
        assert written is not None
        now, clock.now = clock.now, written
        due.committed()
        assert written - last <= max(asked, step + 2 * writing) + (writing if commits == 0 else 1e-6)
        last, written, commits = begun, None, commits + 1
        clock.now = max(now, clock.now)

    for number in range(1, 200):
        clock.now += step
        if written is not None and written <= clock.now:
            commit()
        is_due = due.after(number)
        if is_due and written is not None:  # a commit waits for the one before
            commit()
        if is_due:
            due.began()
            begun, written = clock.now, clock.now + writing
    assert commits > 0 or 199 * step < asked + writing


def test_by_steps_commits_come_every_so_many() -> None:
    due = Due(steps=3, seconds=None)
    assert [step for step in range(1, 10) if due.after(step)] == [3, 6, 9]


@pytest.mark.parametrize(
    "due", [{"steps": 3, "seconds": None}, {"steps": None, "seconds": 30.0}], ids=["steps", "clock"]
)
def test_a_commit_that_could_not_be_written_is_due_after_the_next_step(due: dict[str, Any]) -> None:
    """It is due no later, however long the interval is: a kill costs more with every step."""
    clock = Clock()
    when = Due(**due, clock=clock)
    for number in range(1, 40):
        clock.now += 10
        if when.after(number):
            when.began()
            clock.now += 1
            if number < 20:
                when.failed()
                clock.now += 10
                assert when.after(number + 1)
                when.began()
            when.committed()
            assert not when.after(number + 2)


def test_a_budget_says_when_commits_are_due() -> None:
    assert Due.of(Budget(device=1, host=1, disk="d")) is None
    assert Budget(device=1, host=1, disk="d", durability="interval").interval_seconds == 300
    assert Budget(device=1, host=1, disk="d", durability="interval", interval="90s").interval_seconds == 90
    assert Budget(device=1, host=1, disk="d", durability="interval", interval=7).interval_steps == 7


def test_with_a_disk_every_step_is_durable_by_default() -> None:
    free = Budget(device=1, host=1, disk="d")
    assert free.by_default().durability == "step"
    for other in (
        Budget(device=1, host=1),
        replace(free, slots=1),
        replace(free, state="host"),
        replace(free, durability="none"),
    ):
        assert other.by_default().durability == other.durability


def test_the_default_is_every_step_unless_it_costs_over_a_tenth(campaign: Campaign) -> None:
    asked = st.builds(
        Asked,
        flops=st.sampled_from((1e9, 1e10, 1e11)),
        drive=st.sampled_from((0.3, 1.0, 30.0)),
        host=st.sampled_from((8, 14, 40)),
        precision=st.sampled_from(("fp32", "bf16")),
        waits=st.booleans(),
        micro_batches=st.sampled_from((1, 8)),
    )
    count = campaign.cases(1, 200)
    tried = settings(max_examples=count, deadline=None, derandomize=not campaign.full, database=None)(
        given(asked)(_holds)
    )
    example(Asked(flops=1e11, drive=0.3, host=40, precision="fp32", waits=True, micro_batches=1))(tried)()


def test_a_delay_that_is_asked_for_leaves_families_to_choose_from() -> None:
    """Only one of them can have it, and that one is weighed."""
    one = replace(task(waits=True), delay=0.2)
    weighed = weigh(one, 1, 2)
    assert weighed.step is not None
    assert weigh(replace(one, families=("vertical", "horizontal")), 1, 2) == weighed


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A machine's speeds (FLOP/s, and the drive's beside the usual), host memory in MiB, and how to train."""

    flops: float
    drive: float
    host: int
    precision: Precision
    waits: bool
    micro_batches: int


def _holds(ask: Asked) -> None:
    rates = ("read", "write", "read_both", "write_both")
    faster = replace(DRIVE, **{kind: getattr(DRIVE, kind) * ask.drive for kind in rates})
    device = replace(MACHINE.device, flops={"fp32": ask.flops, "bf16": ask.flops})
    machine = replace(MACHINE, drives=(faster,), device=device)
    wanted = replace(task(machine=machine, host=ask.host * MIB, waits=ask.waits, layers=4), precision=ask.precision)
    found = report(wanted, split=(1, ask.micro_batches))
    kept, weighed = found.forecast.task.budget.durability, found.weighed
    lost = kill_seconds(found.forecast.task, found.forecast.choice)
    assert lost is not None
    assert weighed is not None
    assert weighed.step is not None
    too_much = weighed.interval is not None and weighed.step > (1 + TOO_MUCH) * weighed.interval
    assert kept == ("interval" if too_much else "step")
    plan = found.plan
    trained = [g.index for g in plan.program.groups if g.trainable]
    if kept == "step":
        assert all(plan.settings.place.all_on_disk(g) for g in trained)
        assert lost <= 2 * found.forecast.choice.expected_seconds
    else:
        assert lost >= 300
