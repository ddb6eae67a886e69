"""Places in which a model's own code keeps values for later: attributes, entries of dicts, lists, variables.

There is one such place for all micro-batches that are under way. So each has its own values, which are put there when
its forward goes on (``own_values``).
"""

import builtins
import functools
import logging
import operator
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch import nn

from penstock.compat.modules import forward_hooks
from penstock.tape.buffers import attributes_of
from penstock.tape.opaque import slots_of

ABSENT: Any = object()
"""The value where there is none."""

_MOST = 20_000
"""Values that one search looks at, the nearest first."""
_MOST_OF_ONE = 1_000
"""Values of one object of these, taken at once: other threads may change it."""

_WITHOUT = (
    *(types.NoneType, str, bytes, bool, int, float, complex, type, range, slice, types.ModuleType),
    *(types.BuiltinFunctionType, nn.Module, torch.dtype, torch.device, torch.Generator, logging.Logger),
)
"""Types that hold no tensors, or (modules) such as are looked at by themselves."""


_PLAIN = frozenset({torch.Tensor, nn.Parameter, types.NoneType, bool, int, float, str, torch.dtype, torch.device})
"""Types of nearly all arguments of blocks."""
_NO_DATA = (torch.Tensor, types.FunctionType, types.MethodType, functools.partial, *_WITHOUT)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Holder(ABC):
    """A place for a value: in ``of``, by ``key``. Two are equal if they are the same place."""

    of: Any
    key: Any = None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.of is other.of and self.key == other.key

    def __hash__(self) -> int:
        return hash((id(self.of), self.key))

    @property
    def container(self) -> Any:
        """The dict, list or other object that it is in."""
        return self.of

    @property
    def depth(self) -> int:
        """The number of places that it is within, which are filled before it is."""
        return 0

    @abstractmethod
    def now(self) -> Any:
        """The value that is there, or ``ABSENT``."""

    @abstractmethod
    def put(self, value: Any) -> None: ...


class Entry(Holder):
    """An entry of a dict, be it that of an object's attributes or of globals."""

    def now(self) -> Any:
        return self.of.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        if value is ABSENT:
            self.of.pop(self.key, None)
        else:
            self.of[self.key] = value


class Contents(Holder):
    """All of a list, a set or a deque."""

    def now(self) -> Any:
        return tuple(self.of)

    def put(self, value: Any) -> None:
        if len(value) == len(self.of) and all(map(operator.is_, value, self.of)):
            return  # code may go through it
        self.of.clear()
        (self.of.update if isinstance(self.of, set) else self.of.extend)(value)


class Variable(Holder):
    """A variable that functions share: a cell of their closures."""

    def now(self) -> Any:
        try:
            return self.of.cell_contents
        except ValueError:
            return ABSENT

    def put(self, value: Any) -> None:
        if value is not ABSENT:
            self.of.cell_contents = value
        elif self.now() is not ABSENT:
            del self.of.cell_contents


class Slot(Holder):
    """An attribute of an object whose class has slots, by that slot's descriptor."""

    def now(self) -> Any:
        try:
            return self.key.__get__(self.of)
        except AttributeError:
            return ABSENT

    def put(self, value: Any) -> None:
        if value is not ABSENT:
            self.key.__set__(self.of, value)
        elif self.now() is not ABSENT:
            self.key.__delete__(self.of)


