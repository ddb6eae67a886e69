"""Ctrl-C and steps: a step is finished before an interrupt takes effect.

A second Ctrl-C breaks it off, once, and only where what is broken off can be taken back (``holding``): neither
what is known of the state nor its taking back is ever disturbed, however often it comes. Evaluations, which change
nothing, are broken off by the first in the same way.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(kw_only=True)
class _Asked:
    """Presses of Ctrl-C during a step. ``times``: their number. The one after ``borne`` breaks the step off, by a
    KeyboardInterrupt (``broke``), at once, or after work that may not be broken off (``held``).
    """

    borne: int = 1
    times: int = 0
    held: bool = False
    broke: bool = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.take_effect()

    def take_effect(self) -> None:
        if self.times > self.borne and not self.held and not self.broke:
            self.broke = True
            raise KeyboardInterrupt


_asked = _Asked()
"""Interrupts of the step under way."""


@contextmanager
def whole_steps(borne: int = 1) -> Iterator[None]:
    """Ctrl-C during a step takes effect after it, however it ends (its error is the interrupt's context then); the one
    after so many at once. Leaves a program's own handler alone.
    """
    global _asked
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked = _asked = _Asked(borne=borne)
    signal.signal(signal.SIGINT, asked.receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _asked = _Asked()  # what came during this step is no later one's
        if asked.times:
            raise KeyboardInterrupt


@contextmanager
def holding(held: bool) -> Iterator[None]:
    """Within ``whole_steps``: what is done in here is done to its end, or (False) may be broken off."""
    asked, before = _asked, _asked.held
    try:
        asked.held = held
        asked.take_effect()
        yield
    finally:
        asked.held = before
    asked.take_effect()
