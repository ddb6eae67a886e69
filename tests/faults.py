"""Drives that fail, at the boundary of system calls."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def failing(call: str, code: int, patch: pytest.MonkeyPatch, *, after: int = 0) -> Iterator[None]:
    """``os.preadv`` or ``os.pwritev`` fails inside, once it has worked ``after`` times."""
    real: Callable[..., int] = getattr(os, call)
    left = iter(range(after))

    def fail(*args: Any) -> int:
        if next(left, None) is None:
            raise OSError(code, os.strerror(code))
        return real(*args)

    with patch.context() as patched:
        patched.setattr(os, call, fail)
        yield
