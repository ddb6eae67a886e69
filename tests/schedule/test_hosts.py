"""Collectives on two levels: what goes between hosts is an op of a lane of its own, and whatever mixes the levels up is
refused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.config import Family
from penstock.errors import ScheduleError
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.lower.seat import Seat, streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Depths
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import all_on_disk, transformer

RANKS, HOSTS = 4, 2
PART = Mesh(data=RANKS).everyone().part(transformer(2, block=2))
SETTINGS = all_on_disk(PART, chunk=4096, micro_batches=2)
SEAT = streaming_seat(RANKS, hosts=HOSTS)
WHOLE = lower_step("vertical", PART, SETTINGS, seat=SEAT)
ONCE = streaming_seat(RANKS, hosts=HOSTS, secondary=True)
LONGER = Mesh(data=RANKS).everyone().part(transformer(4, block=2))
CROSSING_ONCE = lower_step("vertical", LONGER, all_on_disk(LONGER, chunk=4096, micro_batches=2), seat=ONCE)
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


@pytest.mark.parametrize(("ranks", "crosses"), [(RANKS, "HW"), (HOSTS, "GW")], ids=["two of each", "one of each"])
@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_with_a_secondary_partition_weights_cross_between_hosts_once_a_step(
    family: Family, ranks: int, crosses: str
) -> None:
    """Whatever the number of visits: each later one finds on its host what had to cross for the first."""
    part = Mesh(data=ranks).everyone().part(transformer(3, block=2))
    asked = all_on_disk(part, chunk=4096, micro_batches=3)
    needs = Needs.of(part, asked, ranks, hosts=HOSTS if crosses == "HW" else 1)
    each_use, once = (
        lower_step(family, part, asked, seat=streaming_seat(ranks, hosts=HOSTS, secondary=secondary))
        for secondary in (False, True)
    )
    prove(once, needs)
    times = Counter(op.id.group for op in of(crosses, each_use))
    assert Counter(op.id.group for op in of(crosses, once)) == dict.fromkeys(range(len(part.groups)), 1)
    kept, again = of("DP", once), of("UP", once)
    assert sorted(op.id.group for op in kept) == [g for g, count in sorted(times.items()) if count > 1]
    assert kept, "some come more than once"
    assert len(again) == len(of(crosses, each_use)) - len(of(crosses, once))
    whole = {g.index: ranks * g.numel * asked.form.weight_bytes for g in part.groups}
    assert {op.nbytes for op in kept} == {whole[op.id.group] // (ranks // HOSTS) for op in again}
    more = sum(pool.size * pool.count for pool in once.pools if pool.name.startswith("secondary"))
    assert more == sum(op.nbytes for op in kept)


def test_what_has_crossed_goes_down_behind_the_saved_activations_of_visits_before() -> None:
    """Of those that have left when its own begins; these would else wait for weights to cross that nobody needs yet. A
    visit of one micro-batch would itself wait for them."""
    for micro_batches, behind in ((1, False), (2, True)):
        asked = all_on_disk(LONGER, chunk=4096, micro_batches=micro_batches)
        down = [op.id for op in lower_step("vertical", LONGER, asked, seat=ONCE).lanes["d2h"]]
        crossed = [i for i, ident in enumerate(down) if ident.kind == "DP"]
        before = {i: [j for j, ident in enumerate(down) if ident.kind == "DC" and j > i] for i in crossed}
        stages = {i: visit.stage for i in crossed if (visit := down[i].visit) is not None}
        assert all(stages[i] - 1 <= down[j].stage for i in crossed for j in before[i]) == behind


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_what_comes_twice_before_its_first_visit_is_down_before_it_comes_again(depth: int) -> None:
    part = Mesh(data=RANKS).everyone().part(transformer(3, block=2, reader=True))
    asked = all_on_disk(part, chunk=4096, micro_batches=2, depths=Depths(weights=depth))
    schedule = lower_step("vertical", part, asked, seat=ONCE)
    check_world(ONCE.world(schedule))
    prove(schedule, Needs.of(part, asked, RANKS, hosts=HOSTS))
    emitted = {op.id: i for i, op in enumerate(schedule.ops)}
    assert all(emitted[other] < emitted[op.id] for op in of("UP", schedule) for other in op.after)


def edited(*edits: tuple[str, Callable[[Op], Op | None]], whole: Schedule = WHOLE) -> Schedule:
    """The schedule with the first op of each kind changed, or left out: who came after it comes after what it did."""
    ops, made = list(whole.ops), dict(edits)
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
    return replace(whole, ops=tuple(ops))


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


def of_another(op: Op) -> Op:
    """What another group has left."""
    others = {name for down in of("DP", CROSSING_ONCE) for name in down.writes} - {*op.reads}
    return replace(op, reads=(min(others),))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("DP", half), "says that it moves"),
        (("UP", half), "says that it moves"),
        (("DP", lambda op: None), "gives back p3, which is not taken"),
        (("DP", lambda op: replace(op, writes=())), "has 0 buffers for what has crossed"),
        (("UP", of_another), "for the weights of its group, which it is not"),
    ],
    ids=["bytes of DP", "bytes of UP", "no DP", "nothing down", "UP of another group"],
)
def test_what_has_crossed_once_is_brought_again_as_it_was(edit: Any, said: str) -> None:
    needs = Needs.of(LONGER, all_on_disk(LONGER, chunk=4096, micro_batches=2), RANKS, hosts=HOSTS)
    prove(CROSSING_ONCE, needs)
    with pytest.raises(ScheduleError, match=said):
        prove(edited(edit, whole=CROSSING_ONCE), needs)


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
