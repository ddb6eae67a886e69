"""Small JSON documents with a kind, a format version and a checksum: manifests and commit records."""

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from penstock import files
from penstock.documents import typed
from penstock.documents.text import MalformedError, parse_json, read_bounded
from penstock.documents.typed import shown
from penstock.errors import StoreError
from penstock.store.directory import in_the_way, is_there
from penstock.store.packed import RESERVED, TO_BE_WRITTEN, refused, store_error

log = logging.getLogger("penstock")

FORMAT = 1
T = TypeVar("T")
_LARGEST = 256 << 20  # bytes of a document; a manifest has some hundred for each parameter of a model
_DEEPEST = 80  # brackets within brackets; a position of the user's may have 64
_NO_SPACE = (b"\v", b"\f")  # Python strips them, and JSON has them nowhere
RESERVE = 256 << 10  # bytes of a commit file from the start, so that no commit needs new space on a full disk


def encode(kind: str, body: object) -> bytes:
    """The document as JSON text. ``body`` must be made of what JSON has."""
    plain = json.loads(json.dumps(body))  # keys become text first, so that they sort the same when read back
    document = {"penstock": kind, "format": FORMAT, "checksum": _checksum(plain), "body": plain}
    return json.dumps(document).encode()


def decode(kind: str, text: bytes, source: Path) -> Any:
    """The body of a document.

    Raises:
        StoreError: damaged, foreign, or of an unknown format version; names ``source``.
    """
    try:
        document = parse_json(_unpadded(text), deepest=_DEEPEST, finite=False)  # a loss may be NaN
    except MalformedError as e:
        raise StoreError(f"{source} is damaged: {e}") from e
    if not isinstance(document, dict) or document.get("penstock") != kind:
        raise StoreError(f"{source} is not a {kind} of penstock's: give another directory")
    if document.get("format") != FORMAT:
        raise StoreError(
            f"{source} has format {shown(document.get('format'))}, this version of penstock reads format {FORMAT}: "
            "use the version of penstock that wrote it"
        )
    if "body" not in document or document.get("checksum") != _checksum(document["body"]):
        raise StoreError(f"{source} is damaged: its checksum does not match its content")
    return document["body"]


def _unpadded(text: bytes) -> bytes:
    """A document without the spaces that fill up a commit file, which take longer to parse than its record."""
    return text if any(mark in text for mark in _NO_SPACE) else text.rstrip()


