"""The search for places in which a model's own code keeps values for later (``places``).

There is one such place for all micro-batches that are under way. So each has its own values, which are put there when
its forward goes on (``places``).
"""

import array
import functools
import logging
import queue
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.compat.modules import forward_hooks
from penstock.tape import trees
from penstock.tape.buffers import attributes_of
from penstock.tape.code import globals_of, is_of_a_model, reached
from penstock.tape.generators import KINDS, Generator, is_own, of_modules
from penstock.tape.places import (
    ABSENT,
    Additions,
    Attribute,
    Attributes,
    ClassAttribute,
    Contents,
    Entries,
    Entry,
    Holder,
    Inner,
    Numbers,
    Part,
    Slot,
    Step,
    Steps,
    Variable,
    attributes_within,
    items_of,
    name_of,
    slots_of,
)

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

_OF_THREADS = (threading.Thread, queue.Queue, type(threading.Lock()), type(threading.RLock()))
"""Types of what an object has that several threads change."""
_KEEPING = frozenset(
    (
        *("builtins", "types", "array", "collections", "argparse", "functools", "weakref", threading.local.__module__),
        *("numpy", "transformers", "peft"),
    )
)
"""Packages whose objects models keep values in."""


class Search:
    """Finds the tensors that are kept by the attributes of a model's own modules, and by the variables and globals that
    its code, its hooks and its loss function refer to, or functions and classes of its own that these use."""

    def __init__(self, own: Iterable[nn.Module], every: Iterable[nn.Module], loss_fn: Callable[..., Any]) -> None:
        """``own``: modules that are in no block; ``every``: all of the model."""
        self._own, self._every = tuple(own), tuple(every)
        # The tape's own hooks, of which each module has one, keep nothing: a search would grow with the model.
        hooks = (hook for module in self._every for hook in forward_hooks(module) if not _is_ours(hook))
        self._others: list[Any] = [loss_fn, *hooks]
        self._seen: set[int] = set()  # values from which ``places`` was, by identity
        self._kinds: dict[type, bool] = {}  # as of ``_may_hold``, which is asked of each value
        self._read: dict[tuple[types.CodeType, int], list[tuple[dict[str, Any], str]]] = {}  # globals that code names
        self._code, self._globals = self._code_of(self._own)

    def _code_of(self, modules: Iterable[nn.Module]) -> tuple[list[Any], set[Entry]]:
        """The functions and classes that modules refer to, and those of the model's own; and the globals of these. As a
        set: functions of one module refer to the same ones. Those that are not there yet may be, later."""
        kinds = {cls for kind in set(map(type, modules)) for cls in kind.__mro__ if issubclass(cls, nn.Module)}
        values = [value for module in self._own for value in attributes_of(module).values()]
        functions, classes = reached(kinds - {nn.Module}, (*self._others, *values))
        code: list[Any] = [*classes, *(code for code in functions if is_of_a_model(code.__module__))]
        return code, {Entry(of=of, key=key) for function in functions for (_, of, key), _ in _globals(function)}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Steps]]:
        return ((item, way) for item, way in self._all(self._others) if isinstance(item, torch.Tensor))

    def tensors_in(self, places: Iterable[Holder]) -> Iterator[torch.Tensor]:
        """The tensors that are in these places, and within what is there."""
        found = self._walk((((), place.now()) for place in places), set())
        return (item for item, _ in found if isinstance(item, torch.Tensor))

    def generators(self) -> Iterator[Generator]:
        """The model's generators of random numbers. Not those of an object whose method is the loss function, as of a
        trainer, which draws data from them."""
        others = self._others if isinstance(self._others[0], types.FunctionType) else self._others[1:]
        yield from of_modules(self._every)
        yield from (item for item, _ in self._all(others) if is_own(item))

    def places(self) -> Iterator[tuple[Holder, str]]:
        """The objects, dicts, lists and variables that are found, each as a whole, globals and attributes of classes,
        with their names; also those that code of blocks refers to. Not those of an object whose method is the loss
        function, nor tables."""
        code, known = self._code_of(self._every)
        yield from ((place, name_of(place.key)) for place in known)
        classes = (kind for kind in code if isinstance(kind, type))
        yield from (
            (ClassAttribute(of=kind, key=key), f"{kind.__name__}.{key}") for kind in classes for key, _ in _own(kind)
        )
        others = self._others[isinstance(self._others[0], types.MethodType) :]
        functions = [(part, ()) for part in code if isinstance(part, types.FunctionType)]
        self._seen.clear()
        found = self._walk(self._roots(others, code, known), self._seen, _may_change)
        yield from _places_within(chain(functions, found))

    def places_on(self, modules: Iterable[nn.Module]) -> Iterator[tuple[Holder, str]]:
        """More of these, reached from the attributes of a block's modules, and from nowhere before."""
        return _places_within(self._walk(_on_modules(modules), self._seen, _may_change))

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
        return self._walk(self._roots(others, self._code, self._globals), set())

    def _roots(self, others: Iterable[Any], code: Iterable[Any], known: Iterable[Entry]) -> Iterator[tuple[Steps, Any]]:
        """The values at which a search begins, each with the way to it."""
        yield from (((), other) for other in others)
        for item in code:
            yield from ((() if step is None else (step,), part) for step, part in parts(item) if self._may_hold(part))
        for entry in known:
            if (value := entry.now()) is not ABSENT:
                yield ((Entry, entry.of, entry.key),), value
        yield from _on_modules(self._own)

    def _walk(
        self, roots: Iterable[tuple[Steps, Any]], seen: set[int], looks_into: Callable[[Any], bool] = lambda item: True
    ) -> Iterator[tuple[Any, Steps]]:
        """All values from these on that are tensors, or may hold some, each with the way to it. ``seen``: those that
        are left out, by identity; these are noted there. ``looks_into``: says of which others it is."""
        queue = deque(roots)
        for _ in range(_MOST):
            if not queue:
                return
            way, item = queue.popleft()
            if isinstance(item, torch.Tensor):
                yield item, way
            elif self._may_hold(item) and id(item) not in seen and looks_into(item):
                seen.add(id(item))
                yield item, way
                queue += (
                    (way if step is None else (*way, step), part)
                    for step, part in islice(self._within(item), _MOST_OF_ONE)
                    if self._may_hold(part)
                )

    def _within(self, item: Any) -> Iterator[tuple[Step | None, Any]]:
        """The values within an object, and of a function those that it refers to, each with its holder; with none where
        it can only be put back with the object."""
        yield from parts(item)
        if not isinstance(item, types.FunctionType):
            return
        key = item.__code__, id(item.__globals__)
        places = self._read.get(key)
        if places is None:  # code names far more than there is
            places = self._read[key] = [*globals_of(item)]
        for known, name in places:
            if (value := known.get(name, ABSENT)) is not ABSENT and _may_be_kept(value):
                yield (Entry, known, name), value

    def _may_hold(self, value: Any) -> bool:
        """True of a tensor, and of what may hold one."""
        kind = type(value)
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = not (issubclass(kind, _WITHOUT) or _is_ours(kind))
        return found


