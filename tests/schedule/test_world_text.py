"""A world's text form can be read, diffed and parsed back, for every family; a line that is wrong is named."""

import time

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.check.worlds import violations
from penstock.schedule.ir.text import MOST_RANKS, parse_ranks, parse_world
from penstock.schedule.ir.worlds import format_ranks
from penstock.schedule.lower.families import FAMILIES, build
from penstock.schedule.lower.request import FamilyRequest
from penstock.sim.models import puzzle, unit
from tests.programs import transformer


def request(family: str, *, abstract: bool) -> FamilyRequest:
    model = unit() if abstract else puzzle()
    one = FAMILIES[family].one_rank
    ranks = 1 if one else 4
    return FamilyRequest(
        family=family, layers=8, ranks=ranks, micro_batches=8, sizes=model.sizes, stage_ops=model.stage_ops
    )


@pytest.mark.parametrize("abstract", [True, False])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.streaming])
def test_every_family_parses_back_to_the_same_world(family: str, abstract: bool) -> None:
    world = build(request(family, abstract=abstract))
    text = str(world)
    again = parse_world(text)
    assert again.ranks == world.ranks
    assert dict(again.groups) == dict(world.groups)
    assert str(again) == text


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.streaming])
def test_every_offload_schedule_parses_back_to_the_same_world(family: str) -> None:
    ranks = 1 if FAMILIES[family].one_rank else 2
    world = build(FamilyRequest(family=family, program=transformer(3, block=16), ranks=ranks, micro_batches=4))
    assert len(world.ranks) == ranks
    assert parse_world(str(world)) == world


def test_ranks_that_share_a_schedule_share_its_text_and_still_share_it_when_read() -> None:
    world = parse_world(str(build(request("fsdp", abstract=False))))
    assert str(world).count("schedule fsdp") == 1
    assert len({id(schedule) for schedule in world.ranks}) == 1


@pytest.mark.parametrize(
    ("ranks", "text"), [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 1, 5, 7, 8), "0-1,5,7-8"), ((3, 1, 2), "3,1-2")]
)
def test_ranks_are_written_as_runs_in_their_order(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text
    assert parse_ranks(text) == ranks


def test_a_long_list_of_ranks_is_read_in_no_time() -> None:
    ranks = tuple(range(0, MOST_RANKS, 2))
    start = time.process_time()
    assert parse_ranks(format_ranks(ranks)) == ranks
    assert time.process_time() - start < 2


GOOD = """\
# two ranks
world two ranks 2

group all 0-1
rank 0
schedule a micro-batches 1 chunk 0
F0m0
AR0 after F0m0 group all
rank 1
schedule b micro-batches 1 chunk 0
AR0 group all
"""

WRONG = {
    "header": ("world two ranks 2", "world two", "line 2: the first line must be 'world NAME ranks P'"),
    "group": ("group all 0-1", "group all", "line 4: 'group all': write 'group NAME RANKS' once for each group"),
    "group twice": ("group all 0-1", "group all 0-1\ngroup all 0", "line 5: 'group all 0': write"),
    "ranks": ("group all 0-1", "group all 0-x", "line 4: '0-x' is not a list of ranks: write 0-3,8"),
    "backwards": ("group all 0-1", "group all 1-0", "line 4: '1-0' names no rank"),
    "twice": ("group all 0-1", "group all 0,0", "line 4: '0,0' names no rank, or one of them twice"),
    "far too many": ("group all 0-1", "group all 0-9999999999", "line 4: '0-9999999999': ranks go up to 99,999"),
    "op before ranks": ("rank 0\n", "", "line 5: 'schedule a micro-batches 1 chunk 0': write 'group NAME RANKS' or"),
    "rank again": ("rank 1", "rank 0", "line 9: rank 0 has a schedule already"),
    "ranks that no memory holds": (
        "world two ranks 2",
        "world two ranks 99999999999",
        "line 2: the world has 99999999999",
    ),
    "ranks beyond numbers": ("world two ranks 2", "world two ranks " + "9" * 5000, "line 2: '99999"),
    "the same ranks again and again": (
        "group all 0-1",
        "group all " + "0-99999," * 2000 + "0",
        "or one of them twice",
    ),
    "rank missing": (
        "world two ranks 2",
        "world two ranks 3",
        "line 2: the world has 3 ranks, but the schedules are those",
    ),
    "unknown op": ("F0m0\n", "Q0m0\n", "line 7: 'Q0m0' is not an op"),
    "in the second schedule": ("AR0 group all\n", "AR0 group\n", "line 11: op 'AR0': 'group' has no value"),
    "no schedule": ("schedule b micro-batches 1 chunk 0\n", "", "line 10: the first line must be 'schedule NAME"),
}


@pytest.mark.parametrize("text", ["world none ranks 0\n", "world none ranks 2\ngroup all 0-1\n"])
def test_a_world_without_ranks_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"line \d: the world has no rank"):
        parse_world(text)


def test_the_example_is_good() -> None:
    assert len(parse_world(GOOD).ranks) == 2


@pytest.mark.parametrize("name", WRONG)
def test_a_line_that_is_wrong_is_named(name: str) -> None:
    old, new, says = WRONG[name]
    assert old in GOOD
    at = GOOD.rindex(old)
    with pytest.raises(ScheduleError) as caught:
        parse_world(GOOD[:at] + new + GOOD[at + len(old) :])
    assert says in str(caught.value)


def test_a_collective_of_a_group_with_a_rank_that_is_not_there_is_refused() -> None:
    """The group is named first; who looks for the collective on all its ranks finds none on that one."""
    one = "schedule x micro-batches 1 chunk 0\nAR0 group all bytes 8\n"
    assert "group all has rank 2, which does not exist" in violations(
        parse_world(f"world x ranks 2\ngroup all 0-2\nrank 0-1\n{one}")
    )
