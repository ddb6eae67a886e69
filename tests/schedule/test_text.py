"""A schedule is text that can be read, diffed and parsed back; a line that is wrong is named."""

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.ir.references import Buffer, OpId, visit
from penstock.schedule.ir.text import buffer, op_id, parse_op, parse_schedule
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


WORDS: dict[str, dict[str, object]] = {
    "F3m0": {"kind": "F", "lane": "compute", "stage": 3, "micro_batch": 0},
    "B3m12": {"kind": "B", "lane": "compute", "stage": 3, "micro_batch": 12},
    "E9m1": {"kind": "E", "lane": "compute", "stage": 9, "micro_batch": 1},
    "ND5": {"kind": "ND", "lane": "compute", "group": 5},
    "OD5": {"kind": "OD", "lane": "compute", "group": 5},
    "RW5.1@F3": {"kind": "RW", "lane": "read", "group": 5, "chunk": 1, "visit": visit("F", 3)},
    "RG5.1": {"kind": "RG", "lane": "read", "group": 5, "chunk": 1},
    "RS5.1": {"kind": "RS", "lane": "read", "group": 5, "chunk": 1},
    "RC3m0": {"kind": "RC", "lane": "read", "stage": 3, "micro_batch": 0},
    "WG5.1": {"kind": "WG", "lane": "write", "group": 5, "chunk": 1},
    "WS5.1": {"kind": "WS", "lane": "write", "group": 5, "chunk": 1},
    "WW5.1": {"kind": "WW", "lane": "write", "group": 5, "chunk": 1},
    "WC3m0": {"kind": "WC", "lane": "write", "stage": 3, "micro_batch": 0},
    "UW5.1@B3m2": {"kind": "UW", "lane": "h2d", "group": 5, "chunk": 1, "visit": visit("B", 3, 2)},
    "UG5.1@B3": {"kind": "UG", "lane": "h2d", "group": 5, "chunk": 1, "visit": visit("B", 3)},
    "UN5.1": {"kind": "UN", "lane": "h2d", "group": 5, "chunk": 1},
    "UC3m0": {"kind": "UC", "lane": "h2d", "stage": 3, "micro_batch": 0},
    "DG5.1@B3": {"kind": "DG", "lane": "d2h", "group": 5, "chunk": 1, "visit": visit("B", 3)},
    "DC3m0": {"kind": "DC", "lane": "d2h", "stage": 3, "micro_batch": 0},
    "AG5.1@B2": {"kind": "AG", "lane": "cpu", "group": 5, "chunk": 1, "visit": visit("B", 2)},
    "NG5.1": {"kind": "NG", "lane": "cpu", "group": 5, "chunk": 1},
    "OP5.1": {"kind": "OP", "lane": "cpu", "group": 5, "chunk": 1},
    "NORM": {"kind": "NORM", "lane": "cpu"},
    "AG5.1@sum2": {"kind": "AG", "lane": "cpu", "group": 5, "chunk": 1, "use": 2},
    "SG5@B3": {"kind": "SG", "lane": "net", "group": 5, "visit": visit("B", 3)},
    "RA3m0": {"kind": "RA", "lane": "recv", "stage": 3, "micro_batch": 0},
    "CM": {"kind": "CM", "lane": "write"},
}
NOTHING = {"stage": -1, "group": -1, "chunk": -1, "micro_batch": -1}


@pytest.mark.parametrize(("text", "parts"), WORDS.items())
def test_every_word_says_what_it_is(text: str, parts: dict[str, object]) -> None:
    word = op_id(text)
    expected = {**NOTHING, "visit": None, "use": 0, **parts}
    assert {name: getattr(word, name) for name in expected} == expected


