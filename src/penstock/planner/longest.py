"""The longest sequence that a budget has room for."""

from dataclasses import dataclass, replace

from penstock.errors import ConfigError
from penstock.planner.proposals import Proposals
from penstock.planner.task import Task

SHORTEST = 2
"""Tokens of the shortest sequence that is tried: one of them has a next one."""
_FIRST = 256
_MOST = 1 << 24
"""Tokens of the longest sequence that is tried."""


@dataclass(frozen=True, kw_only=True)
class Longest:
    """A sequence of so many tokens fits, and one of one more does not, or is more than is tried. ``all``: because the
    model does not take that many, whatever the memory."""

    tokens: int
    all: bool


def longest(task: Task) -> Longest | None:
    """The longest sequences that fit, in steps of one micro-batch of one sequence; None: not even ``SHORTEST`` tokens
    do.

    More micro-batches take more of what holds saved activations, which may be the disk.
    """
    refused: set[int] = set()

    def fit(tokens: int) -> bool:
        longer = replace(task, sequence_length=tokens, profiles={})
        try:
            longer.profile(1)
        except ConfigError:  # more positions than the model has
            refused.add(tokens)
            return False
        return Proposals(longer.question(1, 1)).fits()

    most, beyond, end = SHORTEST - 1, _FIRST, _MOST + 1
    while beyond < end and fit(beyond):
        most, beyond = beyond, min(2 * beyond, end)
    while beyond - most > 1:
        middle = (most + beyond) // 2
        most, beyond = (middle, beyond) if fit(middle) else (most, middle)
    return Longest(tokens=most, all=beyond in refused) if most >= SHORTEST else None
