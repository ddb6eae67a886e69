"""Offload schedules by name: what each moves and holds is what its formulas say; its options do something."""

import time
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import FAMILIES, STREAM_OPTIONS, build
from penstock.schedule.lower.offload import settings
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.place import FP32, PAGE, Depths
from penstock.schedule.program import ALIGN
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import transformer
from tests.uniform import uniform_program

LAYERS, M, RANKS = 4, 3, 4
STREAMED = {name: family.streaming for name, family in FAMILIES.items() if family.streaming is not None}
BLOCK, EMBEDDING, HEAD = 64 * ALIGN, 16 * ALIGN, 32 * ALIGN
BLOCKS, ENDS = LAYERS * BLOCK, EMBEDDING + HEAD
N = BLOCKS + ENDS
ACTIVATION = 10 * PAGE
LOADED = 2 * BLOCKS + ENDS - BLOCK
"""Elements that go to the device in a vertical step: a block's twice, the last one's and the ends' once."""
LOADED_ONE_BY_ONE = M * LOADED - (M - 1) * BLOCK
"""The same in a horizontal step: the first block's also stay from one micro-batch's backward to the next's forward."""

PROGRAM = uniform_program(
    LAYERS, block=BLOCK, embedding=EMBEDDING, head=HEAD, activation=ACTIVATION, working=2 * ACTIVATION
)


def request(family: str, **options: Any) -> FamilyRequest:
    """``M`` micro-batches for each rank, unless asked otherwise."""
    each = M * options.get("ranks", 1)
    return FamilyRequest(**{"family": family, "program": PROGRAM, "micro_batches": each, **options})


def one(family: str, **options: Any) -> Schedule:
    """The schedule of a family on one rank, checked."""
    world = build(request(family, **options))
    check_world(world)
    return world.ranks[0]


def moved(schedule: Schedule) -> dict[Lane, int]:
    found = schedule.bytes_per_lane()
    return {lane: found[lane] for lane in ("h2d", "d2h", "read", "write")}


AWAY = (M * (LAYERS - 1) + M - 2) * ACTIVATION
"""Vertical: what leaves after the embedding and every block but the last two, and the last block's inputs but two."""
AWAY_ONE_BY_ONE = M * (LAYERS - 1) * ACTIVATION


@pytest.mark.parametrize("family", ["horizontal", "zero-infinity"])
def test_horizontal_moves_weights_2m_times_and_gradients_m_times(family: str) -> None:
    """ZeRO-Infinity: 2M x 2n bytes of weights a block. It brings the sum of gradients up for each addition, which makes
    (2M - 1) x 4n both ways; here the host adds, so M x 4n go down and none come up."""
    schedule = one(family)
    weights = 2 * LOADED_ONE_BY_ONE
    assert moved(schedule) == {
        "h2d": weights + AWAY_ONE_BY_ONE,
        "d2h": M * 4 * N + AWAY_ONE_BY_ONE,
        "read": weights + 12 * N,
        "write": 12 * N,
    }
    sums = sum(op.nbytes for op in schedule.ops if op.id.kind == "AG")
    assert sums == (M - 1) * 3 * 4 * N, "each reads two and writes one"


def test_vertical_moves_weights_twice_and_gradients_once() -> None:
    """GreedySnake: 2 x 2n bytes of weights a block, 4n of gradients, whatever M is; on disk 16 read and 12 written for
    each parameter of a block."""
    weights = 2 * LOADED
    assert moved(one("vertical")) == {
        "h2d": weights + AWAY,
        "d2h": 4 * N + AWAY,
        "read": weights + 12 * N,
        "write": 12 * N,
    }


@pytest.mark.parametrize("delay", [0.25, 0.5, 1.0])
def test_greedysnake_reads_the_weights_that_it_has_just_made_from_memory(delay: float) -> None:
    """Its forward reads (1 - delay) x 2n, and nothing of the embedding, which is delayed whole: the rest goes up from
    where the step has put it. With 16 chunks in all groups but the ends, the share is exact there."""
    plain, late = moved(one("vertical", chunks=16)), moved(one("greedysnake", chunks=16, delay=delay))
    assert late == {**plain, "read": plain["read"] - 2 * EMBEDDING - int(2 * delay * (N - EMBEDDING))}


