"""Progress of a command that goes through many bytes: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli.showing.display import can_redraw
from penstock.config import format_size

_EVERY = 10.0  # seconds between lines


@contextmanager
def progress(done: str) -> Iterator[Callable[[int, int], None]]:
    """Yields what is told the bytes that are done, and how many there are. ``done``: what has been done to them, such
    as ``read``."""
    out, said = sys.stdout, time.monotonic()
    if can_redraw(out):
        from penstock.cli.showing.terminal import bar  # rich is only worth importing where it draws

        with bar(out) as show:
            yield show
        return

    def say(count: int, total: int) -> None:
        nonlocal said
        if time.monotonic() >= said + _EVERY:
            said = time.monotonic()
            print(f"{format_size(count)} of {format_size(total)} {done}", file=out, flush=True)

    yield say
