"""Cuts a logical address space over one file per directory, as in RAID 0, or in shares of their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from penstock.store.layout import ALIGN, round_up


class Piece(NamedTuple):
    """One request: ``nbytes`` at ``offset`` of file ``file``, from or to byte ``start`` of the caller's buffer."""

    file: int
    offset: int
    start: int
    nbytes: int


HEAVIEST = 64
"""The largest weight that a manifest may say: rounds stay short."""


@dataclass(frozen=True, kw_only=True)
class Striping:
    """The address space in stripes of ``stripe`` bytes, dealt in *rounds*: of each round a file has as many stripes as
    its weight, one after another. Without ``weights`` each file has one: stripe ``s`` is stripe ``s // files`` of file
    ``s % files``.

    Within a round the stripes of a file are spread evenly: its k-th of w is at (2k + 1) / 2w of the round, and of two
    that meet there the one of the first file comes first. This order is the layout of stores that are there.
    """

    files: int
    stripe: int
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert min(self.files, self.stripe) > 0, self
        assert self.stripe % ALIGN == 0, self
        assert len(self.weights) in (0, self.files), self
        assert all(0 < weight <= HEAVIEST for weight in self.weights), self

    @cached_property
    def _each(self) -> tuple[int, ...]:
        return self.weights or (1,) * self.files

    @cached_property
    def _round(self) -> tuple[tuple[int, int], ...]:
        """(file, which of its stripes in the round) of each stripe of a round."""
        stripes = ((file, k) for file, weight in enumerate(self._each) for k in range(weight))
        return tuple(sorted(stripes, key=lambda one: (Fraction(2 * one[1] + 1, 2 * self._each[one[0]]), one[0])))

    def file_sizes(self, nbytes: int) -> tuple[int, ...]:
        """Bytes of each file that hold an address space of ``nbytes``; at least one block, so no file is empty."""
        full, tail = divmod(nbytes, self.stripe)
        rounds, more = divmod(full, len(self._round))
        sizes = [rounds * weight * self.stripe for weight in self._each]
        for file, _ in self._round[:more]:
            sizes[file] += self.stripe
        sizes[self._round[more][0]] += round_up(tail)
        return tuple(max(size, ALIGN) for size in sizes)

    def pieces(self, address: int, nbytes: int, request: int) -> Iterator[Piece]:
        """Cut ``[address, address + nbytes)`` at stripe boundaries and into requests of at most ``request`` bytes."""
        start = 0
        while start < nbytes:
            if self.files == 1:  # one file: the address space is the file, and stripes mean nothing
                file, offset, room = 0, address + start, nbytes
            else:
                number, within = divmod(address + start, self.stripe)
                rounds, at = divmod(number, len(self._round))
                file, k = self._round[at]
                offset = (rounds * self._each[file] + k) * self.stripe + within
                room = self.stripe - within
            length = min(room, request, nbytes - start)
            yield Piece(file=file, offset=offset, start=start, nbytes=length)
            start += length
