"""Ctrl-C and SIGTERM: the first asks for an end after the step, a second one ends the process at once."""

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Interrupt:
    """While this context is active, ``requested`` tells the loop to stop after the step it is in.

    ``notice`` is called in the signal handler with a line for the user. On the second signal ``last_words`` is called
    and the process ends without unwinding: lanes in the middle of a transfer cannot be waited for.
    """

    def __init__(self, notice: Callable[[str], None], last_words: Callable[[], None]) -> None:
        self._notice = notice
        self._last_words = last_words
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def requested(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended; 0 if none came."""
        return 0 if self._received is None else 128 + self._received

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            self._last_words()
            os._exit(128 + number)
        self._received = signal.Signals(number)
        self._notice("Stopping after this step. Once more stops at once, in the middle of it.")