BUFFERS: dict[str, dict[str, object]] = {
    "W3@F3": {"kind": "W", "holds": "weights", "group": 3, "visit": visit("F", 3)},
    "W3@B3m1": {"kind": "W", "holds": "weights", "group": 3, "visit": visit("B", 3, 1)},
    "i5.1@F3": {"kind": "i", "holds": "chunk of weights", "group": 5, "chunk": 1, "visit": visit("F", 3)},
    "G5": {"kind": "G", "holds": "gradient", "group": 5},
    "G5@B3": {"kind": "G", "holds": "gradient", "group": 5, "visit": visit("B", 3)},
    "H5.1u2": {"kind": "H", "holds": "chunk of gradient", "group": 5, "chunk": 1, "use": 2},
    "H5.1u0@B3m2": {
        "kind": "H",
        "holds": "chunk of gradient",
        "group": 5,
        "chunk": 1,
        "use": 0,
        "visit": visit("B", 3, 2),
    },
    "L5.1u0": {"kind": "L", "holds": "chunk of gradient", "group": 5, "chunk": 1, "use": 0},
    "h5.1": {"kind": "h", "holds": "chunk of gradient", "group": 5, "chunk": 1},
    "S5.1": {"kind": "S", "holds": "state", "group": 5, "chunk": 1},
    "O5.1": {"kind": "O", "holds": "new weights", "group": 5, "chunk": 1},
    "A3m0": {"kind": "A", "holds": "activation", "stage": 3, "micro_batch": 0},
    "Xm0": {"kind": "A", "holds": "activation", "micro_batch": 0},
    "D3m0": {"kind": "D", "holds": "activation gradient", "stage": 3, "micro_batch": 0},
    "C3m0.1": {"kind": "C", "holds": "saved activation", "stage": 3, "micro_batch": 0, "part": 1},
    "c3m0": {"kind": "c", "holds": "saved activation", "stage": 3, "micro_batch": 0},
    "c5.1@B3": {"kind": "c", "holds": "chunk of gradient", "group": 5, "chunk": 1, "visit": visit("B", 3)},
    "mine": {"kind": "", "holds": "unknown"},
    "H5.01u2": {"kind": "", "holds": "unknown"},
}


@pytest.mark.parametrize(("text", "parts"), BUFFERS.items())
def test_a_buffer_says_what_it_holds(text: str, parts: dict[str, object]) -> None:
    found = buffer(text)
    expected = {**NOTHING, "visit": None, "use": -1, "part": 0, **parts}
    assert {name: getattr(found, name) for name in expected} == expected
    assert found == text


@pytest.mark.parametrize("seed", range(20))
def test_what_a_schedule_is_built_from_is_what_its_text_is_read_as(seed: int) -> None:
    """Equal text alone would not say that the parts are the same."""
    schedule = random_case(seed).build()
    for op, read in zip(schedule.ops, parse_schedule(str(schedule)).ops, strict=True):
        mine = [op.id, *op.after, *op.reads, *op.writes, *op.gives]
        theirs = [read.id, *read.after, *read.reads, *read.writes, *read.gives]
        for one, other in zip(mine, theirs, strict=True):
            assert _parts(one) == _parts(other)
    assert all(name.holds != "unknown" for op in schedule.ops for name in (*op.reads, *op.writes))


def _parts(reference: OpId | Buffer) -> list[object]:
    return [getattr(reference, name) for name in type(reference).__slots__]


def test_every_kind_of_op_of_every_schedule_is_in_the_table_above() -> None:
    kinds = {op.id.kind for seed in range(60) for op in random_case(seed, largest=2).build().ops}
    assert kinds | {"UG", "SG", "RA", "CM"} == {parts["kind"] for parts in WORDS.values()}


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
        op_id(text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("Q1m0", "'Q1m0' is not an op"),
        ("F0m0 after", "'after' has no value"),
        ("F0m0 behind F1m0", "unknown field 'behind'"),
        ("F0m0 take A0m0", "must be written buffer=pool"),
        ("F0m0 bytes many", "bytes 'many' is not a number"),
        ("F0m0 peer many items many bytes many", "bytes 'many' is not a number"),
        ("F0m0 bytes -4", "bytes '-4' is not a number"),
        ("F0m0 bytes " + "9" * 16, "bytes '9999999999999999' is not a number"),
        ("F0m0 items " + "9" * 5000, "items '999999999999999999999999...' is not a number"),
        ("SA0m0 peer " + "9" * 400, "is not a number"),
        ("F" + "9" * 5000 + "m0", "is not a number"),
        ("F00m0", "'00' is not a number"),
        ("F\N{ARABIC-INDIC DIGIT THREE}m0", "is not a number"),
        ("OP5.01", "'01' is not a number"),
        ("GW5@F\N{ARABIC-INDIC DIGIT THREE}", "is not an op"),
        ("AG5.1@sum0", "is not an op"),
        ("F0m0 after F1", "'F1' is not an op"),
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
