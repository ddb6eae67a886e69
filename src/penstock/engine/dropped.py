"""Engines that nothing refers to any more, and that nobody has closed: their threads, memory and stores are given back.

The next ``wrap`` ends them, as a kill would: what the last commit of their stores names stands, and nothing is brought
there. Until then they keep what they have. An engine that its own parts lead to (a loss function that is a method of
what has the engine) is never gone, and its store stays in use.
"""

import contextlib
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from penstock.engine.durability import Durability
from penstock.engine.interrupt import whole_calls
from penstock.engine.planning import Planning
from penstock.engine.resources import EngineResources

log = logging.getLogger("penstock")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Watched:
    """An engine that is not closed, the process that has it, and its parts, none of which refers to it."""

    engine: weakref.ref[object]
    process: int
    planning: Planning
    durable: Durability
    resources: EngineResources

    def end(self) -> None:
        """End the parts as a kill would. An error is one of the log's: it is none of who makes another engine."""
        try:
            with contextlib.ExitStack() as all_of_it, self.resources.streams.around_caller():  # last in, first out
                all_of_it.callback(self.durable.abandon)
                all_of_it.callback(self.resources.close)
                all_of_it.callback(self.planning.abandon)
        except Exception as error:  # noqa: BLE001 - whatever it is
            log.warning("an engine that was dropped without close() could not be given back: %s", error)


_watched: set[_Watched] = set()
_ending = threading.RLock()
# A forked child is not to find it held by a thread that it has not.
os.register_at_fork(before=_ending.acquire, after_in_parent=_ending.release, after_in_child=_ending.release)


def watch(engine: object, planning: Planning, durable: Durability, resources: EngineResources) -> Callable[[], object]:
    """Have an engine's parts given back by a ``settle`` once nothing refers to it any more. Returns a function that
    forgets about it: it is closed.

    Of several ranks nothing is given back: what ends one of them ends all, and that is nobody's to decide here.
    """
    if resources.ranks.size > 1:
        return lambda: None
    ref, process = weakref.ref(engine), os.getpid()
    one = _Watched(engine=ref, process=process, planning=planning, durable=durable, resources=resources)
    _watched.add(one)
    return partial(_watched.discard, one)


def settle() -> None:
    """End the engines that are gone: what is to be opened may be what they had. None of them, nor one that another
    thread ends, has anything open when it returns."""
    with _ending, whole_calls():
        if _watched:
            gc.collect()  # an engine in a cycle, as of an error's traceback, is there until somebody looks for such
        for one in list(_watched):  # at once: other threads make engines, and close some
            if one.engine() is None and one.process == os.getpid():  # a forked child's parent ends its own
                _watched.discard(one)
                one.end()
