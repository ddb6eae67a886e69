"""Changes that a forward makes in objects, dicts, lists, variables and classes that its model reaches.

No op of torch tells of it, nor does a module that is assigned to. So a probe looks behind each segment for what has
become another value (``Changes``). Nobody sees who reads it. Where a micro-batch would find what the one before it has
left, that is tried out: the forward is run once more from there, and must come to the same loss (``Trials``).
"""

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from penstock.compat.torch import storage_key
from penstock.tape import trees
from penstock.tape.places import (
    ABSENT,
    Attribute,
    Attributes,
    Contents,
    Entries,
    Entry,
    Held,
    Holder,
    Memory,
    Numbers,
    is_figure,
    is_large,
    name_of,
    put,
    same,
)
from penstock.tape.watch import Operand

BROKEN_OFF: Any = object()
"""In place of the loss of a forward that has ended in an error."""
_LET_GO: Any = object()
"""In place of a value with tensors that another one has followed: it is not to live on."""


@dataclass(kw_only=True, eq=False)
class Change:
    """A place that a forward changes, with its name. ``before``: the value as the forward began; ``after``: segment ->
    the value that it has left, of those that have put another one there; ``set_before``: others have put there what
    was there already; ``handed``: it is in something that blocks are handed, of which each micro-batch has its own
    values anyway; ``begins_anew``: several segments change it, and each forward ends with what it began with, or with
    the same as the one before; ``attribute``: it is one of a module, of which only some are looked at so."""

    place: Holder
    name: str
    before: Any
    after: dict[int, Any] = field(default_factory=dict[int, Any])
    set_before: bool = False
    handed: bool = False
    begins_anew: bool = False
    attribute: bool = False

    @property
    def first(self) -> int:
        return min(self.after)

    @property
    def last(self) -> Any:
        return next(reversed(self.after.values()))

    @property
    def is_of_one(self) -> bool:
        """True if one segment alone sets it."""
        return len(self.after) == 1 and not self.set_before

    @property
    def ends_as_begun(self) -> bool:
        return same(self.before, self.last)

    @property
    def has_grown(self) -> bool:
        """True of a list that has more items than before behind the same ones, as a log."""
        if not isinstance(self.place, Contents):
            return False
        count = len(self.before)
        return len(self.last) > count and all(map(is_, self.before, self.last[:count]))

    @property
    def is_mark(self) -> bool:
        """True of what was not there before, but for figures: it may tell of something that is not undone."""
        return self.before is ABSENT and not is_figure(self.last)

    def note(self, segment: int, value: Any) -> None:
        if self.after and is_large(self.last):
            self.after[next(reversed(self.after))] = _LET_GO
        self.after[segment] = value

    def at(self, segment: int) -> Any:
        """The value as a segment begins; of places that hold no tensors."""
        return next((value for s, value in reversed(self.after.items()) if s < segment), self.before)

    def is_plain(self) -> bool:
        """True if each micro-batch's values can be noted and put there. Large tensors are looked at by themselves."""
        values = (self.before, *self.after.values())
        return not (self.handed or any(value is _LET_GO or is_large(value) for value in values))


