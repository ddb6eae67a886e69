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
7. ops of one group, or of one stage and micro-batch, are in the order that their ids mean: the forward, the backward
   (of the input, then of the weights), the gradient's sums, one optimizer step, and the way home of what it has made;
8. between ranks: every send has one recv of the same on its peer and the other way round, and a collective is on every
   rank of its group, with as many bytes.

What a schedule computes for a given model is proved in ``meaning``, which relies on these rules.

"Before" and "ordered" mean whatever the timing: see ``clocks``. Rules 2 to 5 are in ``rules``, 6 and 7 in ``op_ids``, 8
in ``worlds``, the absence of deadlock in ``order``, what the step before has left to this one in ``late``.
"""

from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World


def check(schedule: Schedule) -> None:
    """Check every rule on a schedule that needs no other rank.

    Raises:
        ScheduleError: names the rule, the op, and what it waits for or collides with.
    """
    check_world(World.of(schedule))
