"""The machine that decides which step counts: its table is the drawn one, and no sequence of events loses a step."""

import ast
import inspect
import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import fate
from penstock.engine.fate import Action, Event, State, transition

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
ARROW = re.compile(r"^ +(?P<state>[a-z ]+) --> (?P<then>[a-z ]+): (?P<events>[a-z ]+?)(?: / (?P<actions>[a-z, ]+))?$")


def drawn() -> dict[tuple[State, Event], tuple[State, tuple[Action, ...]]]:
    """The transitions in the diagram of ``docs/design.md``."""
    found = {}
    for line in DESIGN.read_text().partition("stateDiagram-v2")[2].partition("```")[0].splitlines():
        if arrow := ARROW.match(line):
            actions = tuple(Action(a) for a in (arrow["actions"] or "").split(", ") if a)
            for event in arrow["events"].split(" or "):
                found[State(arrow["state"]), Event(event)] = (State(arrow["then"]), actions)
        else:
            assert "[*]" in line or not line.strip(), line
    return found


def test_every_transition_is_the_drawn_one_and_there_is_no_other() -> None:
    wanted = drawn()
    assert len(wanted) > len(State)
    for state, event in product(State, Event):
        if (state, event) in wanted:
            assert transition(state, event) == wanted[state, event]
        else:
            with pytest.raises(AssertionError, match=f"{event.value} while {state.value}"):
                transition(state, event)


