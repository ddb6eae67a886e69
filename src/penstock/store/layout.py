"""The layout of a store's logical address space: its extents, and their blocks with a checksum each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from penstock.documents.text import MalformedError
from penstock.documents.typed import decode, shown
from penstock.errors import StoreError
from penstock.store.checksums import Borders

ALIGN = 4096  # bytes; direct I/O needs address, offset and length in multiples of the drive's block size
BLOCK = 1 << 20  # bytes under one checksum, of an extent that nothing else is said about
FORMAT = 3


def round_up(nbytes: int) -> int:
    """``nbytes`` rounded up to whole ``ALIGN`` blocks."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True)
class Region:
    """A stretch of an extent, cut from its start into blocks of ``block`` bytes; the last may be shorter."""

    nbytes: int
    block: int

    def __post_init__(self) -> None:
        assert min(self.nbytes, self.block) > 0, self
        assert self.nbytes % ALIGN == self.block % ALIGN == 0, self

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // self.block)


Grid = tuple[Region, ...]
"""The regions of an extent, one after another. Reads and writes begin and end at the borders of their blocks."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A named run of bytes with one or more slots, each padded to ``ALIGN`` and starting on it."""

    name: str
    offset: int
    nbytes: int
    slots: int = 1
    grid: Grid

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: ``nbytes`` padded to ``ALIGN``. All of them may be read and written."""
        return round_up(self.nbytes)

    @property
    def end(self) -> int:
        return self.offset + self.slots * self.stride

    @cached_property
    def blocks(self) -> int:
        """Number of blocks, each with a checksum, in one slot."""
        return sum(region.blocks for region in self.grid)

    def address(self, offset: int, nbytes: int, slot: int) -> int:
        """Logical address of ``nbytes`` at ``offset`` within ``slot``; the range must lie within the slot."""
        assert 0 <= slot < self.slots, f"{self.name}: slot {slot} of {self.slots}"
        assert 0 <= offset <= offset + nbytes <= self.stride, f"{self.name}: [{offset}, +{nbytes}) of {self.stride}"
        assert offset % ALIGN == nbytes % ALIGN == 0, f"{self.name}: [{offset}, +{nbytes}) is not aligned"
        return self.offset + slot * self.stride + offset

    @cached_property
    def borders(self) -> Borders:
        """Of the blocks of a slot."""
        ends = pairwise([0, *accumulate(region.nbytes for region in self.grid)])
        starts = [
            np.arange(start, stop, region.block, dtype=np.int64)
            for region, (start, stop) in zip(self.grid, ends, strict=True)
        ]
        return np.append(np.concatenate(starts), self.stride)

    def touched(self, offset: int, nbytes: int) -> tuple[int, Borders]:
        """(number of the first, their borders) of the blocks that a range has bytes of. There may be none."""
        first = int(self.borders.searchsorted(offset, "right")) - 1
        last = int(self.borders.searchsorted(offset + nbytes)) if nbytes else first
        return first, self.borders[first : last + 1]

    def spans(self, offset: int = 0, nbytes: int | None = None) -> Iterator[tuple[int, range]]:
        """(number, bytes of the extent) of each block that the range touches: whole blocks, also where it is not."""
        first, borders = self.touched(offset, self.stride if nbytes is None else nbytes)
        for number, (start, stop) in enumerate(pairwise(borders.tolist()), first):
            yield number, range(start, stop)

    def ranges(self, most: int) -> Iterator[range]:
        """The whole extent in ranges of whole blocks, of at most ``most`` bytes or one block each."""
        first = 0
        for region in self.grid:
            last, step = first + region.nbytes, max(most // region.block, 1) * region.block
            for start in range(first, last, step):
                yield range(start, min(start + step, last))
            first = last


_Row = tuple[str, int, int, int, tuple[tuple[int, int], ...]]
"""An extent as JSON has it: name, offset, bytes, slots, and (bytes, block) of each region."""

_LARGEST_BLOCK = 64 << 20
"""Bytes under one checksum, which are in memory at once when it is compared."""

_MOST = 1 << 54
"""Bytes; more is no size of an extent."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All extents, in order of their offset, without overlap and without holes other than padding."""

    extents: tuple[Extent, ...]

    @staticmethod
    def build(entries: Iterable[tuple[str, int, int]], grids: Mapping[str, Grid] | None = None) -> "Layout":
        """Place ``(name, bytes, slots)`` entries one after another, in the order given.

        ``grids``: how an extent is cut into blocks with a checksum each; those without are cut at each ``BLOCK`` bytes.
        """
        extents: list[Extent] = []
        offset = 0
        for name, nbytes, slots in entries:
            assert min(nbytes, slots) > 0, f"{name}: {nbytes} bytes in {slots} slots"
            grid = (grids or {}).get(name) or (Region(nbytes=round_up(nbytes), block=BLOCK),)
            assert sum(region.nbytes for region in grid) == round_up(nbytes), f"{name}: {grid} of {nbytes} bytes"
            extents.append(Extent(name=name, offset=offset, nbytes=nbytes, slots=slots, grid=grid))
            offset = extents[-1].end
        assert len({e.name for e in extents}) == len(extents), "extent names must differ"
        return Layout(extents=tuple(extents))

    @property
    def nbytes(self) -> int:
        """Size of the logical address space, padding included."""
        return self.extents[-1].end if self.extents else 0

    @cached_property
    def _by_name(self) -> dict[str, Extent]:
        return {e.name: e for e in self.extents}

    def __getitem__(self, name: str) -> Extent:
        """Raises StoreError: there is none of that name, as in a manifest that was changed."""
        if name not in self._by_name:
            raise StoreError(f"the store or snapshot has no array {name!r}: its manifest is not that of this model")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def to_json(self) -> dict[str, object]:
        rows = [[e.name, e.offset, e.nbytes, e.slots, [[r.nbytes, r.block] for r in e.grid]] for e in self.extents]
        return {"format": FORMAT, "extents": rows}

    @staticmethod
    def from_json(data: object) -> "Layout":
        """Inverse of ``to_json``.

        Raises:
            StoreError: unknown format, or not a layout that ``build`` would make.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise StoreError(
                f"layout has format {shown(found)}, this version of penstock reads format {FORMAT}: use the version of "
                "penstock that wrote it"
            )
        try:
            written = decode(tuple[_Row, ...], data.get("extents"), "extents")
        except MalformedError as e:
            raise StoreError(f"layout is damaged: {e}") from e
        rows = [(name, offset, nbytes, slots) for name, offset, nbytes, slots, _ in written]
        cut = {name: grid for name, _, _, _, grid in written}
        if any(not 0 < nbytes < _MOST or not 0 < slots < 256 for _, _, nbytes, slots in rows) or len(cut) != len(rows):
            raise StoreError("layout is damaged: an extent is empty or appears twice")
        for name, _, nbytes, _ in rows:
            aligned = all(
                n > 0 and 0 < block <= _LARGEST_BLOCK and n % ALIGN == block % ALIGN == 0 for n, block in cut[name]
            )
            if not aligned or sum(n for n, _ in cut[name]) != round_up(nbytes):
                raise StoreError(f"layout is damaged: {name} is cut into blocks that do not cover it")
        grids = {name: tuple(Region(nbytes=n, block=block) for n, block in pairs) for name, pairs in cut.items()}
        layout = Layout.build(((name, nbytes, slots) for name, _, nbytes, slots in rows), grids)
        if [e.offset for e in layout.extents] != [offset for _, offset, _, _ in rows]:
            raise StoreError("layout is damaged: the offsets do not follow from the sizes")
        return layout
