"""The numbers of a page as typed arrays in one compressed blob, which its script unpacks with what browsers have.

A million ops as JSON would be a hundred megabytes; as columns that repeat themselves they are a few.
"""

import base64
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Kind = Literal["f8", "u4", "i4"]
_ALIGN = 8  # a typed array's offset is a multiple of its element's size


@dataclass(kw_only=True)
class Columns:
    """Collects arrays. ``add`` returns what the page's script finds one by: [kind, offset in bytes, length]."""

    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def add(self, kind: Kind, values: Iterable[Any]) -> tuple[str, int, int]:
        """Append one array; the values must fit ``kind`` (little-endian numpy names)."""
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=f"<{kind}")
        raw = array.tobytes()
        found = (kind, self._size, len(array))
        self._parts += [raw, bytes(-len(raw) % _ALIGN)]
        self._size += len(raw) + -len(raw) % _ALIGN
        return found

    def text(self) -> str:
        """All arrays, deflated (zlib), in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._parts), 6)).decode("ascii")


@dataclass(kw_only=True)
class Names:
    """Texts by number, each kept once."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number
