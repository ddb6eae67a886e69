"""One preallocated file that is read and written directly, past the page cache.

A transfer moves every byte or raises `StoreError` with file, offset, bytes asked for and bytes done.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock import files
from penstock.config import format_size
from penstock.errors import StoreError
from penstock.store.layout import ALIGN

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_FICLONERANGE = 0x4020940D  # fcntl has it from Python 3.12 on
_CANNOT_SHARE = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS})
_ZEROS = 4 << 20  # bytes per write where a file system cannot preallocate

ADVICE = {
    errno.EIO: "the drive or its file system failed: see the kernel's log (dmesg) and check the drive",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "the disk quota is used up: raise it, or use another directory",
    errno.ELOOP: "remove the link, or put what it leads to in its place",
    errno.EROFS: "give another place, or if this one could be written to before, see the kernel's log (dmesg)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENAMETOOLONG: "file systems take no names this long: give a shorter one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (sysctl fs.file-max)",
}
RESERVED = ADVICE | {
    errno.ENOSPC: "the space reserved at the start is gone: a copy-on-write file system? free some space",
}
"""Advice on files that have all their space from the start."""
TO_BE_WRITTEN = "check the drive, and the folder's owner and mode"
"""Advice where nothing better is known."""


def store_error(message: str, cause: OSError) -> StoreError:
    """A `StoreError` that keeps the system's error number, so that a caller can tell a full disk from a broken one."""
    error = StoreError(message)
    error.errno = cause.errno
    error.strerror = cause.strerror or message
    return error


@contextmanager
def refused(
    said: str, otherwise: str = "see the kernel's log (dmesg)", advice: Mapping[int, str] = ADVICE
) -> Iterator[None]:
    """An error of the system within is a `StoreError` to the user: what is ``said``, the reason, and the ``advice`` on
    its number, or ``otherwise``."""
    try:
        yield
    except StoreError:
        raise
    except OSError as e:
        raise store_error(f"{said}: {e.strerror or e}: {advice.get(e.errno or 0, otherwise)}", e) from e


@contextmanager
def reported(doing: str) -> Iterator[None]:
    """Whatever the system refuses on the way is a `StoreError` to the user."""
    try:
        yield
    except StoreError:
        raise
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        advice = ADVICE.get(e.errno or 0, "check the directory's disk and permissions")
        raise store_error(f"{doing} failed: {where}{e.strerror or e}: {advice}", e) from e


def allocate(path: Path, nbytes: int) -> None:
    """Create ``path`` with ``nbytes`` of reserved space that reads as zeros.

    Raises:
        StoreError: the disk (or a quota, or a limit on file size) has no room; the caller removes the file.
    """
    try:
        fd = files.descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _reserve(fd, nbytes)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise _allocation_error(path, nbytes, e) from e


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as e:
        if e.errno not in _NO_FALLOCATE:
            raise
        _write_zeros(fd, nbytes)


def preallocates(folder: Path) -> bool:
    """True if the file system of a directory reserves space without writing it. Where it does not, the C library writes
    by itself.

    Raises:
        OSError: no file can be made there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return _fallocate(file.fileno(), ALIGN) not in _NO_FALLOCATE


def _fallocate(fd: int, nbytes: int) -> int:
    """The system's own answer: an error number, 0 if there is none."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return ctypes.get_errno() if call(fd, 0, 0, nbytes) else 0


