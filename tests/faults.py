"""Drives that fail, at the boundary of system calls.

The store's transfers call ``os.preadv`` and ``os.pwritev`` where the kernel gives no asynchronous I/O. So it has none
while one of the two is replaced (``calls_can_be_replaced``); ``tests/store/test_kernel.py`` has faults of its own.

``intercepted`` hands every system call that is made on files of one folder to a hook, which lets it through (``go()``),
shortens it (``go(4096)``), waits, records it, or raises. What reaches the store is what a kernel would have given it.
"""

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.store import kernel

Go = Callable[..., Any]
"""Makes the call; given a number, on so many bytes at most."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A system call that is about to be made on the file ``path``."""

    name: str
    path: str
    offset: int = 0
    nbytes: int = 0
    data: memoryview | None = None
    """what is to be written, or where to read to; only while the call is made"""

    @property
    def writes(self) -> bool:
        return self.name in ("pwritev", "pwrite", "write")

    @property
    def flushes(self) -> bool:
        return self.name in ("fsync", "fdatasync")


Hook = Callable[[Call, Go], Any]


class _Raw(io.FileIO):
    """A file whose reads and writes are calls of ``os``, where they can be intercepted."""

    def write(self, data: Any, /) -> int:
        return os.write(self.fileno(), data)

    def readinto(self, buffer: Any, /) -> int:
        piece = os.read(self.fileno(), len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: os.read(self.fileno(), 1 << 20), b""))


def _buffered(raw: _Raw, mode: str) -> io.IOBase:
    if "+" in mode:
        return io.BufferedRandom(raw)
    return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)


def _made(hook: Hook, call: Call, buffer: Any, go: Go) -> int:
    """Make a transfer through the hook. An error leaves with no reference to the buffer, as one of the kernel's does:
    memory that is mapped cannot be given back while there is one.
    """
    data = memoryview(buffer).cast("B")
    failure = None
    try:
        return int(hook(replace(call, data=data, nbytes=len(data)), partial(go, data)))
    except BaseException as error:  # noqa: BLE001 - it is raised below
        failure = error.with_traceback(None)
    finally:
        del data, buffer
    raise failure


@contextmanager
def intercepted(folder: Path, hook: Hook, *, names: bool = False) -> Iterator[None]:
    """Every system call on a file in ``folder`` goes through ``hook(call, go)``, from whichever thread it is made.

    ``names``: those as well that make folders, and that remove files and folders.
    """
    root = os.path.realpath(folder) + os.sep
    patched = pytest.MonkeyPatch()
    reals: dict[str, Any] = {}

    def path_of(what: Any) -> str | None:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.path.realpath(what)
        return path if f"{path}{os.sep}".startswith(root) else None

    def patch(name: str, make: Callable[[str, Any], Any]) -> None:
        reals[name] = getattr(os, name)
        patched.setattr(os, name, make(name, reals[name]))

    def vectored(name: str, real: Any) -> Any:
        def call(fd: int, views: list[memoryview], offset: int, *flags: int) -> int:
            if (path := path_of(fd)) is None:
                return int(real(fd, views, offset, *flags))
            assert len(views) == 1

            def go(data: memoryview, most: int | None = None) -> int:
                return int(real(fd, [data[:most]], offset, *flags))

            return _made(hook, Call(name=name, path=path, offset=offset), views[0], go)

        return call

    def plain(name: str, real: Any) -> Any:
        def call(fd: int, data: Any, *offset: int) -> int:
            if (path := path_of(fd)) is None:
                return int(real(fd, data, *offset))

            def go(data: memoryview, most: int | None = None) -> int:
                return int(real(fd, data[:most], *offset))

            at = offset[0] if offset else os.lseek(fd, 0, os.SEEK_CUR)
            return _made(hook, Call(name=name, path=path, offset=at), data, go)

        return call

    def other(name: str, real: Any) -> Any:
        def call(what: Any, *rest: Any, **more: Any) -> Any:
            if (path := path_of(what)) is None:
                return real(what, *rest, **more)
            return hook(Call(name=name, path=path), lambda: real(what, *rest, **more))

        return call

    def named(name: str, real: Any) -> Any:
        def call(what: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> Any:
            full = what if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), what)
            if (path := path_of(full)) is None:
                return real(what, *rest, dir_fd=dir_fd, **more)
            return hook(Call(name=name, path=path), lambda: real(what, *rest, dir_fd=dir_fd, **more))

        return call

    real_open = builtins.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        if isinstance(file, int) or "b" not in mode or (path := path_of(file)) is None:
            return real_open(file, mode, buffering, *rest, **more)
        opener = more.get("opener")  # one that we are given calls os.open, which has its own hook
        make = lambda: _Raw(file, mode.replace("b", ""), opener=opener)  # noqa: E731
        raw = make() if opener else hook(Call(name="open", path=path), make)
        return raw if buffering == 0 else _buffered(raw, mode)

    try:
        for name in ("preadv", "pwritev"):
            patch(name, vectored)
        for name in ("write", "pwrite"):
            patch(name, plain)
        for name in ("read", "fsync", "fdatasync", "posix_fallocate", "open", "rename", "replace"):
            patch(name, other)
        for name in ("mkdir", "unlink", "rmdir") if names else ():
            patch(name, named)
        patched.setattr(builtins, "open", opened)
        patched.setattr(io, "open", opened)
        yield
    finally:
        patched.undo()


