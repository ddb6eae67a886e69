"""The folder of one run: who may write into it, and what is written there."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import ConfigError

OWN_FILES = ("config.yaml", "metrics.jsonl", "trace.json", "tokenizer.json", "train.tokens", "validation.tokens")


def claim(path: Path, *, overwrite: bool) -> Path:
    """Make ``path`` a folder with no earlier run in it.

    With ``overwrite`` an earlier run's own files are removed; anything else in the folder stays. The state on disk is
    the store's business, wherever it is.

    Raises:
        ConfigError: the folder holds something and ``overwrite`` is off, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(item.name for item in path.iterdir())
        if present and not overwrite:
            raise ConfigError(
                f"run={str(path)!r}: the folder already holds {_some(present)}. Give another folder (--run PATH), or "
                "--overwrite to replace that run"
            )
        for name in OWN_FILES:
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"run={str(path)!r}: cannot use this folder: {error.strerror}") from error
    return path


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class MetricsFile:
    """``metrics.jsonl``: one line of JSON per step, on disk as soon as the step is done."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a line. A number that JSON has no word for (an overflowed norm) becomes null."""
        self._file.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
