"""The interface of every source of documents."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Cursor = Any
"""A reader's place: numbers, lists and mappings, as JSON holds them. None: the beginning."""

FIELDS = ("text", "prompt", "completion", "messages", "tools")
"""The fields of a source that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One document as a source has it, or a part of a long text. ``place``: where it stands, for messages.

    ``begins`` and ``ends``: whether the document does so here; both are true but for parts of a text.
    """

    fields: Mapping[str, Any]
    place: str
    begins: bool = True
    ends: bool = True


class Reader(Protocol):
    """Examples in an order that is always the same. ``files``: what is read; none for a data set on the hub."""

    @property
    def files(self) -> tuple[Path, ...]: ...

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        """Each example from ``start`` on, with the cursor behind it.

        Raises:
            ConfigError: a file cannot be read, with its line or row.
        """
        ...
