"""Finds out which of the ranks has failed, ended, or does not answer: each beats, and looks at the others.

What they say lies in the key-value store that ``torch.distributed`` was started with. A rank that is killed is missed
by its connections at once; which one it was is told by its process, if that was on this host, or by its beats.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed as dist

from penstock.errors import RankError

if TYPE_CHECKING:
    from penstock.compat.torch import Store

EVERY = 0.25
"""seconds from one beat, and one look at the others, to the next"""
SILENT = 8.0
"""seconds without a beat after which a rank counts as hung"""
_LAST = 1.0
"""seconds after which what a rank has sent before it ended has come"""
_UNNAMED = 3.0
"""seconds that it may take to find out whose connection was lost"""


@dataclass(frozen=True)
class Place:
    """The host and the process of a rank. Two hosts may have one name, and containers of one machine have processes of
    their own: those that can see each other's processes are of one ``boot`` of a machine and one ``processes``.
    """

    name: str
    """the name of the host, for people"""
    boot: str
    processes: str
    """the namespace of process ids"""
    process: int

    @staticmethod
    def here() -> "Place":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Place(socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"), os.getpid())

    @property
    def host(self) -> tuple[str, str]:
        """Equal for those who see each other's processes."""
        return self.boot, self.processes


class Watch:
    """A thread that beats for this rank. ``failure`` is what ended the others' work with it, once something has."""

    def __init__(self, store: "Store", rank: int, places: Sequence[Place]) -> None:
        """``store``: one that only these ranks use; all of them make a ``Watch`` at the same time. ``places``: of all,
        by rank."""
        self._store = store
        self._rank = rank
        self._places = places
        self._several_hosts = len({place.host for place in places}) > 1
        self._others = [other for other in range(len(places)) if other != rank]
        self._count = 0
        self._seen = dict.fromkeys(self._others, (b"", time.monotonic()))
        self._failure: RankError | None = None
        self._all_ended = False
        self._ended: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        """thread -> when it began to wait for what all ranks do together"""
        self._over = threading.Event()
        self._looked = threading.Condition()
        self._beat()
        self._thread = threading.Thread(target=self._work, name="penstock-watch", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> RankError | None:
        return self._failure

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Within, this rank waits for all others: none of them may have ended."""
        self._waits[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[threading.get_ident()]

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on, which ends their work with it."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._set(RankError(f"{self._named(self._rank)} has failed: {said}"), tell=not isinstance(error, RankError))

    def lost(self, error: BaseException) -> RankError:
        """The error for a lost connection, which names its rank as far as that can be found out in a few seconds."""
        until = time.monotonic() + _UNNAMED
        with self._looked:
            while self._failure is None and time.monotonic() < until and not self._over.is_set():
                self._looked.wait(EVERY)
        if self._failure is None:
            self._set(RankError(f"the connection to another rank was lost: {error}"), tell=False)
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """End this rank's part: those who still wait for it learn that. Returns when all others have ended, too, so
        that no connection is closed before everybody has read what was sent last.
        """
        if self._over.is_set():
            return
        try:
            self._store.set(f"ended/{self._rank}", "")
            with self._looked:
                while self._failure is None and not self._all_ended:
                    self._looked.wait(EVERY)
        except (RuntimeError, dist.DistError):  # whoever had the store has ended, too
            return
        finally:
            self._over.set()
            self._thread.join()

    def _set(self, failure: RankError, *, tell: bool) -> None:
        with self._looked:
            first, self._failure = self._failure is None, self._failure or failure
            self._looked.notify_all()
        if first and tell:
            try:
                self._store.compare_set("failed", "", str(failure))
            except (RuntimeError, dist.DistError):  # nobody is there to be told
                return

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self._rank}", str(self._count))

    def _work(self) -> None:
        while not self._over.wait(EVERY):
            try:
                self._beat()
                found = self._look()
            except (RuntimeError, dist.DistError) as error:
                found = None if self._over.is_set() else RankError(f"the ranks' common store is gone: {error}")
            if found is not None:
                self._set(found, tell=False)
                return
            with self._looked:
                self._looked.notify_all()

    def _look(self) -> RankError | None:
        if self._store.check(["failed"]):
            return RankError(self._store.get("failed").decode())
        now = time.monotonic()
        ended = [other for other in self._others if self._store.check([f"ended/{other}"])]
        self._all_ended = len(ended) == len(self._others)
        for other in self._others:
            if other in ended:
                self._ended.setdefault(other, now)
                if now - max(self._ended[other], min([*self._waits.values()], default=math.inf)) > _LAST:
                    return RankError(
                        f"{self._named(other)} has ended its run, and this one has not: give all the same steps"
                    )
                continue
            if self._is_gone(other):
                return RankError(f"{self._named(other)} was killed")
            begun, since = self._store.check([f"beat/{other}"]), self._seen[other][1]
            beat = self._store.get(f"beat/{other}") if begun else b""
            if beat != self._seen[other][0]:
                self._seen[other] = beat, now
            elif now - since > SILENT:
                return RankError(f"{self._named(other)} has not answered for {SILENT:.0f} s")
        return None

    def _named(self, rank: int) -> str:
        return f"rank {rank}" + (f" on host {self._places[rank].name}" if self._several_hosts else "")

    def _is_gone(self, other: int) -> bool:
        """True if another rank's process was on this host, and is no more."""
        place = self._places[other]
        if place.host != self._places[self._rank].host:
            return False
        try:
            state = Path(f"/proc/{place.process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return Path("/proc/self").exists()
        return state in "ZX"
