"""Ranks that send to each other and meet in collectives: what cannot work is found and named, what can is accepted."""

import re
import zlib
from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.check import worlds as check_world_module
from penstock.schedule.check.worlds import check_world, violations
from penstock.schedule.ir.ops import Op, Pool, Schedule
from penstock.schedule.ir.text import parse_op, parse_schedule, parse_world
from penstock.schedule.ir.worlds import World
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate


def pipeline(ranks: int, micro_batches: int) -> World:
    """One forward, one backward, one stage a rank; as many micro-batches in flight as ranks follow."""

    def stage(p: int) -> Schedule:
        last = ranks - 1

        def forward(m: int) -> list[str]:
            lines = [f"RA{p - 1}m{m} take A{m}=in write A{m} peer {p - 1}"] if p else []
            needs = f" after RA{p - 1}m{m} read A{m} give A{m}" if p else ""
            lines.append(f"F{p}m{m} take S{m}=stash write S{m}" + needs)
            return lines + ([f"SA{p}m{m} after F{p}m{m} peer {p + 1}"] if p < last else [])

        def backward(m: int) -> list[str]:
            lines = [f"RD{p}m{m} take D{m}=in_gradient write D{m} peer {p + 1}"] if p < last else []
            needs = f" after RD{p}m{m} read S{m},D{m} give S{m},D{m}" if p < last else f" read S{m} give S{m}"
            lines.append(f"B{p}m{m}" + needs)
            return lines + ([f"SD{p - 1}m{m} after B{p}m{m} peer {p - 1}"] if p else [])

        ahead = min(micro_batches, last - p)
        lines = [line for m in range(ahead) for line in forward(m)]
        for m in range(micro_batches):
            lines += forward(m + ahead) if m + ahead < micro_batches else []
            lines += backward(m)
        pools = [("in", 2), ("in_gradient", 2), ("stash", min(micro_batches, ranks - p))]
        return Schedule(
            name="pipeline",
            micro_batches=micro_batches,
            chunk=0,
            pools=tuple(Pool(name=name, tier="device", size=1, count=n) for name, n in pools),
            ops=tuple(map(parse_op, lines)),
        )

    return World(name="pipeline", ranks=tuple(map(stage, range(ranks))), groups={})


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 1), (4, 8), (5, 3), (300, 4)])
def test_a_pipeline_is_safe_and_says_the_same_after_a_round_trip_through_text(ranks: int, micro_batches: int) -> None:
    world = pipeline(ranks, micro_batches)
    assert violations(world) == []
    if ranks < 10:
        assert violations(parse_world(str(world))) == []


def test_one_buffer_less_than_ranks_follow_still_works_and_none_is_a_deadlock_on_a_named_rank() -> None:
    """Fewer activations in flight make the pipeline slower, down to a number that stops it."""

    def with_stash(count: int) -> World:
        world = pipeline(3, 4)
        pools = tuple(replace(p, count=count) if p.name == "stash" else p for p in world.ranks[0].pools)
        return replace(world, ranks=(replace(world.ranks[0], pools=pools), *world.ranks[1:]))

    with pytest.raises(ScheduleError, match="rank 0: compute F0m0 waits for a buffer of pool stash"):
        check_world(with_stash(0))
    # 1F1B does not need more than its own number, and its order of ops needs exactly that.
    with pytest.raises(ScheduleError, match="deadlock"):
        check_world(with_stash(2))
    check_world(with_stash(3))


# ---- deadlock, against an independent account


def has_cycle(world: World) -> bool:
    """True if lanes' orders, dependencies and messages contradict each other, pools aside: a plain topological sort."""
    needs: dict[tuple[int, str], set[tuple[int, str]]] = defaultdict(set)
    for rank, schedule in enumerate(world.ranks):
        for ops in schedule.lanes.values():
            for i, op in enumerate(ops):
                needs[rank, op.id] |= {(rank, other) for other in op.after}
                needs[rank, op.id] |= {(rank, ops[i - 1].id)} if i else set()
                if op.lane == "recv":
                    needs[rank, op.id].add((op.peer, f"S{op.id[1:]}"))
    done: set[tuple[int, str]] = set()
    while ready := [at for at, others in needs.items() if at not in done and others <= done]:
        done.update(ready)
    return len(done) < len(needs)


