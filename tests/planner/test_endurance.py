"""``budget.endurance``: plans write their drives no faster than they may, or are refused with what would help."""

import math
import pickle
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from penstock.config import Budget, Endurance, format_size
from penstock.engine.due import Due
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.drives import part_of, spread
from penstock.hardware.machine import Machine
from penstock.planner.ask import rated, report
from penstock.planner.endurance import DAY, Commits, EnduranceError, Worn, allowance, in_memory, written_per_day
from penstock.planner.search import Choice, estimate_lasting
from penstock.planner.task import Task
from tests.planner.test_search import MIB, SLOW, forecast, task
from tests.questions import DRIVE, MACHINE, searched

TIGHT: dict[str, Any] = {"host": 5 * MIB, "layers": 2}
"""Memory for a part of the state."""


def lasting(per_day: float, **where: Any) -> Task:
    asked = task(machine=SLOW, **where)
    return replace(asked, budget=replace(asked.budget, endurance=Endurance(per_day=int(per_day))))


def per_day(asked: Task, found: Choice) -> float:
    """Bytes a day, by hand."""
    written = sum(op.nbytes for op in found.plan.schedule.lanes["write"])
    assert not found.repeats
    return written / found.seconds * 86400


@pytest.fixture(scope="module")
def free() -> tuple[Choice, float]:
    """The best plan of all, and what it writes in a day."""
    asked = task(machine=SLOW, **TIGHT)
    found = searched(asked.question(2, 4))
    return found, per_day(asked, found)


def test_a_plan_that_writes_less_than_it_may_is_the_plan_without_a_limit(free: tuple[Choice, float]) -> None:
    best, written = free
    found = searched(lasting(1.01 * written, **TIGHT).question(2, 4))
    assert found.plan.settings == best.plan.settings
    assert found.question.written_per_day(found.plan, found.seconds) == pytest.approx(written)


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_a_plan_that_writes_too_much_gives_way_to_one_that_does_not(free: tuple[Choice, float], share: float) -> None:
    _, written = free
    asked = lasting(share * written, **TIGHT)
    found = searched(asked.question(2, 4))
    assert per_day(asked, found) <= share * written


@pytest.mark.usefixtures("one_simulation")
def test_what_nothing_keeps_to_is_refused_with_what_would_help_and_that_does() -> None:
    """Every number that is offered is one with which a plan is made."""
    most = 8e10
    asked = task(host=20 * MIB, layers=2)
    asked = replace(
        asked, delay=0.0, budget=replace(asked.budget, durability="step", endurance=Endurance(per_day=int(most)))
    )
    with pytest.raises(BudgetError, match="the plan wears its drives too fast: its steps of") as caught:
        report(asked, split=(2, 4))
    said = str(caught.value)
    assert f"budget.endurance allows {format_size(most)} a day" in said
    batch = re.search(r"a batch of (\d+) sequences instead of 8 \((\d+) micro-batches of 2\)", said)
    assert batch is not None
    assert report(asked, split=(2, int(batch[2]))).forecast.written_per_day <= most
    with pytest.raises(BudgetError, match="wears its drives"):
        report(asked, split=(2, int(batch[2]) - 1))
    assert "budget.durability: interval, which may keep state in memory" in said
    freed = replace(asked, budget=replace(asked.budget, durability="interval"))
    assert report(freed, split=(2, 4)).forecast.written_per_day <= most
    drives = re.search(r"(\d+) such drives instead of 1", said)
    assert drives is not None
    more = replace(asked.machine, drives=asked.machine.drives * int(drives[1]))
    assert report(replace(asked, machine=more), split=(2, 4)).forecast.written_per_day <= int(drives[1]) * most
    assert re.search(r"at most [\d.]+ bytes written per parameter \(.*, or less state: optimizer.moments\)", said)


