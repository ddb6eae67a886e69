"""The fate of a step: one machine, whose table decides which step counts and what is done about it.

It is pure: no tensor, no file, and nothing that only one process knows. Whoever drives it tells what has happened (an
``Event``), does what it answers (``Action``), and tells how the last of that went. What a step has changed is a fact
that the driver reads off what was written (``StateArrays.droppable``), and tells as one of two events: ``FAILED``, all
that it changed can be dropped, or ``FAILED_IN_PLACE``, some of it cannot. ``docs/design.md`` draws the table.

An error of an action comes first; the machine says what becomes of the state, and then the error is raised.
"""

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    """Worth of a run's state: whether it is one step's state, and of which step."""

    WHOLE = "whole"
    """between steps: the state is that of the last step that counts; if that is not committed, as its commit has failed
    or it ended, the next MARK commits, or SETTLE"""
    PENDING = "pending"
    """between steps: the last step counts, and its delayed chunks are left to the next one"""
    FINISHING = "finishing"
    """a step runs, and steps what the one before has left"""
    COMPLETING = "completing"
    """a step runs that has changed nothing yet, and the one before, of which nothing is left, is committed"""
    RUNNING = "running"
    """a step runs for the first time; the one before is complete"""
    REPEATING = "repeating"
    """a step runs again, with the factor known that clips its gradients"""
    SKIPPING = "skipping"
    """the changes of a step whose norm is infinite or NaN are taken back, and it counts without them"""
    FILLING = "filling"
    """a step has run with the right numbers; what it did not write of the arrays that it wrote is copied beside"""
    COUNTING = "counting"
    """a step counts from here on: what it wrote is read, and the run is one step further"""
    COMMITTING = "committing"
    """the step that counts is made durable"""
    DROPPING = "dropping"
    """the changes of a step that was broken off are taken back"""
    RETREATING = "retreating"
    """the changes of a step that was broken off are taken back, and the step before is still pending"""
    FLUSHING = "flushing"
    """between steps, what the last one has left is stepped by itself"""
    ENDING = "ending"
    """before the run is closed, what the last step has left is stepped by itself; SETTLE is to commit it"""
    LOADING = "loading"
    """all of the state is replaced by a snapshot's"""
    BROKEN = "broken"
    """half updated: nothing is written any more, until a snapshot is loaded; the last commit stands"""
    CLOSED = "closed"


class Event(Enum):
    """An event of a run, after which its state may be worth something else."""

    BEGIN = "begin"
    """a step is asked for"""
    REST = "rest"
    """nothing may be pending from here on"""
    END = "end"
    """nothing may be pending from here on, and CLOSE follows, which commits"""
    LOAD = "load"
    CLOSE = "close"
    MARKED = "marked"
    """changes of the state may begin"""
    COMPLETED = "completed"
    """the delayed chunks of the step before are stepped and at home"""
    WITHIN = "within"
    """the step has run, and its numbers are right: its norm is within the limit, or was known before its use"""
    OVER = "over"
    """the step has run, and the gradients that it used should have been clipped"""
    NOT_FINITE = "not finite"
    """the step has run, its norm is infinite or NaN, and all its changes can be dropped: such a step is skipped"""
    FILLED = "filled"
    COUNTED = "counted"
    DELAYED = "delayed"
    """counted, with chunks that are left to the next step"""
    DURABLE = "durable"
    DROPPED = "dropped"
    LOADED = "loaded"
    FAILED = "failed"
    """an error; all that was changed since the state was last whole (or pending) can be dropped"""
    FAILED_IN_PLACE = "failed in place"
    """an error; some of what was changed has no other copy"""


class Action(Enum):
    """An action that an event asks for."""

    MARK = "mark"
    """tell the store that the state is about to change"""
    MARK_PENDING = "mark pending"
    """tell it that a step is about to change the state, while the one before is not complete"""
    RUN = "run"
    COMPLETE = "complete"
    """commit the step before, within the step that has stepped what it left"""
    DROP = "drop"
    """take back all that the step has changed"""
    REPEAT = "repeat"
    FILL = "fill"
    FLIP = "flip"
    """read what the step has written"""
    COUNT = "count"
    COMMIT = "commit"
    FLUSH = "flush"
    RESTORE = "restore"
    SETTLE = "settle"
    """bring what is in memory to the store, and commit it"""


