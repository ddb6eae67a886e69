"""Token ids on disk, read piece by piece: prepared by Penstock, or taken ready-made.

A corpus ``NAME`` is

    NAME.tokens   the ids of all documents, one after the other: little-endian uint16 or uint32
    NAME.ends     where each document ends, in tokens from the beginning: little-endian int64
    NAME.loss     optional: a byte per token, 1 where the token counts in the loss as a label
    NAME.xxh3     a checksum for each block of these files, in this order (``data.blocks``): little-endian uint64
    NAME.json     {"format": "penstock.tokens", "version": 1, "dtype": "uint16", "tokens": ..., "documents": ...,
                   "checksums": the checksum of NAME.xxh3}

The last is written last. A raw ``.bin`` file holds ids alone, and is one document. What has no checksums of its own
(a raw file, a corpus of an earlier version) gets them when a run begins with it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock import files
from penstock.data.blocks import ADVICE, BLOCK, BlockArray, SummedFile, Sums, sums_of
from penstock.documents.text import MalformedError, parse_json, read_bounded
from penstock.documents.typed import decode
from penstock.errors import ConfigError, StoreError

SUMS = ".xxh3"
_DTYPES = ("uint16", "uint32")
_LONGEST_HEAD = 1 << 16  # bytes of NAME.json
_CHUNK = 1 << 24  # tokens looked at at a time


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The contents of NAME.json. ``checksums``: empty in a corpus that has none of its own."""

    format: Literal["penstock.tokens"]
    version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    tokens: int
    documents: int
    checksums: str = ""


TokenArray = NDArray[np.uint16] | NDArray[np.uint32] | BlockArray
"""1-D. Of a file it is a BlockArray, of which a stretch is read when it is asked for."""


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
    answers: NDArray[np.uint8] | BlockArray | None

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
        ids = _cut(self.ids, cut)
        answers = (None, None) if self.answers is None else _cut(self.answers, cut)
        return (
            TokenFile(ids=ids[0], ends=self.ends[:count], answers=answers[0]),
            TokenFile(ids=ids[1], ends=self.ends[count:] - cut, answers=answers[1]),
        )

    def largest(self) -> int:
        """The largest id; -1 if there is none."""
        parts = (self.ids[first : first + _CHUNK] for first in range(0, len(self.ids), _CHUNK))
        return max((int(part.max()) for part in parts), default=-1)


A = TypeVar("A", bound=NDArray[Any] | BlockArray)


def _cut(array: A, at: int) -> tuple[A, A]:
    """An array in two, of which nothing is read."""
    if isinstance(array, BlockArray):
        return cast(A, array.window(0, at)), cast(A, array.window(at, len(array)))
    return cast(A, array[:at]), cast(A, array[at:])


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
        for ending in (".json", ".tokens", ".ends", ".loss", SUMS):
            path.with_suffix(ending).unlink(missing_ok=True)
        endings = (".tokens", ".ends", ".loss") if loss else (".tokens", ".ends")
        self._files = [SummedFile(files.create(path.with_suffix(ending), private=False)) for ending in endings]
        self._loss = self._files[2] if loss else None

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
        """Begin a new part: what comes next does not continue what was written last."""
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
        for file in self._files:
            file.close()
        if kind is None:
            digest = write_sums(self._path.with_suffix(SUMS), [file.sums for file in self._files])
            dtype: Any = self._dtype.name
            counts = {"tokens": self.tokens, "documents": self.documents}
            head = _Head(format="penstock.tokens", version=1, dtype=dtype, **counts, checksums=digest)
            files.replace(self._path.with_suffix(".json"), json.dumps(asdict(head)) + "\n", private=False)


def write_tokens(
    path: str | Path, documents: Iterable[Any], *, dtype: str = "uint32", loss: Iterable[Any] | None = None
) -> None:
    """Write a corpus that ``data.sources`` takes: ``NAME.tokens`` and the files beside it.

    ``documents``: for each, its token ids as a list or a 1-D array of integers. ``dtype``: ``uint16`` holds
    vocabularies up to 65,536. ``loss``: for each document a list or a 1-D array as long, 1 where the token counts in
    the loss and else 0; None: all count.

    Raises:
        ConfigError: another name or dtype, an id that is no whole number or that it does not hold, or a loss that is
            not as long.
    """
    path = Path(path)
    if path.suffix != ".tokens":
        raise ConfigError(f"{path}: a file of token ids is called NAME.tokens")
    with TokenWriter(path, dtype, loss=loss is not None) as writer:
        for number, (ids, counts) in enumerate(zip_longest(documents, () if loss is None else loss)):
            if loss is not None and (ids is None or counts is None):
                raise ConfigError(f"document {number}: documents and loss are not equally many")
            array = _ids(ids, number)
            writer.write(Document(ids=array.astype(np.uint32), answers=_answers(counts, len(array), number)))


def _ids(ids: Any, number: int) -> NDArray[Any]:
    """The token ids that are given for document ``number``, as an array."""
    try:
        found = np.asarray(ids)
        found = np.asarray(found.tolist()) if found.dtype == object else found  # a row of such a table, of numbers
    except (TypeError, ValueError):  # lists of several lengths, and what is no array at all
        found = np.empty(())
    if found.ndim != 1 or (len(found) and (found.dtype.kind not in "iu" or int(found.min()) < 0)):
        raise ConfigError(f"document {number}: token ids are a 1-D array of whole numbers that are not negative")
    if len(found) and int(found.max()) >= 1 << 32:
        raise ConfigError(f"document {number}: token id {int(found.max())} does not fit uint32")
    return found


