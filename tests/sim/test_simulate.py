"""The simulator keeps the rules of lanes, pools, links and ranks, and its times are those that follow from them."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.text import parse_schedule, parse_world
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.seat import streaming_seat
from penstock.sim.cause import Cause
from penstock.sim.costs import Costs
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate
from tests.programs import random_case


def one(*lines: str) -> World:
    """A world of one rank with a device pool ``p`` of two buffers of 10 bytes."""
    return World.of(
        parse_schedule("\n".join(("schedule s micro-batches 1 chunk 0", "pool p device 2 x 10 counted", *lines)))
    )


def by_bytes(op: Op) -> float:
    """A cost that a test can write into the schedule: one second per byte."""
    return float(op.nbytes)


COSTS = Costs(name="bytes", seconds=by_bytes)


def spans(result: Simulation, rank: int = 0) -> dict[str, tuple[float, float]]:
    return {t.op.id: (t.start, t.end) for t in result.timed(rank)}


def test_lanes_run_side_by_side_and_each_in_order() -> None:
    result = simulate(one("RW0.0@F0 bytes 4", "RW0.1@F0 bytes 4", "UW0.0@F0 after RW0.0@F0 bytes 3"), COSTS)
    assert spans(result) == {"RW0.0@F0": (0, 4), "RW0.1@F0": (4, 8), "UW0.0@F0": (4, 7)}
    assert result.time == 8
    assert result.lower_bound == 8
    assert result.busy(0) == {"read": 8, "h2d": 3}


def test_ops_of_other_lanes_hold_compute_up_by_what_they_take_of_the_interpreter() -> None:
    """Each once: those between two of compute's ops the second one, and those behind the last one that."""
    lines = ("RW0.0@F0 bytes 1", "UW0.0@F0 bytes 1", "F0m0 bytes 4", "DC0m0 bytes 1", "F1m0 bytes 4", "DC1m0 bytes 1")
    result = simulate(one(*lines), replace(COSTS, interpreter=0.5))
    assert spans(result) | {"F0m0": (0, 5), "F1m0": (5, 10), "DC1m0": (1, 2)} == spans(result)
    assert result.work(0) == {"read": 1, "h2d": 1, "compute": 8 + 4 * 0.5, "d2h": 2}
    serial = simulate(one(*lines), replace(COSTS, interpreter=0.5, serial=True))
    assert serial.time == 12, "where one op runs at a time, nobody is held up"


def test_a_full_pool_holds_an_op_back_until_a_buffer_is_given() -> None:
    lines = (
        "RW0.0@F0 take a=p write a bytes 1",
        "RW0.1@F0 take b=p write b bytes 1",
        "RW0.2@F0 take c=p write c bytes 1",
        "UW0.0@F0 after RW0.0@F0 read a give a bytes 5",
        "UW0.1@F0 after RW0.1@F0 read b give b bytes 5",
        "UW0.2@F0 after RW0.2@F0 read c give c bytes 5",
    )
    result = simulate(one(*lines), COSTS)
    third = next(t for t in result.timed(0) if t.op.id == "RW0.2@F0")
    assert (third.start, third.waited, third.cause) == (6, 4, Cause("UW0.0@F0", pool="p"))
    assert result.peak(0)["device"] == 20
    assert result.memory(0)["device"][-1] == (16, 0)


def test_what_a_stall_waited_for_is_the_last_thing_to_come() -> None:
    result = simulate(one("RW0.0@F0 bytes 4", "UC1m0 bytes 6", "F1m0 after RW0.0@F0,UC1m0 bytes 1"), COSTS)
    compute = next(t for t in result.timed(0) if t.op.id == "F1m0")
    assert (compute.start, compute.waited, compute.cause) == (6, 6, Cause("UC1m0"))


def test_a_serial_rank_does_one_op_at_a_time_in_the_order_written() -> None:
    world = one("RW0.0@F0 bytes 4", "F0m0 bytes 2", "RW0.1@F0 bytes 1")
    result = simulate(world, Costs(name="serial", seconds=by_bytes, serial=True))
    assert spans(result) == {"RW0.0@F0": (0, 4), "F0m0": (4, 6), "RW0.1@F0": (6, 7)}
    assert result.lower_bound == result.time == 7


def test_a_shared_link_gives_each_direction_half_and_a_duplex_one_all() -> None:
    world = one("RW0.0@F0 bytes 4", "WW0.0 bytes 2")
    shared = Costs(name="shared", seconds=by_bytes, contention={("read", "write"): 1.0, ("write", "read"): 1.0})
    assert spans(simulate(world, shared)) == {"RW0.0@F0": (0, 6), "WW0.0": (0, 4)}
    assert spans(simulate(world, COSTS)) == {"RW0.0@F0": (0, 4), "WW0.0": (0, 2)}


