"""How long a test waits for what must come, before it says that it does not.

No property: what must be *soon* a test says itself, from the moment that the clock of its property starts at. This is
what ends a test that hangs, on a machine that may be ten times as slow as a quiet one.
"""

import time
from collections.abc import Callable

PATIENCE = 300.0
"""seconds"""


def until(happened: Callable[[], object], *, looking_every: float = 0.01) -> None:
    """Returns when it has happened, which no event tells of."""
    patient_until = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < patient_until, "it does not happen"
        time.sleep(looking_every)
