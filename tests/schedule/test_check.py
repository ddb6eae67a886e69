"""The checker finds what makes a schedule unsafe, and names it; what it accepts is safe by an independent account."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, islice
from random import Random

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.check.order import run_order
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.lanes import LOCAL_LANES
from penstock.schedule.ir.ops import Op, Pool, Schedule
from penstock.schedule.ir.text import parse_op, parse_schedule
from penstock.schedule.ir.worlds import World
from tests.programs import random_case

# ---- an independent account of what may collide


def orderings(schedule: Schedule) -> Callable[[Op, Op], bool]:
    """True if one op is done before another starts, for every timing: reachability between starts and ends.

    A lane that does one thing at a time starts an op after the end of the one before it. ``read`` and ``write`` keep
    several in flight: only the publication of their ends is in order.
    """
    edges: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for lane, ops in schedule.lanes.items():
        for i, op in enumerate(ops):
            edges["end", op.id].append(("start", op.id))
            edges["start", op.id] += [("end", other) for other in op.after]
            if i:
                edges["end" if lane in ("read", "write") else "start", op.id].append(("end", ops[i - 1].id))
    bit = {op.id: 1 << i for i, op in enumerate(schedule.ops)}
    ended: dict[tuple[str, str], int] = {}  # the ops whose end comes before a point in time, as bits
    for op in run_order(schedule):
        for point in (("start", op.id), ("end", op.id)):
            ended[point] = bit[op.id] if point[0] == "end" else 0
            for earlier in edges[point]:
                ended[point] |= ended[earlier]
    return lambda first, second: bool(ended["start", second.id] & bit[first.id])


def touches(op: Op) -> Iterator[tuple[str, bool]]:
    """(what an op touches, whether it changes it): buffers, and what lies outside the pools."""
    for name in {*op.reads, *op.writes}:
        yield f"buffer {name}", name in op.writes
    for name in [*(name for name, _ in op.takes), *op.gives]:
        yield f"buffer {name}", True
    kind, at = op.id.kind, f"{op.id.group}.{op.id.chunk}"
    homes = {
        "RW": [("weights", False)],
        "UW": [("weights", False)],
        "WW": [("weights", True)],
        "UN": [("weights", True)],
        "RS": [("state", False)],
        "WS": [("state", True)],
        "OP": [("weights", True), ("state", True)],
        "WG": [("waiting gradient", True)],
        "RG": [("waiting gradient", False)],
    }
    for what, changes in homes.get(kind, []):
        yield f"{what} {at}", changes
    if kind in ("WC", "RC"):
        yield f"saved activation {op.id.stage}m{op.id.micro_batch}", kind == "WC"
    if kind in ("NG", "ND"):
        yield f"part of the norm {at}", True
    if kind in ("NORM", "OP", "OD"):
        yield "norm", kind == "NORM"


def conflicts(schedule: Schedule) -> list[tuple[Op, Op]]:
    """Pairs of ops that must not run at the same time, in their order in the schedule as it was built."""
    users: dict[str, list[tuple[Op, bool]]] = defaultdict(list)
    for op in run_order(schedule):
        for what, changes in touches(op):
            users[what].append((op, changes))
        if op.id == "NORM":
            for what in [what for what in users if what.startswith("part of")]:
                users[what].append((op, False))
    return [(a, b) for ops in users.values() for (a, x), (b, y) in combinations(ops, 2) if (x or y) and a is not b]


def changed(schedule: Schedule, ident: str, **fields: object) -> Schedule:
    """The schedule with one op changed."""
    ops = tuple(replace(op, **fields) if op.id == ident else op for op in schedule.ops)  # type: ignore[arg-type]
    return replace(schedule, ops=ops)


def verdict(schedule: Schedule) -> str | None:
    """What the checker says; None if it accepts."""
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return None


SMALL = list(islice((seed for seed in range(400) if len(random_case(seed, largest=2).build().ops) < 130), 60))


@pytest.mark.parametrize("seed", SMALL)
def test_no_two_ops_of_an_accepted_schedule_can_collide(seed: int) -> None:
    schedule = random_case(seed, largest=2).build()
    check(schedule)
    before = orderings(schedule)
    for first, second in conflicts(schedule):
        assert before(first, second), (first.id, second.id)


@pytest.mark.sampled(5, values=False)
@pytest.mark.parametrize("seed", SMALL[::4])
def test_a_missing_dependency_is_found_exactly_when_it_matters(seed: int) -> None:
    """For every dependency of every op: without it the checker raises, if and only if two ops that must not meet could,
    or a pool would be taken from in an order that depends on timing (which it says)."""
    schedule = random_case(seed, largest=2).build()
    pairs = conflicts(schedule)
    harmful = 0
    for op in schedule.ops:
        for other in op.after:
            without = changed(schedule, op.id, after=tuple(name for name in op.after if name != other))
            try:
                before = orderings(without)
            except ScheduleError:  # not even one order works
                harmful += 1
                continue
            ordered = all(before(first, second) for first, second in pairs)
            said = verdict(without)
            harmful += said is not None
            if said is None or "in no fixed order" not in said:
                assert ordered == (said is None), (op.id, other, said)
    assert harmful or not any(op.after for op in schedule.ops)


@pytest.mark.parametrize("seed", SMALL[:12])
def test_the_verdict_does_not_depend_on_how_the_lanes_are_interleaved_in_the_text(seed: int) -> None:
    schedule = random_case(seed, largest=2).build()
    rng = Random(seed)
    queues = {lane: list(ops) for lane, ops in schedule.lanes.items() if ops}
    shuffled: list[Op] = []
    while queues:
        lane = rng.choice(list(queues))
        shuffled.append(queues[lane].pop(0))
        if not queues[lane]:
            del queues[lane]
    check(replace(schedule, ops=tuple(shuffled)))


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("seed", SMALL[:6])
def test_swapped_neighbours_of_a_lane_are_harmless_or_found(seed: int) -> None:
    """Any two neighbours of a lane swapped: if the checker accepts it, it can run, and no two ops can collide."""
    schedule = random_case(seed, largest=2).build()
    found = 0
    for lane in LOCAL_LANES:
        ops = schedule.lanes[lane]
        for i in range(len(ops) - 1):
            swapped = list(ops)
            swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
            rest = [op for op in schedule.ops if op.lane != lane]
            other = replace(schedule, ops=(*rest, *swapped))
            try:
                check(other)
            except ScheduleError:
                found += 1
                continue
            before = orderings(other)
            for first, second in conflicts(schedule):
                assert before(first, second) or before(second, first), (first.id, second.id)
    assert found


# ---- one broken rule each, on the smallest schedule that can break it

GOOD = """\
schedule example micro-batches 1 chunk 4096
pool stage_in host 2 x 16384
pool weights.0 device 1 x 16384
pool gradients.0 device 1 x 16384
pool gradients_out host 1 x 16384
pool state host 1 x 49152
RW0.0@E1 take i=stage_in write i
UW0.0@E1 after RW0.0@E1 take W=weights.0 read i write W give i
F0m0
E1m0 after UW0.0@E1 take G=gradients.0 read W,G write G give W
RS0.0 take S=state write S
DG0.0@E1 after E1m0 take H=gradients_out read G write H give G
OP0.0 after DG0.0@E1,RS0.0 read H,S write S give H
WS0.0 after OP0.0 read S give S
"""


def broken(*edits: tuple[str, str]) -> Schedule:
    text = GOOD
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return parse_schedule(text)


def test_the_example_is_good() -> None:
    check(parse_schedule(GOOD))


BROKEN: dict[str, tuple[list[tuple[str, str]], str]] = {
    "an op twice": ([("F0m0\n", "F0m0\nF0m0\n")], "op F0m0 appears twice"),
    "a pool twice": (
        [("pool state host 1", "pool state host 3 x 49152\npool state host 1")],
        "pool state appears twice",
    ),
    "unknown dependency": ([("F0m0\n", "F0m0 after B7m0\n")], "op F0m0 waits for B7m0, which does not exist"),
    "unknown pool": ([("S=state", "S=attic")], "op RS0.0 takes S from pool attic, which does not exist"),
    "a cycle": ([("F0m0\n", "F0m0 after OP0.0\n")], "deadlock: compute F0m0 waits for op OP0.0"),
    "waits for itself": ([("F0m0\n", "F0m0 after F0m0\n")], "deadlock: compute F0m0 waits for op F0m0"),
    "a pool too small": (
        [("gradients_out host 1", "gradients_out host 0")],
        "d2h DG0.0@E1 waits for a buffer of pool gradients_out",
    ),
    "never given": ([("write S give H", "write S")], "buffer H is never given back to pool gradients_out"),
    "given twice": ([("write G give W", "write G give W,W")], "op E1m0 gives back W, which is not taken"),
    "given by two": ([("read S give S", "read S give S,H")], "op WS0.0 gives back H, which is not taken"),
    "given, never taken": ([("F0m0\n", "F0m0 give Q\n")], "op F0m0 gives back Q, which is not taken"),
    "used, never taken": ([("F0m0\n", "F0m0 read Q\n")], "op F0m0 uses Q, which no op takes"),
    "taken twice": (
        [
            ("gradients_out host 1", "gradients_out host 2"),
            ("OP0.0 after DG0.0@E1,RS0.0", "OP0.0 take H=gradients_out after DG0.0@E1,RS0.0"),
        ],
        "op OP0.0 takes H, which DG0.0@E1 took before",
    ),
    "read before load": ([("E1m0 after UW0.0@E1", "E1m0")], "op E1m0 gives back W, which is not taken"),
    "step without state": (
        [("DG0.0@E1,RS0.0", "DG0.0@E1")],
        "use before load: op OP0.0 uses S before RS0.0 has taken it",
    ),
    "never written": (
        [("take S=state write S", "take S=state")],
        "use before load: op OP0.0 reads S, which nothing has written",
    ),
    "given too early": (
        [("read i write W give i", "read i write W give i,W"), ("write G give W", "write G")],
        "overwrite before last use: UW0.0@E1 gives W back while op E1m0 may use it",
    ),
    "taken and given by ops that do not know each other": (
        [
            ("pool state host 1 x 49152\n", "pool state host 1 x 49152\npool spare host 1 x 4\n"),
            ("F0m0\n", "F0m0 take Q=spare\n"),
            ("DG0.0@E1 after E1m0", "RC9m0\nWC9m0 give Q\nDG0.0@E1 after E1m0"),
        ],
        "op WC9m0 gives Q back before F0m0 has taken it",
    ),
    "two lanes take from a pool": (
        [
            ("gradients_out host 1", "gradients_out host 2"),
            ("F0m0\n", "F0m0\nOP7.0 take Z=gradients_out write Z\nAG7.0 give Z\n"),
        ],
        "pool gradients_out: ops OP7.0 and DG0.0@E1 take from it in no fixed order (H)",
    ),
    "the optimizer overtakes a load": (
        [
            ("pool state host", "pool more device 1 x 16384\npool state host"),
            ("RS0.0 take", "UW0.0@B1 take V=more write V\nF5m0 after UW0.0@B1 read V give V\nRS0.0 take"),
        ],
        "op OP0.0 may run before UW0.0@B1, which it has to come after",
    ),
    "gradient read before it is on disk": ([("F0m0\n", "F0m0\nWG0.0\nRG0.0\n")], "op RG0.0 may run before WG0.0"),
    "saved activation that was never written": (
        [("F0m0\n", "F0m0\nRC0m0\n")],
        "op RC0m0 reads what no op has written to disk",
    ),
    "norm before its parts": ([("F0m0\n", "F0m0\nND3\nNORM\n")], "op NORM may run before ND3"),
    "no ops": ([(GOOD[GOOD.index("RW0.0") :], "")], "schedule example has no ops"),
    "a micro-batch that the step has not": ([("F0m0\n", "F0m1\n")], "op F0m1 is of a micro-batch that does not exist"),
    "no micro-batches": ([("micro-batches 1", "micro-batches 0")], "numbers are below 0"),
    "an op of no micro-batch": ([("F0m0\n", "F0m0 items 0\n")], "op F0m0 computes no micro-batch"),
    "backward before forward": (
        [("F0m0\n", "B0m0\nF0m0\n")],
        "op B0m0 may run before F0m0, which it has to come after",
    ),
    "weights' gradient before the input's": (
        [("F0m0\n", "F0m0\nW0m0\nI0m0\n")],
        "op W0m0 may run before I0m0, which it has to come after",
    ),
    "gradient down before its backward": (
        [("F0m0\n", "DG5.0@B0\nF0m0\nB0m0\n")],
        "op DG5.0@B0 may run before B0m0, which it has to come after",
    ),
    "a step before its gradient's sum": (
        [("WS0.0 after", "AG0.0@E1 after E1m0\nWS0.0 after")],
        "op OP0.0 may run before AG0.0@E1, which it has to come after",
    ),
    "new weights before the step": (
        [("WS0.0 after OP0.0 read S", "WW0.0\nWS0.0 after OP0.0 read S")],
        "op WW0.0 may run before OP0.0, which it has to come after",
    ),
    "new weights that nothing has made": (
        [("F0m0\n", "F0m0\nUN3.0\n")],
        "op UN3.0 brings home what nothing has made: there is no op OP3.0",
    ),
    "two optimizers of one group": ([("F0m0\n", "F0m0\nOD0\n")], "op OD0 steps what OP0.0 steps, too"),
    "a step before the norm": (
        [("WS0.0 after OP0.0", "NORM\nWS0.0 after OP0.0")],
        "op OP0.0 may run before NORM, which it has to come after",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_is_found_and_named(name: str) -> None:
    edits, says = BROKEN[name]
    with pytest.raises(ScheduleError, match=re.escape(says)):
        check(broken(*edits))


LAYERS = """\
schedule example micro-batches 2 chunk 0
F0m0
B0m0 after F0m0
B0m1
SG0@B0m0 after B0m0 group one
SG0.1 after B0m1 group one
OD0 after SG0@B0m0,SG0.1
GN0 after OD0 group one
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("SG0@B0m0 after B0m0", "SG0@B0m0", "op SG0@B0m0 may run before B0m0"),
        ("SG0.1 after B0m1", "SG0.1 after B0m0", "op SG0.1 may run before B0m1"),
        ("OD0 after SG0@B0m0,SG0.1", "OD0 after SG0@B0m0", "op OD0 may run before SG0.1"),
        ("GN0 after OD0", "GN0 after SG0.1", "op GN0 may run before OD0"),
    ],
)
def test_where_groups_are_the_stages_own_a_step_comes_after_its_stages_gradients(old: str, new: str, says: str) -> None:
    assert LAYERS.count(old) == 1
    check_world(World(name="one", ranks=(parse_schedule(LAYERS),), groups={"one": (0,)}))
    with pytest.raises(ScheduleError, match=says):
        check_world(World(name="one", ranks=(parse_schedule(LAYERS.replace(old, new)),), groups={"one": (0,)}))


