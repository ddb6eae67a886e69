"""A file that is one JSON array of objects, read an object at a time and on from any of them.

Where an object ends is found by its brackets, outside of texts; what it holds, ``parse_json`` reads.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.data.sources.walk import BOM
from penstock.errors import ConfigError

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}]', re.DOTALL)
"""A whole text, the beginning of one whose end is not there yet, or a brace. Nothing is tried twice."""

AT_ONCE = 1 << 16
"""Bytes that are read at a time, or more where an object is longer."""


def is_array(file: BinaryIO) -> bool:
    """True if a file's first character is an array's. The file is then at its beginning."""
    start = file.read(AT_ONCE).removeprefix(BOM).lstrip()
    file.seek(0)
    return start.startswith(b"[")


def items(file: BinaryIO, path: Path, offset: int, number: int, longest: int) -> Iterator[tuple[bytes, int, int]]:
    """The objects of the array from the one behind ``offset`` on, which is number ``number`` (0: none has been read):
    each with the byte behind it and its number.

    Raises:
        ConfigError: the file is no array of objects, or one has more than ``longest`` bytes.
    """
    file.seek(offset)
    window = _Window(file, offset)
    if offset == 0:
        window.skip(BOM)
        window.skip(b"[", needed=True)
    while True:
        mark = window.mark()
        place = f"{path}, behind item {number}"
        if mark == b"]":
            window.skip(b"]", needed=True)
            if window.mark():
                raise ConfigError(f"{place}: something follows the array that the file is: one array, and nothing else")
            return
        if number and mark == b",":
            window.skip(b",", needed=True)
            mark = window.mark()
        elif number and mark:
            raise ConfigError(f"{place}: a comma or the array's end is missing")
        if not mark:
            raise ConfigError(f"{place}: the file ends within its array: it is cut off")
        number += 1
        if mark != b"{":
            raise ConfigError(f"{path}, item {number}: each item of the array must be an object")
        found = window.take(longest)
        if found is None:
            raise ConfigError(f"{path}, item {number}: it does not end within {longest:,} bytes: the file is cut off")
        yield found, window.offset, number


class _Window:
    """A stretch of a file: what has been read of it and is not taken yet. ``offset``: of its first byte in the file."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self.offset = offset
        self._file = file
        self._bytes = b""
        self._at = 0  # where it begins in ``_bytes``

    def _more(self) -> bool:
        """Read as much again as is there, so that no byte is looked at often. False: there is nothing more."""
        found = self._file.read(max(AT_ONCE, len(self._bytes) - self._at))
        self._bytes, self._at = self._bytes[self._at :] + found, 0
        return bool(found)

    def mark(self) -> bytes:
        """The next character that is no space, which the window then begins with; empty: the file ends."""
        while True:
            while self._at < len(self._bytes):
                character = self._bytes[self._at : self._at + 1]
                if not character.isspace():
                    return character
                self._advance(1)
            if not self._more():
                return b""

    def skip(self, text: bytes, *, needed: bool = False) -> None:
        while len(self._bytes) - self._at < len(text) and self._more():
            pass
        if needed:
            self.mark()
        if self._bytes.startswith(text, self._at):
            self._advance(len(text))

    def take(self, longest: int) -> bytes | None:
        """The object that the window begins with; None: it does not end."""
        while (end := self._end()) is None:
            if len(self._bytes) - self._at > longest or not self._more():
                return None
        found = self._bytes[self._at : end]
        self._advance(len(found))
        return found if len(found) <= longest else None

    def _end(self) -> int | None:
        depth = 0
        for token in _TOKEN.finditer(self._bytes, self._at):
            first = token[0][:1]
            if first == b"{":
                depth += 1
            elif first == b"}":
                depth -= 1
                if depth == 0:
                    return token.end()
            elif token.end() - token.start() == 1:
                return None
        return None

    def _advance(self, count: int) -> None:
        self._at += count
        self.offset += count
