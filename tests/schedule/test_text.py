"""A schedule is text that can be read, diffed and parsed back; a line that is wrong is named."""

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.op import Word, parse_op, parse_schedule, parse_word
from tests.programs import random_case

HEADER = "schedule vertical micro-batches 2 chunk 4096\n"


@pytest.mark.parametrize("seed", range(40))
def test_text_parses_back_to_the_same_schedule(seed: int) -> None:
    schedule = random_case(seed).build()
    assert parse_schedule(str(schedule)) == schedule


def test_comments_blank_lines_and_indentation_do_not_matter() -> None:
    schedule = random_case(3, largest=2).build()
    lines = str(schedule).splitlines()
    text = "\n# as exported\n\n" + "\n   \n".join(f"  {line}  " for line in lines)
    assert parse_schedule(text) == schedule


WORDS = {
    "F3m0": Word(kind="F", lane="compute", stage=3, micro_batch=0),
    "B3m12": Word(kind="B", lane="compute", stage=3, micro_batch=12),
    "E9m1": Word(kind="E", lane="compute", stage=9, micro_batch=1),
    "ND5": Word(kind="ND", lane="compute", group=5),
    "OD5": Word(kind="OD", lane="compute", group=5),
    "RW5.1@F3": Word(kind="RW", lane="read", group=5, chunk=1, visit="F3"),
    "RG5.1": Word(kind="RG", lane="read", group=5, chunk=1),
    "RS5.1": Word(kind="RS", lane="read", group=5, chunk=1),
    "RC3m0": Word(kind="RC", lane="read", stage=3, micro_batch=0),
    "WG5.1": Word(kind="WG", lane="write", group=5, chunk=1),
    "WS5.1": Word(kind="WS", lane="write", group=5, chunk=1),
    "WW5.1": Word(kind="WW", lane="write", group=5, chunk=1),
    "WC3m0": Word(kind="WC", lane="write", stage=3, micro_batch=0),
    "UW5.1@B3m2": Word(kind="UW", lane="h2d", group=5, chunk=1, visit="B3m2"),
    "UN5.1": Word(kind="UN", lane="h2d", group=5, chunk=1),
    "UC3m0": Word(kind="UC", lane="h2d", stage=3, micro_batch=0),
    "DG5.1@B3": Word(kind="DG", lane="d2h", group=5, chunk=1, visit="B3"),
    "DC3m0": Word(kind="DC", lane="d2h", stage=3, micro_batch=0),
    "AG5.1@B2": Word(kind="AG", lane="cpu", group=5, chunk=1, visit="B2"),
    "NG5.1": Word(kind="NG", lane="cpu", group=5, chunk=1),
    "OP5.1": Word(kind="OP", lane="cpu", group=5, chunk=1),
    "NORM": Word(kind="NORM", lane="cpu"),
}


@pytest.mark.parametrize(("text", "word"), WORDS.items())
def test_every_word_says_what_it_is(text: str, word: Word) -> None:
    assert parse_word(text) == word


def test_every_kind_of_op_of_every_schedule_is_in_the_table_above() -> None:
    kinds = {op.word.kind for seed in range(60) for op in random_case(seed, largest=2).build().ops}
    assert kinds == {word.kind for word in WORDS.values()}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "X3m0",
        "F3",
        "Fm0",
        "F3m",
        "f3m0",
        "F3m0 ",
        "XX5.1",
        "RW",
        "RW.1",
        "RW5.",
        "RW5.1@",
        "F3m0@B1",
        "NORM1",
        "C3m0",
    ],
)
def test_what_is_no_word_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an op"):
        parse_word(text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("Q1m0", "'Q1m0' is not an op"),
        ("F0m0 after", "'after' has no value"),
        ("F0m0 behind F1m0", "unknown field 'behind'"),
        ("F0m0 take A0m0", "must be written buffer=pool"),
        ("F0m0 bytes many", "bytes 'many' is not a number"),
        ("F0m0 bytes -4", "bytes '-4' is not a number"),
        ("F0m0 bytes " + "9" * 16, "bytes '9999999999999999' is not a number"),
        ("F0m0 items " + "9" * 5000, "items '999999999999999999999999...' is not a number"),
        ("SA0m0 peer " + "9" * 400, "is not a number"),
        ("F" + "9" * 5000 + "m0", "is not a number"),
        ("F00m0", "'00' is not a number"),
        ("F\N{ARABIC-INDIC DIGIT THREE}m0", "is not a number"),
        ("OP5.01", "'01' is not a number"),
        ("GW5@F\N{ARABIC-INDIC DIGIT THREE}", "is not an op"),
        ("F0m0 items \N{SUPERSCRIPT TWO}", "is not a number"),
        ("pool p device " + "9" * 400 + " x 5", "is not a number"),
        ("pool p device 1 x " + "9" * 5000, "is not a number"),
        ("fixed host state " + "9" * 5000, "is not a number"),
        ("F0m0 after F1m0 after F2m0", "field 'after' appears twice"),
        ("F0m0 bytes 4 bytes 5", "field 'bytes' appears twice"),
        ("F0m0 after F1m0,,F2m0", "empty name"),
        ("F0m0 take =pool", "must be written buffer=pool"),
        ("F0m0 take A0m0=", "must be written buffer=pool"),
        ("pool weights device", "a pool is written"),
        ("pool weights attic 2 x 4096", "a pool is written"),
        ("pool weights device two x 4096", "a pool is written"),
        ("pool weights device 2 x 4096 rented", "a pool is written"),
        ("fixed device", "write 'fixed TIER WHAT BYTES'"),
        ("fixed attic weights 3", "write 'fixed TIER WHAT BYTES'"),
    ],
)
def test_a_malformed_line_is_named(line: str, says: str) -> None:
    with pytest.raises(ScheduleError, match="line 3: ") as caught:
        parse_schedule(f"{HEADER}F9m9\n{line}\nF8m8\n")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the schedule is empty"),
        ("# nothing\n\n", "the schedule is empty"),
        ("F0m0\n", "line 1: the first line must be"),
        ("schedule v micro-batches two chunk 4096\n", "line 1: the first line must be"),
        ("\n" + HEADER + HEADER, "line 3: "),
        ("schedule v micro-batches " + "9" * 5000 + " chunk 0\n", "is not a number"),
    ],
)
def test_the_first_line_says_what_the_schedule_is(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text)
    assert says in str(caught.value)


def test_an_op_writes_only_the_fields_that_it_has() -> None:
    assert str(parse_op("NORM")) == "NORM"
    line = "OP5.1 after NORM,RS5.1 take O5.1=new_weights read H5.1u0,S5.1 write S5.1,O5.1 give H5.1u0 bytes 120"
    assert str(parse_op(line)) == line
