"""Drives that fail, at the boundary of system calls.

``intercepted`` hands every system call that is made on files of one folder to a hook, which lets it through (``go()``),
shortens it (``go(4096)``), waits, records it, or raises. What reaches the store is what a kernel would have given it.
"""

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Go = Callable[..., Any]
"""Makes the call; given a number, on so many bytes at most."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A system call that is about to be made on the file ``path``."""

    name: str
    path: str
    offset: int = 0
    data: memoryview | None = None
    """what is to be written, or where to read to"""

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else len(self.data)

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


@contextmanager
def intercepted(folder: Path, hook: Hook) -> Iterator[None]:
    """Every system call on a file in ``folder`` goes through ``hook(call, go)``, from whichever thread it is made."""
    root = os.path.realpath(folder) + os.sep
    patched = pytest.MonkeyPatch()
    reals: dict[str, Any] = {}

    def path_of(what: Any) -> str | None:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.path.realpath(what)
        return path if f"{path}{os.sep}".startswith(root) else None

    def replace(name: str, make: Callable[[str, Any], Any]) -> None:
        reals[name] = getattr(os, name)
        patched.setattr(os, name, make(name, reals[name]))

    def vectored(name: str, real: Any) -> Any:
        def call(fd: int, views: list[memoryview], offset: int, *flags: int) -> int:
            if (path := path_of(fd)) is None:
                return int(real(fd, views, offset, *flags))
            (view,) = (memoryview(v).cast("B") for v in views)
            found = Call(name=name, path=path, offset=offset, data=view)
            return int(hook(found, lambda most=None: real(fd, [view[:most]], offset, *flags)))

        return call

    def plain(name: str, real: Any) -> Any:
        def call(fd: int, data: Any, *offset: int) -> int:
            if (path := path_of(fd)) is None:
                return int(real(fd, data, *offset))
            view = memoryview(data).cast("B")
            at = offset[0] if offset else os.lseek(fd, 0, os.SEEK_CUR)
            found = Call(name=name, path=path, offset=at, data=view)
            return int(hook(found, lambda most=None: real(fd, view[:most], *offset)))

        return call

    def other(name: str, real: Any) -> Any:
        def call(what: Any, *rest: Any, **more: Any) -> Any:
            if (path := path_of(what)) is None:
                return real(what, *rest, **more)
            return hook(Call(name=name, path=path), lambda: real(what, *rest, **more))

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
            replace(name, vectored)
        for name in ("write", "pwrite"):
            replace(name, plain)
        for name in ("read", "fsync", "fdatasync", "posix_fallocate", "open", "rename", "replace"):
            replace(name, other)
        patched.setattr(builtins, "open", opened)
        patched.setattr(io, "open", opened)
        yield
    finally:
        patched.undo()


class Nth:
    """A hook that does something else at one call, counting those that ``counts`` says yes to from 0."""

    def __init__(self, number: int, act: Hook, counts: Callable[[Call], bool] = lambda call: True) -> None:
        self._left = number
        self._act = act
        self._counts = counts
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        """all that were counted"""

    @property
    def struck(self) -> bool:
        return self._left < 0

    def __call__(self, call: Call, go: Go) -> Any:
        if not self._counts(call):
            return go()
        with self._lock:
            self.calls.append(call)
            strikes = self._left == 0
            self._left -= 1
        return self._act(call, go) if strikes else go()


def error(code: int) -> Hook:
    """The call fails."""

    def act(call: Call, go: Go) -> Any:
        raise OSError(code, os.strerror(code))

    return act


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
