"""The meaning of each field of settings, read from the table in its class's docstring, wherever it is shown."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from penstock.config.elsewhere import counterpart

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

_WIDTH = 92
"""Columns of a docstring: ``help`` moves it in by some, and does not wrap."""


class OfModel(Protocol[T_contra, P, R_co]):
    """A function of a model and settings, called ``f(model, delay=0.5)`` or ``f(model=model, delay=0.5)``."""

    def __call__(self, model: T_contra, *args: P.args, **settings: P.kwargs) -> R_co: ...


def meanings(kind: type) -> Mapping[str, str]:
    """Field -> meaning, from the ``| field | meaning |`` tables of a dataclass and of those that it adds to."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        for line in joined_rows(inspect.cleandoc(cls.__doc__ or "")):
            found |= dict.fromkeys(names_in(line), line.strip("| ").rpartition("|")[2].strip())
    return found


def by_need(kind: type) -> tuple[Field[Any], ...]:
    """A dataclass's fields as people look for them: what has to be given, then its own, those that it has otherwise
    than a class that it adds to, and those of these classes, which are ever rarer. Fields of a class that says
    ``common = True`` are as those of the class that adds to it: forms of one command have them in common."""
    classes = [cls for cls in kind.__mro__ if is_dataclass(cls) and not vars(cls).get("common", False)]
    lines = [fields(cls) for cls in classes]  # an inherited field is the same object in each

    def rank(f: Field[Any]) -> tuple[bool, int, int]:
        known = sum(f in line for line in lines)
        return not is_required(f), known, sum(other.name == f.name for line in lines for other in line) - known

    return tuple(sorted(fields(kind), key=rank))


def is_required(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


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


def model_and(kind: Callable[P, S]) -> Callable[[Callable[[T, S], R]], OfModel[T, P, R]]:
    """``takes`` for a function whose first parameter is ``model``, which type checkers let callers name, too."""

    def decorate(function: Callable[[T, S], R]) -> OfModel[T, P, R]:
        found: Any = takes(kind)(function)
        return cast(OfModel[T, P, R], found)

    return decorate


def named_arguments(kind: type[T]) -> type[T]:
    """A dataclass whose ``help`` explains its keyword arguments, and that says of one that is none of its fields what
    stands for it, as ``takes`` does."""
    plain: Callable[..., None] = kind.__init__
    known = inspect.signature(kind).parameters

    @wraps(plain)
    def init(self: T, *args: Any, **given: Any) -> None:
        _check_names(kind.__qualname__, given, known)
        plain(self, *args, **given)

    init.__doc__ = _as_arguments(kind)
    setattr(kind, "__init__", init)  # noqa: B010 - a type checker takes it for a method of every class
    return kind


def _as_arguments(kind: type) -> str:
    """The fields of a dataclass and their meanings, as ``help`` shows keyword arguments."""
    said = meanings(kind)
    rows = (
        textwrap.fill(f"{f.name}: {said[f.name]}", _WIDTH, initial_indent="    ", subsequent_indent="        ")
        for f in by_need(kind)
    )
    return "\n".join(["Keyword arguments:", *rows])


def _check_names(whose: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises:
    TypeError: one that is given is none that is known.
    """
    if unknown := [name for name in given if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        there = counterpart(unknown[0], of_wrap="mesh" in known)
        hint = f": {there}" if there else f". Did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{whose}() got an unexpected keyword argument {unknown[0]!r}{hint}")


def takes(kind: Callable[P, S]) -> Callable[[Callable[[T, S], R]], Callable[Concatenate[T, P], R]]:
    """A function of something and settings, called with the settings as keyword arguments: ``f(x, delay=0.5)``.

    They are named, typed and explained in the dataclass ``kind`` alone, which ``help(f)`` shows. A name that is none
    of them is said first, with what stands for it if another tool has it, or the nearest one that is.
    """

    def decorate(function: Callable[[T, S], R]) -> Callable[Concatenate[T, P], R]:
        first = next(iter(inspect.signature(function).parameters.values()))
        plain = inspect.signature(function)
        assert isinstance(kind, type)
        order = [f.name for f in by_need(kind)]
        each = inspect.signature(kind).parameters
        signature = plain.replace(parameters=[first, *(each[name] for name in order)])

        construct: Callable[..., S] = kind

        @wraps(function)
        def call(*args: Any, **given: Any) -> R:
            _check_names(function.__qualname__, given, signature.parameters)
            try:
                bound = signature.bind(*args, **given).arguments
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}() {error}") from None
            return function(bound.pop(first.name), construct(**bound))

        call.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{_as_arguments(kind)}"
        call.__signature__ = signature  # type: ignore[attr-defined]  # what ``inspect`` and editors look at
        call.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
        if plain.return_annotation is not plain.empty:
            call.__annotations__["return"] = plain.return_annotation
        return call

    return decorate
