"""A schedule of the user's own in the place of a plan's: what it needs is read off it, what it computes is proved."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.config import Tier, format_size
from penstock.errors import BudgetError, ScheduleError
from penstock.planner.fit import base_placement
from penstock.planner.plan import Plan
from penstock.planner.request import Request
from penstock.planner.update_mode import no_speculation
from penstock.schedule.check.late import late_chunks
from penstock.schedule.check.rules import check_names
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import ChunkAt, Op, Schedule, graphs_kept
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.place import GRAIN, PAGE, Depths, Placement, Settings, on_grain, page_up
from penstock.schedule.program import ALIGN


def own_plan(request: Request, schedule: Schedule, keep: Placement | None = None) -> Plan:
    """The plan that a schedule is, which all ranks have. It may do whatever computes the step of this model, within
    the budget.

    ``request``: without a choice between waiting and speculating, of a delay and of the side that rounds: the schedule
    has them. ``keep``: where arrays are now; those that no op is about stay there.

    Raises:
        ScheduleError: it is for another number of micro-batches; it is not safe, or does not compute this step; or the
            settings say something else.
        BudgetError: its pools do not fit.
    """
    check_names(schedule)
    _check_cut(request, schedule)
    _check_pools(schedule)
    place = placement_of(schedule, request, base_placement(request) if keep is None else keep)
    late, steps = late_chunks(schedule), sum(op.id.kind == "OP" for op in schedule.ops)
    _check_settings(request, schedule, place, late)
    settings = Settings(
        micro_batches=request.micro_batches,
        chunk=schedule.chunk,
        form=request.form,
        place=place,
        depths=Depths(),
        wait=request.wait,
        speculate=speculates(schedule, wait=request.wait),
        delay=len(late) / steps if late else 0.0,
        grad_dtype=request.grad_dtype,
        cast="device" if schedule.narrow else "host",
        strands=request.own_strands,
        stage=0 if _is_whole(schedule) else 3,
    )
    seat = request.seat(settings)
    check_world(seat.of_few().world(schedule))
    _check_place(request, place)
    prove(schedule, Needs.of(request.program, settings, request.ranks, request.copies, seat.hosts.size))
    plan = request.plan(settings, _with_fixed(request, schedule, place))
    for tier, used, most in (
        ("device", plan.device_bytes, request.budget.device_bytes),
        ("host", plan.host_bytes, request.budget.host_bytes),
    ):
        if used > most:
            raise BudgetError(f"the schedule's pools take {format_size(used)} of budget.{tier}")
    return plan


def speculates(schedule: Schedule, *, wait: bool) -> bool:
    """True if any step comes before the norm that it depends on, or would if it were not delayed. ``wait``: whether
    steps depend on it; then a schedule without an op for it speculates, even if all its chunks are delayed."""
    return schedule.speculative or (wait and "NORM" not in schedule.by_id)


def placement_of(schedule: Schedule, request: Request, others: Placement) -> Placement:
    """The tiers on which a schedule's stages find weights, its state lives, and its gradients and activations wait.

    ``others``: the placement of arrays that no op is about.
    """
    count, form = len(request.program.groups), request.form
    weights, state = list(others.weights), list(others.state)
    ops: list[list[Op]] = [[] for _ in range(count)]
    for op in schedule.ops:
        if 0 <= op.id.group < count:
            ops[op.id.group].append(op)
    used = {g for stage in request.program.stages for g in (*stage.forward_reads, *stage.backward_reads)}
    for g, group in enumerate(request.program.groups):
        kinds = {op.id.kind for op in ops[g]}
        loads = [op for op in ops[g] if op.id.kind == "UW"]
        if g not in used or not group.numel:
            continue
        if "RW" in kinds or any(op.reads for op in loads):
            weights[g] = "disk"
        else:
            weights[g] = "host" if loads else "device"
        if "OD" in kinds:
            state[g] = "device"
        elif "OP" in kinds:
            if "WS" in kinds or "WM" in kinds or ("WW" in kinds and weights[g] != "disk"):
                state[g] = "disk"
            elif "WW" not in kinds or form.state_bytes(group) or state[g] == "device":
                state[g] = "host"
    wrote = {op.id.kind for op in schedule.lanes["write"]}
    away: Tier = "host" if any(op.id.kind == "DC" for op in schedule.lanes["d2h"]) else "device"
    return Placement(
        weights=tuple(weights),
        state=tuple(state),
        gradients="disk" if "WG" in wrote else "host",
        activations="disk" if "WC" in wrote else away,
    )


def _is_whole(schedule: Schedule) -> bool:
    """True if each of several ranks has all of the state: the sum of all gradients."""
    return any(op.id.kind == "AR" for op in schedule.ops)


def _check_cut(request: Request, schedule: Schedule) -> None:
    if schedule.micro_batches != request.micro_batches:
        raise ScheduleError(f"the schedule is for {schedule.micro_batches} micro-batches, not {request.micro_batches}")
    if schedule.chunk < ALIGN or schedule.chunk % ALIGN:
        raise ScheduleError(f"the schedule's chunk of {schedule.chunk} elements is not a multiple of {ALIGN}")
    for group in request.program.groups:
        if not on_grain(group, schedule.chunk):
            raise ScheduleError(
                f"the schedule's chunk of {schedule.chunk} elements is smaller than what has one checksum on disk in "
                f"group {group.name}: make it {GRAIN} or more"
            )


def _check_pools(schedule: Schedule) -> None:
    """Raises ScheduleError: a pool takes other memory than it counts, so that the budget would not hold."""
    for pool in schedule.pools:
        if pool.tier == "disk":
            raise ScheduleError(f"pool {pool.name} is on disk, and buffers are on the device or the host")
        if pool.backed and pool.size % PAGE:
            raise ScheduleError(
                f"pool {pool.name} has buffers of {pool.size} bytes, and memory comes in whole pages: "
                f"write {page_up(pool.size)}"
            )


def _check_settings(request: Request, schedule: Schedule, place: Placement, late: frozenset[ChunkAt]) -> None:
    """Raises ScheduleError: a setting and the schedule say different things."""
    early = speculates(schedule, wait=request.wait)
    if request.speculate is not None and request.speculate != early:
        does = "speculates" if early else "does not speculate"
        raise ScheduleError(f"the schedule {does}: leave speculate={request.speculate} out, or take another schedule")
    if early and (why := no_speculation(request.budget, wait=request.wait)) is not None:
        raise ScheduleError(f"the schedule speculates, which cannot be: {why}")
    if request.delay is not None and (late or request.delay):
        raise ScheduleError(
            f"the schedule itself delays the steps of {len(late)} chunks: leave delay={request.delay} out"
        )
    kept = graphs_kept(schedule)
    own = (stage for stage in request.program.stages if request.program.has(stage.index))
    able = sum(stage.graph is not None for stage in own) * request.micro_batches
    if (request.recompute is True and kept) or (request.recompute is False and kept < able):
        raise ScheduleError(
            f"the schedule keeps the graphs of {kept} calls, of {able} that could: leave "
            f"recompute={request.recompute} out"
        )
    if request.is_of_several:
        if _is_whole(schedule) != (request.stage == 0):
            does, do = ("has", "give stage=0") if _is_whole(schedule) else ("has not", "leave stage=0 out")
            raise ScheduleError(f"in the schedule each rank {does} all of the state: {do}")
        if request.stage:
            raise ScheduleError(f"the schedule says how long gathered weights stay: leave stage={request.stage} out")
    budget, base = request.budget, base_placement(request)
    for g, group in enumerate(request.program.groups):
        for kind, pin, tier, may in (
            ("weights", budget.weights, place.weights[g], base.weights[g]),
            ("state", budget.state if group.trainable else None, place.state[g], base.state[g]),
        ):
            if pin is not None and tier not in (pin, may):
                raise ScheduleError(f"the schedule has the {kind} of {group.name} on {tier}, and budget.{kind}={pin!r}")
            if tier == "disk" and request.bottom != "disk":
                raise ScheduleError(f"the schedule has {kind} of {group.name} on disk: give budget.disk a directory")
    _check_waiting(request, schedule, late)


def _check_place(request: Request, place: Placement) -> None:
    """Raises ScheduleError: weights and state of a group cannot be where a schedule has them."""
    for g, group in enumerate(request.program.groups):
        if (why := place.fault(group)) is not None:
            has = f"weights of {group.name} found on {place.weights[g]} and their state at home on {place.state[g]}"
            raise ScheduleError(f"the schedule has {has}: {why}")


def _check_waiting(request: Request, schedule: Schedule, late: frozenset[ChunkAt]) -> None:
    """Raises ScheduleError: what waits within a step, or for the next one, cannot be where a schedule has it."""
    budget, kinds = request.budget, {op.id.kind for op in schedule.ops}
    if request.bottom != "disk" and (lacking := kinds & {"WG", "WC"}):
        raise ScheduleError(f"the schedule has ops {min(lacking)}, which write to disk: give budget.disk a directory")
    away = {(op.id.stage, op.id.micro_batch): "host" for op in schedule.ops if op.id.kind == "DC"}
    away |= {(op.id.stage, op.id.micro_batch): "disk" for op in schedule.ops if op.id.kind == "WC"}
    if budget.activations is not None and (others := {*away.values()} - {budget.activations}):
        raise ScheduleError(f"saved activations wait on {min(others)}, and budget.activations={budget.activations!r}")
    aside = {(op.id.group, op.id.chunk) for op in schedule.ops if op.id.kind == "WG"}
    if budget.gradients == "host" and aside:
        raise ScheduleError("gradients wait on disk, and budget.gradients='host'")
    if budget.gradients == "disk" and not late <= aside:
        raise ScheduleError("gradients wait in memory, and budget.gradients='disk'")


def _with_fixed(request: Request, schedule: Schedule, place: Placement) -> Schedule:
    """The schedule with what a step of this model holds besides its pools, and what its own lines keep beyond that.

    Raises:
        ScheduleError: a line says less than this model holds, or what another one says.
    """
    said = Counter((tier, what) for tier, what, _ in schedule.fixed)
    if twice := [f"fixed {tier} {what}" for (tier, what), times in said.items() if times > 1]:
        raise ScheduleError(f"the schedule says {twice[0]} more than once: write one line with the sum")
    holds = {(tier, what): n for tier, what, n in request.fixed(place, _under_way(schedule.lanes["compute"])) if n}
    for tier, what, nbytes in schedule.fixed:
        if nbytes < (least := holds.get((tier, what), 0)):
            raise ScheduleError(
                f"fixed {tier} {what} {nbytes}: a step of this model holds {least} bytes of it: write that, or leave "
                "the line out"
            )
        holds[tier, what] = nbytes
    return replace(schedule, fixed=tuple((tier, what, n) for (tier, what), n in holds.items()))


def _under_way(ops: Sequence[Op]) -> int:
    """The most micro-batches that are at once between the start of their forward and the end of their backward."""
    most = 0
    under_way: set[int] = set()
    for op in ops:
        if op.id.kind == "F":
            under_way.add(op.id.micro_batch)
            most = max(most, len(under_way))
        elif op.id.kind == "B" and op.id.stage == 0:
            under_way.discard(op.id.micro_batch)
    return most