def test_contention_may_slow_one_side_only() -> None:
    costs = Costs(name="uneven", seconds=by_bytes, contention={("compute", "cpu"): 0.5})
    found = spans(simulate(one("F0m0 bytes 4", "OP0.0 bytes 3"), costs))
    assert found == {"F0m0": (0, pytest.approx(5)), "OP0.0": (0, 3)}  # 2 done in 3 s beside the step, the rest alone


def test_ops_in_flight_share_the_speed_of_their_lane_and_are_published_in_order() -> None:
    costs = Costs(name="two in flight", seconds=by_bytes, widths={"read": 2})
    lines = ("RW0.0@F0 bytes 5", "RW0.1@F0 bytes 2", "RW0.2@F0 bytes 1", "UW0.1@F0 after RW0.1@F0 bytes 1")
    found = spans(simulate(one(*lines), costs))
    assert found["RW0.0@F0"] == (0, pytest.approx(8))
    assert found["RW0.1@F0"] == (0, pytest.approx(4))
    assert found["RW0.2@F0"] == (pytest.approx(4), pytest.approx(6))
    assert found["UW0.1@F0"][0] == pytest.approx(8)  # read before, but counted as done only after the first


def test_a_collective_starts_when_the_last_rank_has_come_and_blocks_the_lane() -> None:
    text = """
        world w ranks 2
        group all 0-1
        rank 0
        schedule s micro-batches 1 chunk 0
        F0m0 bytes 1
        AR0 after F0m0 bytes 3 group all
        rank 1
        schedule s micro-batches 1 chunk 0
        F0m0 bytes 5
        AR0 after F0m0 bytes 3 group all
    """
    result = simulate(parse_world(text), COSTS)
    assert spans(result, 0)["AR0"] == spans(result, 1)["AR0"] == (5, 8)
    early = next(t for t in result.timed(0) if t.op.id == "AR0")
    assert early.cause == Cause("AR0", rank=1)


def test_a_collective_holds_its_buffers_from_when_its_rank_arrives() -> None:
    text = """
        world w ranks 2
        group all 0-1
        rank 0
        schedule s micro-batches 1 chunk 0
        pool p device 1 x 7 counted
        F0m0 bytes 1
        GW0@F0 after F0m0 bytes 3 take W=p write W give W group all
        rank 1
        schedule s micro-batches 1 chunk 0
        F0m0 bytes 5
        GW0@F0 after F0m0 bytes 3 group all
    """
    result = simulate(parse_world(text), COSTS)
    assert result.memory(0)["device"] == [(0.0, 0), (1.0, 7), (8.0, 0)]


@pytest.mark.parametrize("seed", range(8))
def test_of_ranks_that_do_the_same_one_stands_for_all(seed: int) -> None:
    """Each op of each rank starts and ends when that of a world with one of them does."""
    case = random_case(seed).shared_by(2 + seed % 3)
    seat, schedule = streaming_seat(case.ranks, case.settings.stage), case.build()
    pairs = {("compute", "net"): 0.5, ("net", "compute"): 1.5, ("read", "cpu"): 0.3}
    costs = Costs(name="all", seconds=lambda op: 1.0 + op.nbytes / 9973, contention=pairs, widths={"read": 2})
    all_ranks, stands_for = (simulate(world, costs) for world in (seat.world(schedule), seat.in_step(schedule)))
    for starts, ends in zip(all_ranks.starts, all_ranks.ends, strict=True):
        assert starts == pytest.approx(stands_for.starts[0])
        assert ends == pytest.approx(stands_for.ends[0])


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_is_no_time_is_refused_by_its_op(cost: float) -> None:
    with pytest.raises(ScheduleError, match=f"op F0m0 takes {cost} by the costs odd, which is no time"):
        simulate(one("F0m0"), Costs(name="odd", seconds=lambda op: cost))


def test_a_message_is_received_once_it_has_been_sent() -> None:
    text = """
        world w ranks 2
        rank 0
        schedule s micro-batches 1 chunk 0
        F0m0 bytes 3
        SA0m0 after F0m0 bytes 2 peer 1
        rank 1
        schedule s micro-batches 1 chunk 0
        RA0m0 bytes 1 peer 0
        F1m0 after RA0m0 bytes 1
    """
    result = simulate(parse_world(text), COSTS)
    assert spans(result, 1) == {"RA0m0": (5, 6), "F1m0": (6, 7)}


