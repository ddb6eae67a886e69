"""Ctrl-C, SIGTERM and SIGHUP: the first asks for an end after the step, a second one ends the process at once."""

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SAME_HANGUP = 1.0
"""Seconds within which two signals are one request if either is SIGHUP. When a terminal closes, shell and kernel each
send one; of these ``torchrun`` passes on the first, and at the second ends its processes with SIGTERM; and systemd
sends SIGHUP right after SIGTERM where it is told to (``SendSIGHUP``)."""

_HEARD = 1.0
"""Seconds that the main thread waits at most for a signal to be heard, which takes a millisecond."""


class Interrupt:
    """While this context is active, ``requested`` tells the loop to stop after the step it is in.

    Signals are heard by a thread of its own, to which their numbers are written as they arrive: Python would call a
    handler in the main thread alone, when that runs Python again, and it may be about to wait for lanes, for another
    rank or for an op, where nothing tells it of a signal that came just before. Where it does run Python, it waits
    until the signal has been heard: ``requested`` is true before its next line.

    ``notice`` is called in that thread with a line for the user, and may wait for nothing that the main thread holds.
    On the second signal ``last_words`` is called and the process ends without unwinding: lanes in the middle of a
    transfer cannot be waited for. A SIGHUP that is ignored when this begins (``nohup``) stays so. A process that is
    forked meanwhile has the handlers from before.
    """

    def __init__(self, notice: Callable[[str], None], last_words: Callable[[], None]) -> None:
        self._notice = notice
        self._last_words = last_words
        self._received: signal.Signals | None = None
        self._when = 0.0
        self._hung_up = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._told_before, self._process = -1, os.getpid()
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._heard: SimpleQueue[None] = SimpleQueue()  # which a handler may wait at within another one's wait
        self._listener = threading.Thread(target=self._listen, name="penstock-signals", daemon=True)

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
        for output in (1, 2) if self._hung_up else ():
            with suppress(OSError):  # it is closed
                if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, output)
                    os.close(nowhere)

    def __enter__(self) -> Self:
        global _active
        self._listener.start()
        self._told_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        _active = self
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._wait_until_heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.leave_lost_terminal()
        self.hand_back()
        if os.getpid() == self._process:  # and not one that was forked meanwhile
            self._mouth.shutdown(socket.SHUT_WR)  # by which the listener ends, whatever copies of it others have
            self._listener.join(_HEARD)
        self._mouth.close()
        self._ears.close()

    def hand_back(self) -> None:
        """Have the handlers from before again."""
        global _active
        _active = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        signal.set_wakeup_fd(self._told_before)

    def _wait_until_heard(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, where Python calls this once at most for each number that is written."""
        with suppress(Empty):
            self._heard.get(timeout=_HEARD)

    def _listen(self) -> None:
        while numbers := self._ears.recv(1):
            if numbers[0] in _SIGNALS:
                self._receive(numbers[0])
                self._heard.put(None)

    def _receive(self, number: int) -> None:
        self._hung_up |= number == signal.SIGHUP
        self.leave_lost_terminal()
        if self._received is None:
            self._received, self._when = signal.Signals(number), time.monotonic()
            with suppress(Exception):  # what cannot be said ends nothing
                self._notice("Stopping after this step. A second time stops at once, in the middle of it.")
        elif signal.SIGHUP not in (number, self._received) or time.monotonic() > self._when + _SAME_HANGUP:
            with suppress(Exception):
                self._last_words()
            os._exit(128 + number)


_active: Interrupt | None = None


class _Forking(threading.local):
    """A fork of this thread. A signal to the new process waits until that one has the handlers from before: with those
    of its parent it would be heard there.
    """

    blocked: set[int] | None = None

    def begin(self) -> None:
        if _active is not None:
            self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def end(self) -> None:
        if self.blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
            self.blocked = None

    def end_in_child(self) -> None:
        if _active is not None:
            _active.hand_back()
        self.end()


_forking = _Forking()
os.register_at_fork(before=_forking.begin, after_in_parent=_forking.end, after_in_child=_forking.end_in_child)
