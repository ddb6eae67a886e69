"""Ranks of a pipeline that take turns with forwards and backwards, whole or split: every rank is proved, all are safe
together even one op at a time, few micro-batches are under way, and pools are as large as that takes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.check.order import run_orders
from penstock.schedule.check.worlds import check_world
from penstock.schedule.dealt import dealt_as, dealt_out, program_of_rank, stages_dealt
from penstock.schedule.ir.references import answer_to
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import FAMILIES, build
from penstock.schedule.lower.in_turn import Part, in_turn_route, order_of_all, runs_of
from penstock.schedule.lower.offload import settings
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.lower.seat import pipeline_world, streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.program import ALIGN, Program
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.conftest import Campaign
from tests.programs import random_case, sent_bytes
from tests.uniform import uniform_program

FAMILY = {
    "1f1b": "streamed-1f1b",
    "interleaved-1f1b": "streamed-interleaved-1f1b",
    "zero-bubble": "streamed-zero-bubble",
}
SPLIT = {name: name == "zero-bubble" for name in FAMILY}


def program(layers: int) -> Program:
    return uniform_program(layers, block=16 * ALIGN, embedding=4 * ALIGN, head=4 * ALIGN, activation=10 * ALIGN)


def request(name: str, layers: int, ranks: int, micro_batches: int, **options: object) -> FamilyRequest:
    family, of = FAMILY.get(name, name), program(layers)
    return FamilyRequest(family=family, program=of, ranks=ranks, micro_batches=micro_batches, chunks=2, **options)


def programs(of: Program, name: str, ranks: int, besides: Sequence[int] = ()) -> list[Program]:
    of_stages = stages_dealt(of, ranks, family=FAMILIES[FAMILY[name]].streaming.order)
    return [program_of_rank(of, of_stages, rank, ranks, besides=besides) for rank in range(ranks)]


def needs(asked: FamilyRequest, of: Program) -> Needs:
    streaming = FAMILIES[asked.family].streaming
    assert streaming is not None
    return Needs.of(of, settings(asked, streaming))


def meet(world: World) -> None:
    """Each rank does one op at a time, in the order in which they are written down, and who sends waits for who
    receives."""
    places = [0] * len(world.ranks)

    def op(rank: int):
        ops = world.ranks[rank].ops
        return ops[places[rank]] if places[rank] < len(ops) else None

    while any(op(rank) is not None for rank in range(len(places))):
        before = list(places)
        for rank in range(len(places)):
            while (own := op(rank)) is not None:
                if own.lane in ("send", "recv"):
                    theirs = op(own.peer)
                    if theirs is None or theirs.id != answer_to(own.id):
                        break
                    places[own.peer] += 1
                elif own.lane == "net" and any(
                    (other := op(r)) is None or other.id != own.id for r in range(len(places))
                ):
                    break
                elif own.lane == "net":
                    places[:] = [place + 1 for place in places]
                    continue
                places[rank] += 1
        assert places != before, f"all wait: {[str(op(rank) and op(rank).id) for rank in range(len(places))]}"


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "ranks", "layers"), list(product(FAMILY, (2, 3, 4), (4, 5, 9))))
def test_every_rank_is_proved_and_all_are_safe_together(name: str, ranks: int, layers: int) -> None:
    for micro_batches in (1, 2, 3, 5, 8):
        wait, tier = bool(micro_batches % 2), ("device", "host", "disk")[micro_batches % 3]
        asked = request(name, layers, ranks, micro_batches, wait=wait, activations=tier)
        world = build(asked)
        check_world(world)
        meet(world)
        for schedule, of in zip(world.ranks, programs(program(layers), name, ranks), strict=True):
            prove(schedule, needs(asked, of))
            assert schedule.bytes_per_lane().get("send", 0) == sent_bytes(of, micro_batches)


@pytest.mark.parametrize("name", FAMILY)
def test_whatever_is_trained_and_wherever_it_lives_ranks_are_proved_and_end(name: str, campaign: Campaign) -> None:
    """Tied ends, frozen blocks, any tier for any group, strands, gradients in bf16, with the norm or before it."""
    done, count = 0, campaign.cases(14, 4000)
    for seed in range(count):
        case, rng = random_case(seed, largest=8), Random(seed)
        calls, ranks = len(case.program.stages) - 2, rng.randint(2, 4)
        if not case.settings.train or calls < ranks - 1:
            continue
        s = replace(case.settings, strands=rng.choice((1, 1, 2, 4)))
        try:
            of_stages = stages_dealt(case.program, ranks, family=name)
            of_ranks = [program_of_rank(case.program, of_stages, rank, ranks) for rank in range(ranks)]
        except ConfigError:
            continue  # a block reads what is rank 0's, or no backward can be split
        seat = streaming_seat(1, pipe=ranks)
        fixed = (("device", "working", 900),)
        world = pipeline_world([lower_step(name, of, s, fixed, "any", seat) for of in of_ranks])
        check_world(world)
        for of, schedule in zip(of_ranks, world.ranks, strict=True):
            prove(schedule, Needs.of(of, s))
        result = simulate(world, Costs(name="uneven", seconds=lambda op: {"compute": 0.9}.get(op.lane, 0.31)))
        for rank, schedule in enumerate(world.ranks):
            for tier in ("device", "host"):
                assert result.peak(rank)[tier] <= schedule.peak_bytes(tier)
        done += 1
    assert done > count // 2


@pytest.mark.parametrize("name", FAMILY)
def test_state_on_the_device_sums_its_gradients_there(name: str) -> None:
    asked = request(name, 5, 3, 4, weights="device", state="device", activations="device")
    world = build(asked)
    check_world(world)
    for schedule, of in zip(world.ranks, programs(program(5), name, 3), strict=True):
        prove(schedule, needs(asked, of))
        assert not schedule.lanes.get("d2h")


def test_forwards_and_backwards_of_one_micro_batch_take_turns() -> None:
    def of_rank(rank: int) -> str:
        units = dict.fromkeys(part.unit for part in order if runs[part.unit.run].rank == rank)
        return " ".join(f"{unit.kind}{unit.run}m{unit.micro_batch}" for unit in units)

    of_stages = (0, 0, 0, 1, 1, 2, 2, 0)
    runs, order = runs_of(of_stages), order_of_all(of_stages, 6)
    assert [(run.rank, *run.stages) for run in runs] == [(0, 0, 1, 2), (1, 3, 4), (2, 5, 6), (0, 7)]
    assert of_rank(2) == "F2m0 F2m1 B2m0 F2m2 B2m1 F2m3 B2m2 B2m3 F2m4 B2m4 F2m5 B2m5"
    assert of_rank(1) == "F1m0 F1m1 F1m2 B1m0 F1m3 B1m1 F1m4 B1m2 B1m3 F1m5 B1m4 B1m5"
    assert of_rank(0).startswith("F0m0 F0m1 F0m2 E3m0 F0m3 E3m1 E3m2 B0m0 E3m3 F0m4 B0m1 ")


def test_loops_go_depth_first_a_round_of_micro_batches_at_a_time() -> None:
    of_stages = (0, 0, 1, 0, 1, 0)
    units = dict.fromkeys(part.unit for part in order_of_all(of_stages, 5))
    forwards = [u[1:] for u in units if u.kind == "F" and runs_of(of_stages)[u.run].rank == 0]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3), (0, 4), (2, 4)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_as_many_micro_batches_are_under_way_as_stages_follow_whatever_their_number(ranks: int) -> None:
    for micro_batches in (1, 3, 10, 24):
        for rank, of in enumerate(programs(program(9), "1f1b", ranks)):
            assert in_turn_route(of, micro_batches).at_once <= min(micro_batches, ranks - rank + 1)
    few, many = (build(request("1f1b", 9, ranks, n, activations="device")) for n in (10, 24))
    vertical = build(request("vertical-pipeline", 9, ranks, 24, activations="device"))
    for one, other, all_at_once in zip(few.ranks, many.ranks, vertical.ranks, strict=True):
        assert one.peak_bytes("device") == other.peak_bytes("device") < all_at_once.peak_bytes("device")


@pytest.mark.parametrize(("name", "ranks", "tier"), list(product(FAMILY, (2, 3), ("device", "host", "disk"))))
def test_pools_of_activations_are_as_large_as_the_order_takes(name: str, ranks: int, tier: str) -> None:
    """Of what this rank puts out some more, as sends may lag; of what comes back, one that is on its way."""
    more = {"activations": 2, "restored": 1}
    for schedule in build(request(name, 6, ranks, 7, activations=tier)).ranks:
        held, most, pool_of = Counter[str](), Counter[str](), {}
        for op in schedule.ops:
            for buffer, pool in op.takes:
                pool_of[buffer] = pool
                held[pool] += 1
                most[pool] = max(most[pool], held[pool])
            held.subtract(pool_of[buffer] for buffer in op.gives)
        pools = {pool.name: pool.count for pool in schedule.pools}
        for pool in ("activations", "received", "restored", "saved_activations", "split"):
            assert pools.get(pool, 0) == most[pool] + (more.get(pool, 0) if pool in pools else 0), pool


def test_a_pool_that_is_too_small_is_a_deadlock() -> None:
    world = build(request("1f1b", 6, 3, 7, activations="device"))
    run_orders(world)
    for name in ("received", "activations"):
        fewer = 1 if name == "received" else 1 + 2  # two are there for sends that lag
        smaller = [
            tuple(replace(p, count=p.count - fewer) if p.name == name else p for p in s.pools) for s in world.ranks
        ]
        ranks = tuple(replace(s, pools=pools) for s, pools in zip(world.ranks, smaller, strict=True))
        with pytest.raises(ScheduleError, match="deadlock"):
            run_orders(replace(world, ranks=ranks))


@pytest.mark.parametrize(("name", "ranks"), list(product(FAMILY, (2, 3, 4))))
def test_what_calls_are_handed_besides_comes_before_they_do(name: str, ranks: int) -> None:
    """Masks of two kinds, say: of the first block that a rank has, and of its last."""
    of = program(6)
    of_stages = stages_dealt(of, ranks, family=FAMILIES[FAMILY[name]].streaming.order)
    besides = [0] * len(of.stages)
    for rank in range(1, ranks):
        besides[of_stages.index(rank)] = 7 * ALIGN
    besides[len(besides) - 1 - of_stages[::-1].index(ranks - 1)] = 3 * ALIGN
    asked = request(name, 6, ranks, 9, activations="device")
    s, seat, schedules = settings(asked, FAMILIES[asked.family].streaming), streaming_seat(1, pipe=ranks), []
    of_ranks = programs(of, name, ranks, besides)
    for one in of_ranks:
        schedules.append(lower_step(name, one, s, (), "besides", seat))
        prove(schedules[-1], Needs.of(one, s))
        assert schedules[-1].bytes_per_lane()["send"] == sent_bytes(one, 9)
    world = World(name="besides", ranks=tuple(schedules), groups={"all": tuple(range(ranks))})
    check_world(world)
    meet(world)
    first, *others = (in_turn_route(one, 9, split=SPLIT[name]).at_once for one in of_ranks)
    assert all(other >= first for other in others), "they are there from when the first rank begins with a micro-batch"


def test_blocks_are_dealt_in_one_piece() -> None:
    assert dealt_out(8, 4, 1.0, "1f1b") == dealt_out(8, 4, 1.0, "zero-bubble") == (0, 1, 1, 1, 2, 2, 3, 3)
    assert dealt_out(8, 4, 1.0, "interleaved-1f1b") == dealt_out(8, 4, 1.0) == (0, 1, 2, 3, 1, 2, 3, 1)
    assert dealt_as([1, 3, 2], 6, "1f1b") == (0, 1, 1, 1, 2, 2)
    with pytest.raises(ConfigError, match=r"deal=\[1, 3\] says how many of the model's 6 blocks"):
        dealt_as([1, 3], 6, "1f1b")


def test_nothing_is_delayed() -> None:
    with pytest.raises(ConfigError, match="streamed-1f1b has no option delay"):
        build(request("1f1b", 4, 2, 4, delay=0.5))


def computes(**seconds: float) -> Costs:
    """Compute alone takes time, in blocks."""
    return Costs(name="compute", seconds=lambda op: seconds.get(op.id.kind, 0.0) * (op.id.stage > 0))


@pytest.mark.parametrize("name", FAMILY)
def test_ranks_overlap(name: str) -> None:
    """With 16 micro-batches, four ranks wait for no more than the three that a pipeline takes to fill and to drain."""
    costs = computes(F=1.0, B=3.0, I=2.0, W=1.0)
    one, four = (
        simulate(build(request(name, 16, ranks, 16, weights="device", state="device", activations="device")), costs)
        for ranks in (1, 4)
    )
    assert one.time == 16 * 16 * 4
    assert four.time < one.time / 4 * (16 + 3) / 16 * 1.01


# ---- backwards in two parts


DEALS = st.integers(2, 5).flatmap(
    lambda ranks: st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).map(
        lambda counts: (0, *(r for r, n in enumerate(counts) for _ in range(max(n, r > 0))), 0)
    )
)


@settings_of_hypothesis(max_examples=75, deadline=None)
@given(DEALS, st.integers(1, 14), st.randoms(use_true_random=False))
def test_each_part_comes_once_and_in_its_order_and_few_micro_batches_are_unfinished(
    of_stages: tuple[int, ...], micro_batches: int, rng: Random
) -> None:
    ranks, last = 1 + max(of_stages), len(of_stages) - 1
    split = frozenset(k for k in range(1, last) if rng.random() < 0.8)
    runs, order = runs_of(of_stages), order_of_all(of_stages, micro_batches, split)
    place = {(part.unit.kind, part.stage, part.unit.micro_batch): i for i, part in enumerate(order)}
    assert len(place) == len(order) == micro_batches * (1 + 2 * last + len(split))
    for k, m in product(range(last), range(micro_batches)):
        back = next(place[kind, k, m] for kind in "BI" if (kind, k, m) in place)
        above = next(place[kind, k + 1, m] for kind in "BIE" if (kind, k + 1, m) in place)
        assert place["F", k, m] < above < back
        assert (k in split) == (("W", k, m) in place)
        assert k not in split or back < place["W", k, m]
        assert k not in split or not m or place["W", k, m - 1] < place["W", k, m]
    for rank in range(ranks):
        left: dict[int, int] = {}
        for part in order:
            if runs[part.unit.run].rank == rank and part.unit.kind != "E":
                m = part.unit.micro_batch
                left[m] = left.get(m, of_stages[:last].count(rank)) - _ends(part, split)
                left = {m: n for m, n in left.items() if n}
                assert len(left) <= ranks + 1


def _ends(part: Part, split: frozenset[int]) -> int:
    """1 if the backward of a stage is over with a part."""
    return int(part.unit.kind == "B" or part.unit.kind == ("W" if part.stage in split else "I"))


@pytest.mark.parametrize(("ranks", "layers"), [(2, 4), (3, 6), (4, 8), (4, 16), (4, 9), (6, 18)])
def test_split_backwards_fill_a_part_of_the_bubble(ranks: int, layers: int) -> None:
    on_device = {"weights": "device", "state": "device", "activations": "device"}
    costs = computes(F=1.0, B=3.0, I=2.0, W=1.0, E=1.0)
    for micro_batches in (1, 2, 5, 16):
        whole, split = (
            simulate(build(request(name, layers, ranks, micro_batches, **on_device)), costs).time
            for name in ("1f1b", "zero-bubble")
        )
        assert split < whole


def test_a_program_that_cannot_be_split_is_refused_by_name() -> None:
    of = uniform_program(4, block=ALIGN, activation=ALIGN, splits=False)
    with pytest.raises(
        ConfigError, match="schedule='zero-bubble' runs the backward of blocks in two parts, and none of"
    ):
        stages_dealt(of, 2, family="zero-bubble")


def test_a_proof_knows_what_can_be_split_and_what_that_takes() -> None:
    asked = request("zero-bubble", 6, 3, 7, activations="device")
    schedule, of = build(asked).ranks[1], programs(program(6), "zero-bubble", 3)[1]

    def with_split(change: Callable[[int], int | None]) -> Program:
        stages = (s if s.split is None else replace(s, split=change(s.split)) for s in of.stages)
        return replace(of, stages=tuple(stages))

    with pytest.raises(
        ScheduleError, match=r"op I\dm0 is the first part of a backward that can only be run as a whole"
    ):
        prove(schedule, needs(asked, with_split(lambda nbytes: None)))
    with pytest.raises(
        ScheduleError, match=r"op I\dm0 needs \d+ bytes on the device, counted for K\dm0, and pool split is"
    ):
        prove(schedule, needs(asked, with_split(lambda nbytes: nbytes + 1)))


def test_a_stage_that_shares_a_gradient_with_an_earlier_one_is_not_split_on_any_rank() -> None:
    """The second part of its backward could come after the earlier one's, and the sum would have another order."""
    of = uniform_program(6, block=64 * ALIGN, embedding=4 * ALIGN, head=4 * ALIGN, activation=10 * ALIGN)
    shared = replace(of.stages[2], gradients=(*of.stages[1].gradients, *of.stages[2].gradients))
    of = replace(of, stages=(*of.stages[:2], shared, *of.stages[3:]))
    of_stages = stages_dealt(of, 2, family="zero-bubble")
    assert of_stages[1] == of_stages[2]
    for rank in range(2):
        program = program_of_rank(of, of_stages, rank, 2)
        assert [stage.split is None for stage in program.stages] == [True, False, True, *[False] * 4, True]