def test_a_pool_that_owns_its_memory_takes_it_all_the_time() -> None:
    text = "schedule s micro-batches 1 chunk 0\npool p host 3 x 10\nfixed host x 5\nRW0.0@F0 take a=p give a bytes 1"
    assert simulate(World.of(parse_schedule(text)), COSTS).memory(0)["host"] == [(0, 35)]


def test_a_carried_buffer_takes_room_from_the_start() -> None:
    lines = (
        "carry h H p",
        "OP0.0 read h give h bytes 2",
        "DG0.0@B0 take H=p bytes 1",
        "DG0.1@B0 take x=p give x bytes 1",
    )
    result = simulate(one(*lines), COSTS)
    assert result.memory(0)["device"][0] == (0, 10)
    assert spans(result)["DG0.1@B0"][0] == 2  # H took the second buffer; the third comes back with the step of h


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("F0m0 after F1m0", "F1m0"), "deadlock: compute F0m0 waits for op F1m0"),
        (("F0m0 take a=p,b=p,c=p",), "deadlock: compute F0m0 waits for its pools"),
        (("F0m0 after F7m0",), "op F0m0 waits for F7m0, which does not exist"),
        (("F0m0 take a=q",), "F0m0 takes from pool q, which does not exist"),
        (("F0m0 give a",), "op F0m0 gives back a, which is not taken"),
    ],
)
def test_what_cannot_run_is_named(lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        simulate(one(*lines), COSTS)


def reference(schedule: Schedule, seconds: dict[str, float]) -> dict[str, float]:
    """Start times without sharing, found by looking at every lane again after every change: slow and plain."""
    free = {pool.name: pool.count for pool in schedule.pools}
    pool_of = {name: pool for op in schedule.ops for name, pool in op.takes}
    queues = {lane: list(ops) for lane, ops in schedule.lanes.items()}
    running: dict[str, tuple[float, Op]] = {}
    done: set[str] = set()
    starts: dict[str, float] = {}
    now = 0.0
    while any(queues.values()) or running:
        for lane, queue in queues.items():
            if queue and lane not in running and done.issuperset(queue[0].after):
                wanted = [pool for _, pool in queue[0].takes]
                if all(free[pool] >= wanted.count(pool) for pool in wanted):
                    op = queue.pop(0)
                    for pool in wanted:
                        free[pool] -= 1
                    starts[op.id] = now
                    running[lane] = (now + seconds[op.id], op)
        now = min(end for end, _ in running.values())
        for lane in [lane for lane, (end, _) in running.items() if end == now]:
            op = running.pop(lane)[1]
            done.add(op.id)
            for name in op.gives:
                free[pool_of[name]] += 1
    return starts


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_times_are_those_of_a_plain_simulation(seed: int) -> None:
    schedule = random_case(seed, largest=3).build()
    rng = Random(seed)
    seconds = {op.id: rng.choice((0.0, 0.25, 1.0, 3.5)) + rng.random() * 1e-3 for op in schedule.ops}
    result = simulate(World.of(schedule), Costs(name="random", seconds=lambda op: seconds[op.id]))
    assert {t.op.id: t.start for t in result.timed(0)} == pytest.approx(reference(schedule, seconds))
    assert result.time >= result.lower_bound
    idle = sum(t.waited for t in result.timed(0) if t.op.lane == "compute")
    assert idle + result.busy(0)["compute"] == pytest.approx(
        max(t.end for t in result.timed(0) if t.op.lane == "compute")
    )
    for tier, curve in result.memory(0).items():
        assert curve[0][1] == pytest.approx(curve[-1][1])
        assert result.peak(0)[tier] <= schedule.peak_bytes(tier)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_contention_only_ever_slows_down_and_no_work_is_lost(seed: int) -> None:
    schedule = random_case(seed, largest=3).build()
    rng = Random(seed)
    seconds = {op.id: 0.01 + rng.random() for op in schedule.ops}
    pairs = [("read", "write"), ("write", "read"), ("compute", "cpu"), ("cpu", "compute"), ("h2d", "d2h")]
    contention = {pair: rng.random() for pair in pairs}
    costs = Costs(
        name="shared", seconds=lambda op: seconds[op.id], contention=contention, widths={"read": 2, "write": 2}
    )  # type: ignore[arg-type]
    result = simulate(World.of(schedule), costs)
    for t in result.timed(0):
        assert t.end - t.start >= seconds[t.op.id] - 1e-9
    assert result.time >= result.lower_bound - 1e-9
