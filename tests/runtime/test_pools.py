"""Pools give out each slot once, count what is in use, and take exactly the memory that was planned."""

import itertools

import pytest
import torch

from penstock.runtime.pools import Pools
from penstock.schedule.check.order import run_order
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_op, parse_schedule
from penstock.schedule.place import PAGE
from penstock.state.memory import HostSlab
from tests.programs import random_case

CPU = torch.device("cpu")
SCHEDULE = parse_schedule("""\
schedule example micro-batches 1 chunk 4096
fixed device weights 1000
fixed host state 2000
pool near device 2 x 8192
pool counted device 1 x 5000 counted
pool far host 2 x 4096
OP0.0 take a=near,b=near,c=far,d=counted write a,b,c,d
WS0.0 after OP0.0 read a,b,c,d give a,b,c,d
""")


def test_slots_do_not_overlap_and_start_on_pages() -> None:
    pools = Pools(SCHEDULE, CPU)
    take, give = SCHEDULE.ops
    pools.take(take)
    spans = []
    for name, size in (("a", 8192), ("b", 8192), ("c", 4096)):
        buffer = pools.buffer(name)
        assert buffer.dtype == torch.uint8
        assert buffer.numel() == size
        assert buffer.data_ptr() % PAGE == 0, "direct I/O needs aligned memory"
        spans.append((buffer.data_ptr(), buffer.data_ptr() + size))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    pools.give(give)
    pools.close()


def test_a_pool_has_no_more_slots_than_ops_take_however_many_buffers_it_names() -> None:
    more = "pool none host 1000 x 0\npool near device 200 x 8192\npool counted device 1000 x 5000 counted"
    schedule = parse_schedule(
        str(SCHEDULE).replace("pool near device 2 x 8192\npool counted device 1 x 5000 counted", more)
    )
    pools = Pools(schedule, CPU)
    assert {name: len(slots) for name, slots in pools.slots.items()} == {"none": 0, "near": 2, "far": 1}
    assert len(pools.take(schedule.ops[0])) == 4
    assert pools.in_use["device"] == 1000 + 200 * 8192 + 5000, "memory is what the schedule says"
    pools.give(schedule.ops[1])
    pools.close()


RESERVED = {"device": 1000 + 2 * 8192, "host": 2000 + 2 * 4096, "disk": 0}


def test_what_pools_own_is_in_use_all_the_time_and_the_rest_while_it_is_held() -> None:
    pools = Pools(SCHEDULE, CPU)
    assert pools.in_use == RESERVED
    pools.start_step()
    take, give = SCHEDULE.ops
    assert [pool for pool, _ in pools.take(take)] == ["near", "near", "far", "counted"]
    full = RESERVED | {"device": RESERVED["device"] + 5000}
    assert pools.in_use == full
    pools.give(give)
    assert pools.in_use == RESERVED
    assert pools.peak == full
    assert [(tier, used) for _, tier, used in pools.samples] == [
        ("device", RESERVED["device"]),
        ("host", RESERVED["host"]),
        ("device", full["device"]),
        ("device", RESERVED["device"]),
    ]
    pools.start_step()
    assert pools.peak == pools.in_use
    assert len(pools.samples) == 2


def test_an_op_that_takes_several_buffers_gets_all_or_none() -> None:
    pools = Pools(SCHEDULE, CPU)
    one, two = parse_op("RS0.0 take x=near"), parse_op("RS0.1 take y=near,z=near")
    assert pools.can_take(two)
    pools.take(one)
    assert not pools.can_take(two)
    pools.give(parse_op("WS0.0 give x"))
    assert pools.can_take(two)
    pools.take(two)
    assert not pools.can_take(one)


def test_a_buffer_that_is_not_held_cannot_be_had() -> None:
    pools = Pools(SCHEDULE, CPU)
    with pytest.raises(KeyError):
        pools.buffer("a")


def test_reset_gives_everything_back() -> None:
    pools = Pools(SCHEDULE, CPU)
    pools.take(SCHEDULE.ops[0])
    pools.reset()
    assert pools.in_use == RESERVED
    pools.start_step()
    pools.take(SCHEDULE.ops[0])


def _slabs(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> int:
    """Bytes of all slabs that the pools of a schedule map."""
    mapped: list[int] = []

    class Counted(HostSlab):
        def __init__(self, nbytes: int, *, beside: torch.device | None = None) -> None:
            super().__init__(nbytes, beside=beside)
            mapped.append(nbytes)

    monkeypatch.setattr("penstock.runtime.pools.HostSlab", Counted)
    monkeypatch.setattr("penstock.state.memory.HostSlab", Counted)
    Pools(schedule, CPU).close()
    return sum(mapped)


@pytest.mark.parametrize("seed", range(12))
def test_pools_map_exactly_what_the_plan_counts(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    schedule = random_case(seed).build()
    unmapped = sum(n for _, _, n in schedule.fixed) + sum(p.size * p.count for p in schedule.pools if not p.backed)
    planned = schedule.peak_bytes("device") + schedule.peak_bytes("host")
    assert _slabs(monkeypatch, schedule) == planned - unmapped


@pytest.mark.parametrize("seed", range(12))
def test_a_whole_step_stays_within_the_planned_peak(seed: int) -> None:
    schedule = random_case(seed).build()
    pools = Pools(schedule, CPU)
    pools.start_step()
    for op in run_order(schedule):
        assert pools.can_take(op)
        pools.take(op)
        pools.give(op)
    for tier in ("device", "host"):
        assert pools.peak[tier] <= schedule.peak_bytes(tier)
    pools.start_step()  # asserts that nothing is held any more
    pools.close()
