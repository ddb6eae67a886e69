"""Repeats: the steps that are over the limit on the norm, and so are run again where they do not wait for it."""

from collections import deque

WINDOW = 50
"""steps after which it is looked at how many were over the limit of the norm"""
_OTHER = 0.1
"""a share of steps that differs by more than this from what was expected is worth another plan"""


class Repeats:
    """The share of steps that are run again if they speculate: as plans are made for it, and as it was of late."""

    def __init__(self, expected: float) -> None:
        self.planned = expected
        """the share that plans are made for"""
        self._over: deque[bool] = deque(maxlen=WINDOW)
        self._steps = 0

    @property
    def share(self) -> float:
        """The share of the last steps that were over the limit; before the first, what is expected."""
        return sum(self._over) / len(self._over) if self._over else self.planned

    def add(self, *, over: bool) -> bool:
        """Count a step, whose norm was ``over`` the limit or not. True: every so many steps, if the share of those that
        were is another one than plans are made for: speculating pays as long as few steps have to be run again."""
        self._over.append(over)
        self._steps += 1
        return self._steps % WINDOW == 0 and abs(self.share - self.planned) > _OTHER
