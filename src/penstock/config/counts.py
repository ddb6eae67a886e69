"""Counts of tokens as people write them."""

import math
import re

from penstock.documents.typed import LARGEST, shown
from penstock.errors import ConfigError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_COUNT = re.compile(r"\s*((?:\d+(?:\.\d+)?|\.\d+)(?:[eE]\+?\d{1,3})?)\s*([A-Za-z]?)\s*")


def parse_count(name: str, value: str | float) -> int:
    """The number meant by ``"100M"``, ``"1.5b"``, ``"2e9"`` or a plain number; K, M, B and T are powers of 1000.

    Raises:
        ConfigError: it is no number of at least 1; names the key.
    """
    match = _COUNT.fullmatch(str(value)) if not isinstance(value, bool) else None
    count = float(match[1]) * _UNITS.get(match[2].lower(), math.inf) if match is not None else math.inf
    if not 1 <= count <= LARGEST:
        raise ConfigError(f"{name}: {shown(value)} is not a count: write a number of at least 1, with K, M, B or T")
    return round(count)
