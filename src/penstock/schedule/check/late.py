"""Gradients that the step before has left to a step, and so the chunks that are stepped with them."""

from penstock.schedule.check.clocks import Clocks
from penstock.schedule.check.order import run_order
from penstock.schedule.ir.ops import ChunkAt, Op, Schedule, chunk_of
from penstock.schedule.ir.references import Buffer


def left_buffers(schedule: Schedule, clocks: Clocks | None = None) -> set[Buffer]:
    """Buffers with gradients that the step before has left: those that are carried on, and those that are read from
    disk before this step's own surely are written there. The order in which a schedule lists its lanes means nothing.

    ``clocks``: of the schedule, if they are there already; they are only needed for what waits on disk.

    Raises:
        ScheduleError: no lane can go on.
    """
    left = {name for name, _, _ in schedule.carried if name.holds not in ("state", "new weights")}
    for op in schedule.lanes["read"]:
        if op.id.kind == "RG" and (writer := schedule.by_id.get(op.id.of("WG"))):
            clocks = clocks or Clocks(run_order(schedule))
            if clocks.before(op, writer):
                left |= {*op.writes}
    return left


def late_chunks(schedule: Schedule, clocks: Clocks | None = None) -> frozenset[ChunkAt]:
    """The chunks that a step steps for the step before. Arguments and errors are those of ``left_buffers``."""
    left = left_buffers(schedule, clocks)
    steps = (op for op in schedule.ops if op.id.kind in ("OP", "MU"))
    return frozenset(chunk_of(op) for op in steps if not left.isdisjoint(op.reads))


def late_moves(schedule: Schedule) -> tuple[Op, ...]:
    """The ops that move bytes for the step before, and none in a step that found nothing left to it: a run's first one,
    and one after an evaluation, which has had all of it done. Errors are those of ``left_buffers``."""
    late = late_chunks(schedule)
    return tuple(op for op in schedule.ops if op.id.kind in ("RG", "WS", "WM", "WW") and chunk_of(op) in late)
