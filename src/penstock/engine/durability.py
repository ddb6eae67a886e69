"""What the state is worth between steps: whole, waiting for a step's delayed chunks, or half updated.

before_step   the step is about to change the state: the store is told, where that matters
undo          drops what a step has written: it should have been another one
broken_off    an error has ended a step; from then on the state is whole, or ``broken`` says what it lacks
after_step    the step counts: commits it, leaves it pending, or begins to write it in the background
settle        called within the next step, when it has stepped what was pending
rest          nothing is pending and nothing is written any more: before arrays move, and before the end
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.engine.due import Due
from penstock.engine.interrupt import whole_steps
from penstock.engine.runner import Runner
from penstock.errors import StoreError
from penstock.runtime.context import StepContext
from penstock.state.background import Background
from penstock.state.buffers import Buffers
from penstock.state.commits import Home


@dataclass(kw_only=True)
class Pending:
    """A step whose delayed chunks the next one steps: what it knew, and what its commit will say."""

    context: StepContext
    progress: Mapping[str, Any]
    buffers: Mapping[str, torch.Tensor] | None = None
    """the model's, at the step's end; None: as they are now"""


class Standing:
    """Keeps the promise of ``Home`` from step to step. ``broken``: why the state cannot be used, if it cannot."""

    def __init__(
        self,
        home: Home,
        buffers: Buffers,
        progress: Callable[[], Mapping[str, Any]],
        *,
        waits: bool,
        due: Due | None,
    ) -> None:
        """``progress``: all that a run is besides its arrays. ``waits``: whether the numbers of a step need the norm.
        ``due``: when the next commit of what is in memory is, None: there are none.
        """
        self.broken: str | None = None
        self.pending: Pending | None = None
        self._home = home
        self._buffers = buffers
        self._progress = progress
        self._waits = waits
        self._due = due
        self._background: Background | None = None
        self._unwritten: StoreError | None = None

    def give_up(self, why: str) -> None:
        """The state is half updated: it cannot be used until ``mend``. What was pending is lost with it."""
        self.broken = why
        self.pending = None

    def mend(self) -> None:
        """All of the state has been replaced by a whole one."""
        self.broken = None

    def check_usable(self) -> None:
        """Raises:
        StoreError: the state is half updated.
        """
        if self.broken is not None:
            stands = self._home.always_whole or self._due is not None
            remedy = "wrap the model again: the store goes on from its last commit" if stands else "start over"
            raise StoreError(f"{self.broken}. The state is half updated: engine.load a snapshot, or {remedy}")

    # ---- a step

    def before_step(self) -> Mapping[str, torch.Tensor]:
        """The state is about to change; returns copies of the model's buffers.

        Raises:
            StoreError: what was written in the background has failed; the state is what it was without.
        """
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            raise unwritten
        if self._background is not None:
            self._background.check()
        buffers = self._buffers.copies()
        if self.pending is None:
            self.note(between_steps=False)
        else:
            self._home.note_pending()
            # on the host: its commit comes in the middle of the step, and should not wait for the device
            self.pending.buffers = {name: tensor.to("cpu") for name, tensor in buffers.items()}
        self._home.arrays.drop_step()
        return buffers

    def undo(
        self, context: StepContext, buffers: Mapping[str, torch.Tensor], *, early: bool
    ) -> Callable[[], None] | None:
        """What makes a step that is dropped undone; None where that cannot be done. ``early``: whether it changes
        anything before it knows the norm.
        """
        if not (self._waits or self._home.discardable):
            return None

        def undo() -> None:
            self._home.arrays.drop_step()
            self._buffers.put_back(buffers)
            if early and context.updating:
                self._home.arrays.recast(self._home.arrays.stale())

        return undo

    def broken_off(self, context: StepContext, buffers: Mapping[str, torch.Tensor], error: BaseException) -> None:
        """Find out what a step that an error has ended has left, and say so from now on if it cannot be used."""
        said = f"step {context.step} was broken off by {_named(error)}"
        if context.finishing and not context.complete:
            self.give_up(f"{said}; the step before was not complete")
            return
        if context.in_memory or (context.updating and not self._home.writes_beside):
            self.give_up(said)
            return
        self._home.arrays.drop_step()
        try:
            self._buffers.put_back(buffers)
            if context.updating:
                self._home.arrays.recast(self._home.arrays.stale())
        except BaseException as second:
            self.give_up(f"{said}; weights in memory could not be read back: {_named(second)}")
            if not isinstance(second, StoreError):
                raise
            return
        if self.pending is None:
            with contextlib.suppress(StoreError):  # then the store stays marked as within a step: nothing is lost
                self.note(between_steps=True)

    def after_step(self, context: StepContext, runner: Runner) -> None:
        """A step counts, and ``progress`` says so.

        Raises:
            StoreError: it could not be made durable.
        """
        if runner.late and not context.skip:
            context.previous = None
            self.pending = Pending(context=context, progress=self._progress())
        else:
            try:
                self.note(between_steps=True)
            except StoreError as error:
                self.give_up(f"step {context.step} was computed, but could not be made durable: {error}")
                raise
        if self._due is not None and self._due.after(context.step):
            self.flush(runner)
            try:
                self._write_in_background(runner.stepped)
            except StoreError as error:
                self._unwritten = error  # the step counts: this is for the next one to say

    def complete(self) -> None:
        """The step before is complete: its delayed chunks are stepped."""
        pending, self.pending = self.pending, None
        assert pending is not None
        self._home.complete(lambda: pending.progress, pending.buffers)

    def flush(self, runner: Runner | None) -> None:
        """Complete the step before, if it has left chunks to the next one. ``runner``: of that step."""
        if self.pending is None or self.broken is not None:
            return
        assert runner is not None
        context = replace(self.pending.context, previous=self.pending.context, complete=False, commit=self.complete)
        try:
            with whole_steps():
                runner.flush(context)
                self.note(between_steps=True)
        except BaseException as error:
            if self.pending is not None:
                self.give_up(f"step {context.step} could not be completed: {_named(error)}")
            raise

    # ---- the store

    def note(self, *, between_steps: bool) -> None:
        """Record in the store whether it is whole; never again once the state is broken."""
        if self.broken is None:
            self._home.note(self._progress, between_steps=between_steps)

    def replaced(self, runner: Runner | None) -> None:
        """All of the state has been replaced, and ``progress`` says by what.

        Raises:
            StoreError: it could not be made durable.
        """
        self.mend()
        try:
            self.note(between_steps=True)
            if self._due is not None:
                self._write_in_background(() if runner is None else runner.stepped)
                self.rest(runner)
        except StoreError as error:
            self.give_up(f"what was loaded could not be made durable: {error}")
            raise

    def _write_in_background(self, order: Sequence[int]) -> None:
        """Begin to write what is in memory; the commit of this step follows when it is written. ``order``: groups in
        the order in which the next step changes them.
        """
        arrays = self._home.arrays
        if self._background is None:
            self._background = arrays.background = Background(arrays)
        self._background.wait()
        self._home.write_buffers()
        progress = self._progress()

        def commit() -> None:
            self._home.commit_interval(progress)
            if self._due is not None:
                self._due.committed()

        if self._due is not None:
            self._due.began()
        self._background.begin(order, commit)
        if arrays.any_state_on_disk():
            self._background.wait()  # the next step writes over what is on disk, which this commit names

    def rest(self, runner: Runner | None) -> None:
        """Return when nothing is pending, and nothing is being written.

        Raises:
            StoreError: either has failed.
        """
        self.flush(runner)
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Bring what is in memory to the store; with a broken state the last commit is left to stand."""
        try:
            if self._background is not None:
                self._home.arrays.background = None
                self._background.close()
        finally:
            self._home.close(self._progress if self.broken is None else None)


def _named(error: BaseException) -> str:
    """An error's kind, and what it says if it says anything."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
