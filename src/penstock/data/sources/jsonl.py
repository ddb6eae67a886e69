"""JSON: one object in each line (JSONL), or one array of objects; in one file or several, compressed with gzip or not.

Read here and not by ``datasets``, which knows no line numbers, takes one schema for all lines, and adds to each message
the keys that any other has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.data.sources.json_array import is_array, items
from penstock.data.sources.reader import FIELDS, Cursor, Example
from penstock.data.sources.walk import BOM, LONGEST, ending, walk
from penstock.documents.text import MalformedError, parse_json
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Reads JSON. A cursor is (file, byte, line or item of an array) of what comes next. ``wanted``: the keys that are
    read."""

    files: tuple[Path, ...]
    wanted: Sequence[str] = FIELDS

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        return walk(self.files, start, self._read_one)

    def _read_one(self, file: BinaryIO, path: Path, offset: int, number: int) -> Iterator[tuple[Example, int, int]]:
        array = is_array(file)
        for text, behind, count in (items if array else _lines)(file, path, offset, number, LONGEST):
            place = f"{path}, {'item' if array else 'line'} {count}"
            row = _row(text, place)
            if not array and count == 1 and ending(path) == ".json":
                self._check_rows(file, behind, row, path)
            fields = {name: row[name] for name in self.wanted if name in row}
            yield Example(fields=fields, place=place, has=tuple(row)), behind, count

    def _check_rows(self, file: BinaryIO, offset: int, row: Mapping[str, Any], path: Path) -> None:
        """Refuse a ``.json`` whose first line is all of it, and has the rows as a list within it. ``row``: that line,
        behind which the file is at ``offset``."""
        if not row.keys().isdisjoint(self.wanted) or file.readline(LONGEST).strip():
            file.seek(offset)
            return
        name = next((key for key, value in row.items() if isinstance(value, list) and value), None)
        if name is not None:
            raise ConfigError(f"{path}: it is one object, whose {name!r} is a list: {_TAKE_OUT}")


_TAKE_OUT = (
    "a .json file must be the list of rows itself, or have an object in each line. Write that list into a file of its "
    "own, as jq '.NAME' does"
)


def _lines(file: BinaryIO, path: Path, offset: int, line: int, longest: int) -> Iterator[tuple[bytes, int, int]]:
    """The lines behind ``offset``, but for empty ones: each with the byte behind it and its number."""
    file.seek(offset)
    while text := file.readline(longest + 1):
        if len(text) > longest:
            raise ConfigError(
                f"{path}, line {line + 1}: it has more than {longest:,} bytes: is the file JSONL? Divide the document"
            )
        empty = not (text if line else text.removeprefix(BOM)).strip()
        offset, line = offset + len(text), line + 1
        if not empty:
            yield text, offset, line


def _row(text: bytes, place: str) -> Mapping[str, Any]:
    try:
        value = parse_json(text.rstrip(), finite=False)
    except MalformedError as error:
        opens = text.rstrip().endswith((b"{", b"[", b","))
        several = f". If this is one object over several lines: {_TAKE_OUT}" if opens else ""
        raise ConfigError(f"{place}: {error}{several}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: each line must hold one JSON object, and this one holds a {type(value).__name__}")
    return value
