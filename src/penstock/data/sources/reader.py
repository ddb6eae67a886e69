"""The interface of every source of documents."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from penstock.config.data import FORMS
from penstock.errors import ConfigError

Cursor = Any
"""A reader's place: numbers, lists and mappings, as JSON holds them. None: the beginning."""

TURNS = ("conversations", "conversation")
"""Names of fields with a chat, other than ``messages``."""

FIELDS = tuple(dict.fromkeys((*(name for form in FORMS for name in form.names), *TURNS)))
"""The fields of a source that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One document as a source has it, or a part of a long text. ``place``: where it stands, for messages.

    ``begins`` and ``ends``: whether the document does so here; both are true but for parts of a text.
    ``has``: the names of all that there is in the file, read or not; empty: ``fields`` are all.
    ``names``: what the settings say that the file calls a field.
    """

    fields: Mapping[str, Any]
    place: str
    begins: bool = True
    ends: bool = True
    has: Sequence[str] = ()
    names: Mapping[str, str] | None = None

    def called(self, name: str) -> str:
        """A field for messages: by its name in the file, and here."""
        if self.names is None or name not in self.names:
            return repr(name)
        return f"{self.names[name]!r} (fields.{name})"

    @property
    def listed(self) -> str:
        """The names in the file, for messages."""
        found = list(map(repr, self.has or self.fields))
        more = f" and {len(found) - _MOST_NAMES:,} more" if len(found) > _MOST_NAMES else ""
        return (", ".join(found[:_MOST_NAMES]) or "no fields") + more


_MOST_NAMES = 20


def without_nulls(value: Any) -> Any:
    """A table's value without the keys that are null within it: what one row's mapping has, all rows' have there."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


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


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A reader of a source that has names of its own for fields. ``names``: those that the settings give, by the names
    here. ``reader`` reads the ``wanted`` ones.
    """

    path: str
    reader: Reader
    names: Mapping[str, str]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.reader.files

    def read(self, start: Cursor) -> Iterator[tuple[Example, Cursor]]:
        """As the reader does, and:

        Raises:
            ConfigError: the source has been read from beginning to end, and no row has a field of that name.
        """
        every = _every(self.names)
        unseen = set() if start is not None else {*self.names.values()}
        example = None
        for example, cursor in self.reader.read(start):
            unseen.difference_update(example.has)
            fields = {here: example.fields[theirs] for here, theirs in every.items() if theirs in example.fields}
            yield Example(fields=fields, place=example.place, has=example.has, names=self.names), cursor
        if unseen and example is not None:
            raise ConfigError(f"{self._lacks(unseen)}, which no row has; the last one, {_has(example)}")

    def look(self, rows: int) -> None:
        """Look for the fields in the first ``rows`` rows, where the rest is read only as training goes on.

        Raises:
            ConfigError: no row of them has a field of that name.
        """
        unseen = {*self.names.values()}
        example = None
        for example, _ in islice(self.reader.read(None), rows):
            unseen.difference_update(example.has)
            if not unseen:
                return
        if example is not None:
            raise ConfigError(
                f"{self._lacks(unseen)}, which none of the first {rows:,} rows has; the last of them, {_has(example)}. "
                "If later rows have it, put one of them first, or have all rows read before training begins "
                "(data.streaming: false)"
            )

    def _lacks(self, unseen: Collection[str]) -> str:
        here, theirs = next((here, theirs) for here, theirs in self.names.items() if theirs in unseen)
        return f"data: {self.path!r}: fields.{here} is {theirs!r}"


def _has(example: Example) -> str:
    return f"{example.place}, has {example.listed}"


def wanted(names: Mapping[str, str] | None) -> tuple[str, ...]:
    """Names of the fields to read of a file's rows. ``names``: those that the settings give; None: they give none."""
    return FIELDS if names is None else tuple(_every(names).values())


def _every(names: Mapping[str, str]) -> dict[str, str]:
    """Each field that may be there, and its name in the file: that of the settings, else its own, if it is free."""
    theirs = {*names.values()}
    together = {name for form in FORMS if names.keys() <= {*form.names} for name in form.names}
    if not names.keys() & {"messages"} and "messages" in together:
        together |= {*TURNS}
    return {**names, **{name: name for name in FIELDS if name in together - names.keys() - theirs}}
