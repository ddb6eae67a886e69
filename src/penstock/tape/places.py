"""Places for values: attributes, entries of dicts, lists, variables.

Forwards that are under way share them. The probe learns which attributes are assigned in one stage and read in a later
one (``accesses``), which other places the model's own code reads tensors of earlier stages from (``holders``), or
changes (``changes``), and which are within what blocks are handed. Behind each such stage the micro-batch's own values
are noted, and when it goes on, or a block that reads them is computed again, they are there as its forward has left
them.
"""

import array
import operator
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from penstock.compat.torch import unwatched, without_functions
from penstock.tape import trees

ABSENT: Any = object()
"""The value where there is none."""
_NUMBERS = (bool, int, float, complex, str, bytes)
"""Types of which another object may be the same value."""
SMALL = 4096
"""Elements of tensors whose numbers are looked at."""


def same(one: Any, other: Any, depth: int = 3) -> bool:
    """True if two values are one object, or the same number or text, small tensors of the same numbers, or such side by
    side: in tuples, lists, dicts and namespaces that are ``depth`` deep."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _are_equal(one, other)
    if isinstance(one, _NUMBERS):
        return bool(one == other)
    if type(one) is types.SimpleNamespace:
        one, other = vars(one), vars(other)
    if not depth:
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(same(one[key], other[key], depth - 1) for key in one)
    if not isinstance(one, tuple) and type(one) is not list:
        return False
    return len(one) == len(other) and all(same(a, b, depth - 1) for a, b in zip(one, other, strict=True))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (
        one.is_meta
        or one.numel() > SMALL
        or (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device)
    ):
        return False
    with torch.no_grad(), without_functions(), unwatched():
        return torch.equal(one, other)


def is_large(value: Any) -> bool:
    """True of what holds many numbers in tensors."""
    return sum(tensor.numel() for tensor in trees.tensors(value)) > SMALL


def is_figure(value: Any) -> bool:
    """True of numbers, of tensors, and of what holds nothing else."""
    if isinstance(value, Mapping):
        return all(map(is_figure, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(is_figure, value))
    return isinstance(value, int | float | complex | torch.Tensor) and not isinstance(value, bool)


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


def items_of(of: Any) -> Iterator[Any]:
    """The items of a list, a set, a deque or a tuple, without running code of a class's own."""
    kind: Any = next(kind for kind in (list, tuple, set, frozenset, deque) if isinstance(of, kind))
    return kind.__iter__(of)  # type: ignore[no-any-return]


class _OfObject:
    """A place in the dict of an object's attributes."""

    @classmethod
    def within(cls, value: Any, key: Any) -> Any:
        return attributes_within(value)


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
        return dict(dict.items(self.of))  # ``copy`` asks a class of one's own for each value

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
        return tuple(items_of(self.of))

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


class Numbers(Holder):
    """All of an array of numpy's or of Python's, as bytes."""

    outer = (np.ndarray, bytearray, array.array)

    def now(self) -> Any:
        return bytes(self.of) if isinstance(self.of, bytearray) else self.of.tobytes()

    def put(self, value: Any) -> None:
        if value == self.now():
            return
        if isinstance(self.of, np.ndarray):
            self.of[...] = np.frombuffer(value, self.of.dtype).reshape(self.of.shape)
        else:
            self.of[:] = value if isinstance(self.of, bytearray) else array.array(self.of.typecode, value)


class Memory(Holder):
    """The numbers of a tensor."""

    def now(self) -> Any:
        with torch.no_grad(), without_functions(), unwatched():
            return self.of.detach().clone()

    def put(self, value: Any) -> None:
        with torch.no_grad(), without_functions(), unwatched():
            if not torch.equal(self.of, value):
                self.of.copy_(value)


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


Held = tuple[tuple[Holder, Any], ...]
"""Places, each with the value that is to be there."""
Way = tuple[Holder, ...]
"""The holders on the way to a value, from the outermost to its own."""
Step = tuple[type[Holder], Any, Any]
"""A holder that is made only once it is needed: its class, ``of`` and ``key``."""
Steps = tuple[Step, ...]
"""A way as it is found: see ``holders.along``."""


def values_in(places: Iterable[Holder]) -> Held:
    """These places, each with the value that is there now."""
    return tuple((place, place.now()) for place in places)


def put(values: Iterable[tuple[Holder, Any]]) -> None:
    for holder, value in sorted(values, key=lambda pair: pair[0].depth):
        holder.put(value)


@contextmanager
def held(values: Held) -> Iterator[None]:
    """Inside, these values are there, and afterwards those that were."""
    before = values_in(holder for holder, _ in values)
    put(values)
    try:
        yield
    finally:
        put(before)


def name_of(key: Any) -> str:
    """A place's key in words."""
    return str(key) if isinstance(key, str | int) else getattr(key, "__name__", type(key).__name__)


def attributes_within(item: object) -> dict[str, Any] | None:
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


_KNOWN_SLOTS: MutableMapping[type, tuple[types.MemberDescriptorType, ...]] = weakref.WeakKeyDictionary()


def slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """The slots of a class and of its bases, but for Python's own."""
    if kind not in _KNOWN_SLOTS:
        classes = [cls for cls in kind.__mro__ if cls.__module__ != "builtins"]
        found = (d for cls in classes for d in vars(cls).values() if isinstance(d, types.MemberDescriptorType))
        _KNOWN_SLOTS[kind] = tuple(found)
    return _KNOWN_SLOTS[kind]