def test_a_step_of_the_stage_before_its_backward_is_found_without_a_buffer_that_tells() -> None:
    check(parse_schedule("schedule s micro-batches 1 chunk 0\nF0m0\nB0m0\nOD0\n"))
    with pytest.raises(ScheduleError, match="op OD0 may run before B0m0"):
        check(parse_schedule("schedule s micro-batches 1 chunk 0\nF0m0\nOD0\nB0m0\n"))


def test_two_that_add_to_a_buffer_at_the_same_time_are_a_race() -> None:
    text = """\
schedule example micro-batches 1 chunk 4096
pool state host 1 x 4096
RS0.0 take S=state write S
F0m0 after RS0.0 read S write S
AG0.0 after {} read S write S
OP0.0 after F0m0,AG0.0 read S give S
"""
    check(parse_schedule(text.format("F0m0")))
    with pytest.raises(
        ScheduleError, match=r"race: op (AG0.0 writes S while F0m0|F0m0 writes S while AG0.0) may use it"
    ):
        check(parse_schedule(text.format("RS0.0")))


def test_reads_that_are_in_flight_together_are_not_ordered_by_their_lane() -> None:
    """Two workers of a lane: the second read may end first, so its turn alone does not protect a buffer."""
    text = """\
schedule example micro-batches 1 chunk 4096
pool state host 1 x 4096
RS0.0 take S=state write S
RS0.1 {}read S write S
OP0.0 after RS0.1 read S give S
"""
    check(parse_schedule(text.format("after RS0.0 ")))
    with pytest.raises(ScheduleError, match=re.escape("op RS0.1 uses S before RS0.0 has taken it")):
        check(parse_schedule(text.format("")))


