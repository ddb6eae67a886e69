"""Calls of engines that all ranks make: finds ranks that wait for each other in different ones, for ever, while all of
them beat; and who has not come to a call yet.

Each rank says with its beat how many calls of an engine it has begun, whether it is in one, and whether it waits
elsewhere: in a collective of other code, outside of all calls. Two things are certain, if they last:

- Calls of a process take turns. So a rank that is in a call which another one has not come to, while that one is in a
  call of another engine which this one has not come to, waits in vain.
- Where each rank of the world is either in a call, or waits elsewhere without having come to that call, nobody is left
  who could come to anything.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The state of the calls of one engine on a rank, as the rank says it."""

    begun: int = 0
    inside: bool = False
    elsewhere: int = 0
    """the number of the wait elsewhere that it is in; 0: it is in none"""

    def __str__(self) -> str:
        return f"{self.begun} {int(self.inside)} {self.elsewhere}"

    @classmethod
    def of(cls, text: str) -> "Seen":
        begun, inside, elsewhere = map(int, text.split())
        return cls(begun=begun, inside=bool(inside), elsewhere=elsewhere)


class Calls:
    """The calls of one engine that all its ranks make, as far as they have begun on each."""

    def __init__(self, rank: int, members: Sequence[int], *, world: int) -> None:
        """``members``: their numbers in torch's group, by rank, of ``world`` processes."""
        self._rank, self._members, self._are_world = rank, members, len(members) == world
        self._begun, self._depth, self._waits, self._elsewhere = 0, 0, 0, 0
        self._since = time.monotonic()
        self._thread = threading.get_ident()
        self._within: dict[int, float] = {}
        """thread -> since when it waits in a collective of other code within a call, as of a loss function"""
        self.name = _NONE
        """the call that this rank is in, for people"""
        self._seen: dict[int, tuple[Seen, float]] = {}
        """rank -> what it has said last, and since when"""

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Within: a call that all ranks make, or a part of one."""
        if not self._depth:
            self._begun, self._since, self.name = self._begun + 1, time.monotonic(), name
            self._thread = threading.get_ident()
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
        thread = threading.get_ident()
        if self._depth:
            self._within[thread] = time.monotonic()
            try:
                yield
            finally:
                del self._within[thread]
            return
        if thread != self._thread:  # who makes the calls can make them meanwhile
            yield
            return
        self._waits += 1
        self._elsewhere = self._waits
        try:
            yield
        finally:
            self._elsewhere = 0

    def open(self) -> None:
        """From now on there is this engine, too."""
        _open.append(self)

    def close(self) -> None:
        if self in _open:
            _open.remove(self)

    @property
    def own(self) -> Seen:
        """The state that this rank tells the others."""
        return Seen(begun=self._begun, inside=self._depth > 0, elsewhere=self._elsewhere)

    def hear(self, other: int, seen: Seen) -> None:
        """Note what another rank says."""
        if other not in self._seen or self._seen[other][0] != seen:
            self._seen[other] = seen, time.monotonic()

    def move_on(self, seconds: float) -> None:
        """Leave out of all times that this process was stopped for so long."""
        self._since += seconds
        self._seen = {other: (seen, since + seconds) for other, (seen, since) in self._seen.items()}

    def crossed(self, longer_than: float) -> int | None:
        """The rank that this one waits for in vain, as it waits in a call of another engine, for so many seconds
        already; None: there is none."""
        until = time.monotonic() - longer_than
        if not self._depth or self._since > until:
            return None
        others = [calls for calls in list(_open) if calls is not self]
        for rank in self.missing():
            if any(calls._waits_for_us(self._members[rank], until) for calls in others):
                return rank
        return None

    def stuck(self, longer_than: float) -> list[int]:
        """The ranks that this one, and who else is in its call, wait for in vain, as all of those wait elsewhere, for
        so many seconds already."""
        until = time.monotonic() - longer_than
        if not (self._depth and self._are_world and self._since < until and len(self._seen) == len(self._members) - 1):
            return []
        missing = self.missing()
        for rank, (seen, since) in self._seen.items():
            if since > until or not (seen.elsewhere if rank in missing else seen.inside):
                return []
        return missing

    def missing(self) -> list[int]:
        """The ranks that have not come to the call that this one is in."""
        return [rank for rank, (seen, _) in sorted(self._seen.items()) if self._depth and seen.begun < self._begun]

    @property
    def waits_within(self) -> float:
        """Seconds since which this rank, in a call, waits in a collective of other code; 0: it does not."""
        since = [*self._within.values()] if self._depth else []
        return time.monotonic() - min(since) if since else 0.0

    @property
    def lasts(self) -> float:
        """Seconds since this rank's last call has begun."""
        return time.monotonic() - self._since

    def _waits_for_us(self, number: int, until: float) -> bool:
        """True if a rank, by its number in torch's group, is in a call that this process has not come to."""
        if number not in self._members:
            return False
        seen, since = self._seen.get(self._members.index(number), (Seen(), 0.0))
        return seen.inside and seen.begun > self._begun and since < until


_NONE = "no call"
_open: list[Calls] = []
"""those of this process's engines"""
