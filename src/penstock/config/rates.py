"""Rates of networks as people write them, and the delays of their messages."""

import re

from penstock.documents.typed import shown
from penstock.errors import ConfigError

_POWERS = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}
_RATE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kKmMgGtT]?)(bit/s|bps|B/s)\s*")
_DELAY = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(us|µs|ms|s)\s*")
_IN_A_SECOND = {"us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}
_MOST = 1e15


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
    if not 1 <= rate <= _MOST:
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
