"""Calls of torch that wait for all ranks, be they alive or not."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK = 0.1
"""seconds after which who waits looks whether there is still somebody to wait for"""


def beside(call: Callable[[], T], look: Callable[[], None]) -> T:
    """The result of ``call``, or the error that it raises. It is made in a thread of its own, since nothing ends it;
    meanwhile ``look`` is called again and again, and an error of that is raised."""
    found: list[T] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failed.append(error)

    thread = threading.Thread(target=make, name="penstock-join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK)
        if thread.is_alive():
            look()
    if failed:
        raise failed[0]
    return found[0]
