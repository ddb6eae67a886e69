"""A power cut over a whole folder: what of its files and names a drive may hold, from a record of every flush.

A file's bytes are safe as they were at its last flush, under whatever name; a folder's names as they were at its last.
Of all else a file system may have kept any part: none of it (``dropped``), the names without the bytes behind them
(``empty``: what ext4, XFS and btrfs leave of files that were renamed and not flushed), or some sectors (``torn``).
"""

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

Loss = Literal["dropped", "empty", "torn"]
LOSSES: tuple[Loss, ...] = ("dropped", "empty", "torn")
_SECTOR = 512


class FlushLog:
    """What has been flushed of a folder, and of the name of the folder itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # inode of a folder: name, inode, whether a folder
        self._held: dict[int, int] = {}  # a descriptor for each inode, so that no other file gets its number

    @contextmanager
    def recording(self, flushed: Callable[[], None] = lambda: None) -> Iterator[None]:
        """``flushed``: called after each flush."""
        real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

        def after(name: str) -> Callable[[int], None]:
            def flush(fd: int) -> None:
                real[name](fd)
                if self._note(fd):
                    flushed()

            return flush

        with pytest.MonkeyPatch.context() as patch:
            for name in real:
                patch.setattr(os, name, after(name))
            yield

    def _note(self, fd: int) -> bool:
        path, status = Path(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd)
        if path != self._folder.parent and not path.is_relative_to(self._folder):
            return False
        if status.st_ino not in self._held:
            self._held[status.st_ino] = os.dup(fd)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {e.name: (e.inode(), e.is_dir()) for e in os.scandir(path)}
        else:
            self._bytes[status.st_ino] = path.read_bytes()
        return True

    def image(self, loss: Loss, rng: random.Random, target: Path) -> bool:
        """Build what the drive may hold now in ``target``. False: not even the folder's own name was safe."""
        if loss == "dropped":
            there = self._names.get(self._folder.parent.stat().st_ino, {})
            return self._folder.name in there and self._safe(there[self._folder.name][0], target)
        target.mkdir()
        for place, folders, files in os.walk(self._folder):
            beside = target / Path(place).relative_to(self._folder)
            for name in folders:
                (beside / name).mkdir()
            for name in files:
                path = Path(place) / name
                safe = self._bytes.get(path.stat().st_ino, b"")
                (beside / name).write_bytes(safe if loss == "empty" else _torn(path.read_bytes(), safe, rng))
        return True

    def _safe(self, number: int, target: Path) -> bool:
        """What is safe of a folder, by the names that it had when it was flushed."""
        target.mkdir()
        for name, (inode, is_folder) in self._names.get(number, {}).items():
            if is_folder:
                self._safe(inode, target / name)
            else:
                (target / name).write_bytes(self._bytes.get(inode, b""))
        return True

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])


def _torn(now: bytes, safe: bytes, rng: random.Random) -> bytes:
    """Of the sectors that have changed since, some are there and some are not."""
    found = bytearray(now)
    for first in range(0, len(now), _SECTOR):
        part = slice(first, min(first + _SECTOR, len(now)))
        if now[part] != safe[part] and rng.random() < 0.5:
            found[part] = safe[part].ljust(part.stop - part.start, b"\0")
    return bytes(found)
