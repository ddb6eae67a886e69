"""The values that one micro-batch's forward has put into places which it shares with others (``holders``).

The probe learns which attributes are assigned in one stage and read in a later one, which other places the model's own
code reads tensors of earlier stages from, and which are within what blocks are handed. Behind each such stage the
micro-batch's own values are noted, and when it goes on, or a block that reads them is computed again, they are there as
its forward has left them.
"""

from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from penstock.compat.modules import buffers_of, watched_attributes
from penstock.tape.buffers import is_own
from penstock.tape.holders import Entry, Holder

Attribute = tuple[nn.Module, str]
"""A module and the name of one of its attributes."""


class Accesses:
    """The attributes of modules that each segment of a probe's forward reads and assigns."""

    def __init__(self, modules: Container[nn.Module]) -> None:
        self._modules = modules
        self._segment: int | None = None
        self._written: dict[Attribute, list[int]] = {}  # -> segments
        self._read: dict[Attribute, set[int]] = {}
        self._read_first: set[Attribute] = set()

    def watching(self) -> AbstractContextManager[None]:
        """Inside, what happens ``during`` segments is seen. To begin and to end it takes long: all kinds of modules
        that there are hear of it."""
        return watched_attributes(self._note_read, self._note_written)

    @contextmanager
    def during(self, segment: int) -> Iterator[None]:
        """Inside, a segment runs."""
        self._segment = segment
        try:
            yield
        finally:
            self._segment = None

    def _note_read(self, module: nn.Module, name: str) -> None:
        if self._segment is not None and is_own(name) and module in self._modules:
            self._read.setdefault((module, name), set()).add(self._segment)

    def _note_written(self, module: nn.Module, name: str) -> None:
        if self._segment is None or not is_own(name) or module not in self._modules:
            return
        attribute = module, name
        if attribute in self._read and attribute not in self._written:
            self._read_first.add(attribute)
        self._written.setdefault(attribute, []).append(self._segment)

    def written_in(self, segment: int) -> list[Holder]:
        """The places of the attributes that a segment assigns."""
        return [_place(attribute) for attribute, segments in self._written.items() if segment in segments]

    def found_by(self, segment: int) -> list[Holder]:
        """The places of the attributes that a segment reads and that earlier ones have assigned."""
        found = (a for a in self._handed_on() if segment in self._read.get(a, ()))
        return [_place(attribute) for attribute in found if self._written[attribute][0] < segment]

    def handed_on(self) -> Iterator[tuple[int, Holder]]:
        """Each segment with the place of an attribute that it assigns and that a later one reads."""
        for attribute in self._handed_on():
            last = max(self._read.get(attribute, ()), default=-1)
            yield from ((s, _place(attribute)) for s in set(self._written[attribute]) if s < last)

    def _handed_on(self) -> Iterator[Attribute]:
        """The attributes that may be handed on within a forward. One that is read before it is assigned, by several
        segments, goes on from one forward to the next instead, as a count does."""
        for attribute, segments in self._written.items():
            if attribute not in self._read_first or len(set(segments)) == 1:
                yield attribute


def _place(attribute: Attribute) -> Holder:
    module, name = attribute
    return Entry(of=buffers_of(module) if name in buffers_of(module) else vars(module), key=name)


Held = tuple[tuple[Holder, Any], ...]
"""Places, each with the value that is to be there."""


class OwnValues:
    """The values of one micro-batch, as its forward has left them."""

    def __init__(self) -> None:
        self._values: dict[Holder, Any] = {}

    def note(self, assigned: Iterable[Holder]) -> None:
        """The forward stops behind code that assigns these."""
        self._values.update((holder, holder.now()) for holder in assigned)

    def put(self) -> None:
        """The forward goes on."""
        put(self._values.items())

    def clear(self) -> None:
        """The forward has ended."""
        self._values.clear()

    def now(self, holders: Iterable[Holder]) -> Held:
        """The values in some places, where there are any."""
        return tuple((holder, self._values[holder]) for holder in holders if holder in self._values)


def put(values: Iterable[tuple[Holder, Any]]) -> None:
    for holder, value in sorted(values, key=lambda pair: pair[0].depth):
        holder.put(value)


@contextmanager
def held(values: Held) -> Iterator[None]:
    """Inside, these values are there, and afterwards those that were."""
    before = [(holder, holder.now()) for holder, _ in values]
    put(values)
    try:
        yield
    finally:
        put(before)