@pytest.mark.parametrize("seed", range(60))
def test_a_shuffled_pipeline_is_a_deadlock_exactly_when_its_orders_contradict_each_other(seed: int) -> None:
    rng = Random(seed)
    world = pipeline(rng.randint(2, 4), rng.randint(1, 4))
    ranks = []
    for schedule in world.ranks:
        ops = list(schedule.ops)
        for _ in range(rng.randint(0, 2)):
            i, j = rng.randrange(len(ops)), rng.randrange(len(ops))
            ops[i], ops[j] = ops[j], ops[i]
        bare = tuple(replace(op, takes=(), reads=(), writes=(), gives=()) for op in ops)
        ranks.append(replace(schedule, ops=bare))
    shuffled = replace(world, ranks=tuple(ranks))
    found = violations(shuffled)
    deadlocks = [said for said in found if said.startswith("deadlock: ")]
    assert bool(deadlocks) == has_cycle(shuffled), found
    assert all("may run before F" in said for said in found if said not in deadlocks)


@pytest.mark.parametrize("seed", range(60))
def test_the_checker_finds_a_deadlock_exactly_when_the_simulator_cannot_go_on(seed: int) -> None:
    """Lanes in another order, fewer buffers, any costs: what is accepted runs, what is a deadlock does not."""
    rng = Random(seed)
    world = pipeline(rng.randint(2, 4), rng.randint(2, 5))
    ranks = []
    for schedule in world.ranks:
        ops = list(schedule.ops)
        if rng.random() < 0.3:
            i, j = rng.randrange(len(ops)), rng.randrange(len(ops))
            ops[i], ops[j] = ops[j], ops[i]
        pools = tuple(replace(pool, count=pool.count - (rng.random() < 0.15)) for pool in schedule.pools)
        ranks.append(replace(schedule, ops=tuple(ops), pools=pools))
    changed = replace(world, ranks=tuple(ranks))
    found = violations(changed)
    costs = Costs(name="any", seconds=lambda op: float(zlib.crc32(f"{seed}{op}".encode()) % 7))
    if not found:
        simulate(changed, costs)
    elif any(said.startswith("deadlock: ") for said in found):
        with pytest.raises(ScheduleError, match="deadlock: "):
            simulate(changed, costs)


def test_a_deadlock_across_ranks_is_told_as_the_circle_that_it_is() -> None:
    """Both ranks want to receive before they send."""
    text = """\
world crossed ranks 3
rank 0
schedule a micro-batches 1 chunk 0
RD0m0 peer 1
F0m0 after RD0m0
SA0m0 after F0m0 peer 1
rank 1
schedule b micro-batches 1 chunk 0
RA0m0 peer 0
B1m0 after RA0m0
SD0m0 after B1m0 peer 0
rank 2
schedule c micro-batches 1 chunk 0
F2m0
"""
    with pytest.raises(ScheduleError) as caught:
        check_world(parse_world(text))
    said = str(caught.value)
    for part in (
        "rank 0: recv RD0m0 waits for op SD0m0 of rank 1",
        "rank 1: send SD0m0 waits for op B1m0",
        "rank 1: compute B1m0 waits for op RA0m0",
        "rank 1: recv RA0m0 waits for op SA0m0 of rank 0",
        "rank 0: send SA0m0 waits for op F0m0",
        "rank 0: compute F0m0 waits for op RD0m0",
    ):
        assert part in said
    assert "rank 2" not in said
    assert (caught.value.rank, caught.value.op) in {(0, "RD0m0"), (0, "F0m0")}


def test_collectives_in_different_orders_are_a_deadlock() -> None:
    text = """\
world gathers ranks 2
group all 0-1
rank 0
schedule a micro-batches 1 chunk 0
GW0@F0 group all
GW1@F1 group all
rank 1
schedule b micro-batches 1 chunk 0
{}
"""
    check_world(parse_world(text.format("GW0@F0 group all\nGW1@F1 group all")))
    with pytest.raises(ScheduleError, match="rank 0: net GW0@F0 waits for op GW0@F0 of rank 1"):
        check_world(parse_world(text.format("GW1@F1 group all\nGW0@F0 group all")))


# ---- what ranks promise each other

TWO = """\
world two ranks 2
group all 0-1
group first 0
rank 0
schedule two micro-batches 1 chunk 0
pool in device 1 x 1
F0m0
SA0m0 after F0m0 peer 1
RD0m0 take D=in write D peer 1
B0m0 after RD0m0 read D give D
AR0 after B0m0 group all
SG1 group first
rank 1
schedule two micro-batches 1 chunk 0
pool in device 1 x 1
RA0m0 take A=in write A peer 0
F1m0 after RA0m0 read A give A
B1m0 after F1m0
SD0m0 after B1m0 peer 0
AR0 after B1m0 group all
"""