def test_ops_of_a_lane_are_published_in_order_so_the_second_vouches_for_the_first() -> None:
    """The lane may end its second op first, but it is published after the first, and so after what that waited for."""
    text = """\
schedule example micro-batches 1 chunk 4096
pool state host 1 x 4096
OP0.0 take S=state write S
WS0.0 after OP0.0
WC0m0
F0m0 after {} read S give S
"""
    check(parse_schedule(text.format("WC0m0")))
    with pytest.raises(ScheduleError, match=re.escape("op F0m0 uses S before OP0.0 has taken it")):
        check(parse_schedule(text.replace("WS0.0 after OP0.0", "WS0.0").format("WC0m0")))


@pytest.mark.parametrize("seed", SMALL[:8])
def test_pools_that_shrink_until_nothing_fits_are_a_deadlock_that_is_found(seed: int) -> None:
    schedule = random_case(seed, largest=2).build()
    for pool in schedule.pools:
        smaller = tuple(replace(p, count=0) if p is pool else p for p in schedule.pools)
        with pytest.raises(ScheduleError, match=f"deadlock: .*{re.escape(pool.name)}"):
            check(replace(schedule, pools=smaller))


@pytest.mark.parametrize("seed", SMALL[:8])
def test_every_give_that_is_dropped_or_doubled_is_found(seed: int) -> None:
    schedule = random_case(seed, largest=2).build()
    for op in schedule.ops:
        for name in op.gives:
            with pytest.raises(ScheduleError):
                check(changed(schedule, op.id, gives=tuple(n for n in op.gives if n != name)))
            with pytest.raises(ScheduleError, match="not taken"):
                check(changed(schedule, op.id, gives=(*op.gives, name)))


