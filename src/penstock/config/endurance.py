"""Limit on what a run may write to its drives, which wear by it."""

from dataclasses import dataclass
from functools import cached_property

from penstock.config.checked import check_fields
from penstock.config.sizes import check_size, parse_size
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Endurance:
    """A limit on writes to each drive of ``budget.disk``: a plan stays within it, or is refused with what would help.
    Either ``per_day``, or ``tbw`` and ``days``.

    | field | meaning |
    |---|---|
    | ``per_day`` | bytes that each drive may be written in a day of training without a break: ``"3TB"`` |
    | ``tbw`` | bytes that each drive may still be written: of a new one its rating, ``"1200TB"`` |
    | ``days`` | days of training that it must last with these |
    """

    per_day: str | int | float | None = None
    tbw: str | int | float | None = None
    days: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "budget.endurance")
        if (self.per_day is None) == (self.tbw is None) or (self.tbw is None) != (self.days is None):
            raise ConfigError(
                "budget.endurance: give per_day (3TB), or tbw and days (1200TB, 365), what each drive may be written"
            )
        for key in ("per_day", "tbw"):
            if (size := getattr(self, key)) is not None:
                check_size(f"budget.endurance.{key}", size)
                if not parse_size(size):
                    raise ConfigError(f"budget.endurance.{key}={size}: must be more than 0")
        if self.days is not None and self.days <= 0:
            raise ConfigError(f"budget.endurance.days={self.days:g}: must be more than 0")

    @cached_property
    def bytes_per_day(self) -> float:
        """Bytes that each drive may be written in a day."""
        if self.per_day is not None:
            return parse_size(self.per_day)
        assert self.tbw is not None
        assert self.days is not None
        return parse_size(self.tbw) / self.days

    def shared(self, users: int) -> "Endurance":
        """The limit of each of ``users`` ranks that share a drive: an equal part of the drive's bytes per day."""
        return self if users == 1 else Endurance(per_day=f"{max(int(self.bytes_per_day / users), 1)}B")
