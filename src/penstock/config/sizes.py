"""Bytes as people write them."""

import math
import re

from penstock.documents.typed import LARGEST, shown
from penstock.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes meant by ``"256MiB"``, ``"1.5 GB"`` or a plain number of bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text <= LARGEST:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    size = float(match[1]) * _UNITS.get(match[2], math.inf) if match is not None else math.inf
    if size > LARGEST:
        raise ConfigError(f"{shown(text)} is not a size: write a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(size)


def check_size(name: str, text: str | int) -> None:
    """Raises:
    ConfigError: the text is not a size, with what it was given as.
    """
    try:
        parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def format_size(size: float) -> str:
    """A size for people: ``268435456`` is ``"256 MiB"``."""
    if abs(size) < 1023.5:  # there are no parts of bytes: 0.98 KiB would be 1003.52
        return f"{size:.0f} B"
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        size, unit = size / 1024, larger
        if abs(size) < 999.5:
            break
    return f"{size:.0f} {unit}" if abs(size) >= 99.95 else f"{size:.3g} {unit}"
