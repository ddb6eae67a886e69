"""Checks of values from Python against their type hints. Values from a file were checked when they were read."""

from typing import Any

from penstock.documents.typed import expected, fits, hints_of, shown
from penstock.errors import ConfigError


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises:
    ConfigError: the value is not of the type that the hint says.
    """
    if not fits(value, hint):
        raise ConfigError(f"{name}={shown(value)}: must be {expected(hint, none='None')}")


def check_fields(instance: Any, section: str = "", *, of: type[Any] | None = None) -> None:
    """Check the fields of a dataclass. ``section``: what they are of, for messages. ``of``: those of this class that
    ``instance`` adds to; None: all.

    Raises:
        ConfigError: names the first that is of another type than its hint.
    """
    for key, hint in hints_of(of or type(instance)).items():
        check_value(f"{section}.{key}" if section else key, getattr(instance, key), hint)
