"""CSV and TSV: a table as text, whose first row names the columns, compressed with gzip or not.

Python's own reader takes a line at a time and no more than a row has, so that the byte behind each row is known, and
reading can go on there. Other readers of CSV know a place as a number of rows alone, which have to be read again.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.data.sources.reader import FIELDS, Cursor, Example
from penstock.data.sources.walk import BOM, LONGEST, ending, walk
from penstock.errors import ConfigError

_QUOTES = "text in quotes has its own quotes doubled, and ends with one"


@dataclass(frozen=True, kw_only=True)
class Csv:
    """Reads tables. A cursor is (file, byte, line) of what comes next. ``wanted``: the columns that are read."""

    files: tuple[Path, ...]
    wanted: Sequence[str] = FIELDS

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        return walk(self.files, start, self._read_one)

    def _read_one(self, file: BinaryIO, path: Path, offset: int, line: int) -> Iterator[tuple[Example, int, int]]:
        lines = _Lines(file, path)
        names = next(_rows(lines, path), None)
        if names is None:
            return
        columns = self._columns(names, path)
        if offset:
            file.seek(offset)
            lines.offset, lines.line = offset, line
        for row in _rows(lines, path):
            place = f"{path}, line {lines.first}"
            if len(row) != len(names):
                raise ConfigError(
                    f"{place}: it has {len(row)} fields, and the header names {len(names)}: put a text "
                    "that has separators or line ends in quotes"
                )
            fields = {name: row[n] for name, n in columns.items()}
            yield Example(fields=fields, place=place, has=names), lines.offset, lines.line

    def _columns(self, names: Sequence[str], path: Path) -> dict[str, int]:
        """The index in a row of each column that is read, of which there is one, and none twice."""
        found = {name: n for n, name in enumerate(names) if name in self.wanted}
        if twice := [name for name in found if names.count(name) > 1]:
            raise ConfigError(f"{path}: its header names {twice[0]!r} twice: name one of them otherwise")
        if not found:
            few = ", ".join(repr(name[:40]) for name in names[:10])
            other = " Columns are separated by commas, and by tabs in a .tsv." if len(names) == 1 else ""
            raise ConfigError(
                f"{path}: its first row must name the columns, and has none of the names that are read, "
                f"{', '.join(self.wanted)}: it has {few}.{other} Add a header, or say what its names stand for "
                "(data.sources: fields)"
            )
        return found


class _Lines:
    """The lines of a file as text. ``offset``, ``line``: behind the last one that was taken; ``first``: the number of
    the row's first line."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.offset = self.line = self.first = 0
        self._file, self._path = file, path
        self._row = 0  # bytes

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw = self._file.readline(LONGEST + 1)
        if not raw:
            raise StopIteration
        if self.offset == 0 and raw.startswith(BOM):
            self.offset, raw = len(BOM), raw[len(BOM) :]
        self.offset, self.line, self._row = self.offset + len(raw), self.line + 1, self._row + len(raw)
        if self._row > LONGEST:
            raise ConfigError(
                f"{self._path}, line {self.first}: the row that begins here has more than {LONGEST:,} bytes: {_QUOTES}"
            )
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self._path}, line {self.line}: it is not UTF-8 text ({error.reason}): save it as UTF-8"
            ) from None

    def begin(self) -> None:
        """A row begins with the next line."""
        self.first, self._row = self.line + 1, 0


def _rows(lines: _Lines, path: Path) -> Iterator[list[str]]:
    """Rows, without lines that are empty."""
    delimiter = "\t" if ending(path) == ".tsv" else ","
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # of the whole process, and so never lowered
    rows: Any = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin()
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ConfigError(f"{path}, line {lines.first}: this is no row of a table: {error}: {_QUOTES}") from None
        if row is None:
            return
        if row:
            yield row
