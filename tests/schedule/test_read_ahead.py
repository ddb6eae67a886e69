"""Reads at a step's end for the first delayed steps of the next one: of which chunks, when, and at what cost."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.check.late import late_chunks
from penstock.schedule.ir.ops import Op, Schedule, chunk_of
from penstock.schedule.ir.references import group_buffer
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import Case, random_case, transformer

PROGRAM = transformer(4, block=24)
_COUNT = len(PROGRAM.groups)
DISK = Placement(weights=("disk",) * _COUNT, state=("disk",) * _COUNT, gradients="host", activations="device")


def placed(*, state: int = 4, delay: float = 0.5, place: Placement = DISK) -> Settings:
    return Settings(
        micro_batches=3,
        chunk=4 * ALIGN,
        form=Format.of("bf16", 2),
        place=place,
        depths=Depths(state=state),
        wait=False,
        delay=delay,
    )


def ahead(schedule: Schedule) -> list[Op]:
    """The reads of a step for the next one, in order."""
    ends = {end for _, end, _ in schedule.carried}
    return [op for op in schedule.lanes["read"] if op.id.kind == "RS" and not ends.isdisjoint(op.writes)]


def held(schedule: Schedule, pool: str) -> Iterator[int]:
    """Buffers of a pool that are taken, after each op's takes, when ops run one by one in the schedule's order."""
    names = {start for start, _, of in schedule.carried if of == pool}
    for op in schedule.ops:
        names |= {name for name, of in op.takes if of == pool}
        yield len(names)
        names -= set(op.gives)


def random_step(seed: int, delay: float) -> Case:
    case = random_case(seed)
    return replace(case, family="vertical", settings=replace(case.settings, train=True, delay=delay))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from((0.25, 0.5, 1.0)))
def test_the_first_delayed_chunks_are_read_ahead_in_buffers_that_are_there_anyway(seed: int, delay: float) -> None:
    case = random_step(seed, delay)
    schedule, depths = case.build(), case.settings.depths
    late = late_chunks(schedule)
    steps = [chunk_of(op) for op in schedule.lanes["cpu"] if op.id.kind == "OP" and chunk_of(op) in late]
    reads = {chunk_of(op) for op in schedule.lanes["read"] if op.id.kind == "RS"}
    first = [tag for tag in steps if tag in reads]
    found = [chunk_of(op) for op in ahead(schedule)]
    assert found == first[: len(found)]
    for pool, depth in (("state", depths.state), ("new_weights", depths.stage_out)):
        carried = sum(of == pool for _, _, of in schedule.carried)
        assert carried <= depth - 1
        assert max(held(schedule, pool), default=0) <= depth
    if len(found) < len(first):  # one of the pools has no more buffers to spare
        full = [sum(of == pool for _, _, of in schedule.carried) for pool in ("state", "new_weights")]
        assert full[0] == depths.state - 1 or full[1] == depths.stage_out - 1


@pytest.mark.parametrize("buffers", [1, 2, 4, 7])
def test_one_buffer_of_state_is_left_to_the_steps_own(buffers: int) -> None:
    schedule = lower_step("vertical", PROGRAM, placed(state=buffers))
    check(schedule)
    prove(schedule, Needs.of(PROGRAM, placed(state=buffers)))
    assert len(ahead(schedule)) == min(buffers, Depths().stage_out) - 1
    assert schedule.lanes["read"][len(schedule.lanes["read"]) - len(ahead(schedule)) :] == tuple(ahead(schedule))
    assert parse_schedule(str(schedule)) == schedule


def test_nothing_is_read_ahead_of_steps_on_time() -> None:
    assert not ahead(lower_step("vertical", PROGRAM, placed(delay=0.0)))


def test_a_step_begins_with_arithmetic_instead_of_a_read() -> None:
    """Simulated with reads and writes that take as long as they have bytes: nothing comes before the first write but
    the step of its chunk."""
    schedule = lower_step("vertical", PROGRAM, placed())
    size = max(op.nbytes for op in schedule.lanes["read"])
    costs = Costs(name="drive", seconds=lambda op: op.nbytes / size if op.lane in ("read", "write") else 0.0)
    starts = {
        timed.op.id: timed.start for timed in simulate(World(name="one", ranks=(schedule,), groups={}), costs).timed(0)
    }
    first = next(op for op in schedule.lanes["write"] if op.id.kind == "WS")
    assert starts[first.id] == 0
    assert ahead(schedule)[0].id == first.id.of("RS")


# ---- what is not what the next step finds at home is refused


def with_op(schedule: Schedule, ident: str, change: Callable[[Op], Op]) -> Schedule:
    return replace(schedule, ops=tuple(change(op) if op.id == ident else op for op in schedule.ops))


def test_a_read_that_may_come_before_the_chunk_is_home_is_refused() -> None:
    schedule = lower_step("vertical", PROGRAM, placed())
    read = ahead(schedule)[0]
    early = with_op(schedule, read.id, lambda op: replace(op, after=()))
    with pytest.raises(ScheduleError, match=rf"{read.id} may run before {read.id.of('WS')}"):
        prove(early, Needs.of(PROGRAM, placed()))


def test_state_that_was_read_before_its_step_is_not_what_the_next_step_finds() -> None:
    """The read first of all, into a buffer that is handed on beside the one that the step takes."""
    schedule = lower_step("vertical", PROGRAM, placed())
    read = ahead(schedule)[0]
    early = with_op(schedule, read.id.of("WS"), lambda op: replace(op, after=(*op.after, read.id)))
    early = with_op(early, read.id.of("WW"), lambda op: replace(op, after=(*op.after, read.id)))
    ops = (replace(read, after=()), *(op for op in early.ops if op.id != read.id))
    with pytest.raises(ScheduleError, match="does not have what that finds at home"):
        prove(replace(early, ops=ops), Needs.of(PROGRAM, placed()))


def test_only_a_chunk_that_is_left_to_the_next_step_is_read_ahead_of_it() -> None:
    """State of a chunk that steps on time is still to be written beside what counts when it would be read."""
    schedule = lower_step("vertical", PROGRAM, placed(delay=0.5))
    late = late_chunks(schedule)
    step = next(op for op in schedule.lanes["cpu"] if op.id.kind == "OP" and chunk_of(op) not in late)
    read = schedule.by_id[step.id.of("RS")]
    names = {name: group_buffer(name.kind.lower(), name.group, name.chunk) for name in read.writes}
    ops: list[Op] = []
    for op in schedule.ops:
        if op.id in (step.id, step.id.of("WS"), step.id.of("WW")):
            op = replace(
                op,
                after=tuple(n for n in op.after if n != read.id),
                **{field: tuple(names.get(n, n) for n in getattr(op, field)) for field in ("reads", "writes", "gives")},
            )
        ops += [op] * (op.id != read.id)
    ops.append(replace(read, after=(step.id.of("WW"),)))
    carried = tuple((names[name], name, pool) for name, pool in read.takes)
    own = replace(schedule, ops=tuple(ops), carried=(*schedule.carried, *carried))
    check(own)
    with pytest.raises(ScheduleError, match=rf"{step.id} .*from the step before, which has left it nothing to step"):
        prove(own, Needs.of(PROGRAM, placed(delay=0.5)))


def test_what_a_step_hands_on_beside_its_gradient_is_of_the_same_chunk() -> None:
    schedule = lower_step("vertical", PROGRAM, placed())
    (gradient, (one, one_end, pool), *others) = schedule.carried
    other = next(start for start, _, _ in others if start.holds == "state")
    swap = {one: other, other: one}
    ops = tuple(
        replace(op, reads=tuple(swap.get(n, n) for n in op.reads), writes=tuple(swap.get(n, n) for n in op.writes))
        if op.id.kind == "OP"
        else op
        for op in schedule.ops
    )
    assert (gradient[0].holds, one_end.holds, pool) == ("chunk of gradient", "state", "state")
    with pytest.raises(ScheduleError, match=rf"hands {other} on as .*, which are not both its chunk's state, or its"):
        prove(replace(schedule, ops=ops), Needs.of(PROGRAM, placed()))


def test_what_no_op_reads_from_disk_for_the_next_step_is_not_handed_on() -> None:
    """Here the next step finds it as this one has left it. A run's first step would find nothing: it reads what the op
    reads that is missing."""
    schedule = lower_step("vertical", PROGRAM, placed())
    read = ahead(schedule)[0]
    starts = {end: start for start, end, _ in schedule.carried if end in read.writes}
    ops = (
        replace(op, gives=tuple(name for name in op.gives if name not in starts.values()))
        for op in schedule.ops
        if op.id != read.id
    )
    carried = tuple((start, starts.get(end, end), pool) for start, end, pool in schedule.carried)
    own = replace(schedule, ops=tuple(ops), carried=carried)
    check(own)
    with pytest.raises(ScheduleError, match=rf"hands .* on as .*, which no op {read.id} reads from disk for the next"):
        prove(own, Needs.of(PROGRAM, placed()))
