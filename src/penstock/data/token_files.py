"""Token ids on disk, mapped into memory: what Penstock prepares, and what it takes ready-made.

A corpus ``NAME`` is

    NAME.tokens   the ids of all documents, one after the other: little-endian uint16 or uint32
    NAME.ends     where each document ends, in tokens from the beginning: little-endian int64
    NAME.loss     optional: a byte per token, 1 where the token counts in the loss as a label
    NAME.json     {"format": "penstock.tokens", "version": 1, "dtype": "uint16", "tokens": ..., "documents": ...}

The last is written last. A raw ``.bin`` file holds ids alone, and is one document.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from penstock import files
from penstock.errors import ConfigError

FORMAT, VERSION = "penstock.tokens", 1
_DTYPES = ("uint16", "uint32")
_CHUNK = 1 << 24  # tokens looked at at a time

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Document:
    """Token ids, 1-D, and whether each counts in the loss as a label (uint8, 0 or 1); None: all do.

    ``ends``: the document ends here. What follows one that does not is its continuation.
    """

    ids: NDArray[np.uint32]
    answers: NDArray[np.uint8] | None = None
    ends: bool = True


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A corpus. ``ids``: 1-D. ``ends``: int64 [documents]. ``answers``: uint8 like ``ids``, or None: all count."""

    ids: TokenArray
    ends: NDArray[np.int64]
    answers: NDArray[np.uint8] | None

    @property
    def documents(self) -> int:
        return len(self.ends)

    def divided(self, share: float) -> "tuple[TokenFile, TokenFile]":
        """Two parts, the second with the last ``share`` of the documents; of the tokens, if it is all one document."""
        if self.documents < 2:
            ends = np.array([int(len(self.ids) * (1 - share)), len(self.ids)], dtype=np.int64)
            return TokenFile(ids=self.ids, ends=ends, answers=self.answers).divided(0.5)
        count = min(max(round(self.documents * (1 - share)), 1), self.documents - 1)
        cut = int(self.ends[count - 1])
        answers = (None, None) if self.answers is None else (self.answers[:cut], self.answers[cut:])
        return (
            TokenFile(ids=self.ids[:cut], ends=self.ends[:count], answers=answers[0]),
            TokenFile(ids=self.ids[cut:], ends=self.ends[count:] - cut, answers=answers[1]),
        )

    def largest(self) -> int:
        """The largest id; -1 if there is none."""
        parts = (self.ids[first : first + _CHUNK] for first in range(0, len(self.ids), _CHUNK))
        return max((int(part.max()) for part in parts), default=-1)


class TokenWriter:
    """Writes a corpus, document by document. A context manager; what an error ends is no corpus, as it lacks its JSON.

    ``path``: ``NAME.tokens``. ``loss``: documents say which of their tokens count.
    """

    def __init__(self, path: Path, dtype: str, *, loss: bool) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r}: token ids are kept as {' or '.join(_DTYPES)}")
        self.tokens = self.documents = 0
        self._path = path
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._open = False
        for ending in (".json", ".tokens", ".ends", ".loss"):
            path.with_suffix(ending).unlink(missing_ok=True)
        self._files = [files.create(path.with_suffix(ending), private=False) for ending in (".tokens", ".ends")]
        self._loss: BinaryIO | None = files.create(path.with_suffix(".loss"), private=False) if loss else None

    def write(self, document: Document) -> None:
        """Raises:
        ConfigError: an id that the dtype does not hold.
        """
        ids = document.ids
        if len(ids) and int(ids.max()) > np.iinfo(self._dtype).max:
            raise ConfigError(f"token id {int(ids.max())} does not fit {self._dtype.name}: use uint32")
        assert document.answers is None or (self._loss is not None and len(document.answers) == len(ids))
        self._files[0].write(ids.astype(self._dtype).tobytes())
        if self._loss is not None:
            answers = np.ones(len(ids), np.uint8) if document.answers is None else document.answers
            self._loss.write(answers.tobytes())
        self.tokens += len(ids)
        self._open = True
        if document.ends:
            self._end()

    def part(self) -> None:
        """What comes next is no continuation of what was written last."""
        if self._open:
            self._end()

    def _end(self) -> None:
        self._open = False
        self._files[1].write(np.int64(self.tokens).astype("<i8").tobytes())
        self.documents += 1

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.part()
        for file in [*self._files, *([self._loss] if self._loss else [])]:
            file.close()
        if kind is None:
            head = {"format": FORMAT, "version": VERSION, "dtype": self._dtype.name}
            counts = {"tokens": self.tokens, "documents": self.documents}
            files.replace(self._path.with_suffix(".json"), json.dumps({**head, **counts}) + "\n", private=False)


