"""A schedule of the user's own in the place of a plan's: checked against what the plan's settings need."""

from dataclasses import replace

from penstock.config import Tier, format_size
from penstock.errors import BudgetError, ScheduleError
from penstock.planner.fit import Plan, Request
from penstock.schedule.check import check_readers, check_waits
from penstock.schedule.ir.ops import Op, Schedule, chunk_of
from penstock.schedule.place import GRAIN, Depths, Side, on_grain
from penstock.schedule.program import ALIGN, Program

_SHOWN = 3
"""chunks that an error names"""


def with_schedule(request: Request, plan: Plan, schedule: Schedule) -> Plan:
    """The plan with a schedule of the user's own: the same ops on the same buffers, but in the order, with the
    dependencies and with as many buffers per pool as theirs. It speculates, and delays the same chunks, if the plan
    does: ``means_of`` tells what to ask of the plan. As many inputs of the last block stay on the device as in theirs.

    Raises:
        ScheduleError: it is for another number of micro-batches, or differs in more than that, or would change the
            numbers by adding gradients up in another order.
        BudgetError: its pools do not fit.
    """
    if schedule.chunk < ALIGN or schedule.chunk % ALIGN:
        raise ScheduleError(f"the schedule's chunk of {schedule.chunk} elements is not a multiple of {ALIGN}")
    for group in request.program.groups:
        if not on_grain(group, schedule.chunk):
            raise ScheduleError(
                f"the schedule's chunk of {schedule.chunk} elements is smaller than what has one checksum on disk in "
                f"group {group.name}: make it {GRAIN} or more"
            )
    settings = replace(plan.settings, chunk=schedule.chunk)
    if schedule.micro_batches != settings.micro_batches:
        raise ScheduleError(f"the schedule is for {schedule.micro_batches} micro-batches, not {settings.micro_batches}")
    inputs = _staying_inputs(request, schedule)
    settings = replace(settings, depths=replace(settings.depths, inputs=inputs))
    wanted = request.build(settings)
    _check_means(wanted, schedule, request.program)
    for missing in wanted.by_id.keys() - schedule.by_id.keys():
        raise ScheduleError(f"the schedule has no op {missing}, which this model on this budget needs")
    for extra in schedule.by_id.keys() - wanted.by_id.keys():
        raise ScheduleError(f"the schedule has an op {extra}, which this model on this budget does not have")
    for op in wanted.ops:
        theirs = schedule.by_id[op.id]
        if replace(theirs, after=op.after) != op:
            raise ScheduleError(f"op {op.id} moves or touches something else than this model needs: write '{op}'")
    pools = {pool.name: pool for pool in schedule.pools}
    for pool in wanted.pools:
        if pool.name not in pools or replace(pools[pool.name], count=pool.count) != pool:
            raise ScheduleError(f"the schedule needs a pool like '{pool}'; only its number of buffers may differ")
    found, sums = _order_of_sums(schedule), _order_of_sums(wanted)
    for name in sums:
        if found[name] != sums[name]:
            raise ScheduleError(
                f"gradients are added up in {name} by {', '.join(found[name])}, which changes the numbers: keep the "
                f"order {', '.join(sums[name])}"
            )
    check_readers(schedule, request.program, settings.place.weights)
    check_waits(schedule, settings.waits)
    own = replace(schedule, fixed=wanted.fixed)
    limits: tuple[tuple[Tier, int], ...] = (
        ("device", request.budget.device_bytes),
        ("host", request.budget.host_bytes),
    )
    for tier, most in limits:
        if own.peak_bytes(tier) > most:
            raise BudgetError(f"the schedule's pools take {format_size(own.peak_bytes(tier))} of budget.{tier}")
    return replace(plan, settings=settings, schedule=own)


def _staying_inputs(request: Request, schedule: Schedule) -> int:
    """``Depths.inputs`` of a schedule: how many there were room for when it was made."""
    last = len(request.program.stages) - 3
    leave = sum(op.id.kind == "DC" and op.id.stage == last for op in schedule.lanes["d2h"])
    return max(request.route.at_once - leave, Depths.inputs)


