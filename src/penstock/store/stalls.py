"""Notices requests that do not come back: a drive that stalls is said to, while it does and when it is over."""

import logging
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.config import format_size

Progress = npt.NDArray[np.int64]

LATE = 5.0
"""Seconds after which a request counts as late: at 8 MiB each even a slow drive has had them done long before."""

log = logging.getLogger("penstock")


class Watched:
    """Requests on a file that are made together, and under way until ``end``. They cost an entry in a dict and a look
    at the clock."""

    __slots__ = ("_progress", "_stalls", "began", "ended", "nbytes", "path", "verb")

    def __init__(self, stalls: "Stalls", path: Path, verb: str, nbytes: int, progress: Progress | None) -> None:
        self._stalls, self._progress = stalls, progress
        self.path, self.verb, self.nbytes = path, verb, nbytes
        self.began = self.ended = time.monotonic()

    def end(self) -> None:
        """All of them have come back."""
        self.ended = time.monotonic()
        del self._stalls.under_way[self]

    @property
    def since(self) -> float:
        """Seconds of the monotonic clock, since when none has come back; infinite: none is under way."""
        if self._progress is None:
            return self.began
        return float(self._progress[0]) / 1e9 or math.inf

    @property
    def last(self) -> float:
        """Seconds of the monotonic clock at which one came back last."""
        return self.ended if self._progress is None else float(self._progress[1]) / 1e9


@dataclass(frozen=True, kw_only=True)
class _Stall:
    """``since``: seconds of the monotonic clock. ``requests``: that were late in it, at least one."""

    since: float
    requests: list[Watched]

    @property
    def length(self) -> float:
        """Seconds until the last of them went on."""
        return max(request.last for request in self.requests) - self.since


class Stalls:
    """Watches the requests of one store. ``begin`` is thread-safe.

    A thread looks at what is under way a few times in ``late`` seconds. It starts with the first request and ends at
    ``close``; a process does not wait for it. A file stalls from its first late request until none of its requests is
    late: that is said once when it begins and once when it is over.
    """

    def __init__(self, late: float = LATE) -> None:
        self._late = late
        self.under_way: dict[Watched, None] = {}
        """requests that have not come back, oldest first"""
        self._stalled: dict[Path, _Stall] = {}
        self._closing = threading.Event()
        self._start = threading.Lock()
        self.watcher: threading.Thread | None = None
        """the thread; None: no request has been made"""

    def begin(self, path: Path, verb: str, nbytes: int, progress: Progress | None = None) -> Watched:
        """One request is under way: ``verb`` of ``nbytes`` on the file ``path``. Of several: ``progress`` is two
        numbers, of nanoseconds of the monotonic clock: since when some are under way and none has come back (0: none is
        under way), and when one came back last."""
        if self.watcher is None:
            self._begin()
        self.under_way[request := Watched(self, path, verb, nbytes, progress)] = None
        return request

    def close(self) -> None:
        """End the watcher. No request may be under way."""
        self._closing.set()
        if self.watcher is not None:
            self.watcher.join()

    def _begin(self) -> None:
        with self._start:
            if self.watcher is None:
                watcher = threading.Thread(target=self._watch, name="penstock-stalls", daemon=True)
                watcher.start()
                self.watcher = watcher

    def _watch(self) -> None:
        while not self._closing.wait(self._late / 5):
            self._look(time.monotonic())
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        late: dict[Path, _Stall] = {}
        for request in self.under_way.copy():
            since = request.since
            if now - since >= self._late:
                late.setdefault(request.path, _Stall(since=since, requests=[])).requests.append(request)
        for path, stall in late.items():
            if path not in self._stalled:
                log.warning(_begun(stall.requests[0], now - stall.since))
            known = self._stalled.setdefault(path, stall).requests
            known += [request for request in stall.requests if request not in known]
        for path in [path for path in self._stalled if path not in late]:
            log.warning("%s: goes on after a stall of %.0f s", path, self._stalled.pop(path).length)


def _begun(request: Watched, seconds: float) -> str:
    what = f"{request.verb} of {format_size(request.nbytes)}" if request.nbytes else request.verb
    return (
        f"{request.path}: a {what} has been under way for {seconds:.0f} s: the drive stalls or is very "
        "slow. Waiting for it; the kernel's log (dmesg) may say why"
    )
