"""The identity of a run's data, by which it notices a change: files by their contents, settings by their values.

A run keeps its data's identity in ``data.json``, and each commit has its fingerprint beside the position.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from penstock import files
from penstock.data.sources.walk import ending
from penstock.documents.text import MalformedError, parse_json, read_text
from penstock.documents.typed import decode
from penstock.errors import ConfigError

IDENTITY = "data.json"
"""The file's name in a run's folder."""

_LONGEST = 512 << 20  # bytes of it; some hundred for each file of the data
_CHUNK = 1 << 24
_ENDS = 1 << 20
"""Bytes at each end that are looked at of a file that is streamed."""


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """A file: its name, with escapes for bytes that are not UTF-8, its size in bytes, when it was changed, and a hash
    (xxh3, 128 bits) of what is in it."""

    name: str
    nbytes: int
    changed_ns: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of data. ``files``: of all sources in order. ``settings``: all else that decides which sequences a
    step sees."""

    files: tuple[FileFacts, ...]
    settings: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """A hash of the contents and the settings, whatever place and time the files have."""
        return fingerprint({"files": [(f.nbytes, f.digest) for f in self.files], "settings": self.settings})

    def to_json(self) -> str:
        body = {"files": [asdict(f) for f in self.files], "settings": self.settings}
        return json.dumps({**body, "checksum": fingerprint(body)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Identity":
        """Raises:
        MalformedError: it is not what ``to_json`` gives.
        """
        value = parse_json(text)
        checksum = value.pop("checksum", None) if isinstance(value, dict) else None
        found = decode(cls, value)
        if checksum != fingerprint(value):
            raise MalformedError(
                "it has no checksum of what it says" if checksum is None else "its checksum is another"
            )
        return found

    def difference(self, before: "Identity") -> str | None:
        """The first difference from ``before``, for people; None: there is none."""
        if len(self.files) != len(before.files):
            return f"there were {len(before.files)} files and are {len(self.files)} now"
        for now, then in zip(self.files, before.files, strict=True):
            if ending(Path(now.name)) != ending(Path(then.name)):
                return f"{then.name} was read by its ending, and {now.name} has another"
        if self.fingerprint == before.fingerprint:
            return None
        for now, then in zip(self.files, before.files, strict=True):
            if (now.nbytes, now.digest) != (then.nbytes, then.digest):
                sizes = (
                    f"{then.nbytes:,} bytes then, {now.nbytes:,} now" if now.nbytes != then.nbytes else "other bytes"
                )
                return f"{now.name} has changed since ({sizes})"
        was, is_now = before.settings.get("version"), self.settings.get("version")
        if was != is_now:  # first, as hashes may be taken of other things, too
            return f"this version of Penstock prepares data otherwise than that of then ({was!r}, now {is_now!r})"
        for key in sorted({*self.settings, *before.settings}):
            was, is_now = before.settings.get(key), self.settings.get(key)
            known = key in self.settings and key in before.settings
            if not known or fingerprint(was) != fingerprint(is_now):  # by what JSON has: 1 is neither 1.0 nor true
                return f"{key} was {was!r} and is {is_now!r} now"
        raise AssertionError("fingerprints differ, and nothing that they are made of")


def fingerprint(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def facts_of(paths: Sequence[Path], known: Sequence[FileFacts], *, whole: bool) -> tuple[FileFacts, ...]:
    """The files' facts. One that has the name, the size and the time of a ``known`` one is not read again.

    ``whole``: hash all of a file; otherwise its ends.

    Raises:
        ConfigError: a file cannot be read.
    """
    before = {(f.name, f.nbytes, f.changed_ns): f for f in known}
    found = []
    for path in paths:
        try:
            status = path.stat()
            key = (os.fsencode(path).decode(errors="backslashreplace"), status.st_size, status.st_mtime_ns)
            digest = before[key].digest if key in before else digest_of(path, whole=whole)
        except OSError as error:
            raise ConfigError(f"data: cannot use {path}: {error.strerror}") from None
        found.append(FileFacts(name=key[0], nbytes=key[1], changed_ns=key[2], digest=digest))
    return tuple(found)


def require_unchanged(paths: Sequence[Path], facts: Sequence[FileFacts]) -> None:
    """Look again at files that have been read, before what was made of them is kept under the name of their ``facts``.

    Raises:
        ConfigError: one has changed, or is gone.
    """
    for now, then in zip(facts_of(paths, facts, whole=True), facts, strict=False):
        if (now.nbytes, now.digest) != (then.nbytes, then.digest):
            raise ConfigError(
                f"data: {now.name} has changed while it was read ({then.nbytes:,} bytes at first, {now.nbytes:,} now): "
                "start again once nothing writes to it"
            )


def digest_of(path: Path, *, whole: bool = True) -> str:
    """The hash (xxh3, 128 bits) of what is in a file; not ``whole``: of its ends.

    Raises:
        OSError: it cannot be read.
    """
    state = xxhash.xxh3_128()
    with files.regular(path) as file:
        if whole or os.fstat(file.fileno()).st_size <= 2 * _ENDS:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
        else:
            state.update(file.read(_ENDS))
            file.seek(-_ENDS, 2)
            state.update(file.read(_ENDS))
    return state.hexdigest()


def require_place(position: Mapping[str, Any], fingerprint: str) -> None:
    """Check that the position that a run's last commit has is one in the data of this ``fingerprint``.

    Raises:
        ConfigError: it is one in other data, or another loop's.
    """
    if "data" not in position:
        raise ConfigError(
            "the run's last commit has a position in the data that is not penstock train's: another loop (a "
            "Trainer, or one of your own) has trained it. Go on with that, or start another run"
        )
    if position["data"] != fingerprint:
        raise ConfigError(
            f"the run's last commit is at a place in other data ({position['data']}, not {fingerprint}): the "
            "files or the data's settings have changed since. Put them back, or start another run"
        )


def identity_in(run: Path) -> Identity | None:
    """The identity of the data that a run was on, out of its folder; None: the folder has none.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    path = run / IDENTITY
    try:
        return Identity.from_json(read_text(path, _LONGEST)) if path.exists() else None
    except (OSError, MalformedError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path}, which says on which data the run was, cannot be read: {said}. Put it back from a copy"
        ) from None