@pytest.mark.usefixtures("one_simulation")
def test_where_memory_would_take_the_state_it_is_said_how_much() -> None:
    asked = replace(lasting(8e10, host=4 * MIB, layers=2), delay=0.0)
    with pytest.raises(BudgetError) as caught:
        report(replace(asked, machine=MACHINE), split=(2, 4))
    host = re.search(r"more host memory \((\d+) MiB in all\) with budget.durability: interval", str(caught.value))
    assert host is not None
    roomier = replace(asked.budget, host=int(host[1]) << 20, durability="interval")
    found = report(replace(asked, machine=MACHINE, budget=roomier), split=(2, 4)).forecast
    assert found.written_per_day <= 8e10


def test_an_engine_that_has_no_task_says_it_by_arithmetic() -> None:
    asked = lasting(1e9, host=4 * MIB)
    with pytest.raises(EnduranceError) as caught:
        searched(asked.question(2, 4))
    worn = caught.value.worn
    assert worn is not None
    assert worn.per_day == pytest.approx(worn.written / worn.seconds * DAY)
    assert worn.allowed == 1e9
    assert f"steps of {worn.written / 1e9 * DAY:,.0f} s that write as much" in str(caught.value)
    told = pickle.loads(pickle.dumps(type(caught.value)(str(caught.value))))  # as ranks are told of it
    assert (type(told), str(told)) == (EnduranceError, str(caught.value))


def test_long_steps_are_written_out() -> None:
    worn = Worn(written=1e12, seconds=1234.5, per_day=7e13, allowed=7e12, parameters=1, drives=1)
    assert str(worn).startswith("its steps of 1,234 s write")
    assert worn.what_helps[0] == "steps of 12,345 s that write as much (a larger batch)"


def test_every_drive_may_be_written_its_own_share() -> None:
    """The one of unequal drives that has more of the stripe is the first at its limit."""
    slow = replace(DRIVE, read_both=DRIVE.read_both / 3, write_both=DRIVE.write_both / 3)
    limit = Budget(device=1, host=1, disk=["a", "b"], endurance=Endurance(tbw="100TB", days=100))
    two = replace(SLOW, drives=(DRIVE, slow))
    assert allowance(limit, two) == spread([1e12, 1e12], (3, 1)) == pytest.approx(4e12 / 3)
    assert allowance(replace(limit, endurance=None), two) is None


def test_commits_of_state_in_memory_wear_the_drive_too(free: tuple[Choice, float]) -> None:
    plan = searched(task(machine=SLOW).question(2, 4)).plan
    budget = Budget(device=1, host=1, disk="d", durability="interval", interval=10)
    step = plan.schedule.bytes_per_lane().get("write", 0)
    gradients = 4 * sum(group.trainable for group in plan.program.groups)
    kept = plan.state_bytes - gradients - plan.disk_bytes
    assert kept == in_memory(plan) > 0
    machine = writing_in(1.5, kept)
    assert written_per_day(budget, plan, machine, 1.0, 2.0) == pytest.approx((step + kept / 10) / 2 * DAY)
    by_clock = replace(budget, interval="20s")  # begun 18 s after the one before: a step more, and it is written
    assert written_per_day(by_clock, plan, machine, 1.0, 2.0) == pytest.approx((step / 2 + kept / 18) * DAY)
    none = replace(budget, durability="none", interval=None)
    assert written_per_day(none, plan, machine, 1.0, 2.0) == step / 2 * DAY
    writes = free[0].plan
    assert written_per_day(by_clock, writes, SLOW, 1.05, 2.0) > written_per_day(by_clock, writes, SLOW, 1.0, 2.0)


def writing_in(seconds: float, nbytes: int) -> Machine:
    """A machine that writes so many bytes in so many seconds."""
    return replace(SLOW, drives=(replace(DRIVE, write=nbytes / seconds),))


