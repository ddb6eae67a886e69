"""The values that one micro-batch's forward has put into places which it shares with others (``holders``).

The probe learns in which stages code assigns attributes, and which other places the model's own code reads tensors of
earlier stages from. Behind each such stage the micro-batch's own values are noted, and when it goes on, or a block is
computed again, they are there as its forward has left them.
"""

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.compat.modules import buffers_of, watched_attributes
from penstock.tape.buffers import is_own
from penstock.tape.holders import Entry, Holder


@contextmanager
def assignments(modules: Container[nn.Module]) -> Iterator[set[Entry]]:
    """Inside, the attributes of ``modules`` that code assigns or deletes are noted."""
    found: set[Entry] = set()

    def note(module: nn.Module, name: str) -> None:
        if module in modules and is_own(name):
            found.add(Entry(buffers_of(module) if name in buffers_of(module) else vars(module), name))

    with watched_attributes(note):
        yield found


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

    def now(self) -> Held:
        return tuple(self._values.items())


def put(values: Iterable[tuple[Holder, Any]]) -> None:
    for holder, value in values:
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
