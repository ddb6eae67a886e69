"""Places in which a model's own code keeps values for later: attributes, entries of dicts, lists, variables.

There is one such place for all micro-batches that are under way. So each has its own values, which are put there when
its forward goes on (``own_values``).
"""

import functools
import logging
import operator
import queue
import threading
import types
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn

from penstock.compat.modules import forward_hooks
from penstock.tape import trees
from penstock.tape.buffers import attributes_of
from penstock.tape.code import globals_of, is_of_a_model, reached
from penstock.tape.generators import KINDS, Generator, is_own, of_modules
from penstock.tape.opaque import slots_of

ABSENT: Any = object()
"""The value where there is none."""

_MOST = 20_000
"""Values that one search looks at, the nearest first."""
_MOST_OF_ONE = 1_000
"""Values of one object of these, taken at once: other threads may change it."""

_WITHOUT = (
    *(types.NoneType, str, bytes, bool, int, float, complex, type, range, slice, types.ModuleType),
    *(types.BuiltinFunctionType, nn.Module, torch.dtype, torch.device, logging.Logger),
)
"""Types that hold no tensors, or (modules) such as are looked at by themselves."""

_METHODS = (types.FunctionType, property, staticmethod, classmethod, type)
"""Types of what is in a class and keeps nothing for it: functions are looked at by themselves."""

_PLAIN = trees.PLAIN | {torch.Tensor, nn.Parameter}
"""Types of nearly all arguments of blocks."""
_NOT_OWN = (torch.Tensor, threading.Thread, queue.Queue, *KINDS, *_WITHOUT)
"""Types of what has no places that are a micro-batch's: tensors, and what other threads change."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Holder(ABC):
    """A place for a value: in ``of``, by ``key``. Two are equal if they are the same place."""

    of: Any
    key: Any = None

    outer: ClassVar[tuple[type, ...]] = ()
    """types of the values that such a place is at once within"""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.of is other.of and self.key == other.key

    def __hash__(self) -> int:
        return hash((id(self.of), self.key))

    @property
    def depth(self) -> int:
        """The number of places that it is within, which are filled before it is."""
        return 0

    @abstractmethod
    def now(self) -> Any:
        """The value that is there, or ``ABSENT``."""

    @abstractmethod
    def put(self, value: Any) -> None: ...

    @classmethod
    def within(cls, value: Any, key: Any) -> Any:
        """``of`` of such a place that is at once within a value; None: there is none."""
        return value if isinstance(value, cls.outer) else None


def _set_entry(of: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry, or take it out, without running code of a class's own, which may refuse that (``ModelOutput``)."""
    kind = OrderedDict if isinstance(of, OrderedDict) else dict
    before = dict.get(of, key, ABSENT)
    if value is not ABSENT and value is not before:
        kind.__setitem__(of, key, value)
    elif value is ABSENT and before is not ABSENT:
        kind.__delitem__(of, key)


def _items(of: Any) -> Iterator[Any]:
    """The items of a list, a set, a deque or a tuple, without running code of a class's own."""
    kind: Any = next(kind for kind in (list, tuple, set, frozenset, deque) if isinstance(of, kind))
    return kind.__iter__(of)  # type: ignore[no-any-return]


class _OfObject:
    """A place in the dict of an object's attributes."""

    @classmethod
    def within(cls, value: Any, key: Any) -> Any:
        return _attributes(value)


class Entry(Holder):
    """An entry of a dict, be it that of an object's attributes or of globals."""

    outer = (dict,)

    def now(self) -> Any:
        return dict.get(self.of, self.key, ABSENT)

    def put(self, value: Any) -> None:
        _set_entry(self.of, self.key, value)


class Attribute(_OfObject, Entry):
    """An attribute of an object."""


class Entries(Holder):
    """All of a dict."""

    outer = (dict,)

    def now(self) -> Any:
        return dict.copy(self.of)

    def put(self, value: Any) -> None:
        for key in dict.keys(self.of) - value.keys():
            _set_entry(self.of, key, ABSENT)
        for key, item in value.items():
            _set_entry(self.of, key, item)


class Attributes(_OfObject, Entries):
    """All attributes of an object."""


class Contents(Holder):
    """All of a list, a set or a deque."""

    outer = (list, set, deque)

    def now(self) -> Any:
        return tuple(_items(self.of))

    def put(self, value: Any) -> None:
        now = self.now()
        if len(value) == len(now) and all(map(operator.is_, value, now)):
            return  # code may go through it
        kind: Any = next(kind for kind in self.outer if isinstance(self.of, kind))
        kind.clear(self.of)
        (kind.update if kind is set else kind.extend)(self.of, value)


class Additions(Contents):
    """All of a list, a set or a deque that may be there to be added to: what has come behind what was there stays."""

    def put(self, value: Any) -> None:
        now = self.now()
        if not value or len(value) > len(now) or not all(map(operator.is_, value, now)):
            super().put(value)