def test_greedysnake_delays_half_and_waits_for_nothing() -> None:
    schedule = one("greedysnake")
    assert "NORM" not in schedule.by_id
    steps = [op.id.group for op in schedule.ops if op.id.kind == "OP"]
    embedding = steps.count(0)
    left = [start for start, _, _ in schedule.carried if start.holds == "chunk of gradient"]
    assert len(left) == embedding + -(-(len(steps) - embedding) // 2)


def test_zero_offload_keeps_weights_on_the_device_and_steps_after_the_norm() -> None:
    """2 bytes per parameter on the device, 12 of master copy and moments, 2 of which are weights, and 4 of gradients on
    the host; M x 4 move down and 2 up."""
    schedule = one("zero-offload")
    assert moved(schedule) == {"h2d": 2 * N, "d2h": M * 4 * N, "read": 0, "write": 0}
    fixed = {(tier, what): nbytes for tier, what, nbytes in schedule.fixed}
    assert fixed["device", "weights"] == 2 * N
    assert fixed["host", "state"] == 10 * N
    assert fixed["host", "weights"] == 2 * N
    held = next(pool for pool in schedule.pools if pool.name == "gradients_held")
    assert held.size * held.count == 4 * N
    assert all("NORM" in op.after for op in schedule.ops if op.id.kind == "OP")


def test_superoffload_steps_as_gradients_come_and_the_last_ones_on_the_device() -> None:
    """An eighth of the blocks: those that the forward uses first, whose gradients come last."""
    schedule = one("superoffload")
    assert "NORM" not in schedule.by_id
    assert [op.id for op in schedule.ops if op.id.kind == "OD"] == [f"OD{g}" for g in PROGRAM.stages[1].forward_reads]
    stepped = N - BLOCK
    assert moved(schedule) == {"h2d": 2 * stepped, "d2h": M * 4 * stepped, "read": 0, "write": 0}
    more = one("superoffload", device_blocks=3)
    assert moved(more)["d2h"] == M * 4 * (N - 3 * BLOCK)


# ---- several ranks


SHARDED = [name for name, own in STREAMED.items() if not (FAMILIES[name].one_rank or own.dealt)]


@pytest.mark.parametrize("family", SHARDED)
def test_each_rank_moves_its_part_and_the_network_the_rest(family: str) -> None:
    """ZeRO-3: for each visit of a group an all-gather of its weights, and a reduce-scatter of each gradient; ours are
    summed on the host before that, where a visit has one micro-batch."""
    alone, together = one(family, chunks=4), one(family, chunks=4, ranks=RANKS)
    by_block, summed = STREAMED[family].order == "vertical", STREAMED[family].sharding is None
    nbytes = AWAY if by_block else AWAY_ONE_BY_ONE
    away = {"h2d": nbytes, "d2h": nbytes, "read": 0, "write": 0}  # every rank has its own micro-batches
    if summed and not by_block:  # of all ranks' parts M times down and once up; the exchanged part goes down then
        away |= {"h2d": nbytes + 4 * N, "d2h": nbytes + M * 4 * N}
    part = moved(alone) if by_block or not summed else moved(alone) | {"d2h": AWAY_ONE_BY_ONE + 4 * N}
    for lane, nbytes in moved(together).items():
        own = AWAY if by_block else AWAY_ONE_BY_ONE
        assert RANKS * (nbytes - away[lane]) == part[lane] - own * (lane in ("h2d", "d2h")), lane
    gathered = 2 * (LOADED if by_block else LOADED_ONE_BY_ONE)
    scattered = (1 if by_block or summed else M) * 4 * N
    norm = sum(op.nbytes for op in together.ops if op.id.kind == "AN")
    sent = (gathered + scattered) * (RANKS - 1) // RANKS
    assert together.bytes_per_lane()["net"] == sent + norm
    assert norm == 8 * N // 4096 * (RANKS - 1) // RANKS, "the sum of squares of each 4096 elements"


def test_ranks_wait_for_each_other() -> None:
    """A rank whose compute is slow holds up all gathers that come after it."""
    world = build(request("vertical", ranks=2))
    slow = World(name="slow", ranks=(world.ranks[0], replace(world.ranks[1])), groups=world.groups)
    check_world(slow)
    even = simulate(slow, Costs(name="even", seconds=lambda op: 1.0))
    assert even.end(0) == even.end(1)


def test_the_norm_is_that_of_all_ranks_and_every_step_waits_for_it() -> None:
    schedule = one("vertical", ranks=2, wait=True)
    assert schedule.by_id["NORM"].after == ("AN",)
    steps = [op for op in schedule.ops if op.id.kind == "OP"]
    assert steps
    assert all("NORM" in op.after for op in steps)


def test_gradients_cross_once_chunk_by_chunk() -> None:
    """Whatever the number of micro-batches; what is sent and received at a time is of one chunk of all ranks."""
    for count in (1, 5):
        schedule = one("vertical", ranks=2, micro_batches=2 * count, chunks=4)
        crossed = [op for op in schedule.ops if op.id.kind == "SG"]
        assert sum(op.nbytes for op in crossed) == 4 * N // 2
        assert len(crossed) == len({(op.id.group, op.id.chunk) for op in crossed})
        pool = next(pool for pool in schedule.pools if pool.name == "exchange")
        assert pool.size == 2 * 2 * 4 * schedule.chunk


# ---- options


OPTIONS: dict[str, Any] = {
    "chunks": 5,
    "depths": Depths(weights=1, gradients=1),
    "delay": 0.75,
    "wait": True,
    "weights": "host",
    "state": "host",
    "activations": "disk",
    "device_blocks": 2,
}


SMALL = uniform_program(3, block=12 * ALIGN, embedding=4 * ALIGN, head=4 * ALIGN, activation=ACTIVATION)


@pytest.mark.parametrize("family", STREAMED)
def test_every_option_does_something_where_it_is_allowed_and_is_refused_elsewhere(family: str) -> None:
    assert set(STREAM_OPTIONS) - {"gradients", "stage"} == OPTIONS.keys()
    plain = one(family, program=SMALL)
    for option, value in OPTIONS.items():
        if option in FAMILIES[family].options:
            assert one(family, program=SMALL, **{option: value}) != plain
        else:
            with pytest.raises(
                ConfigError, match=f"{family} has no option {option}: leave it out. Its options: .*chunks"
            ):
                build(request(family, **{option: value}))
    if FAMILIES[family].one_rank:
        with pytest.raises(ConfigError, match=f"{family} is for one rank, and 2 were asked for"):
            build(request(family, ranks=2))
    else:
        assert one(family, program=SMALL, ranks=2) != plain


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_in_lower_stages_ranks_send_less_and_hold_more(family: str) -> None:
    found = {stage: one(family, ranks=RANKS, stage=stage) for stage in (0, 1, 2, 3)}
    assert found[3] == one(family, ranks=RANKS)
    assert found[1] == found[2]
    net = {stage: schedule.bytes_per_lane()["net"] for stage, schedule in found.items()}
    norm = 8 * N // 4096 * (RANKS - 1) // RANKS
    assert net[2] == (2 + 4) * N * (RANKS - 1) // RANKS + norm
    assert net[0] == 2 * 4 * N * (RANKS - 1) // RANKS
    assert net[3] > net[2]
    assert found[2].peak_bytes("device") > found[3].peak_bytes("device")
    assert moved(found[0])["write"] == RANKS * moved(found[3])["write"], "each writes all of the state"
    with pytest.raises(ConfigError, match="stage=2 says what several ranks have parts of"):
        build(request(family, stage=2))


def test_gradients_may_wait_on_disk_where_they_wait() -> None:
    for options in ({"wait": True}, {"delay": 0.5}):
        plain, on_disk = one("vertical", **options), one("vertical", gradients="disk", **options)
        waiting = 4 * N if "wait" in options else sum(op.nbytes for op in on_disk.ops if op.id.kind == "WG")
        assert moved(on_disk)["write"] == moved(plain)["write"] + waiting
    with pytest.raises(ConfigError, match="gradients='disk' does nothing: no gradient waits"):
        build(request("vertical", gradients="disk"))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("vertikal", {}, "there is no schedule 'vertikal'. Known: .*horizontal, vertical, .*zero-offload"),
        ("vertical", {"micro_batches": 0}, "micro_batches=0 must be at least 1"),
        ("vertical", {"delay": 1.5}, "delay=1.5: must be from 0"),
        ("vertical", {"delay": float("nan")}, "delay=nan: must be from 0"),
        ("vertical", {"ranks": 0}, "ranks=0 must be at least 1"),
        ("vertical", {"chunks": 0}, "chunks=0 must be from 1 to 64"),
        ("vertical", {"chunks": 65}, "chunks=65 must be from 1 to 64"),
        ("vertical", {"micro_batches": 3, "ranks": 2}, "3 micro-batches cannot be shared evenly by 2 ranks"),
        ("vertical", {"lookahead": 1}, "vertical has no option lookahead"),
        ("vertical", {"fused": True}, "vertical has no option fused"),
        ("1f1b", {"delay": 0.0}, "1f1b has no option delay"),
        ("vertical", {"program": None}, "vertical streams the groups of a program: give it one"),
        ("vertical", {"chunks": 17, "ranks": 4}, "chunks=17 must be from 1 to 16.*the largest block of a rank"),
        ("vertical", {"state": "device"}, "state on the device needs weights on the device"),
        ("vertical", {"weights": "device", "ranks": 2}, "ranks=2 with weights='device'"),
        ("superoffload", {"device_blocks": 9}, "device_blocks=9 must be from 0 to 4"),
    ],
)
def test_what_cannot_be_is_refused(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(request(family, **options))


def chunk_of(family: str, **options: Any) -> int:
    return settings(request(family, **options), STREAMED[family]).chunk


def test_a_delayed_gradient_is_as_large_as_a_saved_activation_unless_chunks_are_asked_for() -> None:
    """Equal sizes can take turns in one pool."""
    assert chunk_of("greedysnake") * FP32 == ACTIVATION // (4 * ALIGN) * 4 * ALIGN
    assert "held" in {pool.name for pool in one("greedysnake").pools}
    assert chunk_of("greedysnake", chunks=16) == BLOCK // 16
    assert chunk_of("vertical") == BLOCK // 16


@pytest.mark.parametrize("family", STREAMED)
def test_a_model_of_blocks_alone(family: str) -> None:
    check_world(build(request(family, program=uniform_program(2, block=10 * ALIGN), micro_batches=1, chunks=None)))


# ---- time


def seconds(op: Op) -> float:
    """A machine on which moving a block's weights takes a tenth of a micro-batch's forward, its state 20 of them."""
    if op.lane == "compute":
        return {"F": 1.0, "B": 3.0, "E": 1.0, "OD": 0.2}[op.id.kind]
    rates: dict[Lane, float] = {"h2d": 20, "d2h": 20, "read": 1.2, "write": 0.6, "cpu": 10}
    return op.nbytes / BLOCK / rates[op.lane]


def step_time(family: str, **options: Any) -> float:
    return simulate(World.of(one(family, **options)), Costs(name="machine", seconds=seconds)).time


def test_the_newer_systems_are_faster_than_those_they_follow() -> None:
    assert step_time("greedysnake", delay=0.25) < step_time("vertical") < step_time("zero-infinity")
    assert step_time("superoffload") < step_time("zero-offload") < step_time("zero-infinity")


def test_a_large_schedule_is_built_in_well_under_a_second() -> None:
    """One rank of vertical offload with 96 layers, 34 micro-batches and 16 chunks a block."""
    large = uniform_program(96, block=256 * ALIGN, embedding=BLOCK, head=BLOCK, activation=ACTIVATION)
    wanted = FamilyRequest(family="greedysnake", program=large, micro_batches=34, chunks=16)
    begin = time.process_time()
    world = build(wanted)
    taken = time.process_time() - begin
    assert len(world.ranks[0].ops) > 25_000
    assert taken < 1


def test_state_of_tied_weights_on_the_device_is_refused() -> None:
    """Their gradients come from two stages, and are added up in host memory."""
    program = transformer(2, tied=True)
    asked = FamilyRequest(family="vertical", program=program, micro_batches=2, weights="device", state="device")
    with pytest.raises(ConfigError, match="has gradients from several stages"):
        build(asked)
    build(replace(asked, program=transformer(2)))
