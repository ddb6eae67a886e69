"""Causes of waits, in simulations and in runs, with the text that traces, predictions and reports have of them."""

import re
from typing import NamedTuple

_POOL = re.compile(r"pool (\S+)(?: \(given by (\S+)\))?")
_OTHER_RANK = re.compile(r"([0-9]{1,9}):(\S+)")


class Cause(NamedTuple):
    """The op that a lane stood idle for. ``rank``: of that op, -1 if it is the same one's; ``pool``: the pool whose
    buffer it gave back, empty if it was not for a buffer. Only a text from a file may have a pool and no op.

    Its text is ``F3m0``, ``1:AR0`` or ``pool in (given by UW0.0@F0)``.
    """

    op: str
    rank: int = -1
    pool: str = ""

    def __str__(self) -> str:
        name = f"{self.op}" if self.rank < 0 else f"{self.rank}:{self.op}"
        if not self.pool:
            return name
        return f"pool {self.pool} (given by {name})" if name else f"pool {self.pool}"


def parse_cause(text: str) -> Cause | None:
    """The inverse of ``str``; None of no text. Text in no known form stands for an op."""
    if match := _POOL.fullmatch(text):
        giver = parse_cause(match[2] or "") or Cause("")
        return giver._replace(pool=match[1])
    if match := _OTHER_RANK.fullmatch(text):
        return Cause(match[2], int(match[1]))
    return Cause(text) if text else None
