"""The kernel's asynchronous I/O: all requests of a transfer at once, each block hashed while others are under way.

``_transfer.so`` beside this file does it (``native/``, built by CMake), without Python's lock. Where there is none, or
the kernel gives no queue, those of each drive are made one after another, with the same bytes and checksums.
"""

import ctypes
import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.native import HOW_TO_BUILD, address, load
from penstock.store.checksums import Borders, Numbers
from penstock.store.packed import PackedFile
from penstock.store.striping import Piece

ABI = 2  # penstock_abi() in native/transfer.cpp
PATH = Path(__file__).with_name("_transfer.so")
REQUEST = 2 << 20
"""Bytes of a request at most: of 8 MiB three quarters are hashed while the rest is on its way."""

_SLOWER = "each drive is read and written one request after another, which is slower"


class _Transfer(ctypes.Structure):
    """``struct Transfer`` of ``native/transfer.cpp``, with its ``struct Failure`` at the end."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("pieces", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("request", ctypes.c_int64),
        ("borders", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("checksums", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("write", ctypes.c_int64),
        ("piece", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("error", ctypes.c_int64),
    ]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """``done``: bytes of ``piece`` before those that could not be moved. ``error``: errno; 0: no byte was moved."""

    piece: Piece
    done: int
    error: int


class Done(NamedTuple):
    """A transfer that is over. ``checksums``: of each block; ``moved``: bytes of each piece."""

    checksums: Numbers
    moved: npt.NDArray[np.int64]
    failure: Failure | None


class Library:
    """The library, and the queues of this process that no transfer has."""

    def __init__(self, path: Path) -> None:
        """Raises:
        OSError: there is none, or another version's.
        """
        self._calls = load(path, ABI)
        self._calls.penstock_queue.argtypes = (ctypes.POINTER(ctypes.c_uint64),)
        self._calls.penstock_transfer.argtypes = (ctypes.c_uint64, ctypes.POINTER(_Transfer))
        self._queues = list[int]()
        os.register_at_fork(after_in_child=self._queues.clear)  # which are the parent's

    def transfer(
        self,
        files: Sequence[PackedFile],
        pieces: Sequence[Piece],
        view: memoryview,
        borders: Borders,
        progress: npt.NDArray[np.int64],
        *,
        write: bool,
    ) -> Done | None:
        """Move ``pieces`` of ``files`` from or to ``view``. Nothing is in flight afterwards. None: the kernel gives no
        queue, and nothing was moved; which is warned of, once for each reason.

        ``borders``: of the blocks that ``view`` consists of, where it is to be hashed. ``progress``: of each file, as
        ``Stalls.begin`` has it; it is written meanwhile.

        Raises:
            ValueError: a piece is not within its file or ``view``, or ``borders`` are not what that consists of.
        """
        if view.readonly and not write:
            raise ValueError("reading into memory that is read-only")
        if (queue := self._queue()) is None:
            return None
        rows = [_row(files[piece.file], piece) for piece in pieces]
        table, checksums = np.array(rows, dtype=np.int64).reshape(-1, 8), np.zeros(len(borders) - 1, dtype=np.uint64)
        asked = _Transfer(
            address(view),
            len(view),
            address(table),
            len(pieces),
            REQUEST,
            address(borders),
            len(checksums),
            address(checksums),
            address(progress),
            write,
        )
        try:
            done = self._calls.penstock_transfer(queue, ctypes.byref(asked))
        finally:
            self._queues.append(queue)
        if done < 0:
            raise ValueError(f"{pieces} of {files}, in blocks at {borders}, are not {len(view)} bytes of each")
        failure = None if done else Failure(piece=pieces[asked.piece], done=asked.done, error=asked.error)
        return Done(checksums=checksums, moved=table[:, -1], failure=failure)

    def try_out(self) -> None:
        """Warn now, and not within a transfer, if the kernel gives no queue."""
        if (queue := self._queue()) is not None:
            self._queues.append(queue)

    def _queue(self) -> int | None:
        """A queue for one transfer; None: the kernel gives none."""
        try:
            return self._queues.pop()
        except IndexError:
            made = ctypes.c_uint64()
            if error := self._calls.penstock_queue(ctypes.byref(made)):
                _refused(error)
                return None
            return made.value


def _row(file: PackedFile, piece: Piece) -> tuple[int, ...]:
    """``struct Piece``."""
    return file.descriptor, piece.file, file.nbytes, piece.offset, piece.start, piece.nbytes, file.grain, 0


@functools.cache
def library() -> Library | None:
    """The library of this installation, as ``loaded`` has it."""
    return loaded(PATH)


def loaded(path: Path) -> Library | None:
    """A library; None, and a warning, when it cannot be loaded."""
    try:
        return Library(path)
    except OSError as error:
        warnings.warn(f"{_SLOWER}: {error}. {HOW_TO_BUILD}", RuntimeWarning, stacklevel=2)
        return None


@functools.cache
def _refused(error: int) -> None:
    warnings.warn(
        f"{_SLOWER}: the kernel gives no queue for asynchronous I/O (io_setup: {os.strerror(error)}): see sysctl "
        "fs.aio-max-nr, and what the container forbids",
        RuntimeWarning,
        stacklevel=2,
    )
