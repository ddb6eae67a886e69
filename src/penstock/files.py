"""Writes files whole or not at all, and never through a symbolic link that lies where the file should.

A run's folder may come from somebody else. Whatever lies there under a name that a command writes, be it a link to
another file of the user's or a pipe, is not written through: it is replaced where the file is replaced, and refused
where the file is added to or changed in place.

| function | what becomes of the path |
|---|---|
| `regular`, `read` | nothing: it is read, if it is a file |
| `matching`, `no_folder`, `nearest_folder` | nothing: it is looked into, or at |
| `create` | a new file; there must be nothing |
| `append`, `update` | a file that goes on growing, or is changed in place |
| `replace` | the old file or the new one, whenever somebody looks, and after a power cut too |
| `made_once` | a folder whose name says what is in it: there whole or not at all, whoever makes it first |
| `write_named` | what the user has named as a command's output: as any program writes, through links |
| `sync_folder`, `sync_tree`, `make_folder` | names and files that survive a power cut |

What is private is readable by its owner only. Errors are OSErrors; whoever calls says what was being done.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

PARTIAL = ".partial"
_PRIVATE, _ORDINARY = 0o600, 0o666  # the second less the umask


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Inside, an error of the system that does not say which file it is about is about this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and len(error.args) == 2:  # the system's own, and not one in words
            error.filename = str(path)
        raise


def create(path: Path, *, private: bool = True) -> BinaryIO:
    """A new file, open for writing.

    Raises:
        OSError: there is something already, be it a link that leads nowhere.
    """
    return open(path, "xb", opener=_opener(private))


def append(path: Path) -> BinaryIO:
    """A file, made if it is missing, that is added to; nothing waits in memory.

    Raises:
        OSError: what is there is a link, or no file.
    """
    return cast(BinaryIO, open(path, "ab", buffering=0, opener=_opener(private=True)))


def update(path: Path) -> BinaryIO:
    """A file that is there, open for reading and for writing in place.

    Raises:
        OSError: there is none, or what is there is a link, or no file.
    """
    return cast(BinaryIO, open(path, "r+b", opener=_opener(private=True)))


def descriptor(path: Path, flags: int, *, private: bool = True) -> int:
    """``os.open`` of a file, without following a link to one and without waiting for the other end of a pipe.

    Raises:
        OSError: what is there is a link, or no file.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _PRIVATE if private else _ORDINARY)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed here", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    os.set_blocking(fd, True)
    return fd


def regular(path: Path) -> BinaryIO:
    """A file, or a link to one, open for reading, without waiting for the other end of a pipe.

    Raises:
        OSError: it cannot be opened, or is no file.
    """

    def opened(name: str, flags: int) -> int:
        fd = os.open(name, flags | os.O_NONBLOCK)
        if not (stat.S_ISREG(mode := os.fstat(fd).st_mode) or stat.S_ISDIR(mode)):  # a folder the caller refuses
            os.close(fd)
            raise OSError(errno.EINVAL, "is not a regular file", name)
        return fd

    return open(path, "rb", opener=opened)


def read(path: Path) -> bytes:
    """All of a file; raises as ``regular``."""
    with regular(path) as file:
        return file.read()


def _opener(private: bool) -> Callable[[str, int], int]:
    return lambda path, flags: descriptor(Path(path), flags, private=private)


def replace(path: Path, content: str | bytes, *, private: bool = True) -> None:
    """Write a file so that whoever looks, after a kill or a power cut too, finds the old one or the new one, whole; of
    several processes that do so, the one of the last that was done. What one has left that was killed goes first.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    partial = _beside(path)
    with named(path):
        _remove_abandoned(path)
        with create(partial, private=private) as file:
            with suppress(OSError):  # where its file system has no locks
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
    sync_folder(path.parent)


def _beside(path: Path) -> Path:
    """A name that nobody else has for what is to be at a path."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{PARTIAL}")


def left_of(path: Path) -> list[Path]:
    """The files or folders that are on their way to a path, or were when their process was killed, also one of version
    0.1.0.

    Raises:
        OSError: the folder that it is in cannot be looked into.
    """
    name = re.compile(rf"{re.escape(path.name)}(\.[0-9a-f]{{12}})?{re.escape(PARTIAL)}")
    return [left for left in matching(path.parent, f"*{PARTIAL}") if name.fullmatch(left.name)]


