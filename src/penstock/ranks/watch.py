"""Finds out which of the ranks has failed, ended, or does not answer: each beats, and looks at the others.

What they say lies in the key-value store that ``torch.distributed`` was started with. A rank that is killed is missed
by its connections at once; which one it was is told by its process, if that was on this host, or by its beats. A host
that is cut off is missed by nobody's connections for a quarter of an hour: on the others its ranks' beats are missing,
and on itself all of that store, which it waits for no longer than it would for a beat.
"""

import atexit
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed as dist

from penstock.errors import ConfigError, RankError
from penstock.ranks.calls import Calls

if TYPE_CHECKING:
    from penstock.compat.torch import Store

log = logging.getLogger("penstock")

EVERY = 0.25
"""seconds from one beat, and one look at the others, to the next"""
_AT_THE_END = 0.02
"""seconds from one look to the next while this rank waits for the others to end"""
SILENT = 8.0
"""seconds without a beat after which a rank counts as hung"""
LONG = 30.0
"""seconds after which it is said what is waited for; again after twice as many, and so on"""
_DEAF = 8.0
"""seconds without an answer of the store after which this rank counts as cut off"""
_LAST = 1.0
"""seconds after which what a rank has sent before it ended has come"""
_UNNAMED = 3.0
"""seconds that it may take to find out whose connection was lost"""
_watching: set["Watch"] = set()
"""those whose threads have not been ended"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The host and the process of a rank. Two hosts may have one name, and containers of one machine have processes of
    their own: those that can see each other's processes are of one ``boot`` of a machine and one ``processes``.
    Of these ``torchrun`` may have started several as if they were hosts (network namespaces, say): they have memory and
    drives of their own.
    """

    name: str
    """the name of the host, for people"""
    boot: str
    processes: str
    """the namespace of process ids"""
    process: int
    node: int = 0
    """the number that ``torchrun`` has given to the host"""

    @staticmethod
    def here() -> "Place":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        node = int(os.environ.get("GROUP_RANK", 0))
        return Place(
            name=socket.gethostname(),
            boot=boot,
            processes=os.readlink("/proc/self/ns/pid"),
            process=os.getpid(),
            node=node,
        )

    @property
    def host(self) -> tuple[str, str, int]:
        """Equal for those who are on one host."""
        return self.boot, self.processes, self.node

    def sees(self, other: "Place") -> bool:
        """True if another's process is among those that are seen from here."""
        return (self.boot, self.processes) == (other.boot, other.processes)


