"""Python's search for cycles of objects, put off while a schedule is made or simulated."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """A schedule is up to millions of small objects without a cycle, all of which live on: to look for one among them
    again and again, and among all that the process has besides, takes longer than what is done here.

    The process has one such switch. It is left as it was found, whatever other threads have done to it meanwhile.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
