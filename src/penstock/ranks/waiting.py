"""Calls of torch that wait for all ranks, be they alive or not.

Nothing ends most such calls. So another thread makes one (``Beside``), and who needs its result looks meanwhile, again
and again, whether there is still somebody to wait for. A wait for messages of gloo ends when they are given up: who
waits does so itself, which costs no hand-over, and another thread looks (``GivingUp``).
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

from penstock.ranks.watch import Watch

T = TypeVar("T")

LOOK = 0.1
"""seconds after which who waits looks whether there is still somebody to wait for"""


class Beside:
    """A thread that makes one call after the other for one that waits for each."""

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self._made = queue.SimpleQueue[None]()
        self._thread = threading.Thread(
            target=_make, args=(self._calls, self._made), name="penstock-beside", daemon=True
        )
        self._thread.start()
        self._left = False
        """True: a call is left to itself, and may never return"""

    def make(self, call: Callable[[], T], look: Callable[[], None]) -> T:
        """The result of ``call``, or the error that it raises. Meanwhile ``look`` is called again and again; an error
        of that is raised, and the call goes on: nothing else can be made here any more."""
        found: list[T] = []
        failed: list[BaseException] = []

        def noted() -> None:
            try:
                found.append(call())
            except BaseException as error:  # noqa: BLE001 - it is raised below
                failed.append(error)

        self._calls.put(noted)
        self._left = True
        while True:
            try:
                self._made.get(timeout=LOOK)
            except queue.Empty:
                look()
            else:
                break
        self._left = False
        if failed:
            raise failed[0]
        return found[0]

    def close(self) -> None:
        """End the thread; one whose call is left to itself ends when that has returned."""
        self._calls.put(None)
        if not self._left:
            self._thread.join()

    def await_end(self, until: float) -> None:
        """Wait for the end of the thread, which is ``close``d; its call may never return. ``until``: an instant by
        ``time.monotonic``."""
        self._thread.join(max(0.0, until - time.monotonic()))


def _make(calls: "queue.SimpleQueue[Callable[[], None] | None]", made: "queue.SimpleQueue[None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it has what it has found
        made.put(None)


def beside(call: Callable[[], T], look: Callable[[], None]) -> T:
    """As ``Beside.make``, in a thread for this call alone."""
    thread = Beside()
    try:
        return thread.make(call, look)
    finally:
        thread.close()


class GivingUp:
    """A thread that gives up the messages that others wait for once there is nobody to wait for any more."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._waited_for: dict[int, Sequence[Sequence[Any]]] = {}
        """thread -> works of gloo that it waits for"""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="penstock-giving-up", daemon=True)
        self._thread.start()

    @contextmanager
    def while_waiting_for(self, works: Sequence[Sequence[Any]]) -> Iterator[None]:
        """``works``: more may come, and those that are done may go, within."""
        self._waited_for[threading.get_ident()] = works
        try:
            yield
        finally:
            del self._waited_for[threading.get_ident()]

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(LOOK):
            if self._waited_for and self._watch.failure is not None:
                for works in [*self._waited_for.values()]:
                    give_up(works)


def give_up(works: Sequence[Sequence[Any]]) -> None:
    """Have messages of gloo fail, and with each all others of its process group, in whatever threads they are waited
    for: gloo closes the connections of a group of which a message takes longer than it may. A thread that still waited
    as the process ends would abort it."""
    for work in chain.from_iterable([*works]):
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))
