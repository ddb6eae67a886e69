"""The folder of one run: who may write into it, and what is written there."""

import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from penstock import files
from penstock.cli.settings import dump, load
from penstock.cli.trackers.tracking import FOLDERS, IDS
from penstock.config import TrainConfig
from penstock.errors import ConfigError, StoreError
from penstock.report.metrics_file import lines_until
from penstock.report.prediction import Prediction
from penstock.store.journal import Journal
from penstock.store.store import Store

log = logging.getLogger("penstock")

Start = Literal["new", "overwrite", "resume"]

_SETTINGS = "config.yaml"
_PREDICTION = "prediction.json"
_METRICS = "metrics.jsonl"
_FILES = (_SETTINGS, _PREDICTION, "report.html", "timeline.svg", "timeline.png", _METRICS, "data.json", IDS)
_MODEL = "model"
_DATA = "data"
_PREPARED = re.compile(r"(tokenizer-)?[0-9a-f]{16}(\.[0-9a-f]+)?(\.partial)?")
"""What ``data.prepare`` makes in ``data``."""

_TRACES = "trace*.json"


def settings_file(folder: Path) -> Path:
    """The resolved settings of the run in a folder.

    Raises:
        ConfigError: there is no run there.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}: give the folder of a run, which penstock train writes (its run setting)")
    if not (folder / _SETTINGS).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no {_SETTINGS}. Give the folder that penstock train wrote"
        )
    return folder / _SETTINGS


def settings_of(folder: Path, flags: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The settings of the run in a folder, with flags laid over them.

    They name the folder as it was called when the run began. If it is called otherwise now (it was moved, or the
    current directory is another), what they say is in it is looked for where it is now.

    Raises:
        ConfigError: there is no run there, or its settings or the flags cannot be read.
    """
    config = load(settings_file(folder), flags)
    before = Path(config.run)
    if before.resolve() == folder.resolve():
        return config
    moved = tuple(
        str(folder / path.relative_to(before)) if path.is_relative_to(before) else str(path)
        for path in config.budget.disk_paths
    )
    disk = None if not moved else moved[0] if len(moved) == 1 else moved
    return replace(config, run=str(folder), budget=replace(config.budget, disk=disk))


def as_cut_before(config: TrainConfig) -> TrainConfig:
    """The settings of a run that is to go on, with the size of micro-batch that it has had so far if none is asked for.

    Where there is no run to go on with, ``claim`` says so.

    Raises:
        ConfigError: the settings of the run in its folder cannot be read.
    """
    path = Path(config.run) / _SETTINGS
    if config.micro_batch_size is not None or not path.is_file():
        return config
    before = load(path)
    if before.sequences_per_step != config.sequences_per_step:
        return config
    return replace(config, micro_batch_size=before.micro_batch_size)


def claim(config: TrainConfig, start: Start) -> Path:
    """Make the run's folder ready and, but for ``resume``, write the resolved settings into it.

    ``new`` wants a folder with nothing in it and no state on disk. ``overwrite`` removes an earlier run's own files
    and its store, and nothing else. ``resume`` wants an earlier run on the same data; it changes nothing, as that run
    may still be under way: who resumes it calls ``write_settings`` once its store is theirs.

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
        files.make_folder(folder)
        present = sorted(item.name for item in folder.iterdir())
        if start == "new" and present:
            raise ConfigError(f"run={config.run!r}: the folder already holds {_some(present)}. {_REMEDY}")
        if start == "new" and stores:
            raise ConfigError(f"budget.disk={str(stores[0])!r} already holds the state of a run. {_REMEDY}")
        if start == "overwrite":
            discard(config)
            files.make_folder(folder)
        if start != "resume":
            write_settings(folder, config)
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
    stores = [path for path in config.budget.disk_paths if Store.exists([path])]
    if stores:
        Store.delete(stores)  # first: it is refused where the run is still under way
    own = [folder / f"{name}{ending}" for name in _FILES for ending in ("", files.PARTIAL)]
    for path in [*own, *folder.glob(_TRACES)]:
        path.unlink(missing_ok=True)
    if any((model_folder(folder) / name).is_file() for name in ("config.json", "penstock.json")):
        shutil.rmtree(model_folder(folder), ignore_errors=True)
    for name in (f"{_MODEL}{files.PARTIAL}", *FOLDERS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (folder / _DATA).glob("*"):
        if _PREPARED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    for path in [*config.budget.disk_paths, folder / _DATA, folder]:
        with suppress(OSError):  # not there, or something else is in it: not ours to remove
            path.rmdir()


_REMEDY = "Give another folder (--run PATH), --resume to go on with that run, or --overwrite to replace it"


def _check_same_data(config: TrainConfig, folder: Path) -> None:
    """A resumed run goes on where it was in its text, so all that decides what a step sees must be as it was."""
    if not (folder / _SETTINGS).exists():
        raise ConfigError(
            f"run={config.run!r}: there is no run in this folder to resume. Start one: penstock train CONFIG.yaml"
        )
    before = load(folder / _SETTINGS)
    for key in ("model", "data", "sequences_per_step", "micro_batch_size", "seed"):
        if getattr(before, key) != getattr(config, key):
            name = "batch.sequences" if key == "sequences_per_step" else key
            raise ConfigError(
                f"run={config.run!r} was started with {name}={getattr(before, key)!r}, not {getattr(config, key)!r}: "
                "a resumed run must be the same model and see the same text, cut in the same way. Put it back, or "
                "start another run"
            )


def model_folder(folder: Path) -> Path:
    """Where a run's folder keeps what its model is made of (``hf.kept``)."""
    return folder / _MODEL


def has_steps(folder: Path) -> bool:
    """Whether a step has been done in this folder."""
    metrics = folder / _METRICS
    return metrics.exists() and metrics.stat().st_size > 0


def trace_path(folder: Path, first: int) -> Path:
    """The trace of a stretch that starts after ``first`` steps; a resumed one does not replace the others."""
    return folder / (f"trace-from-{first + 1}.json" if first else "trace.json")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def write_settings(folder: Path, config: TrainConfig) -> None:
    """Write the resolved settings, whole or not at all: without them a run cannot be resumed."""
    files.replace(folder / _SETTINGS, dump(config))


def write_prediction(folder: Path, prediction: Prediction) -> None:
    """Put what was predicted beside the trace of what happens; replaces an earlier plan's."""
    files.replace(folder / _PREDICTION, prediction.to_json())


class MetricsFile:
    """``metrics.jsonl``: one line of JSON per step, on disk as soon as the step is done. Adds to what is there."""

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        """``done``: steps that the run goes on after. Lines of later ones are dropped: they will be done again.

        Raises:
            ConfigError: the lines that are there cannot be read.
        """
        path = folder / _METRICS
        lines, unreadable = lines_until(path, done)
        if unreadable:
            log.warning("%s: lines that cannot be read are dropped: %d", path, unreadable)
        self.last = int(json.loads(lines[-1])["step"]) if lines else 0
        """The last step that has a line."""
        text = "".join(f"{line}\n" for line in lines)
        if path.exists() and path.read_bytes() != text.encode():
            files.replace(path, text)
        self._path, self._done = path, done
        self._file = Journal(path, "a")

    def earlier(self) -> Iterator[Mapping[str, Any]]:
        """The lines of the steps that the run goes on after."""
        return map(json.loads, lines_until(self._path, self._done)[0])

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a line. A number that JSON has no word for (an overflowed norm) becomes null.

        Raises:
            StoreError: the disk is full or fails. The step is done all the same; resuming drops half a line.
        """
        self._file.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")

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
