"""The trackers of a run: started together, fed together, and none of them able to end the run."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from penstock import files
from penstock.cli.settings import flat
from penstock.config import TrackerName
from penstock.documents.text import MalformedError, parse_json, read_bounded
from penstock.documents.typed import fits
from penstock.errors import ConfigError

log = logging.getLogger("penstock")

Ending = Literal["done", "stopped", "failed"]

IDS = "trackers.json"
"""In a run's folder: what each tracker calls the run, so that a resumed run goes on under the same name."""

FOLDERS = ("tensorboard", "wandb")
"""Folders that trackers make in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run as a tracker is told of it when it starts. ``settings``: dotted name -> value, as the run resolved them.

    ``done``: steps that are done already. ``known``: the id that the tracker gave the run before; None: it is new.
    """

    folder: Path
    settings: Mapping[str, Any]
    done: int = 0
    known: str | None = None

    @property
    def name(self) -> str:
        """The run's name for people: that of its folder."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """One tracker of one run. What it raises is the end of it, not of the run."""

    def start(self, run: Tracked) -> str:
        """Begin, or go on; returns what to find the run by when it goes on again."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, ending: Ending) -> None: ...


def check_installed(names: Sequence[TrackerName]) -> None:
    """Raises ConfigError: the package of a tracker, which has its name, is not there."""
    for name in names:
        try:
            there = find_spec(name) is not None
        except ValueError:  # a module that is blocked or half imported
            there = False
        if not there:
            raise ConfigError(f"report_to: {name} needs the package {name}, which is not installed: pip install {name}")


def start_trackers(names: Sequence[TrackerName], folder: Path, settings: Mapping[str, Any], *, done: int) -> "Trackers":
    """Start the trackers that a run asks for, before its next step. ``settings``: nested, as YAML would hold them.

    Raises:
        ConfigError: one of them cannot start; those that have are closed.
    """
    path = folder / IDS
    known = _known(path)
    given = dict(flat(settings))
    started = Trackers()
    for name in names:
        tracker = ADAPTERS[name]()
        try:
            known[name] = tracker.start(Tracked(folder=folder, settings=given, done=done, known=known.get(name)))
        except Exception as error:
            started.close("failed")
            raise ConfigError(f"report_to: {name} cannot start: {' '.join(str(error).split())[:400]}") from error
        started.running[name] = tracker
        _keep(path, known)
    return started


def _known(path: Path) -> dict[str, str]:
    """The names that trackers gave the run before.

    Raises:
        ConfigError: they cannot be read.
    """
    try:
        found = parse_json(read_bounded(path))
        if not fits(found, Mapping[str, str]):
            raise MalformedError("it is no object of texts")
    except FileNotFoundError:
        return {}
    except (OSError, MalformedError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path}, which says what trackers call the run, cannot be read: {reason}. Put it back from a copy, or "
            "remove it: trackers then take the run for a new one"
        ) from None
    return dict(found)


def _keep(path: Path, known: Mapping[str, str]) -> None:
    """Write the names at once and whole: a kill must not leave a run that is known there and not here."""
    files.replace(path, json.dumps(known))


@dataclass(kw_only=True)
class Trackers:
    """The trackers that are running. One that fails is said once and left out from then on."""

    running: dict[TrackerName, Tracker] = field(default_factory=dict)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics."""
        values = dict(named(metrics))
        self._each(lambda tracker: tracker.log(step, values), "no longer logs to it")

    def close(self, ending: Ending) -> None:
        """Send what is left, and say how the run ended."""
        self._each(lambda tracker: tracker.close(ending), "may have lost its last steps there")
        self.running.clear()

    def _each(self, act: Callable[[Tracker], None], outcome: str) -> None:
        for name, tracker in list(self.running.items()):
            try:
                act(tracker)
            except Exception as error:  # noqa: BLE001 - whatever a tracker's package raises, training goes on
                del self.running[name]
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                log.warning("%s failed, and the run %s: %s. Training goes on", name, outcome, reason)


_LEARNING = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate"}


def named(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers under the names that Hugging Face's trainer gives them; what the machine did is under ``system/``."""
    for key, value in flat(metrics):
        if key == "step" or value is None:
            continue
        if key == "validation_loss":
            yield "eval/loss", float(value)
        elif key == "plan_change":  # words, which metrics.jsonl has
            yield "system/plan_change", 1.0
        elif key in _LEARNING:
            yield _LEARNING[key], float(value)
        else:
            yield f"system/{key.replace('.', '/')}", float(value)


def _adapter(module: str, name: str) -> Tracker:
    tracker: Tracker = getattr(import_module(f"penstock.cli.trackers.{module}"), name)()
    return tracker


ADAPTERS: Mapping[TrackerName, Callable[[], Tracker]] = {
    "tensorboard": partial(_adapter, "tensorboard", "TensorBoard"),
    "wandb": partial(_adapter, "weights_and_biases", "WeightsAndBiases"),
    "mlflow": partial(_adapter, "mlflow", "MLflow"),
}
