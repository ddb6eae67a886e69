"""Ctrl-C, SIGTERM and SIGHUP: the first asks for an end after the step, a second one ends the process at once."""

import os
import signal
import stat
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SAME_HANGUP = 1.0
"""Seconds within which SIGHUP again is no second request: shell and kernel each send one when a terminal closes."""


class Interrupt:
    """While this context is active, ``requested`` tells the loop to stop after the step it is in.

    ``notice`` is called in the signal handler with a line for the user. On the second signal ``last_words`` is called
    and the process ends without unwinding: lanes in the middle of a transfer cannot be waited for. A SIGHUP that is
    ignored when this begins (``nohup``) stays so.
    """

    def __init__(self, notice: Callable[[str], None], last_words: Callable[[], None]) -> None:
        self._notice = notice
        self._last_words = last_words
        self._received: signal.Signals | None = None
        self._when = 0.0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def requested(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """The exit code that a shell expects of a program that this signal ended; 0 if none came."""
        return 0 if self._received is None else 128 + self._received

    def leave_lost_terminal(self) -> None:
        """After SIGHUP the terminal may be gone, and writing to it would fail: what is said from now on goes nowhere.

        Outputs that are files, pipes or a terminal that is still there stay as they are.
        """
        if self._received == signal.SIGHUP:
            for output in (1, 2):
                if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, output)
                    os.close(nowhere)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received, self._when = signal.Signals(number), time.monotonic()
            self.leave_lost_terminal()
            self._notice("Stopping after this step. A second time stops at once, in the middle of it.")
        elif not (number == self._received == signal.SIGHUP and time.monotonic() < self._when + _SAME_HANGUP):
            self.leave_lost_terminal()
            self._last_words()
            os._exit(128 + number)
