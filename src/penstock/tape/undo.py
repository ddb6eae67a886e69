"""Temporary changes of a model, of its parameters and of torch, each with the function that takes it back.

A clean-up may be broken off itself: by Ctrl-C, or for want of memory. What it has left is then taken back with what is
around it, or before the next call does anything.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from penstock.compat.torch import functions_as_now


class Undo:
    """The functions that take back what is changed now, in the order of the changes."""

    def __init__(self) -> None:
        self._left: list[Callable[[], object]] = []

    @contextmanager
    def after(self, take_back: Callable[[], object]) -> Iterator[None]:
        """Within, something is changed. ``take_back`` follows; it may come before all of that was changed, and again.

        Raises:
            BaseException: what it raises; it is then called once more by whoever changed something before, or ``all``.
        """
        before, see_functions = len(self._left), functions_as_now()
        try:
            self._left.append(take_back)
            yield
        finally:
            see_functions()
            self._back_to(before)

    def all(self) -> None:
        """Take back what is left of calls that have ended."""
        self._back_to(0)

    def _back_to(self, before: int) -> None:
        with ExitStack() as each:  # last in, first out; each whatever the others raise
            for take_back in self._left[before:]:
                each.callback(self._take_back, take_back)

    def _take_back(self, take_back: Callable[[], object]) -> None:
        take_back()
        self._left.remove(take_back)
