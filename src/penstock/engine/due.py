"""The time at which the next commit of state in memory is due."""

import time
from collections.abc import Callable

from penstock.config import Budget


class Due:
    """Commits every so many steps, or so often that a kill costs no more than a time.

    What a kill costs is the time since the step that the last commit names: at worst just before the next commit is
    complete, which begins after a step and is written while the next ones run. By the clock it therefore begins as soon
    as one step more, and the writing, would end too late. How long a step and the writing take is what they took last.
    """

    def __init__(
        self, *, steps: int | None, seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``steps``: from one commit to the next; else ``seconds``: that a kill may cost."""
        assert (steps is None) != (seconds is None)
        self._steps, self._seconds, self._clock = steps, seconds, clock
        self._begun = self._last = clock()
        self._writing = 0.0
        self._under_way = self._failed = False

    @staticmethod
    def of(budget: Budget) -> "Due | None":
        """The interval that a budget asks for; None: by its durability there are no such commits."""
        if budget.durability != "interval":
            return None
        return Due(steps=budget.interval_steps, seconds=budget.interval_seconds)

    def after(self, step: int) -> bool:
        """True if a commit is due after ``step``, which has just been done."""
        now = self._clock()
        took, self._last = now - self._last, now
        if self._failed:
            return True
        if self._seconds is None:
            assert self._steps is not None
            return step % self._steps == 0
        latest = self._begun + self._seconds
        if self._under_way and now < latest:  # beginning another one would wait for it
            return False
        return now + took + self._writing >= latest

    def began(self) -> None:
        """A commit is being written."""
        self._begun = self._last = self._clock()
        self._under_way, self._failed = True, False

    def committed(self) -> None:
        """The commit that was being written counts."""
        self._writing = self._clock() - self._begun
        self._under_way = False

    def failed(self) -> None:
        """The commit could not be written: the next is due after the next step, since a kill costs more and more."""
        self._under_way, self._failed = False, True
