"""Bytes as people write them."""

import math

from penstock.config.quantities import number_with_unit
from penstock.documents.typed import LARGEST, shown
from penstock.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

MEMORY_LEAST = 1_000_000
"""Bytes of a budget, below which a bare number is one of GB or MB whose unit was left out."""

TEXT_LEAST = 1000
"""Bytes of text, files and buffers, below which a bare number is one whose unit was left out."""


def parse_size(text: str | float) -> int:
    """Bytes meant by ``"256MiB"``, ``"1.5 gb"``, ``"64G"`` or a plain number of bytes.

    Letters may be large or small, for bits are never meant. ``GiB`` is 1024³ bytes and ``GB`` 1000³, as drives are
    sold. ``G`` alone is ``GiB``, as it is in what limits memory elsewhere (Slurm's ``--mem``, Docker's ``-m``,
    systemd's ``MemoryMax``, Java's ``-Xmx``, ``ulimit``'s KiB). So with K, M and T.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text <= LARGEST:
        return text
    if isinstance(text, float) and 0 <= text <= LARGEST and text == int(text):
        return int(text)
    number, unit = number_with_unit(text) if isinstance(text, str) else (math.nan, "")
    size = number * _UNITS.get(unit.lower(), math.nan)
    if not size <= LARGEST:
        raise ConfigError(
            f"{shown(text)} is not a size: write a number with KiB, MiB, GiB, TiB (or K, M, G, T), KB, MB, GB or TB"
        )
    return int(size)


def check_size(name: str, text: str | float, least: int = 0) -> None:
    """``least``: a bare number below this, and above 0, is taken for one whose unit was left out.

    Raises:
        ConfigError: the text is not a size, with what it was given as.
    """
    try:
        size = parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if 0 < size < least and not (isinstance(text, str) and text.strip()[-1].isalpha()):
        bare = str(text).strip()
        raise ConfigError(
            f"{name}: {bare} without a unit would be bytes, too few to be meant: write {bare}GiB, {bare}GB or "
            f"what else it is ({bare}B, if it is bytes)"
        )


def three_digits(value: float) -> str:
    """A number for people: to three digits, or with all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_flops(rate: float) -> str:
    """FLOP/s for people."""
    return f"{three_digits(rate / 1e12)} TFLOP/s" if rate >= 1e11 else f"{three_digits(rate / 1e9)} GFLOP/s"


def format_parameters(count: int) -> str:
    """A number of parameters for people: ``29360128`` is ``"29.4M parameters"``; below a million, all digits."""
    return f"{count / 1e6:,.1f}M parameters" if count >= 1_000_000 else f"{count:,} parameters"


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