Next = tuple[State, tuple[Action, ...]]

_LOST: Mapping[Event, Next] = {
    Event.FAILED: (State.BROKEN, ()),
    Event.FAILED_IN_PLACE: (State.BROKEN, ()),
}
_TAKEN_BACK: Mapping[Event, Next] = {
    Event.FAILED: (State.DROPPING, (Action.DROP,)),
    Event.FAILED_IN_PLACE: (State.BROKEN, ()),
}
_COUNTS: Mapping[Event, Next] = {
    Event.FAILED: (State.WHOLE, ()),  # what was not committed is by the next MARK
    Event.FAILED_IN_PLACE: (State.WHOLE, ()),  # by the last step, which counts
}

TABLE: Mapping[State, Mapping[Event, Next]] = {
    State.WHOLE: {
        Event.BEGIN: (State.RUNNING, (Action.MARK, Action.RUN)),
        Event.REST: (State.WHOLE, ()),
        Event.END: (State.WHOLE, ()),
        Event.LOAD: (State.WHOLE, (Action.MARK,)),
        Event.MARKED: (State.LOADING, (Action.RESTORE,)),
        Event.CLOSE: (State.CLOSED, (Action.SETTLE,)),
        Event.DURABLE: (State.WHOLE, ()),
        **_COUNTS,
    },
    State.PENDING: {
        Event.BEGIN: (State.FINISHING, (Action.MARK_PENDING, Action.RUN)),
        Event.REST: (State.FLUSHING, (Action.FLUSH,)),
        Event.END: (State.ENDING, (Action.FLUSH,)),
        Event.CLOSE: (State.CLOSED, ()),
    },
    State.FINISHING: {
        Event.COMPLETED: (State.COMPLETING, (Action.COMPLETE,)),
        Event.FAILED: (State.RETREATING, (Action.DROP,)),
        Event.FAILED_IN_PLACE: (State.BROKEN, ()),
    },
    State.COMPLETING: {Event.DURABLE: (State.RUNNING, ()), **_TAKEN_BACK},
    State.RUNNING: {
        Event.WITHIN: (State.FILLING, (Action.FILL,)),
        Event.OVER: (State.REPEATING, (Action.DROP, Action.REPEAT)),
        Event.NOT_FINITE: (State.SKIPPING, (Action.DROP,)),
        **_TAKEN_BACK,
    },
    State.REPEATING: {
        Event.WITHIN: (State.FILLING, (Action.FILL,)),
        Event.NOT_FINITE: (State.SKIPPING, (Action.DROP,)),
        **_TAKEN_BACK,
    },
    State.SKIPPING: {Event.DROPPED: (State.COUNTING, (Action.COUNT,)), **_TAKEN_BACK},
    State.FILLING: {Event.FILLED: (State.COUNTING, (Action.FLIP, Action.COUNT)), **_TAKEN_BACK},
    State.COUNTING: {
        Event.COUNTED: (State.COMMITTING, (Action.COMMIT,)),
        Event.DELAYED: (State.PENDING, ()),
        **_LOST,
    },
    State.COMMITTING: {Event.DURABLE: (State.WHOLE, ()), **_COUNTS},
    State.DROPPING: {Event.DROPPED: (State.WHOLE, (Action.COMMIT,)), **_LOST},
    State.RETREATING: {Event.DROPPED: (State.PENDING, ()), **_LOST},
    State.FLUSHING: {Event.COMPLETED: (State.WHOLE, (Action.COMMIT,)), **_LOST},
    State.ENDING: {Event.COMPLETED: (State.WHOLE, ()), **_LOST},
    State.LOADING: {Event.LOADED: (State.COMMITTING, (Action.COMMIT,)), **_LOST},
    State.BROKEN: {
        Event.REST: (State.BROKEN, ()),
        Event.END: (State.BROKEN, ()),
        Event.LOAD: (State.LOADING, (Action.RESTORE,)),
        Event.CLOSE: (State.CLOSED, ()),
    },
    State.CLOSED: {},
}


def transition(state: State, event: Event) -> Next:
    """The state after an event, and what is to be done then, in order. The event of the last action comes next.

    An event that a state does not have is a mistake of whoever drives the machine.
    """
    assert event in TABLE[state], f"{event.value} while {state.value}"
    return TABLE[state][event]
