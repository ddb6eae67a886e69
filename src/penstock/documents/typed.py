"""Values against type hints: JSON into frozen dataclasses, and what somebody has given from Python.

Known are bool, int, float, str, None, Any, Literal, unions, ``tuple[X, ...]``, ``tuple[X, Y]``, ``Sequence[X]``,
``Mapping[str, X]``, dataclasses, and any other class, of which a value must be an instance. True is no number, NaN and
infinity are none either, and a whole number has at most 63 bits.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from penstock.documents.text import MalformedError

T = TypeVar("T")

_Reader = Callable[[Any, str], Any]
"""Of a value and what it is called."""

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
    found: T = _reader(kind)(value, place)
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


def _reader(hint: Any) -> _Reader:
    """A reader of values of a hint, made once for all of them: to take a hint apart takes longer than to read a value,
    and a store of a large model has tens of thousands."""
    unions = typing.get_origin(hint) in (Union, types.UnionType)
    ways = [way for option in (typing.get_args(hint) if unions else (hint,)) for way in _ways(option)]

    def read(value: Any, place: str) -> Any:
        for takes, as_it_says in ways:
            if takes(value):
                return as_it_says(value, place)
        raise MalformedError(f"{place or 'the whole of it'} must be {expected(hint)}, not {shown(value)}")

    return read


def _ways(option: Any) -> list[tuple[Callable[[Any], bool], _Reader]]:
    """Pairs of a test of values and their reader, in turn, for a hint that is no union."""
    origin, args = typing.get_origin(option), typing.get_args(option)
    if isinstance(option, type) and dataclasses.is_dataclass(option):
        return [(_is_object, partial(_instance, option))]
    if origin is tuple and args[-1] is not Ellipsis:
        own = [_reader(inner) for inner in args]
        return [(lambda value: _is_list(value) and len(value) == len(own), partial(_each, own))]
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return [(_is_list, partial(_each, repeat(_reader(args[0]))))]
    found: list[tuple[Callable[[Any], bool], _Reader]] = [(partial(fits, hint=option), _itself)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = _reader(args[1])
        return [(_is_object, lambda value, place: {k: inner(v, _within(place, k)) for k, v in value.items()}), *found]
    return [(_PLAINLY[option], _itself), *found] if option in _PLAINLY else found


def _itself(value: Any, place: str) -> Any:
    return value


def _each(readers: Iterable[_Reader], value: Sequence[Any], place: str) -> tuple[Any, ...]:
    return tuple(read(item, f"{place}[{n}]") for n, (item, read) in enumerate(zip(value, readers, strict=False)))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


_PLAINLY: dict[Any, Callable[[Any], bool]] = {
    float: lambda value: type(value) is float and math.isfinite(value),
    int: lambda value: type(value) is int and -LARGEST <= value <= LARGEST,
    str: lambda value: type(value) is str,
}
"""Most of all values, which are told at once."""


def _instance(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    hints, readers = hints_of(kind), _readers_of(kind)
    if unknown := [key for key in value if key not in hints]:
        raise MalformedError(f"{place or 'it'} has {shown(unknown[0])}, which is none of {', '.join(hints)}")
    needed = (f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING)
    if missing := [name for name in needed if name not in value]:
        raise MalformedError(f"{place or 'it'} lacks {missing[0]!r}")
    fields = {key: readers[key](item, _within(place, key)) for key, item in value.items()}
    try:
        return kind(**fields)
    except MalformedError:
        raise
    except ValueError as error:
        raise MalformedError(f"{place}: {error}" if place else str(error)) from None


@cache
def _readers_of(kind: Any) -> Mapping[str, _Reader]:
    """The readers of a dataclass's fields."""
    return {name: _reader(hint) for name, hint in hints_of(kind).items()}


def _within(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _hints_of(kind: type[Any]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


hints_of: Callable[[Any], Mapping[str, Any]] = cache(_hints_of)
"""The types of a dataclass's fields. To find them out takes longer than to read one of its instances."""


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
        return "brackets within brackets, a thousand deep"
    return text if len(text) <= most else f"{text[: most - 3]}..."