def write_tokens(path: str | Path, documents: Iterable[Any], *, dtype: str = "uint32") -> None:
    """Write a corpus that ``data.sources`` takes: ``NAME.tokens`` and the files beside it.

    ``documents``: for each, its token ids as a list or a 1-D array of integers. ``dtype``: ``uint16`` holds
    vocabularies up to 65,536.

    Raises:
        ConfigError: another name or dtype, or an id that it does not hold.
    """
    path = Path(path)
    if path.suffix != ".tokens":
        raise ConfigError(f"{path}: a file of token ids is called NAME.tokens")
    with TokenWriter(path, dtype, loss=False) as writer:
        for number, ids in enumerate(documents):
            array = np.asarray(ids, dtype=np.int64)
            if array.ndim != 1 or (len(array) and int(array.min()) < 0):
                raise ConfigError(f"document {number}: token ids are a 1-D array of numbers that are not negative")
            if len(array) and int(array.max()) >= 1 << 32:
                raise ConfigError(f"document {number}: token id {int(array.max())} does not fit uint32")
            writer.write(Document(ids=array.astype(np.uint32)))


def open_tokens(path: Path, dtype: str | None = None) -> TokenFile:
    """Map a corpus, or with ``dtype`` a raw file of ids.

    Raises:
        ConfigError: what is there is no corpus, or not whole.
    """
    if dtype is not None:
        ids = _map(path, dtype)
        return TokenFile(ids=cast(TokenArray, ids), ends=_one_document(ids), answers=None)
    head = _head(path.with_suffix(".json"))
    ids, ends = _map(path, head["dtype"]), cast(NDArray[np.int64], _map(path.with_suffix(".ends"), "int64"))
    loss = path.with_suffix(".loss")
    answers = cast(NDArray[np.uint8], _map(loss, "uint8")) if loss.exists() else None
    if (
        len(ids) != head["tokens"]
        or len(ends) != head["documents"]
        or (answers is not None and len(answers) != len(ids))
    ):
        raise ConfigError(
            f"data: {path} and what is beside it do not agree: {len(ids):,} tokens and {len(ends):,} documents are "
            f"there, {path.with_suffix('.json').name} says {head['tokens']:,} and {head['documents']:,}. Write it again"
        )
    if len(ends) and (int(ends[-1]) != len(ids) or bool((np.diff(ends, prepend=0) < 0).any())):
        raise ConfigError(f"data: {path.with_suffix('.ends')} must rise to the number of tokens, {len(ids):,}")
    return TokenFile(ids=cast(TokenArray, ids), ends=ends, answers=answers)


def _one_document(ids: NDArray[Any]) -> NDArray[np.int64]:
    return np.array([len(ids)] if len(ids) else [], dtype=np.int64)


def _head(path: Path) -> dict[str, Any]:
    try:
        head = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data: {path.with_suffix('.tokens')} needs {path.name} beside it, which says what it holds "
            f"({type(error).__name__}); penstock.data.write_tokens writes both"
        ) from None
    known = isinstance(head, dict) and (head.get("format"), head.get("version")) == (FORMAT, VERSION)
    whole = (
        known and head.get("dtype") in _DTYPES and all(isinstance(head.get(k), int) for k in ("tokens", "documents"))
    )
    if not whole:
        raise ConfigError(f"data: {path} does not describe token ids in a way that this version knows")
    return cast(dict[str, Any], head)


def _map(path: Path, dtype: str) -> NDArray[Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
        if size % kind.itemsize:
            raise ConfigError(f"data: {path} has {size:,} bytes, which is not a whole number of {dtype}")
        if size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=kind)
        return np.memmap(path, dtype=kind, mode="r")
    except OSError as error:
        raise ConfigError(f"data: cannot use {path}: {error.strerror}") from None
