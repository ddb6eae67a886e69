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
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.native import HOW_TO_BUILD, load
from penstock.store.checksums import Blocks, Numbers
from penstock.store.packed import PackedFile
from penstock.store.striping import Piece

ABI = 1  # penstock_abi() in native/transfer.cpp
PATH = Path(__file__).with_name("_transfer.so")
REQUEST = 2 << 20
"""Bytes of a request at most: of 8 MiB three quarters are hashed while the rest is on its way."""

_SLOWER = "each drive is read and written one request after another, which is slower"


class _Transfer(ctypes.Structure):
    """``struct Transfer`` of ``native/transfer.cpp``, with its ``struct Failure`` at the end."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
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


@dataclass(frozen=True, kw_only=True)
class Done:
    """A transfer that is over. ``checksums``: of each block; ``moved``: bytes of each piece."""

    checksums: Numbers
    moved: list[int]
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
        blocks: Blocks,
        progress: npt.NDArray[np.int64],
        *,
        write: bool,
    ) -> Done | None:
        """Move ``pieces`` of ``files`` from or to ``view``. Nothing is in flight afterwards. None: the kernel gives no
        queue, and nothing was moved; which is warned of, once for each reason.

        ``blocks``: what ``view`` consists of, where it is to be hashed. ``progress``: of each file, as
        ``Stalls.request`` has it; it is written meanwhile.

        Raises:
            ValueError: a piece is not within its file or ``view``, or ``blocks`` are not what that consists of.
        """
        _check(files, pieces, view, blocks, write=write)
        if (queue := self._queue()) is None:
            return None
        rows = [
            (files[p.file].descriptor, p.file, p.offset, p.start, p.nbytes, files[p.file].grain, 0) for p in pieces
        ]  # ``struct Piece``, whose last one is what was moved
        table, first = np.array(rows, dtype=np.int64).reshape(-1, 7), blocks[0].start if blocks else 0
        borders = np.array([0, *(block.stop - first for block in blocks)], dtype=np.int64)
        checksums = np.zeros(len(blocks), dtype=np.uint64)
        asked = _Transfer(
            memory=np.frombuffer(view, np.uint8).ctypes.data,
            pieces=table.ctypes.data,
            count=len(pieces),
            request=REQUEST,
            borders=borders.ctypes.data,
            blocks=len(blocks),
            checksums=checksums.ctypes.data,
            progress=progress.ctypes.data,
            write=write,
        )
        try:
            done = self._calls.penstock_transfer(queue, ctypes.byref(asked))
        finally:
            self._queues.append(queue)
        failure = None if done else Failure(piece=pieces[asked.piece], done=asked.done, error=asked.error)
        return Done(checksums=np.maximum(checksums, 1), moved=table[:, -1].tolist(), failure=failure)

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


def _check(
    files: Sequence[PackedFile], pieces: Sequence[Piece], view: memoryview, blocks: Blocks, *, write: bool
) -> None:
    """Raises if the library would touch other memory than it was given, also where Python runs without asserts."""
    for p in pieces:
        if not 0 <= p.start <= p.start + p.nbytes <= len(view) or not 0 <= p.offset <= files[p.file].nbytes - p.nbytes:
            raise ValueError(f"{files[p.file].path}: {p} of {files[p.file].nbytes} bytes, and of {len(view)} in memory")
    joined = all(a.start < a.stop == b.start for a, b in pairwise(blocks))
    if blocks and not (joined and blocks[-1].stop - blocks[0].start == len(view)):
        raise ValueError(f"blocks from {blocks[0]} to {blocks[-1]} are not what {len(view)} bytes consist of")
    if view.readonly and not write:
        raise ValueError("reading into memory that is read-only")


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
