"""Tensors that pass from one micro-batch to the next through several stages of a model.

A running mean that one stage alone reads and changes takes all micro-batches in their order under any schedule. One
that another stage changes, too, or reads before, does not: block by block, all micro-batches pass the one stage before
any comes to the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.compat.torch import storage_key
from penstock.tape import trees
from penstock.tape.generators import Generator, is_own, key_of
from penstock.tape.places import is_large
from penstock.tape.watch import Operand

_ATEN = torch.ops.aten
_OVERWRITES = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.zero_})
_COUNTS = frozenset({_ATEN.add_, _ATEN.sub_})

Replaced = tuple[str, torch.Tensor]
"""A buffer or attribute in words, and its tensor before the forward."""


@dataclass(kw_only=True)
class _Uses:
    """Segments that have used a range of a storage. ``counted``: they have added to whole numbers, in any order;
    ``filled``: they have put there what is the same in each forward; ``asked``: it has become a number."""

    read: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)

    def all(self) -> set[int]:
        return self.read | self.changed | self.counted

    def every(self) -> set[int]:
        return self.all() | self.filled | self.asked

    def carry(self) -> bool:
        """True if the order of micro-batches in one segment matters to another one."""
        counts = self.counted and self.read and len(self.all()) > 1
        return bool(counts or (self.changed and len(self.every()) > 1))

    def tried(self) -> set[int]:
        """The segments that change it in a way that may matter, where others use it, too."""
        found = self.filled | self.counted if self.asked else self.filled
        return found if len(self.every()) > 1 else set()


class Carried:
    """Follows the tensors from before the forward, op by op."""

    def __init__(self) -> None:
        self._uses: dict[int, dict[tuple[int, int], _Uses]] = {}  # storage (or generator) -> bytes -> uses

    def on_op(self, packet: Any, segment: int, old: Iterable[Operand], written: set[int], *, depends: bool) -> None:
        """Note an op's use of tensors that are ``old``. ``written``: ids of those that it changes; ``depends``: what it
        does depends on the micro-batch, on weights that train, or on what earlier forwards have left."""
        for tensor, storage, _ in old:
            if isinstance(tensor, nn.Parameter) or not tensor.numel():
                continue
            uses = self._uses.setdefault(storage, {}).setdefault(_range(tensor), _Uses())
            if id(tensor) not in written:
                uses.read.add(segment)
            elif packet in _COUNTS and not tensor.is_floating_point():
                uses.counted.add(segment)
            elif depends or packet not in _OVERWRITES:
                uses.changed.add(segment)
            else:
                uses.filled.add(segment)

    def draws(self, generator: Generator, segment: int) -> None:
        """Note that a segment draws from a generator, whose state is for the next one to go on with."""
        if is_own(generator):
            self._uses.setdefault(key_of(generator), {}).setdefault((0, 1), _Uses()).changed.add(segment)

    def asks(self, segment: int, old: Iterable[Operand]) -> None:
        """Note that numbers are made of tensors that are ``old``."""
        for tensor, storage, _ in old:
            if not isinstance(tensor, nn.Parameter) and tensor.numel():
                self._uses.setdefault(storage, {}).setdefault(_range(tensor), _Uses()).asked.add(segment)

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """True if several segments have used a small tensor from before the forward."""
        found = self._together(storage_key(tensor))
        return not is_large(tensor) and any(len(uses.every()) > 1 for uses in found)

    def tried(self, tensor: torch.Tensor) -> set[int]:
        """The segments that change such a tensor in a way that is to be tried out."""
        return set[int]().union(*(uses.tried() for uses in self._together(storage_key(tensor))))

    def _together(self, storage: int) -> Iterator[_Uses]:
        """Of each range of a storage, the uses of all that overlap it."""
        found = self._uses.get(storage, {})
        for start, end in found:
            over = [uses for (first, last), uses in found.items() if first < end and start < last]
            yield _Uses(
                read=set().union(*(uses.read for uses in over)),
                changed=set().union(*(uses.changed for uses in over)),
                counted=set().union(*(uses.counted for uses in over)),
                filled=set().union(*(uses.filled for uses in over)),
                asked=set().union(*(uses.asked for uses in over)),
            )

    def found(self, replaced: Iterable[tuple[Replaced, set[int]]]) -> Iterator[tuple[str | int, set[int]]]:
        """The tensors that are carried, in words or as their storage, with the segments that use each. ``replaced``:
        what has other tensors now, with the segments that made them, and that use one that follows from the tensor
        before it."""
        for (what, before), segments in replaced:
            used = segments.union(*(uses.all() for uses in self._together(storage_key(before))))
            if len(used) > 1:
                yield what, used
        for storage in self._uses:
            yield from ((storage, uses.every()) for uses in self._together(storage) if uses.carry())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor has, with what lies between them."""
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + trees.span(tensor.shape, tensor.stride())) * tensor.itemsize