@contextmanager
def made_once(folder: Path, *, private: bool = True) -> Iterator[Path]:
    """Make a folder that is the same whoever makes it: yields an empty one beside it, which then takes its name.

    If another process was faster, its folder stands and ours is removed. What one has left that was killed as it did
    the same goes first.

    Raises:
        OSError: it could not be made; nothing is left.
    """
    make_folder(folder.parent)
    _remove_abandoned(folder)
    partial = _beside(folder)
    with ExitStack() as under_way:
        partial.mkdir()
        under_way.callback(shutil.rmtree, partial, ignore_errors=True)
        with suppress(OSError):  # a file system without locks
            under_way.enter_context(_flocked(partial))
        yield partial
        sync_tree(partial, private=private)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_folder(folder.parent)


_ABANDONED = 3600
"""Seconds for which nothing was written of a file or a folder before it is taken for what a kill has left. There are
file systems of several hosts on which each sees its own locks alone."""


def _remove_abandoned(path: Path) -> None:
    """Remove what processes have left that were killed as they made what is at a path: it is old, and has no lock."""
    for left in left_of(path):
        with suppress(OSError):  # it is another's, or in use
            walked = os.walk(left, onerror=refuse) if left.is_dir() else ()
            there = (Path(at, name) for at, folders, names in walked for name in (*folders, *names))
            if time.time() - max(path.lstat().st_mtime for path in (left, *there)) > _ABANDONED:
                with _flocked(left):  # not of a new one, whose maker is about to take it
                    remove(left)


@contextmanager
def _flocked(path: Path) -> Iterator[None]:
    """A file or a folder that is locked.

    Raises:
        OSError: it cannot be opened, another process has its lock, or its file system has none.
    """
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR  # without which NFS locks no file
    fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def write_named(path: Path, content: str | bytes) -> None:
    """Write to where the user has said, a link or a device if that is what it names.

    Raises:
        OSError: it could not be written.
    """
    with named(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def copy(source: Path, target: Path, *, private: bool = True) -> None:
    """A new file with what is in another one, in the place of what is there.

    Raises:
        OSError: it could not be written.
    """
    target.unlink(missing_ok=True)
    with named(target), open(source, "rb") as given, create(target, private=private) as file:
        shutil.copyfileobj(given, file)


def matching(folder: Path, pattern: str) -> list[Path]:
    """The entries of a folder whose names match a pattern, sorted; none of one that is not there.

    Raises:
        OSError: the folder cannot be looked into. ``Path.glob`` takes such a one for empty.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def nearest_folder(path: Path) -> Path:
    """The folder at a path, or the nearest one above, in which it is to be made."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def no_folder(path: Path) -> str:
    """The reason that a path is no folder, in words that follow its name.

    Raises:
        OSError: that cannot be found out.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    return "is a link that leads nowhere" if stat.S_ISLNK(mode) and not os.path.exists(path) else "is a file"


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; does nothing where there is none.

    Raises:
        OSError: it could not be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and those that it is in, as far as they are missing, so that they survive a power cut.

    Raises:
        OSError: it could not be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a file that was renamed is only safe once its folder is.

    Raises:
        OSError: they could not be made so.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def refuse(error: OSError) -> NoReturn:
    """For ``os.walk``, which takes a folder that it may not look into for an empty one."""
    raise error


def sync_file(path: Path, *, private: bool = False) -> None:
    """Make a file that others have written durable; and private, if it is to be.

    Raises:
        OSError: it could not be made so, or what is there is a link, or no file.
    """
    fd = descriptor(path, os.O_RDONLY)
    try:
        with named(path):
            if private:
                os.fchmod(fd, _PRIVATE)
            os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path, *, private: bool = True) -> None:
    """Make a folder that others have written into durable, with all that is in it; and private, if it is to be.

    Raises:
        OSError: it could not be made so.
    """
    for place, _, names in os.walk(folder, topdown=False, onerror=refuse):
        for name in names:
            sync_file(Path(place) / name, private=private)
        sync_folder(Path(place))
