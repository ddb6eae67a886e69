"""Gradients of several ranks that are summed on the host, micro-batch by micro-batch, and exchanged once: what does
something else, or in another order, is refused. And sums of strands have the room that they need.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Family
from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.lower.seat import FULLY, Seat, streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Depths, Settings, most_sums, strand_sums
from penstock.schedule.program import Program
from tests.programs import all_on_disk, transformer

TWO = Mesh(data=2).everyone()
PART = TWO.part(transformer(1, block=2))
SETTINGS = all_on_disk(PART, chunk=4096, micro_batches=4, strands=4)
SUMMED = lower_step("horizontal", PART, SETTINGS, seat=streaming_seat(2))


def proved(schedule: Schedule, program: Program = PART, asked: Settings = SETTINGS) -> None:
    check_world(TWO.world(schedule))
    prove(schedule, Needs.of(program, asked, 2))


def edited(*edits: tuple[str, str]) -> Schedule:
    text = str(SUMMED)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return parse_schedule(text)


def test_what_is_edited_below_is_what_it_has_to_be() -> None:
    proved(SUMMED)
    assert parse_schedule(str(SUMMED)) == SUMMED


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([("UG3.0@B1 after AG3.0@B1m2 ", "UG3.0@B1 after AG3.0@B1m1 ")], "gives L3.0u0 back while op AG3.0@B1m2 may"),
        ([("SG3.0@B1 after UG3.0@B1 ", "SG3.0@B1 ")], "op SG3.0@B1 gives back T3.0@B1, which is not taken"),
        ([("DG3.0@B1 after SG3.0@B1 ", "DG3.0@B1 ")], "op DG3.0@B1 gives back g3.0@B1, which is not taken"),
        (
            [("read L3.0u0,t3.0@B1m1 write L3.0u0 give", "read L3.0u0,t3.0@B1m1 write t3.0@B1m1 give")],
            "op SG3.0@B1 adds up over ranks what is stage 1 of micro-batch 0 + (stage 1 of micro-batches 2 to 3)",
        ),
        (  # the later strand first
            [
                (
                    "read L3.0u0,L3.0u0@B1m2 write L3.0u0 give L3.0u0@B1m2",
                    "read L3.0u0@B1m2,L3.0u0 write L3.0u0@B1m2 give L3.0u0",
                ),
                (
                    "take T3.0@B1=exchange read L3.0u0 write T3.0@B1 give L3.0u0 ",
                    "take T3.0@B1=exchange read L3.0u0@B1m2 write T3.0@B1 give L3.0u0@B1m2 ",
                ),
            ],
            "op SG3.0@B1 adds up over ranks what is stage 1 of micro-batches 2 to 3",
        ),
        ([("L3.0u0 bytes 32768\nSG3.0@B1", "L3.0u0 bytes 16384\nSG3.0@B1")], "UG3.0@B1 says that it moves 16384"),
        ([("give t3.0@B1m1 bytes 98304", "give t3.0@B1m1 bytes 49152")], "AG3.0@B1m1 says that it moves 49152"),
        ([("give G3@B1m0 bytes 32768", "give G3@B1m0 bytes 16384")], "DG3.0@B1m0 says that it moves 16384"),
        ([("give T3.0@B1 bytes 16384", "give T3.0@B1 bytes 32768")], "SG3.0@B1 says that it moves 32768"),
        ([("pool exchange device 1 x 65536", "pool exchange device 1 x 32768")], "needs 65536 bytes on the device"),
        ([("gradient_sums host 44 x 32768", "gradient_sums host 44 x 16384")], "needs 32768 bytes on the host"),
        ([("sums_out host 4 x 32768", "sums_out host 4 x 16384")], "needs 32768 bytes on the host"),
        ([("gradient_sums host 44 x 32768", "gradient_sums device 44 x 32768")], "needs 32768 bytes on the host"),
    ],
)
def test_another_order_or_other_bytes_are_refused(edits: list[tuple[str, str]], said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        proved(edited(*edits))
    assert said in str(caught.value)


def test_another_sum_of_strands_is_refused() -> None:
    """The sum of 4 micro-batches in 4 strands is (0 + 1) + (2 + 3), as in 2 and in 8."""
    for strands in (2, 8):
        proved(SUMMED, asked=replace(SETTINGS, strands=strands))
    with pytest.raises(ScheduleError, match="it has to be the sum of all micro-batches of one stage"):
        proved(SUMMED, asked=replace(SETTINGS, strands=1))


@given(micro_batches=st.integers(2, 5), strands=st.sampled_from((1, 2, 4)))
@settings(max_examples=10, deadline=None)
def test_what_is_exchanged_after_each_micro_batch_is_refused(micro_batches: int, strands: int) -> None:
    """Its numbers would depend on the number of ranks."""
    asked = replace(SETTINGS, micro_batches=micro_batches, strands=strands)
    schedule = lower_step("horizontal", PART, asked, seat=Seat(shards=TWO, sharding=FULLY))
    check_world(TWO.world(schedule))
    with pytest.raises(ScheduleError, match="it has to be the sum of all micro-batches of one stage"):
        prove(schedule, Needs.of(PART, asked, 2))


# ---- room for the sums of strands


def live(micro_batches: int, strands: int) -> int:
    """The most strands that are begun and not yet added to another one, micro-batch by micro-batch."""
    most, sums = 0, set[int]()
    pairs = strand_sums(micro_batches, strands)
    for m in range(micro_batches):
        sums.add(next(s for s in range(strands) if m < (s + 1) * micro_batches // strands))
        most = max(most, len(sums))
        sums -= {what for _, what in pairs.get(m, ())}
    return most


@given(st.integers(1, 70), st.integers(1, 70))
def test_few_sums_are_alive(micro_batches: int, strands: int) -> None:
    """The buffers are at most the binary logarithm of the strands, and one; without what is added at once, at most one
    less."""
    most, staged = (most_sums(micro_batches, strands, staged=staged) for staged in (False, True))
    assert most == live(micro_batches, strands) <= 1 + (strands - 1).bit_length()
    assert 1 <= staged <= most <= staged + 1


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_there_is_room_for_the_sums_of_any_strands(order: Family) -> None:
    """Also of fewer micro-batches than strands, and with one buffer of everything."""
    program = transformer(2, tied=True)
    few = Depths(weights=1, gradients=1, stage_in=1, stage_out=1, state=1, activations=1)
    for micro_batches in (1, 2, 3, 5, 7, 8):
        for strands in (1, 2, 3, 4, 6, 8, 16):
            asked = all_on_disk(program, chunk=1 << 18, micro_batches=micro_batches, strands=strands, depths=few)
            schedule = lower_step(order, program, asked)
            check(schedule)
            prove(schedule, Needs.of(program, asked))
