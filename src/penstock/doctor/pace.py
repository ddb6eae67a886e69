"""Runs kinds of work side by side for a while, and says at which rate each went."""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Call = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work of one lane: each worker is called over and over by a thread of its own. ``amount``: done by one call."""

    name: str
    workers: Sequence[Call]
    amount: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """The length of a measurement: ``warm`` seconds that do not count, then ``seconds``, or longer until each worker
    has ended ``calls`` calls, up to ``at_most`` seconds in all.
    """

    warm: float
    seconds: float
    calls: int = 4
    at_most: float = 6.0


@dataclass(kw_only=True)
class _Worker:
    """A thread that repeats a call, and the times at which its calls ended."""

    call: Call
    begun: float = 0.0
    ends: list[float] = field(default_factory=list)
    error: BaseException | None = None

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.call()
                self.ends.append(time.perf_counter())
        except BaseException as error:  # noqa: BLE001 - it surfaces in the thread that measures
            self.error = error

    def ended_since(self, start: float) -> int:
        return sum(end >= start for end in self.ends)


def rates(loads: Sequence[Load], span: Span) -> dict[str, float]:
    """Amounts per second of every load while all of them run, by name; the sum over a load's workers.

    Raises:
        BaseException: what the first worker that failed raised, when none runs any more.
    """
    workers = {load.name: [_Worker(call=call) for call in load.workers] for load in loads}
    every = [worker for group in workers.values() for worker in group]
    stop = threading.Event()
    threads = [
        threading.Thread(target=worker.run, args=(stop,), name="penstock-doctor", daemon=True) for worker in every
    ]
    begun = time.perf_counter()
    try:
        for worker, thread in zip(every, threads, strict=True):
            worker.begun = time.perf_counter()
            thread.start()
        last = _wait(every, begun, span)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for worker in every:
        if worker.error is not None:
            raise worker.error
    start = begun + span.warm
    return {load.name: load.amount * _calls_per_second(workers[load.name], start, last) for load in loads}


def _calls_per_second(workers: Sequence[_Worker], start: float, stop: float) -> float:
    """The slope of the number of ended calls over time, by least squares over the ends within the span.

    It is right whether the workers' calls end together or in turn, and where a call takes a good part of the span:
    calls over seconds would count one that began before the span, or leave out one that goes on after it.
    """
    ends = sorted(end for worker in workers for end in worker.ends if start <= end <= stop)
    if len(ends) <= len(workers) or ends[0] == ends[-1]:  # hardly any: every worker's first call, set-up included
        return sum(1 / (worker.ends[0] - worker.begun) for worker in workers)
    slope, _ = statistics.linear_regression(ends, range(len(ends)))
    return slope


def _wait(workers: Sequence[_Worker], begun: float, span: Span) -> float:
    """Sleep until the span is over; the time at which it was."""
    start = begun + span.warm
    while True:
        now = time.perf_counter()
        if any(worker.error is not None for worker in workers) or now - begun >= span.at_most:
            return now
        enough = all(worker.ended_since(start) > span.calls for worker in workers)
        if now >= start + span.seconds and enough:
            return now
        time.sleep(max(min(start + span.seconds - now, 0.05), 0.005))


def rate(load: Load, span: Span) -> float:
    """Amounts per second of a load that runs alone."""
    return rates([load], span)[load.name]


def medians(rounds: int, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """The median over so many rounds of each number that ``measure`` finds."""
    found = [measure() for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}
