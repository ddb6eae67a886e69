"""The longest sequence that a budget has room for."""

from dataclasses import dataclass, replace

from penstock.errors import ConfigError
from penstock.planner.search import fits
from penstock.planner.task import Task

UNIT = 256
"""Tokens that sequences are tried in multiples of."""
_MOST = 1 << 24
"""Tokens of the longest sequence that is tried."""


@dataclass(frozen=True, kw_only=True)
class Longest:
    """A sequence of so many tokens fits, and one of ``UNIT`` more does not, or is more than is tried. ``all``: because
    the model does not take that many, whatever the memory."""

    tokens: int
    all: bool


def longest(task: Task) -> Longest | None:
    """The longest sequences that fit, in steps of one micro-batch of one sequence; None: not even
    ``UNIT`` tokens do, or the model takes fewer.

    More micro-batches take more of what holds saved activations, which may be the disk.
    """
    refused: set[int] = set()

    def fit(units: int) -> bool:
        longer = replace(task, sequence_length=units * UNIT, profiles={})
        try:
            longer.profile(1)
        except ConfigError:  # more positions than the model has
            refused.add(units)
            return False
        return fits(longer.question(1, 1))

    most, beyond, end = 0, 1, _MOST // UNIT + 1
    while beyond < end and fit(beyond):
        most, beyond = beyond, min(2 * beyond, end)
    while beyond - most > 1:
        middle = (most + beyond) // 2
        most, beyond = (middle, beyond) if fit(middle) else (most, middle)
    return Longest(tokens=most * UNIT, all=beyond in refused) if most else None