def _answers(counts: Any, tokens: int, number: int) -> NDArray[np.uint8] | None:
    """The 0 or 1 that is given for each of the tokens of document ``number``, as an array."""
    if counts is None:
        return None
    found = np.asarray(counts)
    if found.shape != (tokens,) or not np.isin(found, (0, 1)).all():
        raise ConfigError(f"document {number}: loss has 0 or 1 for each of its {tokens:,} tokens")
    return found.astype(np.uint8)


def write_sums(path: Path, sums: Sequence[Sums]) -> str:
    """Write checksums of files one after the other; returns the checksum of them all."""
    data = b"".join(part.tobytes() for part in sums)
    files.replace(path, data, private=False)
    return xxhash.xxh3_64_hexdigest(data)


def lacks_sums(path: Path, dtype: str | None) -> bool:
    """True if a corpus, or with ``dtype`` a raw file of ids, has no checksums of its own.

    Raises:
        ConfigError: what is there is no corpus.
    """
    return dtype is not None or not _head(path.with_suffix(".json")).checksums


def make_sums(path: Path, dtype: str | None) -> list[Sums]:
    """The checksums of a corpus, or of a raw file of ids, that has none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return [sums_of(file) for file in _files_of(path, dtype)]
    except OSError as error:
        raise ConfigError(f"data: cannot use {error.filename}: {error.strerror}") from None


def _files_of(path: Path, dtype: str | None) -> list[Path]:
    """The files that checksums are of, in order."""
    if dtype is not None:
        return [path]
    loss = path.with_suffix(".loss")
    return [path, path.with_suffix(".ends"), *([loss] if loss.exists() else [])]


def open_tokens(path: Path, dtype: str | None = None, sums: Path | None = None) -> TokenFile:
    """Open a corpus, or with ``dtype`` a raw file of ids. ``sums``: its checksums, where it has none of its own.

    Raises:
        ConfigError: what is there is no corpus, or not whole.
        StoreError: it is damaged.
    """
    if dtype is not None:
        assert sums is not None, "a raw file has none of its own"
        (ids,) = _arrays([path], [dtype], sums, None)
        return TokenFile(ids=ids, ends=np.array([len(ids)] if len(ids) else [], dtype=np.int64), answers=None)
    described, names = path.with_suffix(".json"), _files_of(path, None)
    head = _head(described)
    if sums is None and not head.checksums:
        raise ConfigError(f"data: {described} has no checksums: write the corpus with write_tokens again")
    kinds = [head.dtype, "int64", "uint8"][: len(names)]
    arrays = _arrays(names, kinds, sums or path.with_suffix(SUMS), None if sums else head.checksums)
    ids, ends, answers = arrays[0], arrays[1][:].astype(np.int64), arrays[2] if len(arrays) > 2 else None
    counted = answers is None or len(answers) == len(ids)
    if len(ids) != head.tokens or len(ends) != head.documents or not counted:
        raise ConfigError(
            f"data: {path} and what is beside it do not agree: {len(ids):,} tokens and {len(ends):,} documents are "
            f"there, {described.name} says {head.tokens:,} and {head.documents:,}. Write it again"
        )
    if len(ends) and (int(ends[-1]) != len(ids) or bool((np.diff(ends, prepend=0) < 0).any())):
        raise ConfigError(f"data: {path.with_suffix('.ends')} must rise to the number of tokens, {len(ids):,}")
    return TokenFile(ids=ids, ends=ends, answers=answers)


def _arrays(names: Sequence[Path], kinds: Sequence[str], sums: Path, wanted: str | None) -> list[BlockArray]:
    """A file each, with its checksums out of ``sums``. ``wanted``: the checksum of these."""
    try:
        data = files.read(sums)
        blocks = [-(-name.stat().st_size // BLOCK) for name in names]
    except OSError as error:
        raise ConfigError(f"data: cannot use {error.filename}: {error.strerror}") from None
    if len(data) % 8 or (wanted is not None and xxhash.xxh3_64_hexdigest(data) != wanted):
        raise StoreError(f"{sums} is damaged: it is not what was written: check the drive. {ADVICE}")
    rest, found = np.frombuffer(data, dtype="<u8"), []
    for name, kind, count in zip(names, kinds, blocks, strict=True):
        try:
            found.append(BlockArray(name, kind, rest[:count]))
        except ValueError as error:
            again = "" if name == names[0] else ": write the corpus with write_tokens again, with its loss if there is"
            raise ConfigError(f"data: {error}{again}") from None
        rest = rest[count:]
    if len(rest):
        raise ConfigError(f"data: {names[0]} or what is beside it is shorter than when its checksums were made")
    return found


def token_count(path: Path, dtype: str | None = None) -> int:
    """Token ids in a corpus, or with ``dtype`` in a raw file, by the size of the file alone.

    Raises:
        ConfigError: nothing says of which dtype they are.
    """
    kind = dtype or _head(path.with_suffix(".json")).dtype
    return path.stat().st_size // np.dtype(kind).itemsize


def _head(path: Path) -> _Head:
    try:
        found = parse_json(read_bounded(path, _LONGEST_HEAD))
    except (OSError, MalformedError) as error:
        raise ConfigError(
            f"data: {path.with_suffix('.tokens')} needs {path.name} beside it, which says what it holds "
            f"({type(error).__name__}); penstock.data.write_tokens writes both"
        ) from None
    try:
        return decode(_Head, found)
    except MalformedError as error:
        said = f"data: {path} does not describe token ids in a way that this version knows"
        raise ConfigError(f"{said}: {error}") from None
