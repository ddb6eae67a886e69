"""Proves a schedule safe, or names the op that breaks a rule.

1. every id is unique, every dependency exists, micro-batches are those of the step, and there is no deadlock with the
   given pools;
2. a buffer is taken before it is touched and given back after its last use, exactly once (pools are returned); what is
   carried from step to step is held at the start, written and readable, and held at the end under its other name;
3. two ops that touch a buffer are ordered if one of them writes it (no overwrite before last use);
4. an op that only reads a buffer comes after every op that only writes it (no use before load);
5. a pool is taken from in one order whatever the timing, which makes rule 1's proof hold for every timing;
6. outside the pools: weights are read where they are at home before the optimizer replaces them, what waits on disk is
   written before it is read, and the norm comes after all of its parts and before every optimizer step (in a
   speculative schedule not before those whose state comes from disk and goes back there); the commit of the step before
   comes after all that it has left to do and before anything of this step is written;
7. ops of one group, or of one stage and micro-batch, are in the order that their words mean: the forward, the backward
   (of the input, then of the weights), the gradient's sums, one optimizer step, and the way home of what it has made;
8. between ranks: every send has one recv of the same on its peer and the other way round, and a collective is on every
   rank of its group, with as many bytes.

"Before" and "ordered" mean whatever the timing: see ``clocks``. Rules 2 to 5 are in ``rules``, 6 and 7 in ``words``, 8
in ``check_world``, the absence of deadlock in ``order``.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from penstock.config import Tier
from penstock.errors import ScheduleError
from penstock.schedule.check_world import check_world
from penstock.schedule.clocks import Clocks
from penstock.schedule.ir.ops import Op, Schedule, chunk_of
from penstock.schedule.ir.worlds import World
from penstock.schedule.order import run_order
from penstock.schedule.program import Program
from penstock.schedule.words import left_over


def check(schedule: Schedule) -> None:
    """Check every rule on a schedule that needs no other rank.

    Raises:
        ScheduleError: names the rule, the op, and what it waits for or collides with.
    """
    check_world(World.of(schedule))


def check_waits(schedule: Schedule, waits: Callable[[int], bool]) -> None:
    """Check what a schedule does not say of itself either: which groups must wait for the norm (``waits``), because
    their state changes in place.

    Raises:
        ScheduleError: names the optimizer step that may come before it.
    """
    norm = schedule.by_id.get("NORM")
    left = {name for name, _, _ in schedule.carried}
    clocks = Clocks(run_order(schedule))
    for op in schedule.ops:
        if op.id.kind in ("OP", "OD") and waits(op.id.group) and left.isdisjoint(op.reads):
            if any(name.kind == "r" for name in op.reads):  # left by the step before, on disk
                continue
            if norm is None or not clocks.before(norm, op):
                raise ScheduleError(f"op {op.id} may run before NORM, which its group waits for", op=op.id)


def check_readers(schedule: Schedule, program: Program, weights: Sequence[Tier]) -> None:
    """Check what a schedule does not say of itself: weights that live on the device (by ``weights``, a tier for each
    group) are read by every stage that uses them, and no step may change them before the last of those. The step before
    may have left some to do: these come before the first.

    Raises:
        ScheduleError: names the op that may come too early.
    """
    clocks = Clocks(run_order(schedule))
    readers: dict[int, list[Op]] = defaultdict(list)
    for op in schedule.lanes["compute"]:
        if op.id.kind in ("F", "B", "E"):
            stage = program.stages[op.id.stage]
            forward = () if op.id.kind == "B" else stage.forward_reads
            backward = () if op.id.kind == "F" else stage.backward_reads
            for group in {g for g in (*forward, *backward) if weights[g] == "device"}:
                readers[group].append(op)
    late = left_over(schedule, clocks)
    for op in schedule.ops:
        if op.id.kind not in ("OP", "OD", "UN"):
            continue
        for reader in readers[op.id.group]:
            if chunk_of(op) in late and not clocks.before(op, reader):
                message = f"op {reader.id} may run before {op.id}, which ends the step before on the weights it reads"
                raise ScheduleError(message, op=reader.id)
            if chunk_of(op) not in late and not clocks.before(reader, op):
                message = f"op {op.id} may run before {reader.id}, which reads the weights it changes"
                raise ScheduleError(message, op=op.id)
