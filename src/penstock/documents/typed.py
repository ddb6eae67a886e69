"""Values against type hints: JSON into frozen dataclasses, and what somebody has given from Python.

Known are bool, int, float, str, None, Any, Literal, unions, ``tuple[X, ...]``, ``tuple[X, Y]``, ``Sequence[X]``,
``Mapping[str, X]``, dataclasses, and any other class, of which a value must be an instance. True is no number, NaN and
infinity are none either, and a whole number has at most 63 bits.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from penstock.documents.text import MalformedError

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest size or count: no file and no machine has more."""

NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
}
"""Types in words."""


def decode(kind: type[T], value: Any, place: str = "") -> T:
    """A JSON value as an instance of ``kind``, a dataclass. Lists become tuples.

    ``place``: what the value is called, for messages. A dataclass's own ``ValueError`` becomes ``MalformedError``.

    Raises:
        MalformedError: a key is missing or unknown, or a value is not of the type that it must be.
    """
    found: T = _decode(kind, value, place)
    return found


def fits(value: Any, hint: Any) -> bool:
    """True if a value is of the type that a hint says. Any list or tuple is a sequence."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in args)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in args)
    if (each := _items(value, origin, args)) is not None:
        return all(fits(item, inner) for item, inner in each)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(fits(key, args[0]) and fits(item, args[1]) for key, item in pairs)
    return origin is None and _is_plain(value, hint)


def _is_plain(value: Any, hint: Any) -> bool:
    """``fits`` for a hint without parameters."""
    if hint is Any:
        return True
    if hint in (int, float):
        return type(value) is not bool and _is_number(value, whole=hint is int)
    if hint in (None, type(None)):
        return value is None
    return isinstance(value, hint) if isinstance(hint, type) else True


def _is_number(value: Any, *, whole: bool) -> bool:
    """Numpy's numbers are some, too."""
    if isinstance(value, Integral):
        return abs(int(value)) <= LARGEST
    return not whole and isinstance(value, Real) and math.isfinite(value)


def _items(value: Any, origin: Any, args: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
    """The items of a list or a tuple, each with its hint; None: ``origin`` is no sequence, or ``value`` is none."""
    if not isinstance(value, list | tuple):
        return None
    if origin is tuple and args[-1] is not Ellipsis:
        return list(zip(value, args, strict=True)) if len(value) == len(args) else None
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return [(item, args[0]) for item in value]
    return None


def _decode(hint: Any, value: Any, place: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        origin, args = typing.get_origin(option), typing.get_args(option)
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            if isinstance(value, dict):
                return _instance(option, value, place)
        elif (each := _items(value, origin, args)) is not None:
            return tuple(_decode(inner, item, f"{place}[{n}]") for n, (item, inner) in enumerate(each))
        elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
            return {key: _decode(args[1], item, _within(place, key)) for key, item in value.items()}
        elif fits(value, option):
            return value
    raise MalformedError(f"{place or 'the whole of it'} must be {expected(hint)}, not {shown(value)}")


def _instance(kind: type[Any], value: Mapping[str, Any], place: str) -> Any:
    hints = hints_of(kind)
    if unknown := [key for key in value if key not in hints]:
        raise MalformedError(f"{place or 'it'} has {shown(unknown[0])}, which is none of {', '.join(hints)}")
    needed = (f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING)
    if missing := [name for name in needed if name not in value]:
        raise MalformedError(f"{place or 'it'} lacks {missing[0]!r}")
    fields = {key: _decode(hints[key], item, _within(place, key)) for key, item in value.items()}
    try:
        return kind(**fields)
    except MalformedError:
        raise
    except ValueError as error:
        raise MalformedError(f"{place}: {error}" if place else str(error)) from None


def _within(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def hints_of(kind: type[Any]) -> Mapping[str, Any]:
    """The types of a dataclass's fields."""
    if kind not in _KNOWN:
        hints = typing.get_type_hints(kind)
        _KNOWN[kind] = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return _KNOWN[kind]


_KNOWN: dict[type[Any], Mapping[str, Any]] = {}
"""Finding out the hints of a class takes longer than reading one of its instances."""


def expected(hint: Any, none: str = "null") -> str:
    """A hint in words. ``none``: the word for None."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(expected(option, none) for option in args))
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list in which each is {expected(args[0], none)}"
    if dataclasses.is_dataclass(hint) and none != "null":
        return f"a {getattr(hint, '__name__', hint)}"
    if dataclasses.is_dataclass(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "an object"
    if hint in (None, type(None)):
        return none
    return NAMES.get(hint) or str(getattr(hint, "__name__", hint))


def shown(value: Any, most: int = 80) -> str:
    """A value for a message, which may be of any size."""
    if type(value) is int and abs(value) > LARGEST:
        return f"{_cut(value, most)}, which has more than 63 bits"
    return _cut(value, most)


def _cut(value: Any, most: int) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number of thousands of digits"
    except RecursionError:
        return "brackets within brackets, thousands deep"
    return text if len(text) <= most else f"{text[: most - 3]}..."