def free_bytes(path: Path) -> int:
    """Bytes free on the file system of ``path``, less its reserve (which root could use, and should not)."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _write_zeros(fd: int, nbytes: int) -> None:
    zeros = bytes(min(_ZEROS, nbytes))
    done = 0
    while done < nbytes:
        done += os.pwrite(fd, memoryview(zeros)[: nbytes - done], done)


def _allocation_error(path: Path, nbytes: int, cause: OSError) -> StoreError:
    free = format_size(free_bytes(path.parent))
    if cause.errno in FULL:
        limit = {errno.ENOSPC: "free", errno.EDQUOT: "free, but a quota stands in the way"}
        state = f"{free} are {limit.get(cause.errno or 0, 'free, but a limit on the size of files stands in the way')}"
        advice = "free some space, give another directory, or give several that are striped"
        if cause.errno == errno.EFBIG:
            advice = ADVICE[errno.EFBIG]
    else:
        state, advice = str(cause), "see the kernel's log (dmesg)"
    return store_error(f"{path.parent}: {format_size(nbytes)} are needed for {path.name}, {state}: {advice}", cause)


class PackedFile:
    """A file of fixed size. ``read`` and ``write`` may be called from any number of threads."""

    def __init__(self, path: Path, *, direct: bool | None = None, writable: bool = True) -> None:
        """Open an existing file. ``direct``: True insists on O_DIRECT, False does without, None prefers it and warns.

        Raises:
            StoreError: the file cannot be opened, or cannot be read directly although ``direct`` is True.
        """
        self.path = path
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        with refused(f"{path} cannot be opened", "check its owner and mode"):
            self._fd, self.direct = self._open(direct)
        self.nbytes = os.fstat(self._fd).st_size

    @property
    def descriptor(self) -> int:
        return self._fd

    @property
    def grain(self) -> int:
        """Bytes, in multiples of which a transfer that has stopped short may go on."""
        return ALIGN if self.direct else 1

    def _open(self, direct: bool | None) -> tuple[int, bool]:
        fd = None if direct is False else self._open_direct()
        if fd is not None:
            return fd, True
        fd = files.descriptor(self.path, self._flags)  # which refuses what is no file, and has no direct I/O either
        try:
            self._say_buffered(direct)
        except BaseException:
            os.close(fd)
            raise
        return fd, False

    def _say_buffered(self, direct: bool | None) -> None:
        if direct is False:
            return
        message = f"{self.path.parent}: this file system does not do direct I/O (O_DIRECT)"
        if direct:
            raise StoreError(f"{message}: use another directory, or allow buffered I/O")
        warnings.warn(f"{message}: reading and writing through the page cache, which is slower", stacklevel=3)

    def _open_direct(self) -> int | None:
        """A direct descriptor that has read a block, or None: some file systems refuse only at the first read."""
        try:
            fd = files.descriptor(self.path, self._flags | os.O_DIRECT)
        except OSError as e:
            if e.errno == errno.EINVAL:
                return None
            raise
        with mmap.mmap(-1, ALIGN) as block:
            try:
                os.preadv(fd, [block], 0)
            except OSError as e:
                os.close(fd)
                if e.errno == errno.EINVAL:
                    return None
                raise
        return fd

    def read(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` (bytes, aligned) from ``offset``."""
        self._transfer("read", os.preadv, offset, view)

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of ``view`` (bytes, aligned) at ``offset``."""
        self._transfer("write", os.pwritev, offset, view)

    def _transfer(
        self, verb: str, call: Callable[[int, list[memoryview], int], int], offset: int, view: memoryview
    ) -> None:
        done, asked = 0, len(view)
        assert offset + asked <= self.nbytes, f"{self.path}: [{offset}, +{asked}) of {self.nbytes}"
        while done < asked:
            try:
                moved = call(self._fd, [view[done:]], offset + done)
            except OSError as e:
                raise self.failed(verb, offset, asked, done, e) from e
            ahead = (done + moved) // self.grain * self.grain  # direct I/O must go on from a block's start
            if ahead == done:
                raise self.failed(verb, offset, asked, done + moved)
            done = ahead
        if not self.direct:  # what was moved will not be needed before the next step: do not fill memory with it
            os.posix_fadvise(self._fd, offset, asked, os.POSIX_FADV_DONTNEED)

    def failed(self, verb: str, offset: int, asked: int, done: int, cause: OSError | None = None) -> StoreError:
        """The error of a transfer that ended after ``done`` of the bytes that were ``asked`` for; ``cause``: the
        system's; None: it moved no more."""
        if cause is not None:
            advice = RESERVED.get(cause.errno or 0, "see the kernel's log (dmesg)")
            return store_error(self._failure(verb, offset, asked, done, f"{cause.strerror}: {advice}"), cause)
        reason = "the file ended" if verb == "read" else "no more bytes were taken"
        advice = "was it changed by something else? restore it from a snapshot"
        return StoreError(self._failure(verb, offset, asked, done, f"{reason}: {advice}"))

    def _failure(self, verb: str, offset: int, asked: int, done: int, reason: str) -> str:
        return f"{self.path}: {verb} of {asked} bytes at offset {offset} stopped after {done} bytes: {reason}"

    def share(self, offset: int, source: "PackedFile", start: int, nbytes: int) -> bool:
        """Let ``nbytes`` from ``offset`` on be the same blocks of the drive as those of ``source`` from ``start`` on.

        Each file can be written afterwards without changing the other (a reflink). False where the file system has no
        such thing, or the files are on two of them; the range is then undefined.

        Raises:
            StoreError: the drive failed, or is full.
        """
        request = struct.pack("=qQQQ", source._fd, start, nbytes, offset)
        said = f"{self.path}: sharing of {nbytes} bytes of {source.path} at offset {start} failed"
        with refused(said, advice=RESERVED):
            try:
                fcntl.ioctl(self._fd, _FICLONERANGE, request)
            except OSError as e:
                if e.errno in _CANNOT_SHARE:
                    return False
                raise
        return True

    def flush(self) -> None:
        """Return when everything written is on the drive itself.

        Raises:
            StoreError: it could not be put there.
        """
        with refused(f"{self.path}: flush failed", advice=RESERVED):
            os.fdatasync(self._fd)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)
