"""Files of a bounded size, and JSON of a bounded depth: what a file holds costs at most some times its own bytes."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = 16 << 20
"""Bytes of a document that describes something: a configuration, a manifest, a profile."""

DEEPEST = 64
"""Brackets within brackets; what penstock writes has fewer than ten, and a chat's tools some more."""


class MalformedError(ValueError):
    """A document is not what it must be; says where and why, and not in which file."""


def read_bounded(path: Path, most: int = SMALL) -> bytes:
    """All bytes of a regular file.

    Raises:
        MalformedError: it is no regular file, or has more than ``most`` bytes.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would wait for ever
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedError("it is no regular file")
        if status.st_size > most:
            raise MalformedError(f"it has {status.st_size:,} bytes, and such a file has at most {most:,}")
        return file.read(most)


def read_text(path: Path, most: int = SMALL) -> str:
    """All of a UTF-8 text file.

    Raises: as ``read_bounded``, and
        MalformedError: it is not UTF-8.
    """
    try:
        return read_bounded(path, most).decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"it is not UTF-8 text (byte {error.start:,})") from None


def parse_json(
    text: str | bytes, *, deepest: int = DEEPEST, finite: bool = True, numbers: Callable[[str], float] = float
) -> Any:
    """The value that a JSON text holds. ``finite``: without NaN and infinity, which JSON does not have. ``numbers``: of
    the text of a number with a point or an exponent.

    Raises:
        MalformedError: it is not JSON; a key is there twice, a number is NaN, infinite or has thousands of digits,
            brackets are deeper than ``deepest``, or a text has half of a character.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text  # json.loads takes halves of characters
        constant = _no_number if finite else float
        value = json.loads(text, object_pairs_hook=_once, parse_float=numbers, parse_constant=constant)
    except MalformedError:
        raise
    except RecursionError:
        raise MalformedError(f"brackets within brackets, more than {deepest} deep") from None
    except UnicodeDecodeError as error:
        raise MalformedError(f"it is not UTF-8 text (byte {error.start:,})") from None
    except json.JSONDecodeError as error:
        place = f"at character {error.pos + 1}" if error.lineno == 1 else f"in line {error.lineno}"
        raise MalformedError(f"this is not JSON: {error.msg} {place}") from None
    except ValueError as error:
        raise MalformedError(f"this cannot be read: {error}") from None
    _check_depth(value, text, deepest)
    _check_characters(text, value)
    return value


def _check_depth(value: Any, text: str, deepest: int) -> None:
    """Refuse lists and objects that are within each other more than ``deepest`` deep. ``text``: they were read from
    this, and need not be looked through if it has few brackets."""
    brackets = text.count("[") + text.count("{")
    level, depth = [value], 0
    while brackets > deepest and level:
        depth += 1
        if depth > deepest + 1:
            raise MalformedError(f"brackets within brackets, more than {deepest} deep")
        inside: list[Any] = []
        for item in level:
            inside.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        level = [item for item in inside if isinstance(item, dict | list)]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MalformedError(f"the key {twice!r} is there twice")
    return found


def _no_number(word: str) -> Any:
    raise MalformedError(f"{word} is not a number that JSON has")


def _check_characters(text: str, value: Any) -> None:
    """JSON may hold halves of characters, which no file name and no tokenizer takes; only as escapes."""
    if not any(mark in text for mark in ("\\ud", "\\uD")):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise MalformedError(f"the text has {half}, half of a character (an unpaired surrogate)") from None
