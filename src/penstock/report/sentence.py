"""The sentences on top of a page: what bounds the step, how far it is from that bound, how right the prediction was."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean, median

from penstock.config.sizes import three_digits
from penstock.schedule.ir.lanes import Lane

LANE_WORDS: dict[Lane, str] = {
    "compute": "compute",
    "h2d": "the link from host to device",
    "d2h": "the link from device to host",
    "read": "reading from disk",
    "write": "writing to disk",
    "cpu": "the optimizer on the CPU",
    "net": "collectives",
    "nic": "collectives between hosts",
    "send": "sending",
    "recv": "receiving",
}
"""Lanes in sentences."""
LANE_NAMES: dict[Lane, str] = LANE_WORDS | {
    "h2d": "host to device",
    "d2h": "device to host",
    "read": "disk read",
    "write": "disk write",
    "cpu": "host optimizer",
    "nic": "between hosts",
}
"""Lanes in tables."""

_PLURAL: tuple[Lane, ...] = ("net", "nic")
"""Lanes whose words are plural."""
_SLOWER = 1.02
"""Times the predicted bound from which on a lane's own work has taken longer than predicted."""
_BUSY = 0.6
"""Share of a step from which a lane that is busy for it counts as its bottleneck."""


def share_of_life(share: float) -> str:
    """A share of what drives bear, for people."""
    percent = 100 * share
    if percent >= 10:
        return f"{percent:.0f}%"
    return f"{percent:.2g}%" if percent >= 0.001 or not share else "under 0.001%"


def format_time(seconds: float, unit: str = "s") -> str:
    """A time for people: ``0.0123`` s is ``"12.3 ms"``; in other units than seconds the number and the unit."""
    if unit != "s":
        return f"{seconds:,.6g} {unit}".rstrip()
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 0.9995 or name == "µs":
            scaled = seconds * factor
            return f"{scaled:,.0f} {name}" if abs(scaled) >= 999.5 else f"{scaled:.3g} {name}"
    raise AssertionError(seconds)


def format_long_time(seconds: float) -> str:
    """A time for people that may be minutes, hours or days: of steps on slow machines, of runs, of a drive's life."""
    if seconds < 600:
        return format_time(seconds)
    unit, name = (60, "min") if seconds < 7200 else (3600, "hours") if seconds < 2 * 86400 else (86400, "days")
    return f"{three_digits(seconds / unit)} {name}"


def time_of_step(seconds: Sequence[float], runs: Sequence[int]) -> float:
    """The time of a step: the median of a run of its schedule, as often as steps were run on average. ``seconds`` and
    ``runs``: of each step."""
    return median(time / count for time, count in zip(seconds, runs, strict=True)) * fmean(runs)


def bottleneck(time: float, work: Mapping[Lane, float], busy: Mapping[Lane, float], unit: str = "s") -> str:
    """A sentence on the lane whose work bounds a step that takes ``time``, and how far the step is from that.

    ``work``: the time of each lane's ops one after another, alone; their maximum is the step's lower bound.
    """
    if not work or time <= 0:
        return "The step has no work in it."
    lane = max(work, key=lambda lane: work[lane])
    bound = work[lane]
    if bound <= 0:
        return "The step has no work in it."
    return (
        f"{_busiest(lane, busy.get(lane, 0.0) / time)} No order of the same work is faster than "
        f"{format_time(bound, unit)}, and the step takes {three_digits(time / bound)} times that."
    )


def _busiest(lane: Lane, share: float) -> str:
    """Words on the busiest lane; one that is idle for much of the step is no bottleneck, the waiting is."""
    words, verb = LANE_WORDS[lane], "are" if lane in _PLURAL else "is"
    if share < _BUSY:
        return f"Waiting is the bottleneck: even {words} {verb} busy for only {share:.0%} of the step."
    return f"{words[0].upper()}{words[1:]} {verb} the bottleneck: {share:.0%} busy."


def measured_bottleneck(time: float, busy: Mapping[Lane, float], lower_bound: float | None) -> str:
    """As ``bottleneck``, from a measurement, in which a lane's busy time stands for its work.

    ``lower_bound``: the predicted one, if there is a prediction.
    """
    lane = max(busy, key=lambda lane: busy[lane])
    first = _busiest(lane, busy[lane] / time)
    if not lower_bound:
        return first
    bound = format_time(lower_bound)
    if time < lower_bound:
        return f"{first} This step is faster than its predicted lower bound of {bound}: the machine beats its profile."
    slower, words = busy[lane] / lower_bound, LANE_WORDS[lane]
    why = (
        f"{words} took {three_digits(slower)} times that for its own work"
        if slower >= _SLOWER
        else "the rest is waiting"
    )
    return (
        f"{first} That is measured. Its lower bound is predicted: by the machine's profile the busiest lane's work "
        f"takes {bound}. This step took {three_digits(time / lower_bound)} times that; {why}."
    )


def verdict(measured: float, predicted: float) -> str:
    """A sentence on a step's predicted time; the error is relative to the measurement."""
    error = predicted / measured - 1
    if abs(error) < 0.0005:
        return f"This step was predicted to take {format_time(predicted)}, as it did."
    way = "high" if error > 0 else "low"
    return f"This step was predicted to take {format_time(predicted)}: {abs(error):.1%} too {way}."


def listed(numbers: Sequence[int]) -> str:
    """A list of numbers, of which more than three alike that follow each other are one, and how many."""
    runs = [(number, len(list(alike))) for number, alike in groupby(numbers)]
    words = [f"{number} x {count}" if count > 3 else ", ".join([str(number)] * count) for number, count in runs]
    return f"[{', '.join(words)}]"
