"""Calls of an engine that all ranks make: finds out who has not come to one yet. Each rank says with its beat how many
it has begun."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Calls:
    """The calls of one engine that all its ranks make, as far as they have begun on each."""

    def __init__(self) -> None:
        self.begun, self._depth = 0, 0
        self._since = time.monotonic()
        self._within: dict[int, float] = {}
        """thread -> since when it waits in a collective of other code within a call, as of a loss function"""
        self.name = _NONE
        """the call that this rank is in, for people"""
        self._seen: dict[int, int] = {}
        """rank -> how many it has begun, as it has said last"""

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Within: a call that all ranks make, or a part of one."""
        if not self._depth:
            self.begun, self._since, self.name = self.begun + 1, time.monotonic(), name
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.name = _NONE

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Within: this thread waits for other processes in a collective of other code."""
        if not self._depth:
            yield
            return
        thread = threading.get_ident()
        self._within[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._within[thread]

    def hear(self, other: int, begun: int) -> None:
        """Note how many another rank has begun, as it says."""
        self._seen[other] = begun

    def move_on(self, seconds: float) -> None:
        """Leave out of all times that this process was stopped for so long."""
        self._since += seconds

    def missing(self) -> list[int]:
        """The ranks that have not come to the call that this one is in."""
        return [rank for rank, begun in sorted(self._seen.items()) if self._depth and begun < self.begun]

    @property
    def waits_within(self) -> float:
        """Seconds since which this rank, in a call, waits in a collective of other code; 0: it does not."""
        since = [*self._within.values()] if self._depth else []
        return time.monotonic() - min(since) if since else 0.0

    @property
    def lasts(self) -> float:
        """Seconds since this rank's last call has begun."""
        return time.monotonic() - self._since


_NONE = "no call"
