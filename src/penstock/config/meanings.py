"""What the fields of settings mean: read from the tables in their classes' docstrings, wherever they are shown."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")


def meanings(kind: type) -> Mapping[str, str]:
    """Field -> meaning, from the ``| field | meaning |`` tables of a dataclass and of those that it adds to."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        for line in joined_rows(inspect.cleandoc(cls.__doc__ or "")):
            found |= dict.fromkeys(names_in(line), line.strip("| ").rpartition("|")[2].strip())
    return found


def names_in(line: str) -> tuple[str, ...]:
    """The fields that a table's row is about; none: the line is no such row."""
    return tuple(re.findall(r"``(\w+)``", line.split("|")[1])) if line.startswith("| ``") else ()


def joined_rows(text: str) -> list[str]:
    """A docstring's lines, with rows of tables that go on in the next line in one."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and lines[-1].startswith("|") and not lines[-1].endswith("|"):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return lines


def takes(kind: Callable[P, S]) -> Callable[[Callable[[T, S], R]], Callable[Concatenate[T, P], R]]:
    """A function of something and settings, called with the settings as keyword arguments: ``f(x, delay=0.5)``.

    They are named, typed and explained in the dataclass ``kind`` alone, which ``help(f)`` shows.
    """

    def decorate(function: Callable[[T, S], R]) -> Callable[Concatenate[T, P], R]:
        first = next(iter(inspect.signature(function).parameters.values()))
        plain = inspect.signature(function)
        signature = plain.replace(parameters=[first, *inspect.signature(kind).parameters.values()])

        construct: Callable[..., S] = kind

        @wraps(function)
        def call(*args: Any, **given: Any) -> R:
            try:
                bound = signature.bind(*args, **given).arguments
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}() {error}") from None
            return function(bound.pop(first.name), construct(**bound))

        assert isinstance(kind, type)
        rows = [f"    {name}: {meaning}" for name, meaning in meanings(kind).items()]
        call.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Keyword arguments:", *rows])
        call.__signature__ = signature  # type: ignore[attr-defined]  # what ``inspect`` and editors look at
        call.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
        return call

    return decorate