@pytest.mark.parametrize(
    ("step", "writing", "period"),
    [(60.0, 100.0, 180.0), (10.0, 139.0, 160.0), (60.0, 20.0, 240.0), (400.0, 10.0, 400.0), (70.0, 200.0, 210.0)],
)
def test_commits_by_the_clock_come_as_often_as_the_engine_begins_them(
    step: float, writing: float, period: float
) -> None:
    plan = searched(task(machine=SLOW).question(2, 4)).plan
    budget = Budget(device=1, host=1, disk="d", durability="interval", interval="300s")
    found = Commits.of(budget, plan, writing_in(writing, in_memory(plan)).drives, step)
    assert found is not None
    assert (found.writing, found.period) == (pytest.approx(writing), period)
    now, written = 0.0, 0.0
    due = Due(steps=None, seconds=300.0, clock=lambda: now)
    begun = list[float]()
    for number in range(1, 40):
        now = number * step
        if begun and written <= now:
            now = written
            due.committed()
            now, written = number * step, math.inf
        if due.after(number):
            due.began()
            begun.append(now)
            written = now + writing
    assert [later - earlier for earlier, later in pairwise(begun)][1:] == [period] * (len(begun) - 2)


def test_a_commit_writes_what_steps_change_and_leave_in_memory() -> None:
    """No gradients, and no frozen weights, which are on disk once and stay as they are."""
    plan = searched(task(machine=SLOW).question(2, 4)).plan
    groups = plan.program.groups
    frozen = tuple(replace(g, trainable=0, frozen=g.numel) if g.index == 1 else g for g in groups)
    less = replace(plan, program=replace(plan.program, groups=frozen))
    assert in_memory(plan) - in_memory(less) == 3 * 4 * groups[1].trainable, "in fp32: the weights and two moments"


def test_the_days_of_the_drives_count_commits_as_the_whole_run_does() -> None:
    asked = task(machine=SLOW)
    asked = replace(asked, budget=replace(asked.budget, durability="interval", interval=1))
    found = forecast(asked, searched(asked.question(2, 4)))
    assert in_memory(found.choice.plan) > 0
    assert found.wear.days is not None
    run = found.whole_run(1000)
    assert run.life is not None
    assert found.wear.days == pytest.approx(run.days / run.life)
    assert found.wear.steps == pytest.approx(1000 / run.life)


def test_directories_that_share_a_drive_share_what_it_may_be_written() -> None:
    limit = Budget(device=1, host=1, disk=["a", "b"], endurance=Endurance(per_day=10**12))
    half = replace(part_of(DRIVE, 2), directories=2)
    assert allowance(limit, replace(SLOW, drives=(half, half))) == 1e12
    assert allowance(limit, replace(SLOW, drives=(DRIVE, DRIVE))) == 2e12
    (one, other) = rated(replace(SLOW, drives=(half, half)), 600.0).drives
    assert one.tbw == other.tbw == 300.0


def test_an_estimate_of_what_lasts_is_none_where_nothing_does() -> None:
    assert estimate_lasting(lasting(1e9, host=4 * MIB).question(2, 4), "vertical") is None
    free, lasts = task(machine=SLOW, host=4 * MIB).question(2, 4), lasting(1e15, host=4 * MIB).question(2, 4)
    assert estimate_lasting(lasts, "vertical") == pytest.approx(estimate_lasting(free, "vertical"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give per_day"),
        ({"tbw": "1TB"}, "give per_day"),
        ({"days": 3}, "give per_day"),
        ({"tbw": "1TB", "days": 3, "per_day": "1GB"}, "give per_day"),
        ({"per_day": "1 lorry"}, r"budget\.endurance\.per_day: '1 lorry' is not a size"),
        ({"per_day": 0}, r"budget\.endurance\.per_day=0: must be more than 0"),
        ({"tbw": "1TB", "days": 0.0}, r"budget\.endurance\.days=0: must be more than 0"),
    ],
)
def test_what_says_no_rate_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Endurance(**given)


def test_endurance_without_a_disk_has_no_effect_and_ranks_share_that_of_a_drive() -> None:
    with pytest.raises(ConfigError, match="has no effect without budget"):
        Budget(device=1, host=1, endurance=Endurance(per_day="1TB"))
    budget = Budget(device=1, host=4, disk=["a", "b"], endurance=Endurance(tbw="300TB", days=100))
    shares = [budget.of_rank(rank, 3).endurance for rank in range(3)]
    assert [share and share.bytes_per_day for share in shares] == [1.5e12, 3e12, 1.5e12]
