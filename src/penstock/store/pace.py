"""A short measurement of a directory's drive, with the store's own requests: enough to tell fast from slow.

``penstock doctor`` measures thoroughly. This is for a store that is made where nobody has.
"""

import secrets
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from penstock.store.packed import PackedFile, allocate
from penstock.store.transfer import REQUEST, StripedFiles, aligned_bytes, byte_view

_NBYTES = 16 * REQUEST
_AT_ONCE = 4 * REQUEST
_SECONDS = 1.0


def pace(folder: Path) -> float:
    """Bytes per second that a drive writes and reads again, one after the other: at most 128 MiB, in about three
    seconds. Nothing is left behind.

    Raises:
        StoreError: the directory has no room, or the drive failed.
    """
    path = folder / f".penstock-pace-{secrets.token_hex(4)}"
    try:
        allocate(path, _NBYTES)
        with warnings.catch_warnings():  # whoever opens the store says that its file system has no direct I/O
            warnings.simplefilter("ignore")
            file = PackedFile(path)
    finally:
        path.unlink(missing_ok=True)
    files = StripedFiles([file], stripe=REQUEST)
    try:
        buffer = byte_view(aligned_bytes(_AT_ONCE))
        written = _seconds(files.write, buffer)  # first writes cost more than later ones, and so do reads of no block
        files.flush()
        return 1 / (min(written, _seconds(files.write, buffer)) + _seconds(files.read, buffer))
    finally:
        files.close()


def _seconds(move: Callable[[int, memoryview], object], buffer: memoryview) -> float:
    """Seconds per byte."""
    begun, done = time.perf_counter(), 0
    while done < _NBYTES and (done == 0 or time.perf_counter() - begun < _SECONDS):
        move(done, buffer)
        done += len(buffer)
    return (time.perf_counter() - begun) / done
