"""The directories that a user gives to a store: checks that they can be used, and a lock that keeps others out."""

import contextlib
import errno
import fcntl
import logging
import os
import pwd
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock import files
from penstock.errors import StoreError
from penstock.store.packed import ADVICE, refused, store_error

log = logging.getLogger("penstock")

LOCK = "lock"
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def entries(path: Path) -> list[Path]:
    """The entries of a directory, sorted; none of one that is not there.

    Raises:
        StoreError: it cannot be looked into; names the directory that stands in the way, and whose it is.
    """
    try:
        return files.matching(path, "*")
    except OSError as e:
        raise store_error(f"{path} cannot be looked into: {in_the_way(path, e)}", e) from e


def is_there(path: Path) -> bool:
    """True if there is something at ``path``; False of what no file can be called.

    Raises:
        StoreError: that cannot be found out; names the directory that stands in the way, and whose it is.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as e:
        raise store_error(f"{path} cannot be looked at: {in_the_way(path, e)}", e) from e
    return True


def in_the_way(path: Path, error: OSError) -> str:
    """The reason that the system refuses to touch ``path``, with its name for the error and what to do."""
    said = f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'no number')})"
    if error.errno not in _FORBIDDEN:
        return f"{said}: {ADVICE.get(error.errno or 0, 'is this the right place?')}"
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except OSError:
            continue
        return (
            f"{said}: {place} belongs to {_user(status.st_uid)} with mode {status.st_mode & 0o7777:o}, and this is "
            f"{_user(os.geteuid())}: change its owner or mode, or run this as another user"
        )
    return said


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def check_distinct(paths: Sequence[Path]) -> None:
    """Raises:
    StoreError: no directory was given, or the same one twice.
    """
    if not paths:
        raise StoreError("a store needs a directory, none was given")
    seen: dict[Path, Path] = {}
    for path in paths:
        real = path.resolve()
        if real in seen:
            raise StoreError(f"{path} and {seen[real]} are the same directory: give each one once")
        seen[real] = path


def require_parent(path: Path) -> None:
    """Raises:
    StoreError: there is no directory to make ``path`` in, or none that may be written to.
    """
    if path.parent.is_file():
        raise StoreError(f"{path.parent} is a file: give a directory in another place than {path}")
    if not path.parent.is_dir():
        raise StoreError(
            f"{path} does not exist and neither does {path.parent}: is the drive mounted? create {path.parent}"
        )
    if not is_there(path):
        check_directory(path.parent)


def make_directory(path: Path) -> bool:
    """Create the last component of ``path`` if it is missing, for its owner only. True if it was created.

    An existing empty directory of ours is closed to others too; one with other things in it keeps its mode (the
    store's files are readable by their owner only in any case).

    Raises:
        StoreError: the parent is missing, or the directory cannot be made or used.
    """
    if is_there(path):
        check_directory(path)
        if path.stat().st_uid == os.geteuid() and not any(path.iterdir()):
            path.chmod(0o700)
        return False
    require_parent(path)
    with refused(f"{path} cannot be created", "give a directory that you may write to"):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # another process has made it in this moment
            check_directory(path)
            return False
    sync_directory(path.parent)
    return True


def check_directory(path: Path, *, writable: bool = True) -> None:
    """``writable``: whether it will be written to.

    Raises:
        StoreError: missing, not a directory, or neither writable nor, if that is enough, readable.
    """
    if not is_there(path):
        raise StoreError(f"{path} does not exist: is the drive mounted?")
    if not path.is_dir():
        raise StoreError(f"{path} is not a directory: give one")
    if not os.access(path, os.R_OK | os.X_OK | (os.W_OK if writable else 0), effective_ids=True):
        what, advice = "writable" if writable else "readable", "change its owner or mode"
        if writable and os.statvfs(path).f_flag & os.ST_RDONLY:
            advice = "its file system is mounted read-only, or has become so (see the kernel's log, dmesg)"
        raise StoreError(f"{path} is not {what}: {advice}, or give another directory")


def mount_point(path: Path) -> Path:
    """The mount point of the file system that ``path`` is on, or would be on if it were made now."""
    place = path.resolve()
    while not place.is_mount():
        place = place.parent
    return place


def in_memory(path: Path) -> bool:
    """True if the file system of ``path`` keeps its files in memory."""
    return mounted(path.stat().st_dev)[0] in IN_MEMORY


def mounted(device: int, root: Path = Path("/")) -> tuple[str, str]:
    """(type, source) of the file system with a number; both empty if this process does not see its mount."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (root / "proc/self/mountinfo").read_text(errors="replace").splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == wanted:
            kind, source = file_system.split()[:2]
            return kind, source
    return "", ""


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable: a renamed file is only safe once its directory is.

    Raises:
        StoreError: they could not be made so.
    """
    with refused(f"{path}: its names cannot be made durable", "check the drive"):
        files.sync_folder(path)


def is_locked(directory: Path, *, name: str = LOCK) -> bool:
    """True if a process that writes has the lock of a directory now. This takes the lock itself, for an instant, which
    who starts to write waits for: no other way to look knows of the other hosts of a network's file system.

    Raises:
        StoreError: the lock cannot be looked at.
    """
    path = directory / name
    try:
        fd = files.descriptor(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(fd)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise store_error(f"{path}: cannot tell if a process has this lock: {e.strerror}", e) from e
    return False


_LOOKS_LAST = 0.1
"""Seconds in which whoever only looks whether a lock is taken is done."""


def _have_alone(fd: int) -> None:
    """Lock a file, once nobody looks at its lock any more.

    Raises:
        BlockingIOError: another has it.
    """
    end = time.monotonic() + _LOOKS_LAST
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(_LOOKS_LAST / 20)


_READER = "a process that only reads it (penstock verify or export)"
_AGAIN = 0.2
"""Seconds after which who writes looks again whether all that read are done."""


def _holder(fd: int) -> str | None:
    """Words on who has a lock that could not be had: a writer has put his number into its file, readers have not. None:
    by now nobody has it. Closes the file."""
    try:
        writer = f"process {os.pread(fd, 32, 0).decode(errors='replace').strip() or 'of unknown number'}"
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return writer
        with contextlib.suppress(BlockingIOError):
            _have_alone(fd)
            return None
        try:  # what was asked for last has given back what was had before, which a writer may have taken
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return writer
        return _READER
    finally:
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _in_use(lock: Path, holder: str, cause: OSError, *, writes: bool) -> StoreError:
    until = ": wait for it to end"
    if _is_held_here(lock):
        until = ", which is this one: close what has it open here (engine.close(), trainer.end())"
    other = ", or give this run another directory" if writes else ""
    return store_error(f"{lock.parent} is in use by {holder}{until}{other}", cause)


def _is_held_here(lock: Path) -> bool:
    """True if this process has the lock."""
    return any(held.is_at(lock) for held in _held)


class DirectoryLock:
    """An advisory lock (flock) on a directory. The kernel drops it when the process ends, however it ends.

    Who writes has it alone, and waits for those to end that only read: these end, and a run that goes on by itself may
    begin at any time. Who only reads shares it with others that do, and changes nothing: its file is neither made nor
    written to, so that a drive can be read that takes no writes any more.
    """

    def __init__(self, directory: Path, *, name: str = LOCK, writes: bool = True) -> None:
        """Take the lock. ``name``: of its file. ``writes``: have it alone.

        Raises:
            StoreError: another process that writes, or another store in this one, holds it; says which.
        """
        self._directory = directory.absolute()  # a program may go elsewhere
        self._path = directory / name
        self._fd: int | None = None
        self._itself: int | None = None  # the directory, whatever it is called by now
        try:
            self._fd = self._lock(os.O_RDWR | os.O_CREAT, self._take) if writes else self._share(directory)
            self._itself = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except BaseException as e:
            self.forget()
            if isinstance(e, StoreError) or not isinstance(e, OSError):
                raise
            said = f"{e.strerror}: {ADVICE.get(e.errno or 0, 'use a local file system')}"
            if e.errno in _FORBIDDEN:
                said = in_the_way(self._path, e)
            raise store_error(f"{self._path} cannot be locked: {said}", e) from e
        _held.add(self)

    def _lock(self, flags: int, take: Callable[[int], bool]) -> int:
        """The file, opened with ``flags``, once ``take`` has locked it: False has it opened anew."""
        waits = False
        while True:
            fd = files.descriptor(self._path, flags)
            try:
                if take(fd):
                    return fd
            except BlockingIOError as e:
                if (holder := _holder(fd)) is None:
                    continue
                if holder != _READER or _is_held_here(self._path):
                    raise _in_use(self._path, holder, e, writes=flags != os.O_RDONLY) from e
                if not waits:
                    log.warning("%s is in use by %s: waiting for it to end", self._directory, holder)
                waits = True
                time.sleep(_AGAIN)
                continue
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _take(self, fd: int) -> bool:
        """Have the file alone, and write who holds it. If that fails it goes again, while nobody else can hold it."""
        _have_alone(fd)
        if not _is_at(self._path, fd):  # it was deleted between our open and our lock: lock the new one
            return False
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _share(self, directory: Path) -> int | None:
        """The lock of who only reads; None where there is no file of it, so that nobody writes now."""

        def take(fd: int) -> bool:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True

        try:
            return self._lock(os.O_RDONLY, take)
        except FileNotFoundError:
            log.warning("%s is gone: nothing would keep a run from writing while %s is read", self._path, directory)
            return None

    @property
    def in_place(self) -> bool:
        """True if the file that is locked is the one that has its name: the directory is where it was."""
        return self.is_at(self._path)

    def is_at(self, path: Path) -> bool:
        """True if the file that is locked is there."""
        return self._fd is not None and _is_at(path, self._fd)

    @property
    def away(self) -> str | None:
        """Words on a directory that is no longer where it was, with what to do; None: it is there, or was let go."""
        if self._itself is None or _is_at(self._directory, self._itself):
            return None
        now = os.readlink(f"/proc/self/fd/{self._itself}")
        said, advice = f"it is {now} now", "move it back"
        if now.endswith(_REMOVED):
            said, advice = "it was removed", "put it back from a copy"
        elif now == str(self._directory.resolve()):
            said, advice = "what it is in was unmounted, or mounted over", "mount that as it was"
        return f"{self._directory} is no longer where it was while this process used it: {said}: {advice}"

    def require_in_place(self) -> None:
        """Raises:
        StoreError: the directory is no longer where it was, and what is written there by name would go elsewhere.
        """
        if (said := self.away) is not None:
            raise store_error(f"{said}, and go on from the last commit", FileNotFoundError(errno.ENOENT, said))

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back; with ``remove``, delete its file first, while nobody else can hold it."""
        if remove and self._fd is not None:
            self._path.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close the descriptors. In a forked child those are copies, which would keep the lock after its owner's
        death."""
        for fd in (self._fd, self._itself):
            if fd is not None:
                os.close(fd)
        self._fd = self._itself = None


def locked(paths: Sequence[Path], stack: contextlib.ExitStack, *, writes: bool = True) -> list[DirectoryLock]:
    """The locks of several directories, as ``DirectoryLock``; they are given back with the ``stack``."""
    locks = []
    for path in paths:
        locks.append(DirectoryLock(path, writes=writes))
        stack.callback(locks[-1].release)
    return locks


_REMOVED = " (deleted)"
"""Words that the kernel adds to the name of what was removed."""
_held: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)
