"""Engines that nothing refers to any more, and that nobody has closed: their threads, memory and stores are given back.

Python may find in the middle of anything, in any thread, that an engine is gone. So what is to be done then is only put
into a queue (``SimpleQueue.put`` may be called there), and a thread does it: it ends the engine as a kill would. What
the last commit of its store names stands, and nothing is brought there. An engine that its own parts lead to (a loss
function that is a method of what has the engine) is never gone, and its store stays in use.
"""

import contextlib
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from penstock.engine.durability import Durability
from penstock.engine.planning import Planning
from penstock.engine.resources import EngineResources

log = logging.getLogger("penstock")


class _Dropped:
    """The ends of engines that are gone, one after another, in a thread of its own."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.watched: set[weakref.finalize[..., object]] = set()
        """one for each engine that is not closed"""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it is there."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="penstock-dropped", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            self.waiting.get()()


_dropped = _Dropped()


def _start_anew() -> None:
    """In a forked child, which has neither the thread nor the engines."""
    global _dropped
    _dropped = _Dropped()


os.register_at_fork(after_in_child=_start_anew)


def watch(engine: object, planning: Planning, durable: Durability, resources: EngineResources) -> Callable[[], object]:
    """Have an engine's parts, none of which refers to it, given back once nothing refers to it any more. Returns a
    function that forgets about it: it is closed.

    Of several ranks nothing is given back: what ends one of them ends all, and that is nobody's to decide here.
    """
    if resources.ranks.size > 1:
        return lambda: None
    dropped, process = _dropped, os.getpid()
    dropped.start()

    def gone() -> None:
        if os.getpid() == process:
            dropped.waiting.put(lambda: _end(planning, durable, resources))

    final = weakref.finalize(engine, gone)
    final.atexit = False  # a process that ends gives all of it back
    dropped.watched.add(final)

    def forget() -> None:
        final.detach()
        dropped.watched.discard(final)

    return forget


def settle() -> None:
    """Return when no engine that is gone has anything open: what is to be opened may be what it had."""
    dropped = _dropped
    if not dropped.watched:
        return
    gc.collect()  # an engine in a cycle, as of an error's traceback, is there until somebody looks for such
    watched = list(dropped.watched)  # at once: other threads make engines, and close some
    gone = [final for final in watched if not final.alive]
    done = threading.Event()
    dropped.waiting.put(done.set)
    done.wait()
    dropped.watched.difference_update(gone)  # not before: another thread would not wait for them


def _end(planning: Planning, durable: Durability, resources: EngineResources) -> None:
    """End an engine's parts as a kill would. An error is one of the log's, as there is nobody to raise it to."""
    try:
        with contextlib.ExitStack() as all_of_it, resources.streams.around_caller():  # last in, first out
            all_of_it.callback(durable.abandon)
            all_of_it.callback(resources.close)
            all_of_it.callback(planning.abandon)
    except Exception as error:  # noqa: BLE001 - whatever it is, the thread goes on
        log.warning("an engine that was dropped without close() could not be given back: %s", error)
