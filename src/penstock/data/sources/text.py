"""Text files: each is one document. Their order depends on nothing but their names."""

import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from penstock.data.sources.reader import Cursor, Example
from penstock.data.sources.walk import BOM
from penstock.errors import ConfigError

LONGEST = 1 << 20
"""Bytes of a line that are in memory at once."""

PART = 1 << 13
"""Bytes of text handled at a time; also how finely a text is divided between training and validation."""


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Reads text files. A cursor is (file, byte, bytes so far) of what comes next. ``limit``: bytes to read, and up to
    a part more."""

    files: tuple[Path, ...]
    limit: int | None = None

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        first, offset, seen = start or (0, 0, 0)
        for index in range(first, len(self.files)):
            if self.limit is not None and seen >= self.limit:
                return
            path = self.files[index]
            try:
                with path.open("rb") as file:
                    begins = offset == 0
                    offset = len(BOM) if begins and file.read(len(BOM)) == BOM else offset
                    file.seek(offset)
                    ahead = _part(file)
                    while ahead and (self.limit is None or seen < self.limit):
                        text, ahead = ahead, _part(file)
                        offset, seen = offset + len(text), seen + len(text)
                        last = not ahead or (self.limit is not None and seen >= self.limit)
                        fields = {"text": text.decode("utf-8")}
                        yield Example(fields=fields, place=str(path), begins=begins, ends=last), [index, offset, seen]
                        begins = False
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
                raise ConfigError(f"data: cannot use {path}: {reason}") from None
            offset = 0


def _part(file: BinaryIO) -> bytes:
    """Whole lines of ``PART`` bytes or a little more; of a line of more than ``LONGEST``, a part between characters."""
    lines: list[bytes] = []
    nbytes = 0
    while nbytes <= PART and (line := file.readline(LONGEST)):
        if len(line) == LONGEST and not line.endswith(b"\n"):
            rest = next((n for n in range(1, 4) if line[-n] & 0xC0 == 0xC0), 0)  # where a character has begun
            file.seek(-rest, os.SEEK_CUR)
            line = line[: len(line) - rest]
        lines.append(line)
        nbytes += len(line)
    return b"".join(lines)


def in_order(files: Mapping[str, Path]) -> tuple[Path, ...]:
    """Files ordered by a hash of their names (the keys), so that any stretch of them is a fair sample."""
    return tuple(files[name] for name in sorted(files, key=lambda n: (xxhash.xxh3_64_intdigest(os.fsencode(n)), n)))


_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests"}
"""Installed packages are not the standard library; its tests are left out, as some systems ship without them."""


def stdlib() -> tuple[Path, ...]:
    """The sources of Python's own standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = set(below) - _NOT_STDLIB  # not looked into: what is installed can be a hundred times as much
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return in_order({path.relative_to(root).as_posix(): path for path in found})
