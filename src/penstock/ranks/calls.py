"""Calls of several engines on the same ranks: finds ranks that make them in different orders. Each then waits for the
other in another call, for ever, and all of them beat.

Calls of a process take turns. So a rank that is in a call which another one has not come to, while that one is in a
call of another engine which this one has not come to, waits in vain. Each says how many calls it has begun, once there
are two engines.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.compat.torch import Store


class Calls:
    """The calls of one engine that all its ranks make, as far as they have begun on each."""

    def __init__(self, store: "Store", rank: int, members: Sequence[int]) -> None:
        """``store``: one that only these ranks use. ``members``: their numbers in torch's group, by rank."""
        self._store, self._rank, self._members = store, rank, members
        self._begun, self._depth, self._since = 0, 0, time.monotonic()
        self._told = ""
        self._seen: dict[int, tuple[int, bool, float]] = {}
        """rank -> calls that it has begun, True if it is in one, and since when that is known"""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Within: a call that all ranks make, or a part of one."""
        if not self._depth:
            self._begun, self._since = self._begun + 1, time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def open(self) -> None:
        """From now on there is this engine, too."""
        _open.append(self)

    def close(self) -> None:
        if self in _open:
            _open.remove(self)

    def exchange(self) -> None:
        """Tell the others of this rank's calls, and look at theirs; nothing where there is no other engine."""
        if len(_open) < 2:
            return
        now, said = time.monotonic(), f"{self._begun} {int(self._depth > 0)}"
        if said != self._told:
            self._store.set(f"calls/{self._rank}", said)
            self._told = said
        for other in range(len(self._members)):
            key = f"calls/{other}"
            if other == self._rank or not self._store.check([key]):
                continue
            begun, inside = map(int, self._store.get(key).decode().split())
            if self._seen.get(other, (0, False, 0.0))[:2] != (begun, bool(inside)):
                self._seen[other] = begun, bool(inside), now

    def crossed(self, longer_than: float) -> int | None:
        """The rank that this one waits for in vain, for so many seconds already; None: there is none."""
        now = time.monotonic()
        if not self._depth or now - self._since < longer_than:
            return None
        others = [calls for calls in list(_open) if calls is not self]
        for rank, (begun, _, _) in list(self._seen.items()):
            number = self._members[rank]
            if begun < self._begun and any(calls._waits_for_us(number, now - longer_than) for calls in others):
                return rank
        return None

    def _waits_for_us(self, number: int, until: float) -> bool:
        """True if a rank, by its number in torch's group, is in a call that this process has not come to."""
        if number not in self._members:
            return False
        begun, inside, since = self._seen.get(self._members.index(number), (0, False, 0.0))
        return inside and begun > self._begun and since < until


_open: list[Calls] = []
"""those of this process's engines"""