def _holder(step: Step) -> Holder:
    kind, of, key = step
    return kind(of=of, key=key)


def _on_modules(modules: Iterable[nn.Module]) -> Iterator[tuple[Steps, Any]]:
    """The attributes of modules, each with its place."""
    for module in modules:
        of = vars(module)
        yield from ((((Entry, of, name),), value) for name, value in attributes_of(module).items())


def _places_within(found: Iterable[tuple[Any, Steps]]) -> Iterator[tuple[Holder, str]]:
    """The places that found values consist of, with their names."""
    for item, way in found:
        if not isinstance(item, _NOT_OWN):
            yield from ((_holder(step), _name((*way, step))) for step in _places(item) if _is_small(step))


def _may_change(item: Any) -> bool:
    """False of a library's objects, but for configurations and the like, and of those that other threads change."""
    module = getattr(type(item), "__module__", None)
    if not (is_of_a_model(module) or str(module).partition(".")[0] in _KEEPING):
        return False
    return not any(isinstance(value, _OF_THREADS) for value in (attributes_within(item) or {}).values())


def _is_small(step: Step) -> bool:
    """False of a table of more than ``_MOST_OF_ONE`` values, which nobody sets in a forward."""
    kind, of, _ = step
    return kind in (Slot, Variable) or (np.size(of) if kind is Numbers else len(of)) <= _MOST_OF_ONE


