"""Counts of tokens, times, rates of networks and delays of their messages, as people write them. Sizes: ``sizes``."""

import math
import re

from penstock.documents.typed import LARGEST, shown
from penstock.errors import ConfigError

_WRITTEN = re.compile(r"((?:\d+(?:\.\d+)?|\.\d+)(?:[eE]\+?\d{1,3})?)\s*([^\s\d].*)?")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_TIMES = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_LONGEST = 1e7
_RATES = {
    f"{letter}{unit}": 1000.0**power / bits
    for power, letters in enumerate(({""}, {"k", "K"}, {"m", "M"}, {"g", "G"}, {"t", "T"}))
    for letter in letters
    for unit, bits in (("bit/s", 8), ("bps", 8), ("B/s", 1))
}
_FASTEST = 1e15
_IN_A_SECOND = {"us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}


def number_with_unit(text: str) -> tuple[float, str]:
    """The number that a text begins with, and the unit behind it, or none; NaN: it is no such text."""
    match = _WRITTEN.fullmatch(text.strip())
    return (math.nan, "") if match is None else (float(match[1]), match[2] or "")


def parse_count(name: str, value: str | float) -> int:
    """The number meant by ``"100M"``, ``"1.5b"``, ``"2e9"`` or a plain number; K, M, B and T are powers of 1000.

    Raises:
        ConfigError: it is no number of at least 1; names the key.
    """
    number, unit = number_with_unit(str(value))
    count = number * _COUNTS.get(unit.lower(), math.nan)
    if not 1 <= count <= LARGEST:
        raise ConfigError(f"{name}: {shown(value)} is not a count: write a number of at least 1, with K, M, B or T")
    return round(count)


def parse_duration(text: str) -> float:
    """Seconds meant by ``"90s"``, ``"5min"`` or ``"1.5h"``.

    Raises:
        ConfigError: the text is not a time, or not more than none and less than four months.
    """
    number, unit = number_with_unit(text)
    seconds = number * _TIMES.get(unit, math.nan)
    if not 0 < seconds < _LONGEST:
        raise ConfigError(f"{shown(text)} is not a time: write a number with s, min or h, as 5min")
    return seconds


def parse_rate(name: str, text: str) -> float:
    """Bytes/s meant by ``"100Gbit/s"``, ``"200 Mbps"`` or ``"12.5GB/s"``. Units are powers of 1000, as networks have
    them.

    Raises:
        ConfigError: the text is not a rate; names the key.
    """
    number, unit = number_with_unit(text)
    rate = number * _RATES.get(unit, math.nan)
    if not 1 <= rate <= _FASTEST:
        raise ConfigError(
            f"{name}: {shown(text)} is not a network's rate: write a number with Gbit/s or GB/s, as 100Gbit/s"
        )
    return rate


def parse_delay(name: str, text: str) -> float:
    """Seconds meant by ``"10us"``, ``"0.5 ms"`` or ``"1s"``.

    Raises:
        ConfigError: the text is not a delay; names the key.
    """
    number, unit = number_with_unit(text)
    delay = number / _IN_A_SECOND.get(unit, math.nan)
    if not 0 <= delay < _LONGEST:
        raise ConfigError(f"{name}: {shown(text)} is not a message's delay: write a number with us, ms or s, as 10us")
    return delay
