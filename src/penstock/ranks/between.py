"""Collectives between the engine's calls, by whatever else runs in the ranks' processes: a library's loop gathers
figures and waits at barriers by torch's own functions. While there are engines, such a wait ends where a rank is gone,
and an error that ends a process is told to those who wait for it.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

from torch import distributed as dist

from penstock.compat.torch import around_waits
from penstock.errors import RankError
from penstock.ranks.watch import Watch

T = TypeVar("T")

_SHORTEST, _LONGEST = 1e-4, 2e-3
"""seconds between two looks whether what is waited for is done: the first ones, and those of a long wait"""
_watches: list[Watch] = []
"""those of this process's engines"""
_given_up: dict[Any, str] = {}
"""torch's group of all processes -> why a collective of them, or of some, was given up"""


def check_none_given_up() -> None:
    """Raises:
    RankError: a collective was given up, for which others may still wait, who would take the next one for it.
    """
    if said := _given_up.get(dist.group.WORLD):
        raise RankError(f"these processes can do nothing together any more, and have to be started again: {said}")


def open_watch(watch: Watch) -> None:
    """From now on ``watch`` says whether there is still somebody to wait for."""
    _begin()
    _watches.append(watch)


def close_watch(watch: Watch) -> None:
    """From now on ``watch`` says nothing: its engine is closed."""
    if watch in _watches:
        _watches.remove(watch)


@cache
def _begin() -> None:
    """Once in a process."""
    around_waits(_watched)
    before, process = sys.excepthook, os.getpid()

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ends = os.getpid() == process and not hasattr(sys, "ps1")  # a forked child, or who types at a prompt, goes on
        for watch in _watches if ends else ():
            watch.tell(error)
        before(kind, error, trace)

    sys.excepthook = tell


def _watched(work: Any, wait: Callable[[timedelta], T], timeout: timedelta) -> T:
    """``wait`` for a collective, as long as there is somebody to wait for, and for ``timeout`` at most, if that is not
    0. An engine looks after its own waits.

    Raises:
        RankError: a rank has failed, has ended, or does not answer; or the connection to it was lost.
    """
    watches = list(_watches)
    if not watches or any(watch.is_waiting for watch in watches):
        return wait(timeout)
    try:
        future = work.get_future()
    except RuntimeError:  # a message from one rank to another has none
        with ExitStack() as elsewhere:
            for watch in watches:
                elsewhere.enter_context(watch.calls.elsewhere())
            return wait(timeout)
    if not _until_done(future, watches, timeout.total_seconds() or math.inf):
        return wait(timedelta(milliseconds=1))  # which ends it as torch does
    try:
        return wait(timeout)
    except RuntimeError as error:
        raise watches[-1].lost(error) from error


def _until_done(future: Any, watches: list[Watch], patience: float) -> bool:
    """False if it is not done within so many seconds.

    Raises:
        RankError: it never will be.
    """
    pause, until = _SHORTEST, time.monotonic() + patience
    with ExitStack() as waiting:
        for watch in watches:
            waiting.enter_context(watch.waits_elsewhere())
        while not future.done():  # no callback, which torch might make as the process ends, and then abort it
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            for watch in watches:
                if watch.failure is not None:
                    _given_up[dist.group.WORLD] = str(watch.failure)
                    raise RankError(str(watch.failure))
    return True
