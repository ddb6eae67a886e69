"""Arrays in files that are compared, piece by piece as they are read, with checksums made when they were written.

A file is cut into blocks of 16 KiB, the last of which may be shorter, and each has a checksum (xxh3, 64 bits). Whoever
asks for a stretch of an array gets it out of blocks that were read for it and are what was written: damage, and a drive
that fails, is an error that names the file and the offset, and not a token that was never in the text.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock import files
from penstock.errors import StoreError

BLOCK = 1 << 14
_AT_ONCE = BLOCK << 10

Sums = NDArray[np.uint64]
"""1-D, little-endian: a checksum for each block of a file."""


class SummedFile:
    """Writes a file from its beginning to its end, and makes its checksums on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting = b""
        self._found: list[int] = []

    def write(self, data: bytes) -> None:
        self._file.write(data)
        whole = self._waiting + data
        cut = len(whole) - len(whole) % BLOCK
        self._found += _sums(whole[:cut])
        self._waiting = whole[cut:]

    def close(self) -> None:
        self._file.close()

    @property
    def sums(self) -> Sums:
        """The checksums of all that has been written."""
        return np.array([*self._found, *_sums(self._waiting)], dtype="<u8")


def sums_of(path: Path) -> Sums:
    """The checksums of a file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    found: list[int] = []
    with files.regular(path) as file:
        while part := file.read(_AT_ONCE):
            found += _sums(part)
    return np.array(found, dtype="<u8")


def _sums(data: bytes) -> list[int]:
    view = memoryview(data)
    return [xxhash.xxh3_64_intdigest(view[first : first + BLOCK]) for first in range(0, len(view), BLOCK)]


class BlockArray:
    """A file as a 1-D array that is never in memory as a whole: ``array[a:b]`` reads, compares and returns a copy."""

    def __init__(self, path: Path, dtype: str, sums: Sums, *, first: int = 0, end: int | None = None) -> None:
        """``first``, ``end``: the elements of the file that this is an array of; all of them, unless they are given.

        Raises:
            ValueError: the file's size is no whole number of elements, or not what the checksums are for.
            OSError: there is no such file.
        """
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._nbytes = path.stat().st_size
        if self._nbytes % self.dtype.itemsize:
            raise ValueError(f"{path} has {self._nbytes:,} bytes, which is not a whole number of {dtype}")
        if len(sums) != -(-self._nbytes // BLOCK):
            raise ValueError(f"{path} has {self._nbytes:,} bytes, and its checksums are for {len(sums)} blocks")
        self._sums = sums
        self._first = first
        self._end = self._nbytes // self.dtype.itemsize if end is None else end

    def __len__(self) -> int:
        return self._end - self._first

    def window(self, first: int, end: int) -> "BlockArray":
        """A stretch of it, as an array of its own; nothing is read."""
        place = self._first
        return BlockArray(self.path, self.dtype.name, self._sums, first=place + first, end=place + end)

    def __getitem__(self, stretch: slice) -> NDArray[Any]:
        """A copy of a stretch.

        Raises:
            StoreError: the drive failed, or what it gave is not what was written; names file and offset.
        """
        first, end, step = stretch.indices(len(self))
        assert step == 1
        size = self.dtype.itemsize
        start, stop = (self._first + first) * size, (self._first + max(end, first)) * size
        if start == stop:
            return np.empty(0, dtype=self.dtype)
        number = start // BLOCK
        data = self._read(number * BLOCK, min(-(-stop // BLOCK) * BLOCK, self._nbytes))
        self._compare(number, data)
        return np.frombuffer(data, dtype=np.uint8)[start - number * BLOCK : stop - number * BLOCK].view(self.dtype)

    def _read(self, start: int, stop: int) -> bytes:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                parts = [os.pread(fd, stop - start, start)]
                while len(parts[-1]) and (done := sum(map(len, parts))) < stop - start:
                    parts.append(os.pread(fd, stop - start - done, start + done))
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failed(f"cannot be read at offset {start}: {error.strerror}", error) from error
        data = b"".join(parts)
        if len(data) < stop - start:
            raise self._failed(f"ends at offset {start + len(data)}, and had {self._nbytes} bytes when it was opened")
        return data

    def _compare(self, number: int, data: bytes) -> None:
        for block, found in enumerate(_sums(data), start=number):
            if found != self._sums[block]:
                where = range(block * BLOCK, min((block + 1) * BLOCK, self._nbytes))
                raise self._failed(
                    f"is damaged in bytes {where.start} to {where.stop}: their checksum is not that of what was written"
                )

    def _failed(self, what: str, cause: OSError | None = None) -> StoreError:
        error = StoreError(f"{self.path} {what}: check the drive. {ADVICE}")
        error.errno = None if cause is None else cause.errno
        return error

    def damage(self) -> Iterator[tuple[int, str | None]]:
        """Read all of it, some MB at a time: yields bytes read, and what was found wrong with them, in words."""
        count = _AT_ONCE // self.dtype.itemsize
        for first in range(0, len(self), count):
            part = range(first, min(first + count, len(self)))
            try:
                self[part.start : part.stop]
                found = None
            except StoreError as error:
                found = str(error)
            yield len(part) * self.dtype.itemsize, found


ADVICE = (
    "Token ids that penstock has prepared can be made again: remove the folder that the file is in, and go on with the "
    "run; others have to be put back as they were"
)