class Changes:
    """The places that a forward changes, segment by segment."""

    def __init__(self, places: Iterable[tuple[Holder, str]], blocks: Iterable[Iterable[tuple[Holder, str]]]) -> None:
        """``places``, with their names: those that the whole model reaches; ``blocks``: of each, those that are found
        from it alone."""
        self._begun: dict[Holder, tuple[str, Any]] = {}
        self._shared = self._begin(places)
        self._blocks = [self._begin(found) for found in blocks]
        self._found: dict[Holder, Change] = {}
        self._latest: int | None = None  # the block that was called

    def _begin(self, places: Iterable[tuple[Holder, str]]) -> dict[Holder, Any]:
        now = {place: (name, place.now()) for place, name in places}
        self._begun |= now
        return {place: value for place, (_, value) in now.items()}

    def look(self, segment: int, *, block: int | None = None, ahead: int | None = None) -> None:
        """The segment has ended: a call of a block, or the model's own code before the block ``ahead``. What is found
        from blocks elsewhere is looked at where the forward begins and ends: each time it would take long."""
        self._look_at(self._shared, segment)
        near = [self._latest, ahead] if block is None else [block]
        for index, found in enumerate(self._blocks):
            if None in near or index in near:
                self._look_at(found, segment)
        self._latest = self._latest if block is None else block

    def _look_at(self, places: dict[Holder, Any], segment: int) -> None:
        for place, before in places.items():
            now = place.now()
            if now is before:
                continue
            changed = list(_differences(place, before, now))
            if changed:
                places[place] = now
            for part, old, new in changed:
                if part not in self._found:
                    self._found[part] = Change(place=part, name=self._name(place, part), before=old)
                self._found[part].note(segment, new)

    def _name(self, place: Holder, part: Holder) -> str:
        name, _ = self._begun[place]
        return name if part is place else f"{name}.{name_of(part.key)}"

    def end(self, handed: Container[int]) -> None:
        """The forward has ended. ``handed``: objects, dicts and lists that blocks are handed, by identity."""
        self._shared.clear()
        self._blocks.clear()
        for change in self._found.values():
            change.handed = id(change.place.of) in handed

    @property
    def found(self) -> Collection[Change]:
        return self._found.values()

    def put_back(self) -> None:
        """Undo what has changed since the forward began, but for marks that are new, and let go of everything."""
        found = [
            Change(place=part, name="", before=old, after={0: new})
            for place, (_, before) in self._begun.items()
            for part, old, new in _differences(place, before, place.now())
        ]
        put((change.place, change.before) for change in found if not change.is_mark)
        for values in (self._begun, self._shared, self._blocks, self._found):
            values.clear()


