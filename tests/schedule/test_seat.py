"""Which seats a rank that streams its groups can take: all others are refused in words, not built as something else."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Emitter
from penstock.schedule.lower.provision import Provision
from penstock.schedule.lower.rank import lower_rank
from penstock.schedule.lower.seat import FULLY, Seat, Sharding, streaming_seat
from penstock.schedule.lower.visits import route_of
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Placement
from tests.programs import all_on_disk, transformer

TWO = Mesh(data=2).everyone()


def lowered(seat: Seat, **places: Any) -> None:
    program = transformer(3)
    settings = all_on_disk(program, chunk=4096)
    count = len(program.groups)
    place: Placement = replace(settings.place, **{name: (tier,) * count for name, tier in places.items()})
    settings = replace(settings, place=place)
    provision = Provision(route_of(program, settings.micro_batches, "vertical"), settings, seat)
    emitter = Emitter(provision.pools.values())
    ranks = (lower_rank(Builder(provision, emitter), "vertical", ()),) * seat.shards.size
    groups = {seat.shards.name: seat.shards.members} if seat.shards.size > 1 else {}
    check_world(World(name="streams", ranks=ranks, groups=groups))


@pytest.mark.parametrize(
    "seat",
    [Seat(), Seat(shards=TWO, sharding=FULLY), *(streaming_seat(2, stage) for stage in (0, 1, 2, 3))],
    ids=["alone", "zero-infinity", "0", "1", "2", "3"],
)
def test_what_streams_is_one_ranks_or_shared_as_in_a_stage_of_zero(seat: Seat) -> None:
    lowered(seat)


def test_stages_1_and_2_are_one() -> None:
    """A gradient leaves the device as soon as it is complete: there is no whole one that could stay."""
    assert streaming_seat(2, 1) == streaming_seat(2, 2)
    assert {stage: streaming_seat(2, stage).parts for stage in (0, 1, 2, 3)} == {0: 1, 1: 2, 2: 2, 3: 2}


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(),
        Sharding(reduce="all", stay=True),
        Sharding(weights=True, state=True, reduce="all"),
        Sharding(state=True, reduce="scatter-late"),
        Sharding(state=True, reduce="scatter-early"),
        replace(FULLY, piece=64),
        replace(FULLY, apart=True),
    ],
)
def test_other_ways_to_share_are_refused(sharding: Sharding) -> None:
    with pytest.raises(AssertionError, match="shared as one of the stages of ZeRO shares them"):
        lowered(Seat(shards=TWO, sharding=sharding))


@pytest.mark.parametrize(
    "more", [{"model": TWO}, {"items": 2}, {"inputs": 8}, {"lookahead": 1}, {"steps": "up"}, {"steps": "down"}]
)
def test_what_only_ranks_of_layers_do_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="computes a micro-batch at a time, whole"):
        lowered(Seat(**more))


def test_of_one_rank_nothing_is_cut() -> None:
    with pytest.raises(AssertionError, match="those of one rank are not"):
        lowered(Seat(sharding=FULLY))


@pytest.mark.parametrize("places", [{"weights": "device"}, {"weights": "device", "state": "device"}])
def test_parts_that_ranks_share_are_below_the_device(places: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="share lives below the device"):
        lowered(Seat(shards=TWO, sharding=FULLY), **places)