def _order_of_sums(schedule: Schedule) -> dict[str, list[str]]:
    """For each buffer that gradients are added up in, the ops that add, in order."""
    sums: dict[str, list[str]] = {}
    for op in (*schedule.lanes["compute"], *schedule.lanes["cpu"]):
        if op.id.kind in ("B", "E", "AG"):
            for name in set(op.reads) & set(op.writes):
                sums.setdefault(name, []).append(op.id)
    return sums


def means_of(schedule: Schedule, program: Program, *, wait: bool) -> tuple[bool, float]:
    """Whether a schedule speculates, and the largest delay ratio that delays exactly the chunks that it delays.

    ``wait``: whether a step's numbers need the norm. Then a schedule without an op for it speculates, even if all its
    chunks are delayed. Of the first n chunks that step in host memory n times the ratio are delayed, rounded up
    (``delayed_share``), and all of ``program.last_stepped``, which do not count among them.

    Raises:
        ScheduleError: no ratio delays these chunks.
    """
    steps = sorted((op for op in schedule.ops if op.id.kind == "OP"), key=lambda op: (op.id.group, op.id.chunk))
    stepped = [op for op in steps if op.id.group not in program.last_stepped]
    ends = {_is_late(op) for op in steps if op.id.group in program.last_stepped}
    above, most, late = -1.0, 1.0, 0
    for n, op in enumerate(stepped, start=1):
        late += _is_late(op)
        above, most = max(above, (late - 1) / n), min(most, late / n)
    delays = late > 0 or True in ends
    if above >= most or (delays and (False in ends or (stepped and not late))):
        raise ScheduleError(
            f"the schedule delays the steps of {sum(map(_is_late, steps))} of {len(steps)} chunks, but not the ones "
            "that a delay ratio does, which are all of the groups that the backward is done with last, and of the "
            "others as evenly spread as can be: take a schedule from penstock simulate --delay"
        )
    return schedule.speculative or (wait and "NORM" not in schedule.by_id), most if delays else 0.0


def cast_of(schedule: Schedule) -> Side:
    """On which side of the link a schedule rounds gradients, if they are rounded: on the device it takes a buffer for
    each of them there."""
    return "device" if any(len(op.writes) > 1 for op in schedule.lanes["d2h"] if op.id.kind == "DG") else "host"


def _is_late(op: Op) -> bool:
    """Whether a step is of a gradient that the step before has left: ``h`` held in host memory, ``r`` on disk."""
    return any(name.kind in ("h", "r") for name in op.reads)


def _check_means(wanted: Schedule, schedule: Schedule, program: Program) -> None:
    """Raises ScheduleError: one speculates, delays or rounds gradients, and the other does otherwise."""
    if cast_of(schedule) == "device" != cast_of(wanted):
        raise ScheduleError(
            "the schedule rounds gradients to bf16 on the device, and the plan does not: give grad_dtype='bf16'"
        )
    if schedule.speculative != wanted.speculative:
        does, doing = ("speculates", "does not") if schedule.speculative else ("does not speculate", "does")
        raise ScheduleError(
            f"the schedule {does}, and the plan {doing}: give speculate={schedule.speculative}, or a schedule whose "
            f"first line {'ends with' if wanted.speculative else 'has no'} 'speculative'"
        )
    late, planned = ({chunk_of(op) for op in s.ops if op.id.kind == "OP" and _is_late(op)} for s in (schedule, wanted))
    if late != planned:
        differ = sorted(late ^ planned)
        chunks = ", ".join(f"{g}.{c}" for g, c in differ[:_SHOWN]) + (", ..." if len(differ) > _SHOWN else "")
        raise ScheduleError(
            f"the schedule delays the steps of {len(late)} chunks, and the plan of {len(planned)} (they differ in "
            f"{chunks}): give delay={means_of(schedule, program, wait=True)[1]:.6g}, as the schedule has it"
        )
    carried, handed_on = set(schedule.carried), set(wanted.carried)
    if carried != handed_on:
        start, end, pool = sorted(carried ^ handed_on)[0]
        missing = (start, end, pool) in handed_on
        raise ScheduleError(
            f"the schedule {'has no' if missing else 'has a'} line 'carry {start} {end} {pool}', which hands a "
            f"gradient on to the next step: {'add it' if missing else 'remove it'}"
        )