def test_the_machine_can_look_at_nothing_that_only_one_process_knows() -> None:
    found = [
        node for node in ast.walk(ast.parse(inspect.getsource(fate))) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert {node.module for node in found if isinstance(node, ast.ImportFrom)} == {"collections.abc", "enum"}
    assert all(isinstance(node, ast.ImportFrom) for node in found)


class FailedError(Exception):
    """An action has failed."""


@dataclass
class Run:
    """A run without arrays. A step is a number, and each run of it an attempt; ``state`` has those that are read, and
    numbers below 0 of steps that were skipped; ``beside`` the one that is written beside it. ``draw``: which of several
    things happens.
    """

    data: st.DataObject
    now: State = State.WHOLE
    attempts: int = 0
    state: list[int] = field(default_factory=list)
    beside: int | None = None
    verdict: Event | None = None
    changed: bool = False
    """true if something that a run of a step changes, on disk or in memory, was neither dropped nor counted"""
    dropped: set[int] = field(default_factory=set)
    left: int | None = None
    """the attempt whose delayed chunks are left to the next step"""
    begun: bool = False
    """true if some of them are stepped"""
    in_place: bool = False
    """true if the step under way has changed what has no other copy"""
    durable: list[int] = field(default_factory=list)
    whole: bool = True
    """true if ``state`` is that of one step, or is so but for ``left``"""

    def draw(self, *what: Event) -> Event:
        """One of these, mostly the first, or an error."""
        found = self.data.draw(st.sampled_from([what[0]] * 8 + [*what[1:], Event.FAILED]))
        if found is Event.FAILED:
            raise FailedError
        return found

    def happens(self) -> bool:
        return self.data.draw(st.booleans())

    def follow(self, event: Event) -> None:
        """A stand-in that does as ``Durability.follow`` does."""
        actions = self.tell(event)
        while actions:
            try:
                for action in actions:
                    event = getattr(self, f"_{action.name.lower()}")()
            except FailedError:
                event = Event.FAILED_IN_PLACE if self.in_place or self.begun else Event.FAILED
            actions = self.tell(event)

    def close(self) -> None:
        """As ``Durability.close`` does."""
        if Action.SETTLE in self.tell(Event.CLOSE):
            self._settle()
            assert self.durable == self.state

    def tell(self, event: Event) -> tuple[Action, ...]:
        self.now, actions = transition(self.now, event)
        assert self.now is not State.BROKEN or not actions, "after it broke nothing is written"
        if self.now is State.WHOLE:
            assert self.left is None, "nothing is pending"
        if self.now in (State.WHOLE, State.PENDING, State.COMMITTING):
            assert self.whole
        if self.now in (State.WHOLE, State.PENDING) and Action.COMMIT not in actions:
            assert not self.changed, "what a step has changed counts, or was dropped"
        if event is Event.DURABLE:
            assert self.durable == self.state[: None if self.left is None else -1], "only a commit makes durable"
        return actions

    def _record(self) -> None:
        assert self.now not in (State.BROKEN, State.CLOSED)
        assert not self.dropped.intersection(self.state), "nothing is committed that was dropped"
        assert self.state[: len(self.durable)] == self.durable, "what is durable only grows"
        self.durable = list(self.state)

    # ---- the actions

    def _mark(self) -> Event:
        self._mark_pending()
        if self.durable != self.state:
            self._record()
        return Event.MARKED

    def _mark_pending(self) -> Event:
        self.in_place = self.begun = False
        return self.draw(Event.MARKED)

    def _run(self) -> Event:
        assert not self.changed
        assert self.now is State.FINISHING or self.durable == self.state, (
            "nothing changes before what counts is durable"
        )
        self.attempts += 1
        self.changed = True
        if self.now is State.FINISHING:
            self.begun = self.happens()
            self.draw(Event.COMPLETED)
            assert self.tell(Event.COMPLETED) == (Action.COMPLETE,)
            assert self.left is not None
            self.left, self.begun = None, False
            self.draw(Event.DURABLE)
            self._record()
            self.tell(Event.DURABLE)
        self.beside = self.attempts
        self.verdict = event = self.draw(Event.WITHIN, Event.NOT_FINITE, *[Event.OVER] * (self.now is State.RUNNING))
        self.in_place = event is Event.WITHIN and self.happens()
        self.whole = not self.in_place
        if self.in_place and self.happens():
            raise FailedError
        return event

    _repeat = _run

    def _drop(self) -> Event:
        assert not self.in_place
        assert not self.begun
        self.draw(Event.DROPPED)
        if self.beside is not None:
            self.dropped.add(self.beside)
        self.beside, self.changed = None, False
        return Event.DROPPED

    def _fill(self) -> Event:
        return self.draw(Event.FILLED)

    def _flip(self) -> Event:
        assert self.beside is not None
        assert self.verdict is Event.WITHIN
        self.draw(Event.FILLED)
        self.state.append(self.beside)
        self.beside, self.in_place, self.changed, self.whole = None, False, False, True
        return Event.FILLED

    def _count(self) -> Event:
        if self.verdict is Event.NOT_FINITE:
            self.draw(Event.COUNTED)
            self.state.append(-self.attempts)  # a step that is skipped counts, too
            return Event.COUNTED
        event = self.draw(Event.DELAYED, Event.COUNTED)
        if event is Event.DELAYED:
            self.left = self.state[-1]
        return event

    def _commit(self) -> Event:
        self.draw(Event.DURABLE)
        self._record()
        return Event.DURABLE

    def _flush(self) -> Event:
        assert self.left is not None
        self.begun = True
        self.draw(Event.COMPLETED)
        self.left, self.begun = None, False
        return Event.COMPLETED

    def _restore(self) -> Event:
        self.whole, self.in_place = False, True
        self.draw(Event.LOADED)
        self.attempts += 1
        self.state, self.durable, self.dropped = [self.attempts], [], set()
        self.whole, self.in_place, self.begun, self.changed, self.beside = True, False, False, False, None
        return Event.LOADED

    def _settle(self) -> Event:
        assert self.whole
        self.durable = list(self.state)
        return Event.DURABLE


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_happens_a_step_counts_whole_or_not_at_all(data: st.DataObject) -> None:
    """Nothing is committed that was dropped; what is pending is committed, or the run is broken; what is durable only
    grows, until a snapshot is loaded."""
    run = Run(data)
    for _ in range(data.draw(st.integers(6, 20))):
        pending, durable = run.left, list(run.durable)
        usable = run.now is not State.BROKEN
        event = data.draw(
            st.sampled_from([Event.BEGIN] * (usable * 3) + [Event.REST] + [Event.LOAD] * (run.left is None))
        )
        run.follow(event)
        assert run.now in (State.WHOLE, State.PENDING, State.BROKEN)
        if pending is not None and run.left != pending:
            assert run.now is State.BROKEN or pending in run.state
        if not usable and event is not Event.LOAD:
            assert (run.now, run.durable) == (State.BROKEN, durable)
    durable = list(run.durable)
    if data.draw(st.booleans()):
        run.follow(Event.END)
        assert run.durable == durable, "CLOSE commits"
        assert run.now in (State.WHOLE, State.BROKEN)
    run.close()
