"""The store's native library on a kernel that does all that a real one may (``native/hostile.cpp``)."""

import ctypes
import subprocess
from pathlib import Path

from penstock.store import kernel
from tests.accelerator import build

_NATIVE = Path(__file__).parent / "native"
_SOURCES = kernel.PATH.parent / "native"


class Hostile(kernel.Library):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._kernel = ctypes.CDLL(str(path))  # the same again
        self._kernel.hostile_begin.argtypes = (ctypes.c_uint64, *[ctypes.c_long] * 3)
        for name in ("flying", "moves", "bytes", "failed_fd", "failed_offset"):
            getattr(self._kernel, f"hostile_{name}").restype = ctypes.c_long
        self._kernel.hostile_refuse.argtypes = (ctypes.c_long,)

    def begin(self, seed: int, *, fail_at: int = -1, error: int = 0, grain: int = 1) -> None:
        """From now on, what happens follows from ``seed``, and the request numbered ``fail_at`` fails; ``error`` 0: it
        moves nothing, as at the end of a file. Others stop short, after ``grain`` bytes at least."""
        self._kernel.hostile_begin(seed, fail_at, error, grain)

    @property
    def failed(self) -> tuple[int, int]:
        """The descriptor and the offset of the request that failed."""
        return int(self._kernel.hostile_failed_fd()), int(self._kernel.hostile_failed_offset())

    @property
    def bytes(self) -> int:
        """Bytes moved since ``begin``, in whole grains of each request."""
        return int(self._kernel.hostile_bytes())

    def refuse(self, error: int) -> None:
        """No new queue is given any more."""
        self._kernel.hostile_refuse(error)

    @property
    def flying(self) -> int:
        """Requests under way."""
        return int(self._kernel.hostile_flying())

    @property
    def moves(self) -> int:
        """Requests that came back, or were refused, since ``begin``."""
        return int(self._kernel.hostile_moves())


def built(folder: Path) -> Hostile:
    """The library, built in ``folder``. It has no queue yet."""
    compiler = build.compiler()
    assert compiler is not None
    made = folder / "hostile.so"
    level = ["-DPENSTOCK_XXH3=xxh3_baseline", "-DPENSTOCK_SYSCALL=hostile_syscall"]
    sources = [_SOURCES / "transfer.cpp", _SOURCES / "xxh3.cpp", _NATIVE / "hostile.cpp"]
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", *level, *sources, "-o", made], check=True)
    return Hostile(made)
