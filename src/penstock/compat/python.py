"""A private name of Python's own library: what ``warnings`` keeps of who listens."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

_SHOW = "_showwarnmsg_impl"
"""The function that ``catch_warnings(record=True)`` puts a list's ``append`` in the place of."""


def listening() -> tuple[Any, ...]:
    """Values that context managers of Python set: ``redirect_stdout``, ``redirect_stderr`` and ``catch_warnings``.

    Without: a model's warnings would be recorded, or not, as another's code wants them.
    """
    show: Callable[..., None] | None = getattr(warnings, _SHOW, None)
    return sys.stdout, sys.stderr, warnings.filters, warnings.showwarning, show


def set_listening(value: tuple[Any, ...]) -> None:
    """Put back what ``listening`` has found. Without: as there."""
    sys.stdout, sys.stderr, warnings.filters, warnings.showwarning, show = value
    if show is not None:
        setattr(warnings, _SHOW, show)
    with warnings.catch_warnings():  # which has Python forget what it did by the filters before
        pass
