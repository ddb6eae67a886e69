"""Ctrl-C and calls of an engine: a step is finished before an interrupt takes effect; another call is broken off.

A second Ctrl-C breaks a step off, too. Either happens once in a call, and only where what is broken off can be taken
back (``holding``): neither what is known of the state nor its taking back is ever disturbed, however often it comes.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(kw_only=True)
class _Presses:
    """Presses of Ctrl-C during a call. ``times``: their number. The one after ``spared`` breaks the call off, by a
    KeyboardInterrupt (``broke``), at once, or after work that may not be broken off (``held``).
    """

    times: int = 0
    spared: int = 1
    held: bool = False
    broke: bool = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.take_effect()

    def take_effect(self) -> None:
        if self.times > self.spared and not self.held and not self.broke:
            self.broke = True
            raise KeyboardInterrupt


class _Now(threading.local):
    """Presses during the call under way. Only the main thread gets any."""

    def __init__(self) -> None:
        self.presses = _Presses()


_now = _Now()


@contextmanager
def whole_calls() -> Iterator[None]:
    """Ctrl-C during a call takes effect where that is not ``holding``, at its end otherwise, however it ends (its error
    is the interrupt's context then). Leaves a program's own handler alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    presses = _now.presses = _Presses(spared=0, held=True)
    try:
        signal.signal(signal.SIGINT, presses.receive)
        yield
    finally:
        _now.presses = _Presses()  # what came during this call is no later one's
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if presses.times:
            raise KeyboardInterrupt


@contextmanager
def whole_steps() -> Iterator[None]:
    """As ``whole_calls``, or within them: Ctrl-C during a step takes effect after it, and a second one where it may be
    broken off."""
    with whole_calls():
        presses, before = _now.presses, _now.presses.spared
        try:
            presses.spared = 1
            yield
        finally:
            presses.spared = before
        presses.take_effect()


@contextmanager
def holding(held: bool) -> Iterator[None]:
    """Within ``whole_calls``: what is done in here is done to its end, or (False) may be broken off."""
    presses, before = _now.presses, _now.presses.held
    try:
        presses.held = held
        presses.take_effect()
        yield
    finally:
        presses.held = before
    presses.take_effect()
