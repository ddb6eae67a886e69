"""JSONL: one object in each line, in one file or several, compressed with gzip or not.

Read here and not by ``datasets``, which knows no line numbers, takes one schema for all lines, and adds to each message
the keys that any other has.
"""

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.data.sources.reader import FIELDS, Cursor, Example
from penstock.documents.text import MalformedError, parse_json
from penstock.errors import ConfigError

LONGEST = 32 << 20
"""Bytes in a line; a document of more has some millions of tokens."""


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """A cursor is (file, byte, line) of what comes next. ``wanted``: the keys that are read."""

    files: tuple[Path, ...]
    wanted: Sequence[str] = FIELDS

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        first, offset, line = start or (0, 0, 0)
        for index in range(first, len(self.files)):
            path = self.files[index]
            try:
                with open_bytes(path) as file:
                    file.seek(offset)
                    while text := file.readline(LONGEST + 1):
                        if len(text) > LONGEST:
                            raise ConfigError(
                                f"{path}, line {line + 1}: it has more than {LONGEST:,} bytes: is the file JSONL? "
                                "Divide the document"
                            )
                        offset, line = offset + len(text), line + 1
                        if not text.isspace():
                            place = f"{path}, line {line}"
                            row = _row(text, place)
                            fields = {name: row[name] for name in self.wanted if name in row}
                            yield Example(fields=fields, place=place, has=tuple(row)), [index, offset, line]
            except (OSError, EOFError, zlib.error) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise ConfigError(f"data: cannot read {path}, after line {line}: {reason}") from None
            offset = line = 0


def open_bytes(path: Path) -> BinaryIO:
    """A file of a source, unpacked if its name says that it is packed."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _row(text: bytes, place: str) -> Mapping[str, Any]:
    try:
        value = parse_json(text.rstrip(), finite=False)
    except MalformedError as error:
        whole = text.lstrip()[:1] == b"[" and place.endswith("line 1")
        hint = ": the file is one JSON array; write each of its objects into a line of its own" if whole else ""
        raise ConfigError(f"{place}: {error}{hint}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: each line must hold one JSON object, and this one holds a {type(value).__name__}")
    return value