def host_count(places: Sequence[Place]) -> int:
    """The number of hosts that ranks are on.

    Raises:
        ConfigError: they are not in the order of their hosts, or not as many on each.
    """
    hosts = list(dict.fromkeys(place.host for place in places))
    each, rest = divmod(len(places), len(hosts))
    if rest or any(place.host != hosts[rank // each] for rank, place in enumerate(places)):
        found = ", ".join(f"rank {rank}: {place.name}" for rank, place in enumerate(places))
        raise ConfigError(
            f"{len(places)} ranks on {len(hosts)} hosts ({found}): start as many on each, numbered host by host, as "
            "torchrun with the same --nproc-per-node on all of them does"
        )
    return len(hosts)


class Watch:
    """A thread that beats for this rank. ``failure`` is what ended the others' work with it, once something has."""

    def __init__(self, store: "Store", rank: int, places: Sequence[Place], calls: Calls) -> None:
        """``store``: one that only these ranks use; all of them make a ``Watch`` at the same time. ``places``: of all,
        by rank; ``calls``: those that they make together."""
        self._store = store
        self._rank = rank
        self.calls = calls
        self._places = places
        self._several_hosts = len({place.host for place in places}) > 1
        self._store_is_at = os.environ.get("MASTER_ADDR", "localhost")
        self._others = [other for other in range(len(places)) if other != rank]
        self._count = 0
        self._seen = dict.fromkeys(self._others, (b"", time.monotonic()))
        self._answered = self._looks = time.monotonic()
        """time of the last answer of the store, and of the last look at the others"""
        self._asked: float | None = None
        """time since when it is asked; None: it is not"""
        self._cut_off = False
        """True: the store does not answer, and may never"""
        self._failure: RankError | None = None
        self._all_ended = False
        self._ended: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        """thread -> when it began to wait for what all ranks do together"""
        self._said: tuple[int, float] = 0, 0.0
        """the call of which it was said last that ranks are missing, and how long it had lasted"""
        self._said_within = 0.0
        """seconds that a wait in a collective of other code had lasted when it was said last"""
        self._over = threading.Event()
        self._ends = False
        self._next = threading.Event()
        """set: it looks at once"""
        self._looked = threading.Condition()
        self._beat()
        self._thread = threading.Thread(target=self._work, name="penstock-watch", daemon=True)
        self._thread.start()
        _watching.add(self)

    @property
    def failure(self) -> RankError | None:
        asked = self._asked
        late = asked is not None and time.monotonic() - asked > _DEAF and self._failure is None
        if late and not self._over.is_set() and self._still_waits(asked) and self._failure is None:
            said = f"{self._where_the_store_is()} has not answered for {_DEAF:.0f} s"
            self._cut_off = True
            self._set(RankError(said), tell=False)
        return self._failure

    def _still_waits(self, asked: float | None) -> bool:
        """True if the store does not answer what it was asked then, as it does at once where all were stopped."""
        with self._looked:
            return not self._looked.wait_for(lambda: self._asked != asked, _LAST)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Within, this rank waits for all others: none of them may have ended."""
        self._waits[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[threading.get_ident()]

    @contextmanager
    def waits_elsewhere(self) -> Iterator[None]:
        """Within, this rank waits for others in a collective of other code."""
        with self.calls.elsewhere(), self.waits():
            yield

    @property
    def is_waiting(self) -> bool:
        """True if this thread waits for all others."""
        return threading.get_ident() in self._waits

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on, which ends their work with it."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._set(RankError(f"{self._named(self._rank)} has failed: {said}"), tell=not isinstance(error, RankError))

    def lost(self, error: BaseException) -> RankError:
        """The error for a lost connection, which names its rank as far as that can be found out in a few seconds."""
        until = time.monotonic() + _UNNAMED
        with self._looked:
            while self.failure is None and time.monotonic() < until and not self._over.is_set():
                self._looked.wait(EVERY)
        if self._failure is None:
            silent = [other for other, (_, since) in self._seen.items() if self._answered - since > _UNNAMED / 2]
            who = self._named(silent[0]) if silent else "another rank"
            self._set(RankError(f"the connection to {who} was lost: {error}"), tell=False)
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """End this rank's part: those who still wait for it learn that. Returns when all others have ended, too, so
        that no connection is closed before everybody has read what was sent last.
        """
        if self._over.is_set():
            return
        try:
            told = not self._cut_off and self._in_time(lambda: self._store.set(f"ended/{self._rank}", ""))
            self._ends = True
            self._next.set()
            with self._looked:
                while told and self.failure is None and not self._all_ended:
                    self._looked.wait(EVERY)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the thread, which tells nobody."""
        self._over.set()
        self._next.set()
        self._thread.join(0 if self._cut_off else _UNNAMED)
        _watching.discard(self)

    def _set(self, failure: RankError, *, tell: bool) -> None:
        with self._looked:
            first, self._failure = self._failure is None, self._failure or failure
            self._looked.notify_all()
        if first and tell:
            self._in_time(lambda: self._store.compare_set("failed", "", str(failure)))

    def _in_time(self, say: Callable[[], object]) -> bool:
        """Tell the store something; False: whoever has it has ended, or does not answer."""
        said: list[None] = []

        def try_to() -> None:
            with suppress(RuntimeError, dist.DistError):
                say()
                said.append(None)

        thread = threading.Thread(target=try_to, name="penstock-tell", daemon=True)
        thread.start()
        thread.join(_UNNAMED)
        return bool(said)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self._rank}", f"{self._count} {self.calls.begun}")

    def _work(self) -> None:
        while True:
            self._next.wait(_AT_THE_END if self._ends else EVERY)
            if self._over.is_set():
                return
            self._next.clear()
            self._asked = time.monotonic()
            try:
                self._beat()
                found = self._look()
            except (RuntimeError, dist.DistError) as error:
                found = None if self._over.is_set() else RankError(f"{self._where_the_store_is()} is gone: {error}")
            if found is not None:
                self._set(found, tell=False)
                return
            self._say_who_is_missing()
            self._say_what_others_may_not_wait_for()
            self._asked, self._answered = None, time.monotonic()
            with self._looked:
                self._looked.notify_all()

    def _begin_to_look(self, now: float) -> None:
        """Move all beats on if this look is late: nobody counts as silent while all were stopped."""
        seconds, self._looks = now - self._looks - 4 * EVERY, now
        if seconds > 0:
            self._seen = {other: (beat, since + seconds) for other, (beat, since) in self._seen.items()}
            self.calls.move_on(seconds)

    def _look(self) -> RankError | None:
        if self._store.check(["failed"]):
            return RankError(self._store.get("failed").decode())
        now = time.monotonic()
        self._begin_to_look(now)
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
                self.calls.hear(other, int(beat.split()[1]))
            elif now - since > SILENT:
                return RankError(f"{self._named(other)} has not answered for {SILENT:.0f} s")
        return None

    def _say_who_is_missing(self) -> None:
        """A rank may well compute for long before it comes to a call; or it never does."""
        call, lasts, missing = self.calls.begun, self.calls.lasts, self.calls.missing()
        told = self._said[1] if self._said[0] == call else 0.0
        if missing and self._waits and lasts > max(LONG, 2 * told):
            self._said = call, lasts
            log.warning(
                "%s has waited in %s for %.0f s, and goes on waiting, for %s: all ranks make every call of an engine "
                "(steps, saves, close), those of several engines in the same order, and none within `if rank == 0`",
                self._named(self._rank),
                self.calls.name,
                lasts,
                self._all_named(missing),
            )

    def _say_what_others_may_not_wait_for(self) -> None:
        """Other ranks may be about to come to the same collective, or wait for this one in the engine's, for ever."""
        lasts = self.calls.waits_within
        self._said_within = self._said_within if lasts else 0.0
        if lasts > max(LONG, 2 * self._said_within):
            self._said_within = lasts
            log.warning(
                "%s has waited within %s for %.0f s, and goes on waiting, in a collective that is not the engine's, as "
                "of a loss_fn or a hook: all ranks have to make it, as often as this one",
                self._named(self._rank),
                self.calls.name,
                lasts,
            )

    def _where_the_store_is(self) -> str:
        if not self._several_hosts:
            return "the ranks' common store"
        return f"the host at {self._store_is_at}, which has the ranks' common store,"

    def _named(self, rank: int) -> str:
        return f"rank {rank}" + (f" on host {self._places[rank].name}" if self._several_hosts else "")

    def _all_named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._named(rank) for rank in ranks)

    def _is_gone(self, other: int) -> bool:
        """True if another rank's process was on this host, and is no more."""
        place = self._places[other]
        if not self._places[self._rank].sees(place):
            return False
        try:
            # Its name is in there, cut after 15 bytes, whatever a program has made it.
            state = Path(f"/proc/{place.process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return Path("/proc/self").exists()
        except OSError:  # this process may open no more files, say
            return False
        return state in "ZX"


@atexit.register
def _stop_all() -> None:
    """A thread that is in torch's store as the process ends aborts it: nobody may have closed its engine."""
    for watch in [*_watching]:
        watch.stop()


os.register_at_fork(after_in_child=_watching.clear)  # a child has no such threads
