"""Copies of the state: each gradient is added up over the ranks of a copy, and then over all copies; anything less is
refused.
"""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.lower.seat import streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.mesh import Mesh
from tests.programs import all_on_disk, transformer

PART = Mesh(data=2).everyone().part(transformer(1, block=2))
SETTINGS = all_on_disk(PART, chunk=4096, micro_batches=2)
SEAT = streaming_seat(2, copies=2)
WHOLE = lower_step("vertical", PART, SETTINGS, seat=SEAT)
NEEDS = Needs.of(PART, SETTINGS, 2, 2)


def with_ops(*ops: Op | None) -> Schedule:
    return replace(WHOLE, ops=tuple(op for op in ops if op is not None))


def sums() -> list[Op]:
    """Those between copies."""
    return [op for op in WHOLE.ops if op.id.kind == "HR"]


def test_each_gradient_is_added_up_within_its_copy_and_then_over_all() -> None:
    check_world(SEAT.world(WHOLE))
    prove(WHOLE, NEEDS)
    for op in sums():
        assert [other.kind for other in op.after] == ["SG"]
        assert op.nbytes == 2 * 4 * 4096 // 2, "twice a half of the chunk, to one other copy"
    world = SEAT.world(WHOLE)
    assert world.groups == {"all0": (0, 1), "all1": (2, 3), "copies0": (0, 2), "copies1": (1, 3)}


def test_a_gradient_of_one_copy_alone_is_refused() -> None:
    left_out = sums()[0]
    before = next(op for op in WHOLE.ops if op.id == left_out.after[0])
    ops = [
        None if op is left_out else replace(op, after=tuple(before.id if a == left_out.id else a for a in op.after))
        for op in WHOLE.ops
    ]
    with pytest.raises(ScheduleError, match="for a gradient, which it is not"):
        prove(with_ops(*ops), NEEDS)


def test_other_bytes_between_copies_are_refused() -> None:
    first = sums()[0]
    ops = [replace(op, nbytes=op.nbytes // 2) if op is first else op for op in WHOLE.ops]
    with pytest.raises(ScheduleError, match=f"says that it moves {first.nbytes // 2} bytes"):
        prove(with_ops(*ops), NEEDS)


def test_ranks_of_one_copy_do_not_meet_those_of_another() -> None:
    world = SEAT.world(WHOLE)
    crossed = replace(world, groups=world.groups | {"all0": (0, 3), "all1": (1, 2)})
    with pytest.raises(ScheduleError, match="does not belong to"):
        check_world(crossed)
