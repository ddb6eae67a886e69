"""Times as people write them."""

import re

from penstock.documents.typed import shown
from penstock.errors import ConfigError

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_LONGEST = 1e7
_TIME = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)\s*")


def parse_duration(text: str) -> float:
    """Seconds meant by ``"90s"``, ``"5min"`` or ``"1.5h"``.

    Raises:
        ConfigError: the text is not a time, or not more than none and less than four months.
    """
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _UNITS.get(match[2], 0.0) if match is not None else 0.0
    if not 0 < seconds < _LONGEST:
        raise ConfigError(f"{shown(text)} is not a time: write a number with s, min or h, as 5min")
    return seconds
