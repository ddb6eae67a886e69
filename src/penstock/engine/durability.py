"""Durability of a run: which step a kill goes on from, and whether the state in memory can be used.

``Durability`` drives the machine of ``fate``: it holds the state, tells what has happened, and does what is done to the
store. What a step itself does is ``attempt``'s.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from penstock.engine.due import Due
from penstock.engine.fate import Action, Event, State, transition
from penstock.engine.interrupt import holding, whole_steps
from penstock.engine.progress import Progress
from penstock.engine.runner import Runner
from penstock.errors import ConfigError, NonFiniteError, RankError, StoreError
from penstock.runtime.context import StepContext, Update
from penstock.state.background import Background
from penstock.state.commits import Commits
from penstock.store.packed import store_error

log = logging.getLogger("penstock")

Actions = Mapping[Action, Callable[[], Event]]
"""By action, the function that carries it out: it returns the event that came of it."""


@dataclass(kw_only=True)
class Pending:
    """A step whose delayed chunks the next one steps."""

    step: int
    update: Update
    buffers: Mapping[str, torch.Tensor]
    """the model's, at the step's end, on the host: its commit should not wait for the device"""


_NOT_COMPLETE = "{what} was broken off by {error}; the step before was not complete"
_REASONS: Mapping[State, str] = {
    State.FINISHING: _NOT_COMPLETE,
    State.COMPLETING: _NOT_COMPLETE,
    State.COUNTING: "{what} was broken off by {error} while it was counted",
    State.DROPPING: "{what} was broken off, and what it had changed could not be taken back: {error}",
    State.RETREATING: "{what} was broken off, and what it had changed could not be taken back: {error}",
    **dict.fromkeys((State.FLUSHING, State.ENDING), "{what} could not be completed: {error}"),
}

_LATER = "the next step's commit has it at the latest, and engine.save can be used"
_AGAIN = "Ask for it again: it commits first what is not committed by then"
"""Advice for programs after a commit that failed."""

_LONG = frozenset((Action.RUN, Action.REPEAT, Action.FLUSH, Action.FILL, Action.RESTORE, Action.COMMIT))
"""Actions that a second Ctrl-C may break off: of each it is known what the state is worth then."""


class Durability:
    """Keeps the promise of ``Commits`` from step to step."""

    def __init__(self, commits: Commits, progress: Progress, due: Due | None) -> None:
        """``due``: when the next commit of what is in memory is; None: there are none."""
        self.state = State.WHOLE
        self.pending: Pending | None = None
        self._why = ""
        self._commits = commits
        self._progress = progress
        self._due = due
        self.background: Background | None = None
        """the writer of snapshots of state in memory; None: there is none yet"""
        self._unwritten: Exception | None = None

    def check_open(self) -> None:
        """Raises:
        ConfigError: the engine is closed.
        """
        if self.state is State.CLOSED:
            raise ConfigError("this engine is closed: build the model anew, and wrap that")

    def check_usable(self) -> None:
        """Raises:
        ConfigError: the engine is closed.
        StoreError: the state is half updated.
        """
        self.check_open()
        if self.state is State.BROKEN:
            stands = self._commits.every_step or self._due is not None
            remedy = "wrap the model again: the store goes on from its last commit" if stands else "start over"
            raise StoreError(f"{self._why}. The state is half updated: engine.load a snapshot, or {remedy}")

    def check_written(self) -> None:
        """Raises:
        Exception: what the write in the background has failed with, mostly a StoreError; the state is what it was
            without, and the next write begins after the next step.
        """
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            raise unwritten
        if self.background is not None:
            with self._due_again_if_it_fails():
                self.background.check()

    # ---- the machine

    def tell(self, event: Event) -> tuple[Action, ...]:
        """Take note of an event: the state changes by it. Returns the actions that have to follow."""
        self.state, actions = transition(self.state, event)
        return actions

    def follow(self, event: Event, do: Actions, what: str) -> None:
        """Tell what has happened, do what is to be done then, tell what came of it, until there is nothing more to do.

        ``what``: is under way, for what is said of it.

        Raises:
            BaseException: what an action has failed with, once the state is what it is worth then.
        """
        raised: BaseException | None = None
        with whole_steps(), holding(True):
            actions = self.tell(event)
            while actions:
                try:
                    for action in actions:
                        with holding(action not in _LONG):
                            event = do[action]()
                    actions = self.tell(event)
                except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised below
                    if not isinstance(error, NonFiniteError):  # which all ranks have found
                        self._commits.ranks.fail(error)  # now: nobody is to commit what this one has not
                    reason = _REASONS.get(self.state, "{what} was broken off by {error}")
                    raised = error if raised is None or not isinstance(error, StoreError | RankError) else raised
                    actions = self.tell(Event.FAILED if self._commits.arrays.droppable else Event.FAILED_IN_PLACE)
                    if self.state is State.BROKEN:
                        self._why, self.pending = reason.format(what=what, error=_named(error)), None
            if raised is not None:
                try:
                    raise raised
                finally:
                    del raised  # its traceback holds this frame, which would hold it and the micro-batches

    def mark(self, not_done: str) -> Event:
        """The state is about to change. ``not_done``: what does not follow where what counts cannot be committed."""
        self._commits.arrays.begin_step()
        commits = self._committing(f"{not_done}: {self._counts}", _AGAIN)
        with commits if self._commits.every_step else nullcontext():  # elsewhere it only says that a step begins
            self._commits.mark(self._progress.record())
        return Event.MARKED

    def mark_pending(self) -> Event:
        self._commits.arrays.begin_step()
        self._commits.mark_pending()
        return Event.MARKED

    def complete(self) -> None:
        """Within a step: the one before is complete, its delayed chunks are stepped and at home."""
        with holding(True):
            asked = self.tell(Event.COMPLETED)
            assert asked == (Action.COMPLETE,)
            assert self.pending is not None
            self._commits.arrays.complete_late()
            pending, self.pending = self.pending, None
            not_taken = f"step {self._progress.step + 1} was not taken: {self._counts}"
            with self._committing(not_taken, _AGAIN):
                self._commits.complete(self._progress.record(), pending.buffers)
            self.tell(Event.DURABLE)

    def hold(self, step: int, update: Update, buffers: Mapping[str, torch.Tensor]) -> None:
        """A step counts, and has left chunks to the next one."""
        held = {name: tensor.to("cpu", copy=True) for name, tensor in buffers.items()}
        self.pending = Pending(step=step, update=update, buffers=held)

    def commit(self) -> Event:
        """Commit the step that has just run."""
        return self._commit(self._counts, f"Do not repeat it: {_LATER}")

    def _commit(self, fact: str, advice: str) -> Event:
        with self._committing(fact, advice):
            self._commits.commit(self._progress.record())
        return Event.DURABLE

    @property
    def _counts(self) -> str:
        return f"step {self._progress.step} counts"

    @contextmanager
    def _committing(self, fact: str, advice: str) -> Iterator[None]:
        """A commit that fails, of whatever, says what is the case all the same. ``advice``: for programs, as a note."""
        try:
            yield
        except RankError:  # which step counts is known when all open their stores again
            raise
        except Exception as error:
            said = f"{fact}, but its commit failed: {error if isinstance(error, StoreError) else _named(error)}"
            raised = store_error(said, error) if isinstance(error, OSError) else StoreError(said)
            raised.add_note(advice)
            raise raised from error

    def commit_loaded(self, runner: Runner | None, path: str) -> Event:
        """All of the state has been replaced by the snapshot at ``path``. ``runner``: that is there, if one is."""
        self._commit(f"{path} is loaded", _LATER[0].upper() + _LATER[1:])
        if self._due is not None:
            self._write_in_background(() if runner is None else runner.bound.stepped)
            self._wait_written()
        return Event.DURABLE

    def rest(self, runner: Runner | None, *, closes: bool = False) -> None:
        """Return when nothing is pending, and nothing is being written. ``runner``: of the last step; ``closes``: what
        is not committed yet is left to ``close``, which follows.

        Raises:
            StoreError: either has failed.
        """
        self._flush(runner, Event.END if closes else Event.REST)
        self._wait_written()

    def rest_of_all(self, runner: Runner | None) -> None:
        """``rest``, where all ranks can: where another one has failed, what is committed stands, and nothing is
        done."""
        if self._commits.ranks.failure is None:
            self.rest(runner)

    def _flush(self, runner: Runner | None, why: Event = Event.REST) -> None:
        """Complete the step before, if it has left chunks to the next one. ``why``: the event that asks for it."""
        step = 0 if self.pending is None else self.pending.step

        def flush() -> Event:
            assert runner is not None
            assert self.pending is not None
            left = self.pending.update
            self._commits.arrays.begin_step()
            runner.flush(StepContext(step=step, update=left, left=left))
            self._commits.arrays.complete_late()
            self.pending = None
            return Event.COMPLETED

        def commit() -> Event:
            return self._commit(self._counts, f"Nothing else was done. {_AGAIN}")

        self.follow(why, {Action.FLUSH: flush, Action.COMMIT: commit}, f"step {step}")

    # ---- state in memory

    def after_step(self, step: int, runner: Runner) -> None:
        """A step counts: begin to write what is in memory, if that is due.

        Raises:
            StoreError: it could not be completed.
        """
        due, ranks = self._due, self._commits.ranks
        if due is not None and ranks.once("commit that is due", lambda: due.after(step)):
            with holding(True):
                self._flush(runner)
                try:
                    self._write_in_background(runner.bound.stepped)
                except Exception as error:
                    if ranks.size > 1:  # the others are waiting for this rank's part, and not for its next step
                        raise
                    self._unwritten = error  # the step counts, whatever it is: the next one says so

    @contextmanager
    def _due_again_if_it_fails(self) -> Iterator[None]:
        assert self._due is not None
        try:
            yield
        except BaseException:
            self._due.failed()
            raise

    def _write_in_background(self, order: Sequence[int]) -> None:
        """Begin to write what is in memory; the commit of this step follows when it is written. ``order``: groups in
        the order in which the next step changes them.
        """
        due, arrays, record = self._due, self._commits.arrays, self._progress.record()
        assert due is not None

        def commit() -> None:
            self._commits.commit_beside(record)
            due.committed()

        with self._due_again_if_it_fails():
            if self.background is None:
                self.background = arrays.background = Background(arrays)
            self.background.wait()
            self._commits.write_buffers()
            due.began()
            self.background.begin(order, commit)
            if arrays.any_state_on_disk():
                self.background.wait()  # the next step writes over what is on disk, which this commit names

    def _wait_written(self) -> None:
        if self.background is not None:
            with self._due_again_if_it_fails():
                self.background.wait()

    def close(self) -> None:
        """Bring what is in memory to the store; with a broken state the last commit is left to stand. May be called
        again where an error has broken it off: what is open then is closed."""
        try:
            self._stop_writing()
        finally:
            try:
                if self.state is not State.CLOSED and Action.SETTLE in self.tell(Event.CLOSE):
                    with whole_steps(), holding(False):
                        self._commits.settle(self._progress.record())
            finally:
                self._commits.close()

    def abandon(self) -> None:
        """End as a kill does: nothing is brought to the store, whose last commit stands."""
        if self._commits.store is not None and (self.pending is not None or not self._commits.every_step):
            log.warning(
                "an engine was dropped without close(): its store goes on from the last commit, which may be of a step "
                "before step %d (engine.close(), or with penstock.wrap(...) as engine)",
                self._progress.step,
            )
        try:
            self._stop_writing()
        finally:
            self._commits.close()

    def _stop_writing(self) -> None:
        if self.background is not None:
            self._commits.arrays.background = None
            self.background.close()


def _named(error: BaseException) -> str:
    """An error's kind, and what it says if it says anything."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
