"""Counts of tokens, times, rates of networks and delays of their messages, as people write them. Sizes: ``sizes``."""

import math
import re

from penstock.documents.typed import LARGEST, shown
from penstock.errors import ConfigError

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_COUNT = re.compile(r"\s*((?:\d+(?:\.\d+)?|\.\d+)(?:[eE]\+?\d{1,3})?)\s*([A-Za-z]?)\s*")
_TIMES = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)\s*")
_LONGEST = 1e7
_POWERS = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}
_RATE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kKmMgGtT]?)(bit/s|bps|B/s)\s*")
_FASTEST = 1e15
_IN_A_SECOND = {"us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}
_DELAY = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(us|µs|ms|s)\s*")


def parse_count(name: str, value: str | float) -> int:
    """The number meant by ``"100M"``, ``"1.5b"``, ``"2e9"`` or a plain number; K, M, B and T are powers of 1000.

    Raises:
        ConfigError: it is no number of at least 1; names the key.
    """
    match = _COUNT.fullmatch(str(value)) if not isinstance(value, bool) else None
    count = float(match[1]) * _COUNTS.get(match[2].lower(), math.inf) if match is not None else math.inf
    if not 1 <= count <= LARGEST:
        raise ConfigError(f"{name}: {shown(value)} is not a count: write a number of at least 1, with K, M, B or T")
    return round(count)


def parse_duration(text: str) -> float:
    """Seconds meant by ``"90s"``, ``"5min"`` or ``"1.5h"``.

    Raises:
        ConfigError: the text is not a time, or not more than none and less than four months.
    """
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _TIMES.get(match[2], 0.0) if match is not None else 0.0
    if not 0 < seconds < _LONGEST:
        raise ConfigError(f"{shown(text)} is not a time: write a number with s, min or h, as 5min")
    return seconds


def parse_rate(name: str, text: str) -> float:
    """Bytes/s meant by ``"100Gbit/s"``, ``"200 Mbps"`` or ``"12.5GB/s"``. Units are powers of 1000, as networks have
    them.

    Raises:
        ConfigError: the text is not a rate; names the key.
    """
    match = _RATE.fullmatch(text)
    rate = 0.0
    if match is not None:
        rate = float(match[1]) * 10.0 ** _POWERS[match[2].lower()] / (1 if match[3] == "B/s" else 8)
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
    match = _DELAY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name}: {shown(text)} is not a message's delay: write a number with us, ms or s, as 10us")
    return float(match[1]) / _IN_A_SECOND[match[2]]
