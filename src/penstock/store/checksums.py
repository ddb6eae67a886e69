"""The checksum of a block: xxh3 (64 bits)."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

UNWRITTEN = 0
"""Stands for no block."""

Numbers = npt.NDArray[np.uint64]

Borders = npt.NDArray[np.int64]
"""The bytes of an extent at which blocks with a checksum each begin, one after another, and where the last one ends."""


def checksum(view: memoryview) -> int:
    """The checksum of a block; never ``UNWRITTEN``."""
    return settled(xxhash.xxh3_64_intdigest(view))


def settled(digest: int) -> int:
    """A digest as the table has it: one block in 2**64 has the digest that stands for no block."""
    return 1 if digest == UNWRITTEN else digest


def checksums(view: memoryview, borders: Borders) -> Numbers:
    """The checksum of each of the blocks of an extent, which ``view`` has one after another."""
    own = (borders - borders[:1]).tolist()
    return np.array([checksum(view[start:stop]) for start, stop in pairwise(own)], dtype=np.uint64)
