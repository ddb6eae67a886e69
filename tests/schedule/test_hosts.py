"""Collectives on two levels: what goes between hosts is an op of a lane of its own, and whatever mixes the levels up is
refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.lower.seat import Seat, streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.mesh import Mesh
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import all_on_disk, transformer

RANKS, HOSTS = 4, 2
PART = Mesh(data=RANKS).everyone().part(transformer(2, block=2))
SETTINGS = all_on_disk(PART, chunk=4096, micro_batches=2)
SEAT = streaming_seat(RANKS, hosts=HOSTS)
WHOLE = lower_step("vertical", PART, SETTINGS, seat=SEAT)
NEEDS = Needs.of(PART, SETTINGS, RANKS, hosts=HOSTS)


def of(kind: str, schedule: Schedule = WHOLE) -> list[Op]:
    return [op for op in schedule.ops if op.id.kind == kind]


def test_each_level_is_an_op_on_a_lane_of_its_own() -> None:
    check_world(SEAT.world(WHOLE))
    prove(WHOLE, NEEDS)
    groups = SEAT.world(WHOLE).groups
    assert groups == {"all": (0, 1, 2, 3), "host0": (0, 1), "host1": (2, 3), "hosts0": (0, 2), "hosts1": (1, 3)}
    part = {g.index: g.numel * SETTINGS.form.weight_bytes for g in PART.groups}
    for within in of("GW"):
        (between,) = (WHOLE.by_id[ident] for ident in within.after)
        assert (between.id.kind, between.lane, within.lane) == ("HW", "nic", "net")
        assert (between.nbytes, within.nbytes) == (part[within.id.group], 2 * part[within.id.group])
    for between in of("HG"):
        (within,) = (WHOLE.by_id[ident] for ident in between.after)
        assert (within.id.kind, between.lane, within.lane) == ("SG", "nic", "net")
        assert (between.nbytes, within.nbytes) == (4096 * 4, 2 * 4096 * 4)
    assert len(of("HW")) == len(of("GW"))
    assert len(of("HG")) == len(of("SG"))


def test_all_in_all_a_rank_sends_as_much_as_on_one_level() -> None:
    flat = lower_step("vertical", PART, SETTINGS, seat=streaming_seat(RANKS)).bytes_per_lane()
    moved = WHOLE.bytes_per_lane()
    assert moved["net"] + moved["nic"] == flat["net"]


@pytest.mark.parametrize(
    ("seat", "kinds"),
    [
        (streaming_seat(4, hosts=4), set()),
        (streaming_seat(4, stage=0, hosts=2), set()),
        (streaming_seat(2, copies=2, hosts=2), {"HR"}),
        (streaming_seat(6, hosts=2), {"HW"}),
    ],
    ids=["one rank each", "stage 0", "copies", "three ranks each"],
)
def test_who_has_no_two_levels_has_one(seat: Seat, kinds: set[str]) -> None:
    """A host of three ranks has no branch of the tree of sums: its gradients go on one level."""
    whole = transformer(2, block=2)
    part = seat.shards.part(whole) if seat.parts > 1 else whole
    schedule = lower_step("vertical", part, all_on_disk(part, chunk=4096, micro_batches=2), seat=seat)
    assert {op.id.kind for op in schedule.ops if op.lane == "nic"} == kinds


def test_the_levels_of_different_collectives_go_on_beside_each_other() -> None:
    """With links that are busy for as long as each other, a step takes much less than both one after the other."""
    costs = Costs(
        name="links",
        seconds=lambda op: op.nbytes / 2e4 if op.lane == "nic" else op.nbytes / 4e4 if op.lane == "net" else 0.0,
    )
    result = simulate(SEAT.in_step(WHOLE), costs)
    busy = result.busy(0)
    assert busy["net"] == pytest.approx(busy["nic"], rel=0.05)
    assert result.time < 0.7 * (busy["net"] + busy["nic"])
    assert simulate(SEAT.world(WHOLE), costs).time == pytest.approx(result.time)


def edited(*edits: tuple[str, Callable[[Op], Op | None]]) -> Schedule:
    """The schedule with the first op of each kind changed, or left out: who came after it comes after what it did."""
    ops, made = list(WHOLE.ops), dict(edits)
    for kind, edit in made.items():
        at = next(i for i, op in enumerate(ops) if op.id.kind == kind)
        old, new = ops[at], edit(ops[at])
        if new is None:
            ops = [
                replace(op, after=tuple(b for a in op.after for b in (old.after if a == old.id else (a,))))
                for op in ops
                if op is not old
            ]
        else:
            ops[at] = new
    return replace(WHOLE, ops=tuple(ops))


def half(op: Op) -> Op:
    return replace(op, nbytes=op.nbytes // 2)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (edited(("HG", half)), "says that it moves 8192 bytes, and moves 16384"),
        (edited(("SG", half)), "says that it moves 16384 bytes, and moves 32768"),
        (edited(("HW", half)), "says that it moves"),
        (edited(("GW", half)), "says that it moves"),
        (edited(("GW", lambda op: None)), "for weights, which it is not"),
    ],
    ids=["bytes of HG", "bytes of SG", "bytes of HW", "bytes of GW", "no GW"],
)
def test_what_is_not_done_on_both_levels_is_refused(schedule: Schedule, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        prove(schedule, NEEDS)


def test_one_level_is_refused_where_there_are_two_and_the_other_way_round() -> None:
    flat = lower_step("vertical", PART, SETTINGS, seat=streaming_seat(RANKS))
    with pytest.raises(ScheduleError, match="GW"):
        prove(flat, NEEDS)
    with pytest.raises(ScheduleError, match="HW0@F0 is for other ranks than those that train"):
        prove(WHOLE, Needs.of(PART, SETTINGS, RANKS))


def test_two_hosts_of_two_ranks_stand_for_more() -> None:
    many = streaming_seat(32, hosts=4)
    assert many.of_few() == SEAT
    assert streaming_seat(32).of_few() == streaming_seat(2)
    assert streaming_seat(4, copies=8).of_few() == streaming_seat(2, copies=2)
