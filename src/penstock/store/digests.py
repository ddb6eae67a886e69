"""The checksums of all blocks of all slots: xxh3 (64 bits), one number each, in memory and in an area of their own.

A block that was never written, or whose writing has failed, has none: its number is ``UNWRITTEN``, and it cannot be
read. What is to be read as zeros without being written is declared so (``Digests.zero``).
"""

from functools import cache

import numpy as np
import xxhash

from penstock.store.checksums import Borders, Numbers, checksum
from penstock.store.layout import BLOCK, Extent, Layout, Region, round_up
from penstock.store.transfer import StripedFiles, aligned_bytes, byte_view

NAME = "digests"


def area(layout: Layout, slots: int) -> Extent:
    """The region of a layout's table of checksums, behind everything else."""
    nbytes = max(8 * sum(e.slots * e.blocks for e in layout.extents), 1)
    grid = (Region(nbytes=round_up(nbytes), block=BLOCK),)
    return Extent(name=NAME, offset=layout.nbytes, nbytes=nbytes, slots=slots, grid=grid)


def blocks_of(extent: Extent, offset: int, nbytes: int) -> tuple[int, Borders]:
    """(number of the first, their borders) of the blocks that a range consists of. There may be none.

    The range must begin and end at borders of blocks.
    """
    first, borders = extent.touched(offset, nbytes)
    assert not nbytes or (int(borders[0]), int(borders[-1])) == (offset, offset + nbytes), _cut(
        extent, offset, offset + nbytes, borders
    )
    return first, borders


def _cut(extent: Extent, start: int, stop: int, borders: Borders) -> str:
    block = borders[:2] if borders[0] < start else borders[-2:]
    return f"{extent.name}: [{start}, {stop}) cuts the block [{block[0]}, {block[1]}), which has one checksum"


class Digests:
    """The table. Threads may write different blocks at once."""

    def __init__(self, layout: Layout) -> None:
        self._first: dict[str, int] = {}
        total = 0
        for extent in layout.extents:
            self._first[extent.name] = total
            total += extent.slots * extent.blocks
        self._pages = aligned_bytes(round_up(max(8 * total, 1)))
        self._numbers: Numbers = self._pages[: 8 * total].view(np.uint64)

    def of(self, extent: Extent, slot: int) -> Numbers:
        """The checksums of one slot, block by block: a view."""
        first = self._first[extent.name] + slot * extent.blocks
        return self._numbers[first : first + extent.blocks]

    def zero(self, extent: Extent, slot: int) -> None:
        """A slot that was never written is to be read as zeros, which is what a new file reads as."""
        numbers = self.of(extent, slot)
        assert not numbers.any(), f"{extent.name}: slot {slot} was written before"
        numbers[:] = _of_zeros(extent)

    def write(self, files: StripedFiles, address: int) -> str:
        """Write the table as it is now, in whole pages; its own checksum."""
        pages = aligned_bytes(len(self._pages))
        pages[:] = self._pages
        files.write(address, byte_view(pages))
        return xxhash.xxh3_64_hexdigest(pages.data)

    def read(self, files: StripedFiles, address: int, digest: str) -> bool:
        """Take over what ``write`` has written; False, and nothing is taken over, if it has another checksum by now."""
        pages = aligned_bytes(len(self._pages))
        files.read(address, byte_view(pages))
        if xxhash.xxh3_64_hexdigest(pages.data) != digest:
            return False
        self._pages[:] = pages
        return True


def _of_zeros(extent: Extent) -> Numbers:
    parts = []
    for region in extent.grid:
        numbers = np.full(region.blocks, _digest_of_zeros(region.block), np.uint64)
        numbers[-1] = _digest_of_zeros(region.nbytes - (region.blocks - 1) * region.block)
        parts.append(numbers)
    return np.concatenate(parts)


@cache
def _digest_of_zeros(nbytes: int) -> int:
    return checksum(memoryview(bytes(nbytes)))
