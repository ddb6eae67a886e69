"""Text files: each is one document. Their order depends on nothing but their names."""

import codecs
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from penstock.data.sources.reader import Cursor, Example
from penstock.data.sources.walk import BOM
from penstock.errors import ConfigError

PART = 1 << 13
"""Bytes of text handled at a time, or up to a quarter more; also how finely a text is divided between training and
validation."""

_CUTS = (r"\S\n(?=\w)", r"[^\W\d_](?= [^\W\d_])", r"[^\W_](?=\s)", r"\n(?=\S)", r"\S(?=\s)", r"[^\W_](?=[,.，。、])")
"""The places where a text is cut, as expressions for what is before, the best first: behind a line, and between two
words. Spaces in a row, ends of lines among them, may be of one token, as ends of lines and punctuation may; tokenizers
look ahead, too, at whether a space is the last one. The last is for what has no spaces, as Chinese."""


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
                        nbytes = len(text.encode())
                        offset, seen = offset + nbytes, seen + nbytes
                        last = not ahead or (self.limit is not None and seen >= self.limit)
                        example = Example(fields={"text": text}, place=str(path), begins=begins, ends=last)
                        yield example, [index, offset, seen]
                        begins = False
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
                raise ConfigError(f"data: cannot use {path}: {reason}") from None
            offset = 0


def _part(file: BinaryIO) -> str:
    """The next ``PART`` bytes, and what follows up to the best place to cut; a quarter more, if there is none."""
    most = PART + PART // 4
    data = file.read(most)
    text, _ = codecs.utf_8_decode(data, "strict", len(data) < most)
    least = len(codecs.utf_8_decode(data[:PART])[0])
    cuts = (re.compile(cut).search(text, least) for cut in _CUTS if len(data) > PART)
    part = text[: next((cut.end() for cut in cuts if cut), None)]
    file.seek(len(part.encode()) - len(data), os.SEEK_CUR)
    return part


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
