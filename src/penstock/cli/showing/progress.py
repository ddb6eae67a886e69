"""Progress of a command that goes through many bytes: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from penstock.cli.showing.display import can_redraw
from penstock.config import format_size

_EVERY = 10.0  # seconds between lines


class Bar(Protocol):
    def show(self, done: int, total: int) -> None: ...


class _Lines:
    """A line now and then, for logs and pipes."""

    def __init__(self, out: TextIO, done: str) -> None:
        self._out = out
        self._word = done
        self._next: float | None = None

    def show(self, done: int, total: int) -> None:
        if self._next is None:
            self._next = time.monotonic() + _EVERY
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            print(f"{format_size(done)} of {format_size(total)} {self._word}", file=self._out, flush=True)


@contextmanager
def progress(done: str) -> Iterator[Bar]:
    """``done``: what has been done to the bytes, such as ``read``."""
    if not can_redraw(sys.stdout):
        yield _Lines(sys.stdout, done)
        return
    from penstock.cli.showing.terminal import reading  # rich is only worth importing where it draws

    with reading(sys.stdout) as bar:
        yield bar
