"""What lanes look up: an op's turn comes when all that it waits for is done, and that is said once."""

import pytest

from penstock.runtime.lanes import lanes_of
from penstock.runtime.streams import HostStreams
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_schedule
from tests.programs import random_case


def needs_of(schedule: Schedule) -> dict[str, dict[str, int]]:
    lanes = lanes_of(schedule, HostStreams()).values()
    return {turn.op.id: {lane.name: count for lane, count in turn.needs} for lane in lanes for turn in lane.turns}


@pytest.mark.parametrize("seed", range(20))
def test_with_those_before_it_in_its_lane_an_op_waits_for_all_that_it_names(seed: int) -> None:
    schedule = random_case(seed, largest=3).build()
    needs, place = needs_of(schedule), {op.id: i for ops in schedule.lanes.values() for i, op in enumerate(ops)}
    for ops in schedule.lanes.values():
        waited: dict[str, int] = {}
        for op in ops:
            for lane, count in needs[op.id].items():
                assert count > waited.get(lane, 0), "what is waited for already is not waited for again"
                waited[lane] = count
                assert count - 1 in [place[b] for b in op.after if schedule.by_id[b].lane == lane]
            assert all(place[other] < waited[schedule.by_id[other].lane] for other in op.after)


def test_a_lane_waits_once_for_the_last_of_several() -> None:
    schedule = parse_schedule(
        "schedule example micro-batches 1 chunk 4096\n"
        "RS0.0\nRS0.1\nRS0.2\nOP0.0 after RS0.1,RS0.0\nOP0.1 after RS0.1\nOP0.2 after RS0.2,RS0.0\n"
    )
    needs = needs_of(schedule)
    assert (needs["OP0.0"], needs["OP0.1"], needs["OP0.2"]) == ({"read": 2}, {}, {"read": 3})