def test_a_larger_pool_is_never_a_problem() -> None:
    for seed in SMALL[:8]:
        schedule = random_case(seed, largest=2).build()
        check(replace(schedule, pools=tuple(replace(pool, count=pool.count + 3) for pool in schedule.pools)))


def test_run_order_keeps_lanes_dependencies_and_pools() -> None:
    for seed in SMALL[:12]:
        schedule = random_case(seed, largest=2).build()
        order = list(run_order(schedule))
        assert sorted(op.id for op in order) == sorted(schedule.by_id)
        position = {op.id: i for i, op in enumerate(order)}
        free = {pool.name: pool.count for pool in schedule.pools}
        home: dict[str, str] = {}
        for op in order:
            assert all(position[other] < position[op.id] for other in op.after)
            for name, pool in op.takes:
                home[name] = pool
                free[pool] -= 1
                assert free[pool] >= 0
            for name in op.gives:
                free[home[name]] += 1
        for ops in schedule.lanes.values():
            assert [op.id for op in ops] == sorted((op.id for op in ops), key=position.__getitem__)


def test_ops_and_pools_are_values() -> None:
    assert parse_op("F0m0") == parse_op("F0m0")
    assert Pool(name="a", tier="host", size=1, count=1) != Pool(name="a", tier="host", size=1, count=2)