class Part(Holder):
    """A part of a tuple, which has no other than it is made of."""

    outer = (tuple,)

    def now(self) -> Any:
        return tuple.__getitem__(self.of, self.key) if self.key < tuple.__len__(self.of) else ABSENT

    def put(self, value: Any) -> None:
        pass


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

    @classmethod
    def within(cls, value: Any, key: Any) -> Any:
        return value if isinstance(value, key.__objclass__) else None


class ClassAttribute(Holder):
    """An attribute of a class itself, which its metaclass is not asked about."""

    outer = (type,)

    def now(self) -> Any:
        return vars(self.of).get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        before = self.now()
        if value is not ABSENT and value is not before:  # to set one takes from Python what it knows of the class
            type.__setattr__(self.of, self.key, value)
        elif value is ABSENT and before is not ABSENT:
            type.__delattr__(self.of, self.key)


class Inner(Holder):
    """A place within whatever is in another place, ``of``: the model may put another object there, or first make it in
    a forward. ``key``: the way from there, of each place its class as a holder, and key."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Inner and (self.of, self.key) == (other.of, other.key)

    def __hash__(self) -> int:
        return hash((self.of, self.key))

    @property
    def depth(self) -> int:
        return len(self.key)

    def _there(self) -> Holder | None:
        """The place; None: there is something else than in the probe."""
        place: Holder = self.of
        for kind, key in self.key:
            of = kind.within(place.now(), key)
            if of is None:
                return None
            place = kind(of=of, key=key)
        return place

    def now(self) -> Any:
        there = self._there()
        return ABSENT if there is None else there.now()

    def put(self, value: Any) -> None:
        there = self._there()
        if there is not None:
            there.put(value)


Way = tuple[Holder, ...]
"""The holders on the way to a value, from the outermost to its own."""
_Step = tuple[type[Holder], Any, Any]
"""A holder that is made only once it is needed: its class, ``of`` and ``key``."""
Steps = tuple[_Step, ...]
"""A way as it is found: see ``along``."""


class Search:
    """Finds the tensors that are kept by the attributes of a model's own modules, and by the variables and globals that
    its code, its hooks and its loss function refer to, or functions and classes of its own that these use."""

    def __init__(self, own: Iterable[nn.Module], every: Iterable[nn.Module], loss_fn: Callable[..., Any]) -> None:
        """``own``: modules that are in no block; ``every``: all of the model."""
        self._own, self._every = tuple(own), tuple(every)
        # The tape's own hooks, of which each module has one, keep nothing: a search would grow with the model.
        hooks = (hook for module in self._every for hook in forward_hooks(module) if not _is_ours(hook))
        self._others: list[Any] = [loss_fn, *hooks]
        kinds = {cls for module in self._own for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        values = [value for module in self._own for value in attributes_of(module).values()]
        functions, classes = reached(kinds - {nn.Module}, (*self._others, *values))
        self._code: list[Any] = [*classes, *(code for code in functions if is_of_a_model(code.__module__))]
        self._kinds: dict[type, bool] = {}  # as of ``_may_hold``, which is asked of each value
        # As a set: functions of one module refer to the same ones. Those that are not there yet may be, later.
        self._globals = {Entry(of=of, key=key) for function in functions for (_, of, key), _ in _globals(function)}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Steps]]:
        return ((item, way) for item, way in self._all(self._others) if isinstance(item, torch.Tensor))

    def generators(self) -> Iterator[Generator]:
        """The model's generators of random numbers. Not those of an object whose method is the loss function, as of a
        trainer, which draws data from them."""
        others = self._others if isinstance(self._others[0], types.FunctionType) else self._others[1:]
        yield from of_modules(self._every)
        yield from (item for item, _ in self._all(others) if is_own(item))

    def ways_to(self, places: Container[Holder]) -> Iterator[Holder]:
        """The holders on the ways to some of these places that are found; lists are there to be added to."""
        for item, way in self._all(self._others):
            for step in () if isinstance(item, torch.Tensor) else _places(item):
                if _holder(step) in places:
                    yield from along(
                        (Additions if kind is Contents else kind, of, key) for kind, of, key in (*way, step)
                    )

    def _all(self, others: Iterable[Any]) -> Iterator[tuple[Any, Steps]]:
        """All values that are tensors, or may hold some, each with the way to it."""
        queue: deque[tuple[Steps, Any]] = deque(((), other) for other in others)
        for code in self._code:
            queue += ((() if step is None else (step,), part) for step, part in _parts(code) if self._may_hold(part))
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
                yield item, way
            elif self._may_hold(item) and id(item) not in seen:
                seen.add(id(item))
                yield item, way
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


def _holder(step: _Step) -> Holder:
    kind, of, key = step
    return kind(of=of, key=key)


def along(way: Iterable[_Step]) -> Iterator[Holder]:
    """The places on a way, each as one within the outermost that it is found from."""
    root: Holder | None = None
    before: Any = ABSENT
    steps: tuple[tuple[type[Holder], Any], ...] = ()
    for kind, of, key in way:
        if root is not None and kind.within(before, key) is of:
            steps = (*steps, (kind, key))
            yield Inner(of=root, key=steps)
        else:  # a variable of a function, or within a list
            root, steps = kind(of=of, key=key), ()
            yield root
        before = kind(of=of, key=key).now()


def tensors_in(holders: Iterable[Holder]) -> list[torch.Tensor]:
    """The tensors that are in these places, and within what is there."""
    queue, seen, found = deque(holder.now() for holder in holders), set[int](), []
    for _ in range(_MOST):
        if not queue:
            break
        item = queue.popleft()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif id(item) not in seen and not isinstance(item, _WITHOUT):
            seen.add(id(item))
            queue += (part for _, part in islice(_within(item), _MOST_OF_ONE))
    return found


def places_handed(arguments: Iterable[Any]) -> tuple[tuple[Holder, Any], ...]:
    """All dicts, lists, attributes of objects and variables of functions within arguments, the nearest first, each with
    what is there now; without tables of more than ``_MOST_OF_ONE`` values, which nobody sets in a forward."""
    found: list[tuple[Holder, Any]] = []
    seen: set[int] = set()
    left = deque(arguments)
    while left and len(found) < _MOST_OF_ONE:
        item = left.popleft()
        if type(item) in _PLAIN or isinstance(item, _NOT_OWN) or id(item) in seen or _is_ours(type(item)):
            continue
        seen.add(id(item))
        left += _fixed(item)
        for kind, of, key in _places(item):
            place, single = kind(of=of, key=key), kind in (Slot, Variable)
            if single or len(of) <= _MOST_OF_ONE:
                value = place.now()
                found.append((place, value))
                left += (value,) if single else value if kind is Contents else value.values()
    return tuple(found)


def _is_ours(code: Callable[..., Any]) -> bool:
    """True of a class or a function of Penstock's, as of an engine to which an object that blocks are handed refers."""
    module = getattr(code, "__module__", None) or ""  # as a ``functools.partial`` has none
    return bool(module.partition(".")[0] == __name__.partition(".")[0])


