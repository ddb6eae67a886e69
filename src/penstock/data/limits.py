"""Limits on the time and memory that rendering one chat takes: a template is a program, and may be somebody else's.

Jinja's sandbox keeps a template from files and from Python's inside, but not from looping, or from growing a text,
without end. A thread watches the one that renders, and ends it. Beside an engine, whose memory is the process's too, it
looks at the clock alone, and what has been rendered is bounded by its length.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

from penstock.errors import ConfigError

SECONDS = 20.0
"""A chat renders in milliseconds."""

GROWTH = 2 << 30
"""Bytes that the process may grow by meanwhile; other threads count, too."""

LONGEST = 1 << 27
"""Characters of a rendered chat, or its tokens; of a file a line has a quarter as many bytes at most."""

_LOOKS = 0.05
_LONGEST_TEMPLATE = 1 << 20


class _EndlessError(BaseException):
    """Raised in the thread that renders; no handler in between takes it for its own."""


def check_template(template: object) -> None:
    """Raises:
    ConfigError: a chat template is no text, or is larger than any that is one.
    """
    each = template.values() if isinstance(template, dict) else (template,)
    for text in each:
        if not isinstance(text, str) or len(text) > _LONGEST_TEMPLATE:
            raise ConfigError(f"the tokenizer's chat template must be text of at most {_LONGEST_TEMPLATE:,} characters")


@contextmanager
def limited(place: Callable[[], str], *, alone: bool) -> Iterator[None]:
    """Inside, work ends when a chat takes more than ``SECONDS``, or all more than ``GROWTH``. ``place``: of the chat.
    ``alone``: no engine works beside; else memory is not looked at.

    Raises:
        ConfigError: it was ended.
    """
    watch = _Watch(threading.get_ident(), place, alone=alone)
    thread = threading.Thread(target=watch.run, name="penstock chat template", daemon=True)
    thread.start()
    try:
        try:
            yield
        except _EndlessError:
            watch.arrived = True
            raise
        finally:
            watch.stop()
            thread.join()
    except _EndlessError:
        raise _endless(place(), watch.reason) from None


def check_length(found: Sized, place: str) -> None:
    """Raises:
    ConfigError: what a template has written of a chat is longer than any that is one.
    """
    if len(found) > LONGEST:
        raise _endless(place, f"it writes more than {LONGEST:,} characters")


def _endless(place: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{place}: the chat template does not come to an end on this chat: {reason}. Give another (data.chat_template)"
    )


class _Watch:
    """Looks after one chat after the other. What it raises reaches the other thread before ``stop`` returns."""

    def __init__(self, watched: int, place: Callable[[], str], *, alone: bool) -> None:
        self._place, self._alone = place, alone
        self._watched = ctypes.c_ulong(watched)
        self._done = threading.Event()
        self._lock = threading.Lock()
        self.reason = ""
        self.arrived = False

    def run(self) -> None:
        place, began, before = self._place(), time.monotonic(), _resident()
        while not self._done.wait(_LOOKS):
            if place != (place := self._place()):
                began = time.monotonic()
            if time.monotonic() - began > SECONDS:
                self._end(f"it takes more than {SECONDS:g} seconds")
                return
            if self._alone and _resident() - before > GROWTH:
                self._end(f"it takes more than {GROWTH >> 30} GiB of memory")
                return

    def _end(self, reason: str) -> None:
        with self._lock:
            if not self._done.is_set():
                self.reason = reason
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._watched, ctypes.py_object(_EndlessError))

    def stop(self) -> None:
        with self._lock:
            self._done.set()
        while self.reason and not self.arrived:  # it has been asked to end, and is so in one of these steps
            time.sleep(0.001)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