class Inner(Holder):
    """A place within whatever is in another place, ``of``: the model may put another object there, or first make it in
    a forward. ``key``: its class as a holder, and key."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Inner and (self.of, self.key) == (other.of, other.key)

    def __hash__(self) -> int:
        return hash((self.of, self.key))

    @classmethod
    def on_the_way(cls, outer: Holder, place: Holder) -> Holder:
        """A place as one within ``outer``; unchanged where it is not at once within what is there."""
        found = cls(of=outer, key=(type(place), place.key))
        return found if found.container is place.of else place

    @property
    def container(self) -> Any:
        (kind, _), value = self.key, self.of.now()
        return _attributes(value) if kind is Entry and not isinstance(value, dict) else value

    @property
    def depth(self) -> int:
        return 1 + int(self.of.depth)

    def _there(self) -> Holder | None:
        """The place; None: there is something else than in the probe."""
        (kind, key), container = self.key, self.container
        wanted = key.__objclass__ if kind is Slot else (list, set, deque) if kind is Contents else dict
        return kind(of=container, key=key) if isinstance(container, wanted) else None

    def now(self) -> Any:
        there = self._there()
        return ABSENT if there is None else there.now()

    def put(self, value: Any) -> None:
        there = self._there()
        if there is not None:
            there.put(value)


Way = tuple[Holder, ...]
"""The holders on the way to a value, from the outermost to its own."""


class Search:
    """Finds the tensors that are kept by the attributes of a model's own modules, and by the variables and globals that
    its code, its hooks and its loss function refer to."""

    def __init__(self, own: Iterable[nn.Module], every: Iterable[nn.Module], loss_fn: Callable[..., Any]) -> None:
        """``own``: modules that are in no block; ``every``: all of the model."""
        self._own = tuple(own)
        self._others: list[Any] = [loss_fn, *(hook for module in every for hook in forward_hooks(module))]
        code = {cls for module in self._own for cls in type(module).__mro__ if issubclass(cls, nn.Module)} - {nn.Module}
        members = [member for cls in code for member in vars(cls).values()]
        self._others += [member for member in members if isinstance(member, list | dict | set | deque)]
        functions = [member for member in members if isinstance(member, types.FunctionType)]
        self._kinds: dict[type, bool] = {}  # as of ``_may_hold``, which is asked of each value
        # As a set: functions of one module refer to the same ones. Those that are not there yet may be, later.
        self._globals = {Entry(of=of, key=key) for function in functions for (_, of, key), _ in _globals(function)}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Way]]:
        queue: deque[tuple[tuple[_Step, ...], Any]] = deque(((), other) for other in self._others)
        for entry in self._globals:
            if (value := entry.now()) is not ABSENT:
                queue.append((((Entry, entry.of, entry.key),), value))
        for module in self._own:
            of = vars(module)
            queue += ((((Entry, of, name),), value) for name, value in attributes_of(module).items())
        seen: set[int] = set()
        for _ in range(_MOST):
            if not queue:
                return
            way, item = queue.popleft()
            if isinstance(item, torch.Tensor):
                places = [kind(of=of, key=key) for kind, of, key in way]
                yield item, tuple(accumulate(places, Inner.on_the_way))
            elif self._may_hold(item) and id(item) not in seen:
                seen.add(id(item))
                queue += (
                    (way if step is None else (*way, step), part)
                    for step, part in islice(_within(item), _MOST_OF_ONE)
                    if self._may_hold(part)
                )

    def _may_hold(self, value: Any) -> bool:
        """True of a tensor, and of what may hold one."""
        kind = type(value)
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = not issubclass(kind, _WITHOUT)
        return found


_Step = tuple[type[Holder], Any, Any]
"""A holder that is made only once a tensor is found in it: its class, ``of`` and ``key``."""


def tensors_in(holders: Iterable[Holder]) -> list[torch.Tensor]:
    """The tensors that are in these places, and within what is there."""
    return [item for _, item in _parts(holder.now() for holder in holders) if isinstance(item, torch.Tensor)]


def places_in(value: Any) -> set[int]:
    """The identities of what holders within a value are ``of``."""
    return {id(step[1]) for step, _ in _parts([value]) if step is not None}


def _parts(values: Iterable[Any]) -> Iterator[tuple[_Step | None, Any]]:
    """These values, and all within them, each with its holder."""
    queue: deque[tuple[_Step | None, Any]] = deque((None, value) for value in values)
    seen: set[int] = set()
    for _ in range(_MOST):
        if not queue:
            return
        step, item = queue.popleft()
        yield step, item
        if id(item) not in seen and not isinstance(item, (torch.Tensor, *_WITHOUT)):
            seen.add(id(item))
            queue += islice(_within(item), _MOST_OF_ONE)


def attributes_handed(arguments: Iterable[Any]) -> tuple[tuple[Holder, Any], ...]:
    """The attributes and entries of all objects and dicts within arguments, each place with its value now; without
    functions, of which nobody sets any."""
    found: list[tuple[Holder, Any]] = []
    seen: set[int] = set()
    left = [*arguments]
    while left and len(found) < _MOST_OF_ONE:
        item = left.pop()
        if type(item) in _PLAIN or isinstance(item, _NO_DATA) or id(item) in seen:
            continue
        seen.add(id(item))
        for step, part in _within(item):
            left.append(part)
            if step is not None and step[0] is not Contents:
                kind, of, key = step
                found.append((kind(of=of, key=key), part))
    return tuple(found)


def _within(item: Any) -> Iterator[tuple[_Step | None, Any]]:
    """The values within an object, each with its holder; with none where it can only be put back with the object."""
    if isinstance(item, tuple | frozenset):
        yield from ((None, part) for part in item)
    elif isinstance(item, list | set | deque):
        step = (Contents, item, None)
        yield from ((step, part) for part in list(islice(item, _MOST_OF_ONE)))
    elif isinstance(item, types.MethodType):
        yield from ((None, part) for part in (item.__self__, item.__func__))
    elif isinstance(item, functools.partial):
        yield from ((None, part) for part in (item.func, item.args, item.keywords))
    elif isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            if (value := Variable(of=cell).now()) is not ABSENT:
                yield (Variable, cell, None), value
        yield from ((step, value) for step, value in _globals(item) if value is not ABSENT)
    else:
        entries = item if isinstance(item, dict) else _attributes(item)
        yield from (((Entry, entries, key), value) for key, value in list(islice(entries.items(), _MOST_OF_ONE)))
        for slot in slots_of(type(item)):
            if "__slots__" in vars(slot.__objclass__) and (value := Slot(of=item, key=slot).now()) is not ABSENT:
                yield (Slot, item, slot), value  # those of classes in C may be there to be read alone


def _attributes(item: object) -> dict[str, Any]:
    """An object's attributes, without running code of its own."""
    try:
        found = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _globals(function: types.FunctionType) -> Iterator[tuple[_Step, Any]]:
    """The globals that a function may refer to, but for modules and code, each with its value now, or ``ABSENT``."""
    known = function.__globals__
    for name in _names(function.__code__):
        value = known.get(name, ABSENT)
        if not (callable(value) or isinstance(value, types.ModuleType)):
            yield (Entry, known, name), value


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names that code refers to, of globals and of attributes, but for those of Python itself."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner) - vars(builtins).keys()