def _places(item: Any) -> Iterator[_Step]:
    """The places that an object consists of: the variables of a function; all of a dict, or a list; all attributes."""
    if isinstance(item, types.FunctionType):
        yield from ((Variable, cell, None) for cell in item.__closure__ or ())
        if item.__dict__:
            yield Attributes, item.__dict__, None
        return
    if isinstance(item, dict):
        yield Entries, item, None
    elif isinstance(item, list | set | deque):
        yield Contents, item, None
    attributes = _attributes(item)
    if attributes is not None:
        yield Attributes, attributes, None
    # Those of classes in C may be there to be read alone.
    yield from ((Slot, item, slot) for slot in slots_of(type(item)) if "__slots__" in vars(slot.__objclass__))


def _fixed(item: Any) -> Collection[Any]:
    """The values within an object that has no places for them."""
    if isinstance(item, types.FunctionType):
        return (*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values())
    if isinstance(item, types.MethodType):
        return item.__self__, item.__func__
    if isinstance(item, functools.partial):
        return item.func, item.args, item.keywords
    return tuple(_items(item)) if isinstance(item, tuple | frozenset) else ()


def _within(item: Any) -> Iterator[tuple[_Step | None, Any]]:
    """The values within an object, and of a function those that it refers to, each with its holder; with none where it
    can only be put back with the object."""
    yield from _parts(item)
    if isinstance(item, types.FunctionType):
        yield from ((step, value) for step, value in _globals(item) if value is not ABSENT)


def _parts(item: Any) -> Iterator[tuple[_Step | None, Any]]:
    """The values within an object: see ``_within``."""
    if isinstance(item, type):
        members = list(vars(item).items())
        yield from (((ClassAttribute, item, name), value) for name, value in members if not isinstance(value, _METHODS))
        return
    if isinstance(item, tuple):
        yield from (((Part, item, index), part) for index, part in enumerate(_items(item)))
    else:
        yield from ((None, part) for part in _fixed(item))
    for step in _places(item):
        kind, of, _ = step
        if issubclass(kind, Entries):
            each = Attribute if kind is Attributes else Entry
            yield from (((each, of, key), value) for key, value in list(islice(dict.items(of), _MOST_OF_ONE)))
        elif kind is Contents:
            yield from ((step, part) for part in list(islice(_items(of), _MOST_OF_ONE)))
        elif (value := _holder(step).now()) is not ABSENT:
            yield step, value


def _attributes(item: object) -> dict[str, Any] | None:
    """The dict of an object's attributes, without running code of its own; None: it has none. Of a ``threading.local``
    that of this thread."""
    read: Callable[[Any, str], Any] = object.__getattribute__
    if isinstance(item, threading.local):
        read = threading.local.__getattribute__
    try:
        found = read(item, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _globals(function: types.FunctionType) -> Iterator[tuple[_Step, Any]]:
    """The globals that a function may refer to, but for modules and code, each with its value now, or ``ABSENT``."""
    for known, name in globals_of(function):
        value = known.get(name, ABSENT)
        if not (isinstance(value, types.ModuleType) or (callable(value) and not is_of_a_model(type(value).__module__))):
            yield (Entry, known, name), value
