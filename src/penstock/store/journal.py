"""A text file that grows with a run: its metrics, its trace."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from penstock import files
from penstock.errors import StoreError
from penstock.store.packed import ADVICE, FULL, store_error


class Journal:
    """A file that grows. Nothing waits in memory: what ``write`` has taken is with the system, and survives the
    process.
    """

    def __init__(self, path: Path, mode: Literal["w", "a"]) -> None:
        """Open a file; ``w`` replaces it by an empty one, ``a`` adds to it.

        Raises:
            StoreError: it cannot be opened or made.
        """
        self.path = path
        try:
            if mode == "w":
                path.unlink(missing_ok=True)
            self._file = files.append(path)
        except OSError as e:
            raise self._error(e) from e

    def write(self, text: str) -> None:
        """Append ``text``.

        Raises:
            StoreError: the disk is full or fails. The file is as it was, if the drive still takes that.
        """
        rest, before = text.encode(), os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as e:
            with suppress(OSError):
                self._file.truncate(before)
            raise self._error(e) from e

    def flush(self) -> None:
        """Return when all of it is on the drive.

        Raises:
            StoreError: it could not be put there.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as e:
            raise self._error(e) from e

    def _error(self, cause: OSError) -> StoreError:
        otherwise = ADVICE.get(cause.errno or 0, "check the drive, and the folder's owner and mode")
        advice = "free some space" if cause.errno in FULL else otherwise
        return store_error(f"{self.path} cannot be written: {cause.strerror}: {advice}", cause)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()
