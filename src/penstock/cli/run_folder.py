"""The folder of one run: who may write into it, and what is written there."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from penstock.cli.settings import dump, load
from penstock.config import TrainConfig
from penstock.errors import ConfigError, StoreError
from penstock.report.prediction import Prediction
from penstock.store.store import Store

Start = Literal["new", "overwrite", "resume"]

_SETTINGS = "config.yaml"
_PREDICTION = "prediction.json"
_FILES = (_SETTINGS, _PREDICTION, "report.html", "metrics.jsonl", "tokenizer.json", "train.tokens", "validation.tokens")
_TRACES = "trace*.json"


def claim(config: TrainConfig, start: Start) -> Path:
    """Make the run's folder ready and write the resolved settings into it.

    ``new`` wants a folder with nothing in it and no state on disk. ``overwrite`` removes an earlier run's own files
    and its store, and nothing else. ``resume`` wants an earlier run on the same data.

    Raises:
        ConfigError: what is there is not what ``start`` wants, or the folder cannot be made.
        StoreError: the store of the earlier run is in use or cannot be removed.
    """
    folder = Path(config.run)
    stores = [path for path in config.budget.disk_paths if Store.exists([path])]
    if start == "resume":
        _check_same_data(config, folder)
        if not stores:
            raise ConfigError(
                f"run={config.run!r} left no state on disk (budget.disk) to resume from: start another run"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = sorted(item.name for item in folder.iterdir())
        if start == "new" and present:
            raise ConfigError(f"run={config.run!r}: the folder already holds {_some(present)}. {_REMEDY}")
        if start == "new" and stores:
            raise ConfigError(f"budget.disk={str(stores[0])!r} already holds the state of a run. {_REMEDY}")
        if start == "overwrite":
            discard(config)
            folder.mkdir(exist_ok=True)
        (folder / _SETTINGS).write_text(dump(config), encoding="utf-8")
    except StoreError:
        raise
    except OSError as error:
        raise ConfigError(f"run={config.run!r}: cannot use this folder: {error.strerror}") from error
    return folder


def discard(config: TrainConfig) -> None:
    """Remove a run's own files and its store, and nothing else.

    Raises:
        StoreError: the store is in use or cannot be removed.
    """
    folder = Path(config.run)
    for path in [*(folder / name for name in _FILES), *folder.glob(_TRACES)]:
        path.unlink(missing_ok=True)
    stores = [path for path in config.budget.disk_paths if Store.exists([path])]
    if stores:
        Store.delete(stores)
    for path in [*config.budget.disk_paths, folder]:
        with suppress(OSError):  # not there, or something else is in it: not ours to remove
            path.rmdir()


_REMEDY = "Give another folder (--run PATH), --resume to go on with that run, or --overwrite to replace it"


def _check_same_data(config: TrainConfig, folder: Path) -> None:
    """A resumed run goes on where it was in its text, so all that decides what a step sees must be as it was."""
    if not (folder / _SETTINGS).exists():
        raise ConfigError(f"run={config.run!r}: there is no run in this folder to resume. Leave out --resume")
    before = load(folder / _SETTINGS)
    for key in ("data", "micro_batches", "micro_batch_size", "seed"):
        if getattr(before, key) != getattr(config, key):
            raise ConfigError(
                f"run={config.run!r} was started with {key}={getattr(before, key)!r}, not {getattr(config, key)!r}: "
                "a resumed run must see the same text. Put it back, or start another run"
            )
    if (before.evaluate and before.evaluate.share) != (config.evaluate and config.evaluate.share):
        raise ConfigError(f"run={config.run!r} held out another share of the text (evaluate.share): put it back")


def has_steps(folder: Path) -> bool:
    """Whether a step has been done in this folder."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def trace_path(folder: Path, first: int) -> Path:
    """The trace of a stretch that starts after ``first`` steps; a resumed one does not replace the others."""
    return folder / (f"trace-from-{first + 1}.json" if first else "trace.json")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def write_prediction(folder: Path, prediction: Prediction) -> None:
    """Put what was predicted beside the trace of what happens; replaces an earlier plan's."""
    (folder / _PREDICTION).write_text(prediction.to_json(), encoding="utf-8")


class MetricsFile:
    """``metrics.jsonl``: one line of JSON per step, on disk as soon as the step is done. Adds to what is there."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

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
