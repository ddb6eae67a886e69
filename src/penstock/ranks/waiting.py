"""Calls of torch that wait for all ranks, be they alive or not.

Nothing ends such a call. So another thread makes it, and who needs its result looks meanwhile, again and again, whether
there is still somebody to wait for.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

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
