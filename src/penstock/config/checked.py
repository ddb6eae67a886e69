"""Checks of values that any setting may have. Type hints are for those from Python; a file's were read by them."""

import re
from numbers import Integral, Real
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
    """Check the fields of a dataclass, and make their numbers, which may be numpy's, Python's own: a commit holds no
    others. ``section``: what they are of, for messages. ``of``: those of this class that ``instance`` adds to; None:
    all.

    Raises:
        ConfigError: names the first that is of another type than its hint.
    """
    for key, hint in hints_of(of or type(instance)).items():
        check_field(instance, key, hint, f"{section}.{key}" if section else key)


def check_field(instance: Any, key: str, hint: Any, name: str) -> None:
    """``check_fields`` of one field, which messages call by this ``name``."""
    value = getattr(instance, key)
    check_value(name, value, hint)
    object.__setattr__(instance, key, _own_numbers(value))


def check_least(instance: Any, section: str = "", **least: float) -> None:
    """Raises:
    ConfigError: a number of a dataclass is given and less than the ``least`` that it may be.
    """
    for key, bound in least.items():
        if (value := getattr(instance, key)) is not None and value < bound:
            raise ConfigError(f"{section}{key}={value}: must be at least {bound}")


def check_pattern(name: str, pattern: str | None) -> None:
    """Raises:
    ConfigError: a text that is given is not a regular expression.
    """
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"{name}={pattern!r} is not a regular expression: {error}") from error


def _own_numbers(value: Any) -> Any:
    """A value, or the items of a list or a tuple, with Python's own numbers."""
    if type(value) in (list, tuple):
        return type(value)(map(_own_numbers, value))
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