class Nth:
    """A hook that does something else at one call, counting those that ``counts`` says yes to from 0."""

    def __init__(self, number: int, act: Hook, counts: Callable[[Call], bool] = lambda call: True) -> None:
        self.number = number
        self._act = act
        self._counts = counts
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        """all that were counted"""

    @property
    def struck(self) -> bool:
        return len(self.calls) > self.number >= 0

    def __call__(self, call: Call, go: Go) -> Any:
        if not self._counts(call):
            return go()
        with self._lock:
            strikes = len(self.calls) == self.number
            self.calls.append(replace(call, data=None))
        return self._act(call, go) if strikes else go()


def error(code: int) -> Hook:
    """The call fails, as Python says it: with the file's name where the call was given one."""

    def act(call: Call, go: Go) -> Any:
        named = (call.path,) if call.name in ("open", "rename", "replace") else ()
        raise OSError(code, os.strerror(code), *named)

    return act


class FullDisk:
    """A hook of a disk that takes no more than half of each write while it is ``full``."""

    def __init__(self, *, full: bool) -> None:
        self.full = full

    def __call__(self, call: Call, go: Go) -> Any:
        if not (call.writes and self.full):
            return go()
        return go(call.nbytes // 2) if call.nbytes > 9 else error(errno.ENOSPC)(call, go)


def calls_can_be_replaced() -> None:
    """From here on, who puts something else in the place of ``os.preadv`` or ``os.pwritev`` has it called."""
    real, calls = kernel.library, (os.preadv, os.pwritev)
    kernel.library = lambda: real() if (os.preadv, os.pwritev) == calls else None  # type: ignore[assignment]


@contextmanager
def failing(call: str, code: int, patch: pytest.MonkeyPatch, *, after: int = 0) -> Iterator[None]:
    """``os.preadv`` or ``os.pwritev`` fails inside, once it has worked ``after`` times."""
    real: Callable[..., int] = getattr(os, call)
    left = iter(range(after))

    def fail(*args: Any) -> int:
        if next(left, None) is None:
            raise OSError(code, os.strerror(code))
        return real(*args)

    with patch.context() as patched:
        patched.setattr(os, call, fail)
        yield


def fill(path: Path) -> None:
    """Take every block of a disk."""
    with path.open("wb") as file:
        end = 0
        for step in (1 << 20, 1 << 16, 1024):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), end, step)
                    end += step
    assert os.statvfs(path).f_bavail < 4
