"""Settings as frozen, keyword-only dataclasses. The strict YAML file of ``penstock train`` is these same classes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
Precision = Literal["fp32", "bf16", "fp16"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes meant by ``"256MiB"``, ``"1.5 GB"`` or a plain number of bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(size: float) -> str:
    """A size for people: ``268435456`` is ``"256 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.3g} TiB"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much memory of each tier training may take, and where on disk the rest goes.

    | field | meaning |
    |---|---|
    | ``device`` | bytes (or ``"256MiB"``) of the accelerator's memory; on the CPU, of the memory that computes |
    | ``host`` | bytes of host memory for buffers and whatever state is kept there |
    | ``disk`` | a directory, or several that are striped; None: nothing goes to disk |
    | ``weights``, ``state``, ``gradients``, ``checkpoints`` | pin one kind to a tier; None: the planner chooses |
    """

    device: str | int
    host: str | int
    disk: str | Path | Sequence[str | Path] | None = None
    weights: Tier | None = None
    state: Tier | None = None
    gradients: Literal["host", "disk"] | None = None
    checkpoints: Tier | None = None

    @property
    def device_bytes(self) -> int:
        return parse_size(self.device)

    @property
    def host_bytes(self) -> int:
        return parse_size(self.host)

    @property
    def disk_paths(self) -> tuple[Path, ...]:
        if self.disk is None:
            return ()
        paths = [self.disk] if isinstance(self.disk, str | Path) else self.disk
        return tuple(Path(path) for path in paths)

    def __post_init__(self) -> None:
        parse_size(self.device)
        parse_size(self.host)
        for kind in ("weights", "state", "gradients", "checkpoints"):
            tier = getattr(self, kind)
            if tier is not None and tier not in TIERS:
                raise ConfigError(f"budget.{kind}={tier!r}: must be one of {', '.join(TIERS)} or None")
            if tier == "disk" and not self.disk_paths:
                raise ConfigError(f"budget.{kind}='disk' needs budget.disk, a directory")
        if self.gradients == "device":
            raise ConfigError("budget.gradients='device' is not supported: use 'host' or 'disk'")
        if self.disk is not None and not self.disk_paths:
            raise ConfigError("budget.disk is an empty list: give a directory or None")
