"""Attributes of modules that one segment of a forward reads or assigns: values that it has for later ones.

The probe learns which are assigned in one stage and read in a later one, by the same micro-batch or the next.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from penstock.compat.modules import buffers_of, watched_attributes
from penstock.tape import trees
from penstock.tape.buffers import is_own
from penstock.tape.changes import Change
from penstock.tape.places import Entry, Held, Holder, is_figure, is_large, same
from penstock.tape.segments import BirthOf

Attribute = tuple[nn.Module, str]
"""A module and the name of one of its attributes."""


class Accesses:
    """The attributes of modules that each segment of a probe's forward reads and assigns."""

    def __init__(self, modules: Container[nn.Module]) -> None:
        self._modules = modules
        self._segment: int | None = None
        self._written: dict[Attribute, list[int]] = {}  # -> segments
        self._read: dict[Attribute, set[int]] = {}
        self._seen: dict[int, dict[Attribute, None]] = {}  # by segment, what it reads and earlier ones have written
        self._read_first: dict[Attribute, Any] = {}  # before they were written -> what was there then
        self._left: dict[Attribute, dict[int, Any]] = {}  # by these and by segments that assign small values to them

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
        for attribute in self._read_first:
            if segment in self._written[attribute] and not is_large(now := _place(attribute).now()):
                self._left.setdefault(attribute, {})[segment] = now

    def _note_read(self, module: nn.Module, name: str) -> None:
        if self._segment is None or not is_own(name) or module not in self._modules:
            return
        attribute = module, name
        self._read.setdefault(attribute, set()).add(self._segment)
        if self._written.get(attribute, [self._segment])[0] < self._segment:
            self._seen.setdefault(self._segment, {})[attribute] = None

    def _note_written(self, module: nn.Module, name: str) -> None:
        if self._segment is None or not is_own(name) or module not in self._modules:
            return
        attribute = module, name
        if attribute in self._read and attribute not in self._written:
            self._read_first[attribute] = _place(attribute).now()
        self._written.setdefault(attribute, []).append(self._segment)

    def written_in(self, segment: int) -> list[Holder]:
        """The places of the attributes that a segment assigns."""
        return [_place(attribute) for attribute, segments in self._written.items() if segment in segments]

    def seen_by(self, segment: int) -> list[Holder]:
        """The places of the attributes that a segment reads and that earlier ones have assigned."""
        return [_place(attribute) for attribute in self._seen.get(segment, ())]

    def found_by(self, segment: int) -> list[Holder]:
        """Places as of ``seen_by``, without those that go on from one forward to the next, as far as is known."""
        return [_place(attribute) for attribute in self._seen.get(segment, ()) if self._is_handed_on(attribute)]

    def finds(self, segment: int) -> list[Holder]:
        """The places that are to hold in a recomputation what they do in the call of a segment: as of ``found_by``, and
        of other small values that it reads and that it or others assign."""
        own = self.found_by(segment)
        others = [*self.seen_by(segment), *(place for place, _ in self.begun_with(segment))]
        return [*own, *(place for place in others if place not in own and not is_large(place.now()))]

    def undoes(self, segment: int) -> list[Holder]:
        """The places of attributes that a segment assigns, and that others use, too: its recomputation is not to."""
        return [
            _place(attribute)
            for attribute, segments in self._written.items()
            if segment in segments and len({*segments, *self._read.get(attribute, ())}) > 1
        ]

    def begun_with(self, segment: int) -> Held:
        """The places of the attributes that a segment reads and none before it assigns, but it itself or a later one,
        with what was there as the forward began."""
        return tuple(
            (_place(attribute), before)
            for attribute, before in self._read_first.items()
            if segment in self._read[attribute] and segment <= self._written[attribute][0] and not is_large(before)
        )

    def handed_on(self) -> Iterator[tuple[int, Holder]]:
        """Each segment with the place of an attribute that it assigns and that a later one reads, be it the first one
        of the next micro-batch (``restored``)."""
        for attribute in self._handed_on():
            again = self._ends_as_begun(attribute)
            last = max(self._read.get(attribute, ()), default=-1)
            yield from ((s, _place(attribute)) for s in set(self._written[attribute]) if s < last or again)

    def restored(self) -> set[Holder]:
        """The places of attributes that a forward leaves as it has found them, having changed them in between."""
        return {_place(attribute) for attribute in self._read_first if self._ends_as_begun(attribute)}

    def carried(self, depends: Callable[[torch.Tensor], bool]) -> Iterator[tuple[str, set[int]]]:
        """The attributes that one segment leaves for another one of the next micro-batch, in words, each with the
        segments that use it. ``depends``: says if a tensor's numbers follow from the micro-batch."""
        for attribute, before in self._read_first.items():
            read, written = self._read[attribute], set(self._written[attribute])
            if min(read) < min(written) and _goes_on(before, _place(attribute).now(), depends):
                yield _words(attribute), read | written

    def suspects(self, birth_of: BirthOf) -> Iterator[Change]:
        """Attributes that several segments use and that end as something else than what was found there, be it a count
        that nothing reads. Not tensors that ops have made of such: ``Carried`` knows more."""
        for attribute, before in self._read_first.items():
            segments, now = set(self._written[attribute]), _place(attribute).now()
            tensors = isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor) and birth_of(now) is not None
            if len(segments | self._read[attribute]) > 1 and not (tensors or same(before, now)):
                after = dict.fromkeys(sorted(segments), now) | self._left.get(attribute, {})
                yield Change(
                    place=_place(attribute), name=_words(attribute), before=before, after=after, attribute=True
                )

    def _handed_on(self) -> Iterator[Attribute]:
        """The attributes that may be handed on within a forward. One that is read before it is assigned, by several
        segments, goes on from one forward to the next instead, as a count does, unless it is again what it was."""
        return filter(self._is_handed_on, self._written)

    def _is_handed_on(self, attribute: Attribute) -> bool:
        one = len(set(self._written[attribute])) == 1
        return one or attribute not in self._read_first or self._ends_as_begun(attribute)

    def _ends_as_begun(self, attribute: Attribute) -> bool:
        """True of an attribute that several segments assign, and that is what it was before they did."""
        if attribute not in self._read_first or len(set(self._written[attribute])) == 1:
            return False
        return same(self._read_first[attribute], _place(attribute).now())


def _goes_on(before: Any, now: Any, depends: Callable[[torch.Tensor], bool]) -> bool:
    """True if code that finds what is there ``now`` does something else than with what was there ``before``: unless it
    is a mark, or a table that does not depend on the micro-batch. Where both are tensors, ``Carried`` knows more."""
    if isinstance(before, torch.Tensor):
        return False
    if is_figure(now) and not trees.tensors(now):
        return not same(before, now)
    return any(map(depends, trees.tensors(now)))


def _words(attribute: Attribute) -> str:
    module, name = attribute
    return f"attribute {name!r} of a {type(module).__name__}"


def _place(attribute: Attribute) -> Holder:
    module, name = attribute
    return Entry(of=buffers_of(module) if name in buffers_of(module) else vars(module), key=name)
