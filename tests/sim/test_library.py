"""Events in native code are those in Python, to the bit; and what is wrong with a world is said in the same words."""

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.lanes import LANES
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.references import stage_op
from penstock.schedule.ir.text import parse_world
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import build
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.lower.seat import streaming_seat
from penstock.sim.costs import Costs
from penstock.sim.library import Library, library, why_none
from penstock.sim.simulate import simulate
from penstock.sim.template import ranks_of
from tests.documented import ROOT
from tests.programs import random_case
from tests.schedule.test_families import requests
from tests.sim.events import in_python


@pytest.fixture(scope="module")
def native() -> Library:
    return library()


def random_costs(rng: Random, *, serial: bool = False) -> Costs:
    """Of a machine whose lanes slow each other, keep several ops in flight, or neither. Many ops end together, or would
    but for rounding."""
    some, times = (0.0, 0.1, 0.3, 0.7), dict[str, float]()

    often = rng.choice((0.5, 1.0))

    def seconds(op: Op) -> float:
        return times.setdefault(op.id, rng.choice(some) if rng.random() < often else rng.random())

    lanes, slows = rng.sample(LANES, k=rng.choice((0, 3, 6))), rng.choice((0.1, 0.5, None))
    return Costs(
        name="any",
        seconds=seconds,
        contention={(a, b): slows or rng.random() for a in lanes for b in lanes if a != b and rng.random() < 0.7},
        widths={lane: rng.randint(1, 4) for lane in rng.sample(LANES, k=rng.choice((0, 2)))},
        interpreter=rng.choice((0.0, 0.01)),
        serial=serial,
    )


def check_same(native: Library, world: World, rng: Random, *, serial: bool = False) -> None:
    """On ranks of two kinds."""
    several = [random_costs(rng, serial=serial) for _ in range(2)]
    ranks = ranks_of(world, [rng.choice(several) for _ in world.ranks])
    found, wanted = native.run(world, ranks), in_python(world, ranks)
    assert found is not None
    assert wanted is not None
    for own, theirs in zip(found, wanted, strict=True):
        assert np.array_equal(own, theirs)


@given(request=requests(), seed=st.integers(0, 2**32 - 1), serial=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ranks_that_compute_whole_layers_run_as_in_python(
    native: Library, request: FamilyRequest, seed: int, *, serial: bool
) -> None:
    check_same(native, build(request), Random(seed), serial=serial)


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_ranks_that_stream_run_as_in_python(native: Library, seed: int, ranks: int) -> None:
    case = random_case(seed) if ranks == 1 else random_case(seed).shared_by(ranks)
    check_same(native, streaming_seat(ranks, case.settings.stage).world(case.build()), Random(seed))


CIRCLE = """world w ranks 2
rank 0
schedule s micro-batches 2 chunk 0
RD1m0 peer 1
F0m0 after RD1m0
SA0m0 after F0m0 peer 1
rank 1
schedule s micro-batches 2 chunk 0
RA0m0 peer 0
F1m0 after RA0m0
SD1m0 after F1m0 peer 0
"""
LOST = CIRCLE.replace("RD1m0 peer 1\n", "").replace(" after RD1m0", "").replace("SD1m0 after F1m0 peer 0\n", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            CIRCLE,
            "rank 0: recv RD1m0 waits for op SD1m0 of rank 1; rank 1: send SD1m0 waits for op F1m0; rank 1: compute",
        ),
        (LOST.replace("peer 0", "peer 1"), "rank 0: op SA0m0 sends to rank 1, which has no op RA0m0 from rank 0"),
        (LOST.replace("SA0m0 after F0m0 peer 1", "SA0m0 after F0m0 peer 7"), "sends to rank 7, which does not exist"),
        (LOST.replace("RA0m0", "RA0m1"), "rank 0: op SA0m0 sends to rank 1, which has no op RA0m0 from rank 0"),
    ],
)
def test_what_is_wrong_with_a_world_is_said(native: Library, text: str, says: str) -> None:
    world, costs = parse_world(text), Costs(name="one", seconds=lambda _: 1.0)
    ranks = ranks_of(world, [costs] * 2)
    assert native.run(world, ranks) is None
    assert in_python(world, ranks) is None
    with pytest.raises(ScheduleError, match=re.escape(says)):
        simulate(world, costs)


LONG = 4_000_000_000
"""A number that a file may have, and 32 bits do not hold."""


@pytest.mark.parametrize("micro_batch", [0, LONG])
@pytest.mark.parametrize("buffers", [1, LONG, (1 << 32) + 1])
def test_numbers_of_more_than_32_bits_are_those_of_the_file(micro_batch: int, buffers: int) -> None:
    """Two ops run beside each other where there are buffers for both."""
    text = f"""schedule s micro-batches {LONG + 1} chunk 0
pool p device {buffers} x 1
RC0m{micro_batch} take A=p give A
UC0m{micro_batch} take B=p give B
"""
    world, costs = parse_world(text), Costs(name="one", seconds=lambda _: 1.0)
    assert sorted(simulate(world, costs).starts[0]) == [0.0, 0.0 if buffers > 1 else 1.0]


def test_as_many_ops_of_a_lane_are_under_way_as_it_is_wide(native: Library) -> None:
    """Also where they are more than 16 bits count. All reads wait for one forward."""
    reads = (1 << 15) + 1000
    first = stage_op("F", 0, 0)
    ops = [Op(id=first), *(Op(id=stage_op("RC", 0, m), after=(first,)) for m in range(reads))]
    world = World.of(Schedule(name="wide", micro_batches=reads, chunk=0, pools=(), ops=tuple(ops)))
    ranks = ranks_of(world, [Costs(name="one", seconds=lambda _: 1.0, widths={"read": reads})])
    found, wanted = native.run(world, ranks), in_python(world, ranks)
    assert found is not None
    assert wanted is not None
    assert np.array_equal(found.ends, wanted.ends)
    assert found.ends[1] == pytest.approx(1 + reads)


def test_native_code_has_all_lanes() -> None:
    source = (ROOT / "src/penstock/sim/native/simulate.cpp").read_text()
    assert re.findall(r"constexpr int LANES = (\d+);", source) == [str(len(LANES))]


def test_simulations_of_one_world_are_equal() -> None:
    world, costs = World.of(random_case(3).build()), random_costs(Random(3))
    assert simulate(world, costs) == simulate(world, costs)


def test_without_the_library_it_is_said_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("penstock.sim.library.PATH", tmp_path / "_simulate.so")
    for kept in (library, why_none):
        kept.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"_simulate\.so is not built; pip install -e \. builds it"):
            simulate(World.of(random_case(3).build()), random_costs(Random(3)))
        assert "is not built" in (why_none() or "")
    finally:
        for kept in (library, why_none):
            kept.cache_clear()


def test_messages_of_micro_batches_that_native_code_does_not_count_to_are_refused() -> None:
    text = LOST.replace("micro-batches 2", f"micro-batches {LONG + 1}").replace("A0m0", f"A0m{LONG}")
    with pytest.raises(ScheduleError, match="more than 1,073,741,824 ops or micro-batches cannot be simulated"):
        simulate(parse_world(text), Costs(name="one", seconds=lambda _: 1.0))