def _checksum(body: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def write_document(path: Path, kind: str, body: object) -> None:
    """Replace ``path`` by the document, atomically and durably.

    Raises:
        StoreError: it could not be written; what was there before is still there.
    """
    with refused(f"{path} cannot be written", TO_BE_WRITTEN):
        files.replace(path, encode(kind, body))


def read_document(path: Path, kind: str) -> Any:
    """The body of the document at ``path``.

    Raises:
        StoreError: missing, unreadable, damaged, foreign, or of an unknown format version.
    """
    try:
        text = _text(path)
    except MalformedError as e:
        raise StoreError(f"{path} is damaged: {e}") from e
    return decode(kind, text, path)


def _text(path: Path) -> bytes:
    try:
        return read_bounded(path, _LARGEST)
    except OSError as e:
        raise store_error(f"{path} cannot be read: {in_the_way(path, e)}", e) from e


def is_foreign(path: Path) -> bool:
    """True if what is at ``path`` is certain to be no document, whole or damaged: JSON of somebody else's, or no file.

    Raises:
        StoreError: it cannot be read.
    """
    if not path.is_file():
        return True
    try:
        found = parse_json(_text(path), deepest=_DEEPEST, finite=False)
    except MalformedError:
        return False
    return not isinstance(found, dict) or "penstock" not in found


def read_as(path: Path, kind: str, body: type[T]) -> T:
    """The body of the document at ``path``, as a dataclass.

    Raises: as ``read_document``, and
        StoreError: the body has not the fields of ``body``, or one is of another type.
    """
    found = read_document(path, kind)
    try:
        return typed.decode(body, found)
    except MalformedError as e:
        raise StoreError(f"{path} is damaged: {e}") from e


@dataclass(frozen=True, kw_only=True)
class Table:
    """The checksums that a commit vouches for: the slot of their area, and the checksum of the table."""

    slot: int
    digest: str

    def __post_init__(self) -> None:
        if self.slot not in (0, 1):
            raise ValueError(f"slot={self.slot} is not one of two")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A record in a commit file. ``store``: the id of the store that it belongs to."""

    store: str
    sequence: int
    record: dict[str, Any] | None
    table: Table | None

    def __post_init__(self) -> None:
        if self.sequence < 0:
            raise ValueError(f"sequence={self.sequence} is no number of a commit")


class CommitLog:
    """Two files written in turn, so that the newer complete one is always there, whenever the process dies.

    They are overwritten in place, within space that they have from the start: a commit cannot fail for lack of it.
    """

    def __init__(self, directory: Path, store: str, *, writable: bool = True) -> None:
        """``store`` is the id of the store: a record of another store is not taken for ours. ``writable``: False: to
        look at alone, else the newest record is made durable, and a file that is gone is made again.

        Raises:
            StoreError: neither file holds a readable record, one cannot be read, or what is to be written cannot be.
        """
        directory = directory.absolute()  # a program may go elsewhere between two commits
        self._paths = (directory / "commit.0", directory / "commit.1")
        self._store = store
        self.writable = writable
        self._newest, self.faults = self._find()
        """The newest record; and an error for each file that has neither a record nor is blank: a power cut has torn it
        while it was written, or it is damaged."""
        self._doubtful: Path | None = None  # of a record that may be there or not
        if writable:
            _write_again(self.path)
            for path in self._paths:
                if not is_there(path):
                    _blank_file(path, b"")
                    log.warning("%s is made again, for the next commit", path)

    @staticmethod
    def create(directory: Path, store: str) -> None:
        """Make both files: record 0 says that nothing has been committed, the other is blank."""
        for name, text in (
            ("commit.0", encode("commit", {"store": store, "sequence": 0, "record": None, "table": None})),
            ("commit.1", b""),
        ):
            _blank_file(directory / name, text)

    def _find(self) -> tuple[_Entry, tuple[StoreError, ...]]:
        found, faults = self._readable()
        if not found:
            said = "; ".join(map(str, faults.values()))
            raise StoreError(f"no commit record can be read: {said}: start from a snapshot")
        newest = max(found, key=lambda entry: entry.sequence)
        return newest, tuple(fault for path, fault in faults.items() if not _blank(path))

    def _readable(self) -> tuple[list[_Entry], dict[Path, StoreError]]:
        """The records that there are; and what is wrong with the others.

        Raises:
            StoreError: the system does not let a file be read that is there. It may hold the newest record, and who
                went on from the other one would write over what that names.
        """
        found: list[_Entry] = []
        faults: dict[Path, StoreError] = {}
        for path in self._paths:
            try:
                found.append(self._read(path))
            except StoreError as e:  # one of the two may be blank, or torn by a crash while it was written
                if isinstance(e.__cause__, OSError) and not isinstance(e.__cause__, _NO_FILE):
                    raise _refused(str(e), e.__cause__) from e.__cause__
                faults[path] = StoreError(str(e))  # its own traceback leads here, and to all that has called this
        return found, faults

    @property
    def records(self) -> dict[int, dict[str, Any] | None]:
        """Each record that can be read, by its number: the newest and, if it is there, the one before."""
        found, _ = self._readable()
        return {entry.sequence: entry.record for entry in found}

    def _read(self, path: Path) -> _Entry:
        entry = read_as(path, "commit", _Entry)
        if entry.store != self._store:
            raise StoreError(f"{path} belongs to another store: restore the file that was there")
        return entry

    def _place(self, entry: _Entry) -> Path:
        return self._paths[entry.sequence % 2]

    @property
    def doubtful(self) -> bool:
        """True if the writing of a record has failed, so that it may be there or not."""
        return self._doubtful is not None

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest record, or None before the first."""
        return self._newest.record

    @property
    def table(self) -> Table | None:
        """The place of the checksums that belong to the newest record; None: nothing had been written."""
        return self._newest.table

    @property
    def path(self) -> Path:
        """The file of the newest record."""
        return self._place(self._newest)

    def append(self, record: dict[str, Any], table: Table | None) -> None:
        """Write ``record`` durably over the older of the two.

        Raises:
            StoreError: it could not be written; the last one still stands.
        """
        assert self.writable, "opened to be read alone"
        self.settle()
        plain = json.loads(json.dumps(record))
        entry = _Entry(store=self._store, sequence=self._newest.sequence + 1, record=plain, table=table)
        path = self._place(entry)
        self._doubtful = path
        with refused(f"{path}: commit failed, and the commit before it still stands", advice=RESERVED):
            _overwrite(path, encode("commit", asdict(entry)))
        self._newest, self._doubtful = entry, None

    @property
    def sequence(self) -> int:
        """The number of the newest record, from 0."""
        return self._newest.sequence

    def count_from(self, sequence: int) -> None:
        """Give the next record the number after this one, of a store in which nothing has been committed: it takes over
        what others have committed under that number. The record that says that nothing has been is there until it is.

        Raises:
            StoreError: that one cannot be kept beside it.
        """
        assert self._newest.record is None, "nothing has been committed"
        beside = self._paths[sequence % 2]
        if beside != self.path:  # the next one would be written over it
            with refused(f"{beside} cannot be written", advice=RESERVED):
                _overwrite(beside, encode("commit", asdict(self._newest)))
        self._newest = replace(self._newest, sequence=sequence)

    def take_back(self, sequence: int) -> None:
        """Make the record before the newest one, which has this number, the newest. Opened to be read alone, the log
        passes the newest over, which stays where it is.

        Raises:
            StoreError: it is not there, or the newest one cannot be removed.
        """
        newest, path = self._newest, self.path
        before = self._read(self._paths[(newest.sequence + 1) % 2])
        if before.sequence != sequence or newest.sequence != sequence + 1:
            raise StoreError(
                f"{path} is commit {newest.sequence}, and the one to go back to, {sequence}, is not the one before: go "
                "on from a snapshot"
            )
        if self.writable:
            with refused(f"{path}: a commit cannot be taken back", advice=RESERVED):
                _overwrite(path, b"")
            log.warning("%s: commit %d is taken back: not all ranks have it", path, newest.sequence)
        self._newest = before

    def settle(self) -> None:
        """Make sure that a record whose writing has failed is not there after all. Before anything is written that it
        names: a process that is killed then must find the record before it.

        Raises:
            StoreError: that fails, too; nothing may be written.
        """
        if (path := self._doubtful) is not None:  # threads may come here at once
            said = f"{path}: a commit that has failed cannot be taken back, and the commit before it still stands"
            with refused(said, advice=RESERVED):
                _overwrite(path, b"")
            self._doubtful = None


def _blank_file(path: Path, text: bytes) -> None:
    """Make a commit file, with the space that it will ever need."""
    with refused(f"{path} cannot be written", TO_BE_WRITTEN):
        with files.create(path) as file:
            file.write(text.ljust(RESERVE))
            file.flush()
            os.fsync(file.fileno())
        files.sync_folder(path.parent)


def _overwrite(path: Path, text: bytes) -> None:
    """Replace all of a commit file, in place and durably."""
    with files.update(path) as file:
        file.write(text.ljust(max(RESERVE, os.fstat(file.fileno()).st_size)))
        file.flush()
        os.fdatasync(file.fileno())


_NO_FILE = (FileNotFoundError, IsADirectoryError)
"""There is nothing in the place of a commit file that could hold a record."""


def _refused(said: str, cause: OSError) -> StoreError:
    """The error for a commit file that the system does not let be read."""
    helps = "it may hold the last commit, so try again; if it stays so, go on from a snapshot in another directory"
    return store_error(f"{said.removesuffix('?')}; {helps}", cause)


def _blank(path: Path) -> bool:
    try:
        return read_bounded(path, _LARGEST).isspace()
    except (*_NO_FILE, MalformedError):
        return False
    except OSError as e:
        raise _refused(f"{path} cannot be read: {in_the_way(path, e)}", e) from e


def _write_again(path: Path) -> None:
    """Make a record durable that can be read: a process may have been killed, or told of an error, before it was.

    Were it lost in a power cut later, the record before it would count, of which the run that goes on overwrites the
    slots. The bytes are the same, so a power cut in this very moment leaves either record whole.
    """
    with refused(f"{path} cannot be made durable", "check the drive", RESERVED), files.update(path) as file:
        text = file.read()
        file.seek(0)
        file.write(text)
        file.flush()
        os.fdatasync(file.fileno())
