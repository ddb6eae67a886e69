"""Text as a stream of pieces of documents, in an order that depends on nothing but the documents' names."""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.config import DataConfig
from penstock.errors import ConfigError

PIECE = 1 << 13
"""Bytes of text handled at a time; also how finely text is divided between training and validation."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some lines of a document. ``last``: the document ends here. ``nbytes``: its length in UTF-8."""

    text: str
    nbytes: int
    last: bool


def documents(config: DataConfig) -> tuple[Path, ...]:
    """The files of a source, ordered by a hash of their names, so that any stretch of them is a fair sample.

    Raises:
        ConfigError: a pattern names no file.
    """
    if config.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py") if _is_stdlib(path, root)}
    else:
        names = {path: Path(path) for pattern in config.files for path in _matches(pattern)}
    return tuple(names[name] for name in sorted(names, key=lambda n: (xxhash.xxh3_64_intdigest(os.fsencode(n)), n)))


def _is_stdlib(path: Path, root: Path) -> bool:
    """Installed packages are not the standard library; its tests are left out, as some systems ship without them."""
    return not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts)


def _matches(pattern: str) -> list[str]:
    found = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
    if not found:
        raise ConfigError(f"data.files: {pattern!r} matches no file (relative to {os.getcwd()})")
    return found


def pieces(paths: Sequence[Path], limit: int | None) -> Iterator[Piece]:
    """The documents' text in pieces of whole lines of about ``PIECE`` bytes, until ``limit`` bytes are passed.

    Raises:
        ConfigError: a document cannot be read or is not UTF-8 text.
    """
    seen = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                ahead = _lines(file.readlines(PIECE))
                while ahead:
                    text, ahead = ahead, _lines(file.readlines(PIECE))
                    yield Piece(text=text.decode("utf-8"), nbytes=len(text), last=not ahead)
                    seen += len(text)
                    if limit is not None and seen >= limit:
                        return
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
            raise ConfigError(f"data: cannot use {path}: {reason}") from None


def _lines(lines: list[bytes]) -> bytes:
    return b"".join(lines)


def total_bytes(paths: Sequence[Path], limit: int | None) -> int:
    """Bytes of text that ``pieces`` gives, up to one piece more than ``limit``."""
    total = sum(path.stat().st_size for path in paths)
    return total if limit is None else min(total, limit)