UNMET: dict[str, tuple[str, str, str, int, str]] = {
    "a send to nobody": (
        "SA0m0 after F0m0 peer 1",
        "SA0m0 after F0m0 peer 7",
        "rank 0: op SA0m0 sends to rank 7, which does not exist",
        0,
        "SA0m0",
    ),
    "a send without a peer": (
        "SA0m0 after F0m0 peer 1",
        "SA0m0 after F0m0",
        "rank 0: op SA0m0 sends to no rank: write 'peer RANK'",
        0,
        "SA0m0",
    ),
    "a send without its recv": (
        "SD0m0 after B1m0 peer 0",
        "SD0m0 after B1m0 peer 0\nSD5m0 peer 0",
        "rank 1: op SD5m0 sends to rank 0, which has no op RD5m0 from rank 1",
        1,
        "SD5m0",
    ),
    "a recv without its send": (
        "SA0m0 after F0m0 peer 1\n",
        "",
        "rank 1: op RA0m0 receives from rank 0, which has no op SA0m0 to rank 1",
        1,
        "RA0m0",
    ),
    "a recv from another rank": (
        "RA0m0 take A=in write A peer 0",
        "RA0m0 take A=in write A peer 1",
        "rank 0: op SA0m0 sends to rank 1, which has no op RA0m0 from rank 0",
        0,
        "SA0m0",
    ),
    "a collective that one rank lacks": (
        "AR0 after B1m0 group all\n",
        "",
        "rank 0: op AR0 waits for all of group all, and rank 1 has no such op of that group",
        0,
        "AR0",
    ),
    "a group that is not there": (
        "SG1 group first",
        "SG1 group third",
        "rank 0: op SG1 is of group third, which does not exist",
        0,
        "SG1",
    ),
    "a collective of another rank's group": (
        "AR0 after B1m0 group all",
        "AR0 after B1m0 group all\nSG1 group first",
        "rank 1: op SG1 is of group first, which rank 1 does not belong to",
        1,
        "SG1",
    ),
    "a collective without a group": (
        "SG1 group first",
        "SG1",
        "rank 0: op SG1 is a collective: write 'group NAME'",
        0,
        "SG1",
    ),
    "a group on an op that is none": (
        "F0m0\nSA",
        "F0m0 group all\nSA",
        "rank 0: op F0m0 is of group all, but is no collective",
        0,
        "F0m0",
    ),
    "a peer on an op that has none": (
        "F0m0\nSA",
        "F0m0 peer 1\nSA",
        "rank 0: op F0m0 has a peer, but neither sends nor receives",
        0,
        "F0m0",
    ),
    "a group with a rank that is not there": (
        "group first 0\n",
        "group first 0\ngroup far 0,9\n",
        "group far has rank 9, which does not exist",
        -1,
        "group far",
    ),
    "a recv of other bytes": (
        "RA0m0 take A=in write A peer 0",
        "RA0m0 take A=in write A bytes 7 peer 0",
        "rank 1: op RA0m0 receives 7 bytes of 1, and rank 0 sends 0 bytes of 1 micro-batches",
        1,
        "RA0m0",
    ),
    "a recv of other micro-batches": (
        "RA0m0 take A=in write A peer 0",
        "RA0m0 take A=in write A items 3 peer 0",
        "rank 1: op RA0m0 receives 0 bytes of 3",
        1,
        "RA0m0",
    ),
    "a collective of other bytes": (
        "AR0 after B1m0 group all",
        "AR0 after B1m0 bytes 5 group all",
        "rank 1: op AR0 has 5 bytes, and on another rank 0",
        1,
        "AR0",
    ),
    "a rule of one rank": (
        "B0m0 after RD0m0 read D give D",
        "B0m0 after RD0m0 read D,Q give D",
        "rank 0: op B0m0 uses Q, which no op takes",
        0,
        "B0m0",
    ),
    "a name that is not there": (
        "B1m0 after F1m0",
        "B1m0 after F9m0",
        "rank 1: op B1m0 waits for F9m0, which does not exist",
        1,
        "B1m0",
    ),
    "not given back": (
        "F1m0 after RA0m0 read A give A",
        "F1m0 after RA0m0 read A",
        "rank 1: buffer A is never given back to pool in",
        1,
        "RA0m0",
    ),
}


def test_the_two_ranks_are_good() -> None:
    check_world(parse_world(TWO))


@pytest.mark.parametrize("name", UNMET)
def test_each_broken_promise_is_found_and_named_with_rank_and_op(name: str) -> None:
    old, new, says, rank, op = UNMET[name]
    assert TWO.count(old) == 1, old
    world = parse_world(TWO.replace(old, new))
    with pytest.raises(ScheduleError, match=re.escape(says)) as caught:
        check_world(world)
    assert (caught.value.rank, caught.value.op) == (rank, op)


