"""Files that a pattern names. A folder that may not be read is an error; ``glob.glob`` takes it for an empty one."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock import files
from penstock.errors import ConfigError

OF_THE_SYSTEM = "lost+found"
"""A folder at the root of a file system that root alone may look into."""

_MAGIC = re.compile(r"[*?[]")
_RECURSIVE = "**"
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR})


def is_pattern(text: str) -> bool:
    return _MAGIC.search(text) is not None


def matching(pattern: Path) -> tuple[Path, ...]:
    """The files that a pattern names, in order. ``**`` stands for any number of folders; no ``*`` for a hidden name. A
    folder is not looked into again below itself, where a link leads back to it.

    Raises:
        ConfigError: a folder cannot be looked into, or what is named is no file, such as a pipe or a link to nothing.
    """
    *above, last = pattern.parts
    places = {Path()}
    for part in above:
        places = {found for place in places for found in _matches(place, part)}
    found = {path for place in places for path in _matches(place, last)}
    if last == _RECURSIVE:
        found |= {path for place in found for path in _entries(place)}
    return tuple(sorted(path for path in found if is_file(path)))


def _matches(place: Path, part: str) -> Iterator[Path]:
    """The paths that one part of a pattern stands for in a folder; a plain name is one, be it there or not."""
    if part == _RECURSIVE:
        yield from _folders(place, frozenset())
    elif is_pattern(part):
        yield from _entries(place, part)
    else:
        yield place / part


def _folders(place: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """A folder and all below it. ``above``: device and inode of those that it is in."""
    status = _status(place)
    if status is None or not stat.S_ISDIR(status.st_mode) or (own := (status.st_dev, status.st_ino)) in above:
        return
    yield place
    for path in _entries(place):
        yield from _folders(path, above | {own})


def _entries(place: Path, part: str = "*") -> list[Path]:
    """The entries of a folder whose names match, but for hidden ones; none where there is no folder."""
    try:
        found = files.matching(place, part)
    except OSError as error:
        raise unreadable(error) from error
    hidden = part.startswith(".")
    return [path for path in found if (hidden or not path.name.startswith(".")) and path.name != OF_THE_SYSTEM]


def is_file(path: Path) -> bool:
    """True of a file, and of a link to one; False of a folder, and where there is nothing.

    Raises:
        ConfigError: it is a pipe, a device or a socket, or a link that leads to nothing, or nobody may look.
    """
    status = _status(path)
    if status is None and path.is_symlink():
        raise ConfigError(
            f"data: {path} is a link to {os.readlink(path)}, which is not there: put that in its place (is its drive "
            "mounted?), or remove the link"
        )
    if status is None or stat.S_ISDIR(status.st_mode):
        return False
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"data: {str(path)!r} is neither a file nor a folder, but a pipe or a device: write what it has into a "
            "file, which is read more than once, or give a pattern that leaves it out"
        )
    return True


def _status(path: Path) -> os.stat_result | None:
    """The status of a path, links followed; None: nothing is there."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise unreadable(error) from error


def unreadable(error: OSError) -> ConfigError:
    """The error for a folder or file below a source's path that the system does not show."""
    if error.errno == errno.ELOOP:
        return ConfigError(f"data: {error.filename} is a link that leads back to itself: remove the link")
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"data: no file is called {error.filename}: file systems take no names this long")
    return ConfigError(
        f"data: {error.filename} cannot be read ({error.strerror}): make it readable, or name what is to be read by a "
        "pattern that leaves it out"
    )