class Overwritten:
    """The tensors from before a forward that it writes to, as they were: a model's own that are no buffers. And those
    that a call of a block writes to, be they buffers of other modules."""

    def __init__(self, micro_batch: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """``micro_batch``, ``buffers``: tensors that somebody else puts back."""
        self._given = _storages(micro_batch)
        self._apart = self._given | _storages(buffers)
        self.before: list[tuple[Holder, Any]] = []
        self._apart_in_call: set[int] = set()
        self._by_call: dict[tuple[Any, ...], tuple[Holder, Any]] | None = None  # by the part of memory; None: none runs

    def begin_call(self, buffers: Iterable[torch.Tensor]) -> None:
        """A block is called that has these ``buffers`` itself."""
        self._apart_in_call, self._by_call = self._given | _storages(buffers), {}

    def end_call(self) -> Held:
        """Returns the tensors that the call has written to, as they were."""
        found, self._by_call = self._by_call, None
        return tuple((found or {}).values())

    def note(self, operand: Operand) -> None:
        """It is about to be written to."""
        tensor, storage, birth = operand
        if birth is not None or tensor.is_meta:
            return
        place = Memory(of=tensor)
        if storage not in self._apart and all(place != known for known, _ in self.before):
            self.before.append((place, place.now()))
        part = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        known = self._by_call is None or storage in self._apart_in_call or part in self._by_call
        if self._by_call is not None and not (known or is_large(tensor)):
            self._by_call[part] = place, place.now()

    def put_back(self) -> None:
        for place, value in reversed(self.before):
            place.put(value)


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {storage_key(tensor) for tensor in tensors if trees.has_storage(tensor)}


class Trials:
    """Runs a forward again to find out what its changes matter to.

    ``run(values, at)``: runs it with these values in places as it begins, and those of ``at`` as a segment does.
    Returns its loss, None where it goes another way then, ``BROKEN_OFF`` where it ends in an error, and what was in the
    places of ``at`` until then.
    """

    def __init__(
        self,
        changes: Collection[Change],
        run: Callable[[Held, Mapping[int, Held]], tuple[float | None, Mapping[Holder, Any]]],
        loss: float | None,
    ) -> None:
        """``loss``: of the forward that has found the ``changes``; None: there are no numbers to compare."""
        self._changes = list(changes)
        self._run = run
        self._loss = loss if loss is None or math.isfinite(loss) else None
        self._noise: float | None = None  # by which two runs from the same values differ
        self._left: dict[Holder, Any] = {}  # what the first run from there has left

    def carried(self, depends: Callable[[torch.Tensor], bool]) -> list[Change]:
        """The changes that another segment would read in the next forward, or the same one where others have changed
        the place since. ``depends``: says if a tensor's numbers follow from the micro-batch."""
        suspects = [c for c in self._changes if not c.is_mark and _goes_on(c, depends)]
        if not suspects or not self._matter(suspects):
            return []
        if len(suspects) == 1:
            return suspects
        return [change for change in suspects if self._matter([change])] or suspects

    def own(self, changes: Iterable[Change], last: int) -> list[Change]:
        """Of these changes, none of them carried, all that later segments may read: what is there then is each
        micro-batch's own. Not logs and counts that several segments go on with, and nothing has read. ``last``: the
        last segment, behind which nothing is."""
        found: list[Change] = []
        grown: list[Change] = []
        going_on: list[Change] = []
        for change in changes:
            if change.first == last and not change.set_before:
                continue
            if change.is_of_one:
                (grown if change.has_grown else found).append(change)
            elif change.ends_as_begun or same(self._left.get(change.place, _LET_GO), change.last):
                change.begins_anew = True
                found.append(change)
            else:
                going_on.append(change)
        if grown and self._differs(grown, _at((c.first + 1, c.place, c.before) for c in grown)):
            found += grown
        if going_on and self._are_read(going_on, last):
            for change in going_on:
                change.begins_anew = True
            found += going_on
        return found

    def _are_read(self, changes: Collection[Change], last: int) -> bool:
        """True if a segment does something else where another micro-batch has passed it just before, or where what
        earlier ones have changed is as it was."""
        passed = ((s, c.place, c.at(s + 1)) for c in changes for s in range(last + 1))
        as_begun = ((s, c.place, c.before) for c in changes for s in range(c.first + 1, last + 1))
        return self._differs(changes, _at(passed)) or self._differs(changes, _at(as_begun))

    def _matter(self, changes: Collection[Change]) -> bool:
        """True if the forward is another one where it begins with what it has left itself. Of a place that one segment
        alone changes, that segment may go on from what was there."""
        return self._differs(changes, _at((c.first, c.place, c.before) for c in changes if c.is_of_one), from_left=True)

    def _differs(self, changes: Collection[Change], at: Mapping[int, Held], *, from_left: bool = False) -> bool:
        if self._loss is None:
            return False
        begun_with = changes if from_left else ()
        as_it_was = {change.place: change.before for change in self._changes if not change.is_mark}
        left = {change.place: change.last for change in begun_with}
        found, met = self._run(tuple((as_it_was | left).items()), at)
        for change in begun_with:
            change.set_before |= change.is_of_one and not same(met.get(change.place, change.last), change.last)
        if begun_with and not self._left:
            self._left = {change.place: change.place.now() for change in self._changes}
        if found == self._loss:
            return False
        if found is BROKEN_OFF:  # where others are as they begin, such as tables that a count says are made, too
            return not all(change.attribute for change in changes)
        if self._noise is None:
            again, _ = self._run(tuple(as_it_was.items()), {})
            self._noise = math.inf if again is None or again is BROKEN_OFF else abs(again - self._loss)
        return math.isfinite(self._noise) and (found is None or not abs(found - self._loss) <= 4 * self._noise)


def _at(values: Iterable[tuple[int, Holder, Any]]) -> dict[int, Held]:
    """Values in places, by the segment that is to begin with them."""
    found: dict[int, Held] = {}
    for segment, place, value in values:
        found[segment] = (*found.get(segment, ()), (place, value))
    return found


def _goes_on(change: Change, depends: Callable[[torch.Tensor], bool]) -> bool:
    """True if the next forward finds another value than this one has, where another segment than the first may look."""
    if change.ends_as_begun or (change.is_of_one and change.first == 0):
        return False
    tensors = trees.tensors(change.last)
    return not tensors or any(map(depends, tensors))


def _differences(place: Holder, before: Any, now: Any) -> Iterator[tuple[Holder, Any, Any]]:
    """The places within one that hold other objects than before, each with what it held, and holds."""
    if isinstance(place, Entries):
        if not (_are_same(before, now) and _are_same(before.values(), now.values())):
            kind = Attribute if isinstance(place, Attributes) else Entry
            for key in before | now:
                old, new = before.get(key, ABSENT), now.get(key, ABSENT)
                if new is not old:
                    yield kind(of=place.of, key=key), old, new
    elif isinstance(place, Contents):
        if not _are_same(before, now):
            yield place, before, now
    elif now is not before and not (isinstance(place, Numbers) and now == before):
        yield place, before, now


def _are_same(before: Collection[Any], now: Collection[Any]) -> bool:
    """True if two hold the same objects, in the same order."""
    return len(before) == len(now) and all(map(is_, before, now))
