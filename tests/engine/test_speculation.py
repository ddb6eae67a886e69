"""Steps before the norm is known: which groups take them, and that the checker allows no others."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.check.clocks import Clocks
from penstock.schedule.check.order import run_order
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN
from tests.programs import Case, random_case, transformer


def speculative(seed: int) -> Case:
    """A random training step with clipping, that speculates."""
    case = random_case(seed)
    return replace(case, settings=replace(case.settings, train=True, wait=True, speculate=True))


cases = st.builds(speculative, st.integers(0, 10_000))


@settings(max_examples=40, deadline=None)
@given(cases)
def test_only_state_that_is_all_on_disk_steps_before_the_norm(case: Case) -> None:
    schedule, s = case.build(), case.settings
    check(schedule)
    assert parse_schedule(str(schedule)) == schedule
    clocks, norm = Clocks(run_order(schedule)), schedule.by_id.get("NORM")
    for op in schedule.ops:
        if op.id.kind in ("OP", "OD"):
            on_disk = s.place.all_on_disk(op.id.group)
            assert s.waits(op.id.group) == (not on_disk)
            assert on_disk or (norm is not None and clocks.before(norm, op))


@settings(max_examples=40, deadline=None)
@given(cases)
def test_a_step_that_speculates_does_the_work_of_one_that_does_not_wait(case: Case) -> None:
    """With all state on disk it is that step, op by op."""
    count = len(case.program.groups)
    place = replace(case.settings.place, state=("disk",) * count, weights=("disk",) * count)
    s = replace(case.settings, place=place)
    free = replace(case, settings=replace(s, wait=False, speculate=False)).build()
    schedule = replace(case, settings=s).build()
    assert schedule.ops == free.ops
    assert schedule.pools == free.pools


def test_a_step_before_the_norm_is_refused_where_nothing_can_take_it_back() -> None:
    program = transformer(2)
    count = len(program.groups)
    s = Settings(
        micro_batches=2,
        chunk=5 * ALIGN,
        form=Format.of("bf16", 2),
        place=Placement(
            weights=("disk",) * count, state=("host", *("disk",) * (count - 1)), gradients="host", activations="device"
        ),
        depths=Depths(),
        wait=True,
        speculate=True,
    )
    schedule = lower_step("vertical", program, s)
    check(schedule)
    with pytest.raises(ScheduleError, match=r"op OP1\.0 may run before NORM"):
        check(replace(schedule, speculative=False))
    early = schedule.by_id["OP0.0"]
    ops = [op for op in schedule.ops if op is not early]
    early = replace(early, after=tuple(n for n in early.after if n != "NORM"))
    ops.insert(ops.index(schedule.by_id["NORM"]), early)
    with pytest.raises(ScheduleError, match=r"op OP0\.0 may run before NORM"):
        prove(replace(schedule, ops=tuple(ops)), Needs.of(program, s))
