"""The decision of all ranks on how they begin or go on, by the table of what each has found; no rank is started."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, StoreError
from penstock.state.survey import Decision, Survey, decided
from penstock.state.take_over import Drive
from penstock.store.facts import StoreFacts
from penstock.store.parts import of_rank

Records = Mapping[int, dict[str, Any] | None]


def recorded(number: int, every: int, **other: Any) -> dict[str, Any] | None:
    """The record of a commit, of which there is one every so many steps; 0: each step is one, and the first is of the
    model as it came."""
    if number == 0:
        return None
    return {"step": number * every if every else number - 1, "whole": True, "last": {"loss": 0.5 / number}, **other}


def at(rank: int, ranks: int, newest: int, every: int = 0, *, copies: int = 1, there: bool = True) -> Survey:
    """A rank whose store has come to commit ``newest``; -1: there is none. ``there``: its directory."""
    path = Path(f"/disk/rank-{rank}")
    found = Survey(paths=(path,), drives=(Drive(path, there, path.parent, there, Path("/")),))
    if newest < 0:
        return found
    records: Records = {number: recorded(number, every) for number in {max(0, newest - 1), newest}}
    facts = StoreFacts(owner=None, records=records, missing=(), passing=False)
    of_ranks = of_rank(rank, ranks, whole=copies == ranks, copies=1 if copies == ranks else copies)
    return replace(found, facts=facts, store=f"store {rank}", of_ranks=of_ranks | {"world": "w"}, moments="fp32")


def table_of(*newest: int, every: int = 0, copies: int = 1) -> list[Survey]:
    return [at(rank, len(newest), number, every, copies=copies) for rank, number in enumerate(newest)]


BEGIN = Decision(commit=None)


@pytest.mark.parametrize(
    ("newest", "every", "copies", "wanted"),
    [
        ((-1,), 0, 1, BEGIN),
        ((0,), 0, 1, BEGIN),
        ((1,), 0, 1, Decision(commit=1)),
        ((-1, -1), 0, 1, BEGIN),
        ((1, 0), 0, 1, BEGIN),
        ((1, -1), 0, 1, BEGIN),
        ((1, 1), 0, 1, Decision(commit=1)),
        ((1, 0), 2, 1, Decision(commit=0)),
        ((1, 0, 1, 0), 2, 2, Decision(commit=0)),
        ((1, 0, -1, 0), 2, 2, Decision(commit=0, givers={2: 0})),
        ((1, -1), 0, 2, BEGIN),
        ((7, 7), 0, 1, Decision(commit=7)),
        ((7, 8), 0, 1, Decision(commit=7)),
        ((2, 1), 0, 1, Decision(commit=1)),
        ((7, -1), 0, 2, Decision(commit=7, givers={1: 0})),
        ((0, 7), 0, 2, Decision(commit=7, givers={0: 1})),
        ((1, 0), 2, 2, Decision(commit=1, givers={1: 0})),
        ((7, 8, -1, -1), 0, 2, Decision(commit=7, givers={2: 0, 3: 1})),
        ((-1, 8, 8, -1), 0, 2, Decision(commit=8, givers={0: 2, 3: 1})),
        ((-1, 3, 1, 3), 0, 4, Decision(commit=3, givers={0: 1, 2: 1})),
    ],
)
def test_ranks_begin_go_on_or_take_over(newest: tuple[int, ...], every: int, copies: int, wanted: Decision) -> None:
    assert decided(table_of(*newest, every=every, copies=copies), len(newest) // copies) == wanted


def changed(table: list[Survey], rank: int, **other: Any) -> list[Survey]:
    """The table with another survey of one rank. ``other``: fields of it, or of its newest record."""
    one = table[rank]
    of_survey = {key: value for key, value in other.items() if hasattr(one, key)}
    if len(of_survey) < len(other):
        assert one.facts is not None
        record = one.facts.records[one.newest]
        assert record is not None
        of_survey["facts"] = replace(one.facts, records={**one.facts.records, one.newest: record | other})
    return [*table[:rank], replace(one, **of_survey), *table[rank + 1 :]]


def lacking(table: list[Survey], rank: int) -> list[Survey]:
    """A directory of one rank's store is not there."""
    facts = table[rank].facts
    assert facts is not None
    gone = replace(facts, missing=(Path("/gone"),))
    return changed(table, rank, facts=gone, misfit=StoreError("/gone holds no store: is the drive mounted?"))


