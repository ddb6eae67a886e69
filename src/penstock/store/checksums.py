"""The checksum of a block: xxh3 (64 bits)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

UNWRITTEN = 0
"""Stands for no block."""

Numbers = npt.NDArray[np.uint64]

Blocks = Sequence[range]
"""Bytes of an extent that have a checksum each, one after another."""


def checksum(view: memoryview) -> int:
    """The checksum of a block; never ``UNWRITTEN``."""
    return settled(xxhash.xxh3_64_intdigest(view))


def settled(digest: int) -> int:
    """A digest as the table has it: one block in 2**64 has the digest that stands for no block."""
    return 1 if digest == UNWRITTEN else digest


def checksums(view: memoryview, blocks: Blocks) -> list[int]:
    """The checksum of each of ``blocks`` of an extent, which ``view`` has one after another."""
    first = blocks[0].start if blocks else 0
    return [checksum(view[block.start - first : block.stop - first]) for block in blocks]
