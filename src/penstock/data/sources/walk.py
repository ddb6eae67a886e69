"""The files of a source, one after the other, each as bytes that are read on from any of its rows."""

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from penstock.data.sources.reader import Cursor, Example
from penstock.errors import ConfigError

LONGEST = 32 << 20
"""Bytes in a line; a document of more has some millions of tokens."""

BOM = b"\xef\xbb\xbf"
"""The byte order mark, with which some programs begin a file in UTF-8."""

PACKED = ".gz"

ReadOne = Callable[[BinaryIO, Path, int, int], Iterator[tuple[Example, int, int]]]
"""Reads a file's rows behind a byte, which is behind the row of a number (0, 0: from its beginning): each with the byte
behind it and its number."""


def ending(path: Path) -> str:
    """The ending of a file's name that says of what kind it is, in lower case and without ``.gz``."""
    return Path(path.name.lower().removesuffix(PACKED)).suffix


def is_packed(path: Path) -> bool:
    return path.name.lower().endswith(PACKED)


def walk(files: Sequence[Path], start: Cursor, read_one: ReadOne) -> Iterator[tuple[Example, Cursor]]:
    """Each row of the files from ``start`` on, with the cursor behind it: (file, byte, number) of what comes next.

    Raises:
        ConfigError: a file cannot be read.
    """
    first, offset, number = start or (0, 0, 0)
    for index in range(first, len(files)):
        path, place = files[index], ""
        try:
            with _open_bytes(path) as file:
                for example, behind, row in read_one(file, path, offset, number):
                    place = f", after {example.place.removeprefix(f'{path}, ')}"
                    yield example, [index, behind, row]
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"data: cannot read {path}{place}: {reason}") from None
        offset = number = 0


def _open_bytes(path: Path) -> BinaryIO:
    """A file of a source, unpacked if its name says that it is packed."""
    return cast(BinaryIO, gzip.open(path, "rb")) if is_packed(path) else path.open("rb")
