"""A text file that grows with a run: its metrics, its trace."""

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Literal

from penstock import files
from penstock.store.packed import TO_BE_WRITTEN, refused


class Journal:
    """A file that grows. Nothing waits in memory: what ``write`` has taken is with the system, and survives the
    process. Where the disk is full or fails, or the file cannot be made, all of it raises StoreError."""

    def __init__(self, path: Path, mode: Literal["w", "a"]) -> None:
        """Open a file; ``w`` replaces it by an empty one, ``a`` adds to it."""
        self.path = path
        with self._refused():
            if mode == "w":
                path.unlink(missing_ok=True)
            self._file = files.append(path)

    def write(self, text: str) -> None:
        """Append ``text``. Where that fails the file is as it was, if the drive still takes that."""
        rest, before = text.encode(), os.fstat(self._file.fileno()).st_size
        with self._refused():
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(before)
                raise

    def flush(self) -> None:
        """Return when all of it is on the drive."""
        with self._refused():
            os.fsync(self._file.fileno())

    def _refused(self) -> AbstractContextManager[None]:
        return refused(f"{self.path} cannot be written", TO_BE_WRITTEN)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()
