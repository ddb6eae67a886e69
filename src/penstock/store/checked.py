"""Moves blocks between memory and an address space, and computes their checksums beside the drive's work.

A thread that asks for a transfer asks for the next one when it is back, so what it does in between keeps the drive
waiting. Therefore what is written is hashed while the drive takes it. What is read comes in parts, each half of what is
left, and each is hashed while the next is read: only the last, ``LAST`` bytes or less, when the drive is done. Nobody
gets a byte before it was hashed.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from penstock.store.digests import checksums
from penstock.store.layout import Extent
from penstock.store.transfer import StripedFiles

LAST = 4 << 20
"""Bytes; smaller requests are slower on some drives than what hashing the rest costs."""
AT_ONCE = 1 << 20
"""Bytes that are hashed in the time that another thread takes to begin."""
_THREADS = 4

Blocks = Sequence[range]
"""Bytes of an extent that have a checksum each, one after another."""


class CheckedFiles:
    """An address space whose transfers tell the checksum of each block. Thread-safe. ``files`` stay whose they are."""

    def __init__(self, files: StripedFiles) -> None:
        self._files = files
        threads = min(_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-hash")

    def read(self, extent: Extent, blocks: Blocks, view: memoryview, slot: int) -> list[int]:
        """Fill ``view`` with ``blocks`` of an extent's slot; the checksum of each.

        Raises:
            StoreError: the drive failed.
        """
        parts, jobs = [*halves(blocks)], list[Future[list[int]]]()
        try:
            for part in parts:
                piece = _piece(view, blocks, part)
                self._files.read(extent.address(part[0].start, len(piece), slot), piece)
                if part is not parts[-1]:
                    jobs.append(self._pool.submit(checksums, piece, part))
            last = checksums(_piece(view, blocks, parts[-1]), parts[-1])
        finally:  # nobody may look at the buffer after we return, whether with an error or without
            wait(jobs)
        return [*(number for job in jobs for number in job.result()), *last]

    def write(self, extent: Extent, blocks: Blocks, view: memoryview, slot: int) -> list[int]:
        """Write ``view`` to ``blocks`` of an extent's slot; the checksum of each.

        Raises:
            StoreError: the drive failed.
        """
        address = extent.address(blocks[0].start, len(view), slot)
        if len(view) <= AT_ONCE:
            found = checksums(view, blocks)
            self._files.write(address, view)
            return found
        job = self._pool.submit(checksums, view, blocks)
        try:
            self._files.write(address, view)
        finally:
            begun = not job.cancel()
            if begun:
                wait([job])
        return job.result() if begun else checksums(view, blocks)

    def close(self) -> None:
        self._pool.shutdown()


def halves(blocks: Blocks) -> Iterator[Blocks]:
    """The parts in which blocks are read: each half of what is left, down to ``LAST`` bytes, or one block."""
    while blocks:
        nbytes = blocks[-1].stop - blocks[0].start
        count = len(blocks) if nbytes <= LAST else -(-len(blocks) // 2)
        yield blocks[:count]
        blocks = blocks[count:]


def _piece(view: memoryview, blocks: Blocks, part: Blocks) -> memoryview:
    return view[part[0].start - blocks[0].start : part[-1].stop - blocks[0].start]