def test_a_schedule_that_needs_other_ranks_is_no_schedule_of_one() -> None:
    world = pipeline(2, 1)
    with pytest.raises(ScheduleError, match="op SA0m0 sends to rank 1, which does not exist"):
        check(world.ranks[0])


def test_violations_name_every_rank_that_breaks_a_rule() -> None:
    world = pipeline(4, 2)

    def unread(schedule: Schedule) -> Schedule:
        return replace(schedule, ops=tuple(replace(op, reads=("Q",)) if op.id[0] == "B" else op for op in schedule.ops))

    found = violations(replace(world, ranks=(*map(unread, world.ranks[:2]), *world.ranks[2:])))
    assert [said[:7] for said in found] == ["rank 0:", "rank 1:"]


def test_ranks_that_share_a_schedule_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Schedule] = []
    real = check_world_module.check_rules

    def counted(schedule: Schedule, order: list[Op]) -> None:
        checked.append(schedule)
        real(schedule, order)

    monkeypatch.setattr(check_world_module, "check_rules", counted)
    shared = parse_schedule("schedule all micro-batches 1 chunk 0\nF0m0\nAR0 after F0m0 group all\n")
    check_world(World(name="all", ranks=(shared,) * 50, groups={"all": tuple(range(50))}))
    assert checked == [shared]


# ---- buffers that are carried from step to step

CARRIED = """\
schedule late micro-batches 1 chunk 4096
pool gradients host 2 x 16384
pool state host 1 x 49152
carry old new gradients
RS0.0 take S=state write S
OP0.0 after RS0.0 read S,old write S give old
WS0.0 after OP0.0 read S give S
CM after WS0.0
RW0.0@F0 after WS0.0
F0m0 after RW0.0@F0
B0m0 after F0m0
DG0.0@B0 after B0m0 take new=gradients write new
"""

BROKEN_CARRY: dict[str, tuple[str, str, str]] = {
    "never made": (" take new=gradients write new", "", "buffer new is to be carried on, but is not held at the end"),
    "given back": ("write new", "write new give new", "buffer new is to be carried on, but is not held at the end"),
    "kept": (" give old", "", "buffer old is never given back to pool gradients"),
    "taken again": (
        "take S=state",
        "take S=state,old=gradients",
        "op RS0.0 takes old, which is held from the step bef",
    ),
    "from another pool": (
        "take new=gradients",
        "take new=state",
        "buffer new is carried on as one of pool gradients, but is from pool state",
    ),
    "in no pool": ("carry old new gradients", "carry old new attic", "buffer old is carried in pool attic, which does"),
    "twice at the start": (
        "carry old new gradients",
        "carry old new gradients\ncarry old newer gradients",
        "buffer old is carried twice at the step's start",
    ),
    "more than the pool": (
        "pool gradients host 2",
        "pool gradients host 0",
        "more buffers of pool gradients are carried than it has",
    ),
    "the new weights come too late for who reads them": (
        "RW0.0@F0 after WS0.0",
        "RW0.0@F0",
        "op RW0.0@F0 may run before OP0.0, which it has to come after",
    ),
    "this step's norm before that step": (
        "OP0.0 after RS0.0",
        "NORM\nOP0.0 after RS0.0",
        "op NORM may run before OP0.0, which it has to come after",
    ),
}


def test_what_the_step_before_has_left_is_held_written_and_readable() -> None:
    check(parse_schedule(CARRIED))
    assert parse_schedule(str(parse_schedule(CARRIED))) == parse_schedule(CARRIED)


@pytest.mark.parametrize("name", BROKEN_CARRY)
def test_each_broken_rule_of_what_is_carried_is_found(name: str) -> None:
    old, new, says = BROKEN_CARRY[name]
    assert CARRIED.count(old) == 1, old
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check(parse_schedule(CARRIED.replace(old, new)))


def test_a_buffer_may_stay_from_step_to_step_under_its_name() -> None:
    text = "schedule s micro-batches 1 chunk 0\npool p host 1 x 4\ncarry x x p\nF0m0 read x\nB0m0 read x write x\n"
    check(parse_schedule(text))
    with pytest.raises(ScheduleError, match="race: op "):
        check(parse_schedule(text + "AG0 read x write x\n"))


def test_a_buffer_that_is_carried_and_shared_by_two_lanes_needs_an_order() -> None:
    with pytest.raises(
        ScheduleError, match=r"overwrite before last use: OP0\.0 gives old back while op F0m0 may use it"
    ):
        check(parse_schedule(CARRIED.replace("F0m0 after RW0.0@F0\n", "F0m0 read old\n")))