TWO = table_of(7, 7)
REFUSED = [
    (table_of(7, -1), 2, StoreError, "/disk/rank-1 holds no store, and other ranks have theirs"),
    (table_of(7, -1, 7, -1, copies=2), 2, StoreError, "/disk/rank-1 holds no store, and other ranks have theirs"),
    (table_of(7, 0), 2, StoreError, "no commit in common: /disk/rank-1 is at commit 0, and others are at 7"),
    (table_of(7, 5), 2, StoreError, "no commit in common: /disk/rank-1 is at commit 5, and others are at 7"),
    (table_of(9, -1, 3, copies=3), 1, StoreError, "/disk/rank-2 is at commit 3, and others are at 9. .* remove it"),
    (
        [*table_of(7, 7, copies=2)[:1], at(1, 2, -1, there=False)],
        1,
        StoreError,
        r"rank-1 is not there: .*\(mkdir -p /disk/rank-1\): rank 1 then takes the state over from rank 0$",
    ),
    (
        [*table_of(7, 7, 7, 7, copies=2)[:2], *(at(rank, 4, -1, there=False) for rank in (2, 3))],
        2,
        StoreError,
        r"^/disk/rank-2, /disk/rank-3 are not there: .*\(mkdir -p /disk/rank-2 /disk/rank-3\): rank 2 .*, rank 3 from",
    ),
    (changed(TWO, 1, of_ranks={**TWO[1].of_ranks, "world": "x"}), 2, StoreError, "have parts of two runs: put back"),
    (
        changed(table_of(1, 0, every=9), 1, of_ranks={**TWO[1].of_ranks, "world": "x"}),
        2,
        StoreError,
        "have parts of two runs: put back",
    ),
    (changed(TWO, 1, of_ranks=TWO[0].of_ranks), 2, StoreError, "rank-1 has the part of rank 0 of 2, and what is"),
    (
        changed(TWO, 1, last={"loss": float("nan")}),
        2,
        StoreError,
        "rank-1 to step 6 with loss nan .*: put back",
    ),
    (changed(changed(TWO, 0, whole=False), 1, whole=False), 2, StoreError, "stopped in or before step 7, and what"),
    (
        changed(TWO, 1, moments="int8"),
        2,
        StoreError,
        "forms of moments: /disk/rank-0 has fp32 and /disk/rank-1",
    ),
    (changed(TWO, 1, misfit=ConfigError("budget.slots=1: give 2")), 2, ConfigError, "^rank 1: budget.slots=1: give 2"),
    (changed(table_of(7), 0, misfit=StoreError("another model: give it")), 1, StoreError, "^another model: give it"),
    (changed(table_of(-1), 0, in_the_way=StoreError("move it away")), 1, StoreError, "^move it away"),
    (lacking(table_of(0), 0), 1, StoreError, "^/gone holds no store: is the drive mounted"),
    (lacking(table_of(0, 1), 0), 2, StoreError, "^rank 0: /gone holds no store: is the drive mounted"),
    (
        changed(table_of(7, -1, copies=2), 0, converts=True),
        1,
        ConfigError,
        "rank-0 has another form of moments, and another rank has lost its state, which it can take over as it is: put",
    ),
]


@pytest.mark.parametrize(("table", "parts", "kind", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_is_refused_in_words(table: list[Survey], parts: int, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        decided(table, parts)


def test_what_a_first_step_has_begun_on_one_rank_alone_is_taken_back_though_it_has_a_copy() -> None:
    """Where state is in memory, the first commit says that a step begins, and nothing has been done by then."""
    table = changed(table_of(1, 0, copies=2), 0, whole=False)
    assert decided(table, 1) == Decision(commit=0)
    assert decided(changed(table_of(1, 1, copies=2), 0, whole=True), 1) == Decision(commit=1)


def test_a_commit_that_cannot_be_read_where_the_last_is_taken_back_is_missed_before_any_is() -> None:
    table = table_of(7, 8)
    facts = table[1].facts
    assert facts is not None
    table[1] = replace(table[1], facts=replace(facts, records={8: facts.records[8]}))
    with pytest.raises(StoreError, match=r"rank-1 is at commit 8, .* one before, and that cannot be read there: go on"):
        decided(table, 2)


def parts_with(table: Sequence[Survey], ranks: Iterable[int], number: int, parts: int) -> set[int]:
    """The parts of the state of which some of these ranks' stores have a commit of a step."""
    found = set()
    for rank in ranks:
        facts = table[rank].facts
        record = None if facts is None else facts.records.get(number)
        if record is not None and record["step"] > 0:
            found.add(rank % parts)
    return found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_table_is_refused_in_words_or_decided_so_that_no_committed_step_is_lost(data: st.DataObject) -> None:
    parts, copies = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    every, newest = data.draw(st.sampled_from((0, 2))), data.draw(st.sampled_from((0, 1, 1, 2, 4)))
    near = st.sampled_from((newest, newest, newest, newest + 1, newest - 1, 0, -1))
    table = table_of(*(max(-1, data.draw(near)) for _ in range(parts * copies)), every=every, copies=copies)
    for rank in range(len(table)):
        if data.draw(st.integers(0, 9)) == 0 and table[rank].facts is not None:
            table = lacking(table, rank)
        if data.draw(st.integers(0, 19)) == 0 and table[rank].facts is not None:
            table = changed(table, rank, of_ranks={**table[rank].of_ranks, "world": "another"})
    everyone = range(len(table))
    try:
        decision = decided(table, parts)
    except (StoreError, ConfigError) as error:
        assert any(word in str(error) for word in ("is the drive mounted", "Put back", "put back")), error  # noqa: PT017
        steps = [one.newest for one in table]
        of_two = len({one.of_ranks["world"] for one in table if one.of_ranks}) > 1
        assert of_two or min(steps) < max(steps) or any(one.misfit for one in table), "all have the same, and all of it"
        return
    assert decided(list(table), parts) == decision
    newest = max(one.newest for one in table)
    if decision.commit is None:
        assert not decision.givers
        for number in range(1, newest + 1):
            assert parts_with(table, everyone, number, parts) != set(range(parts)), "a step of all parts is there"
        assert all(one.untouched for one in table), "a store goes that has a step"
        return
    takers, there = decision.givers, [rank for rank in everyone if rank not in decision.givers]
    for taker, giver in takers.items():
        assert giver in there
        assert giver % parts == taker % parts
        assert table[taker].untouched
    assert {rank % parts for rank in there} == set(range(parts))
    assert len({table[rank].of_ranks["world"] for rank in there}) == 1
    for rank in there:
        facts = table[rank].facts
        assert facts is not None
        assert not facts.missing
        assert decision.commit in facts.records
        assert table[rank].newest in (decision.commit, decision.commit + 1)
    assert any(table[rank].newest == decision.commit for rank in there), "all have a later one"