def _name(way: Steps) -> str:
    """The names of the places on a way."""
    return ".".join(name_of(key) for _, _, key in way if key is not None) or "a variable of a function"


def _own(kind: type) -> list[tuple[str, Any]]:
    """A class's attributes with their names, but for methods and those of Python's: a dataclass has as many of these,
    as annotations and fields, as all else that a search comes to."""
    members = list(vars(kind).items())
    return [
        (name, value) for name, value in members if not (name[:2] == "__" == name[-2:] or isinstance(value, _METHODS))
    ]


def along(way: Iterable[Step]) -> Iterator[Holder]:
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
            if _is_small((kind, of, key)):
                place = kind(of=of, key=key)
                value = place.now()
                found.append((place, value))
                single = kind in (Slot, Variable, Numbers)
                left += (value,) if single else value if kind is Contents else value.values()
    return tuple(found)


def _is_ours(code: Callable[..., Any]) -> bool:
    """True of a class or a function of Penstock's, as of an engine to which an object that blocks are handed refers."""
    module = getattr(code, "__module__", None) or ""  # as a ``functools.partial`` has none
    return bool(module.partition(".")[0] == __name__.partition(".")[0])


def _places(item: Any) -> Iterator[Step]:
    """The places that an object consists of: the variables of a function; all of a dict, a list or an array; all
    attributes."""
    if isinstance(item, types.FunctionType):
        yield from ((Variable, cell, None) for cell in item.__closure__ or ())
        if item.__dict__:
            yield Attributes, item.__dict__, None
        return
    if isinstance(item, dict):
        yield Entries, item, None
    elif isinstance(item, list | set | deque):
        yield Contents, item, None
    elif _is_array(item):
        yield Numbers, item, None
    attributes = attributes_within(item)
    if attributes is not None:
        yield Attributes, attributes, None
    yield from ((Slot, item, slot) for slot in slots_of(type(item)) if _may_be_set(slot))


def _may_be_set(slot: types.MemberDescriptorType) -> bool:
    """False of the slots of classes in C, which may be there to be read alone."""
    return "__slots__" in vars(slot.__objclass__)


def _is_array(item: Any) -> bool:
    """True of an array of numbers that has its own memory."""
    if isinstance(item, np.ndarray):
        return bool(item.flags.owndata and item.flags.writeable) and not item.dtype.hasobject
    return isinstance(item, bytearray | array.array)


def _fixed(item: Any) -> Collection[Any]:
    """The values within an object that has no places for them."""
    if isinstance(item, types.FunctionType):
        return (*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values())
    if isinstance(item, types.MethodType):
        return item.__self__, item.__func__
    if isinstance(item, functools.partial):
        return item.func, item.args, item.keywords
    return tuple(items_of(item)) if isinstance(item, tuple | frozenset) else ()


def parts(item: Any) -> Iterator[tuple[Step | None, Any]]:
    """The values within an object: see ``Search._within``."""
    if isinstance(item, type):
        yield from (((ClassAttribute, item, name), value) for name, value in _own(item))
        return
    if isinstance(item, tuple):
        yield from (((Part, item, index), part) for index, part in enumerate(items_of(item)))
    else:
        yield from ((None, part) for part in _fixed(item))
    for step in _places(item):
        kind, of, _ = step
        if issubclass(kind, Entries):
            each = Attribute if kind is Attributes else Entry
            yield from (((each, of, key), value) for key, value in list(islice(dict.items(of), _MOST_OF_ONE)))
        elif kind is Contents:
            yield from ((step, part) for part in list(islice(items_of(of), _MOST_OF_ONE)))
        elif kind is not Numbers and (value := _holder(step).now()) is not ABSENT:
            yield step, value
    read_alone = (Slot(of=item, key=slot).now() for slot in slots_of(type(item)) if not _may_be_set(slot))
    yield from ((None, value) for value in read_alone if value is not ABSENT)


def _globals(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    """The globals that a function may refer to, but for modules and code, each with its value now, or ``ABSENT``."""
    for known, name in globals_of(function):
        value = known.get(name, ABSENT)
        if _may_be_kept(value):
            yield (Entry, known, name), value


def _may_be_kept(value: Any) -> bool:
    """False of modules and of code."""
    return not (isinstance(value, types.ModuleType) or (callable(value) and not is_of_a_model(type(value).__module__)))
