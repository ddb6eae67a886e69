"""Figures of a run, read from its folder: its settings, how far it is, and how fast it was. It changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from glob import iglob
from pathlib import Path
from statistics import median
from typing import Any

from penstock import files
from penstock.cli.run_folder import METRICS, RUN_LOCK, settings_of, settings_path
from penstock.cli.run_record import RunRecord
from penstock.cli.settings import flat, plain
from penstock.config import Tier, TrainConfig
from penstock.errors import ConfigError, StoreError
from penstock.report.metrics_file import StepMetrics, read_metrics
from penstock.store.directory import is_locked
from penstock.store.owner import RUN_FILE

_DEEPEST = 3
"""Folders below the one that is given in which runs are looked for."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """A run. ``ranks``: that train it; ``begun``: false of one that was ended before its settings were written;
    ``training``: whether a process has it now; ``last``: when its last step was done, else when it was begun.
    """

    folder: Path
    config: TrainConfig
    ranks: int
    begun: bool
    training: bool
    metrics: Sequence[StepMetrics]
    last: datetime

    @property
    def step(self) -> int:
        return self.metrics[-1].step if self.metrics else 0

    @property
    def state(self) -> str:
        """``training``, ``complete``, ``stopped``, or ``not begun``."""
        if self.training:
            return "training"
        if not self.begun or not self.metrics:
            return "not begun"
        return "complete" if self.config.steps is not None and self.step >= self.config.steps else "stopped"

    @property
    def loss(self) -> float | None:
        """Loss of the last step."""
        return self.metrics[-1].loss if self.metrics else None

    def loss_at(self, step: int) -> float | None:
        return next((m.loss for m in self.metrics if m.step == step), None)

    @property
    def validation(self) -> float | None:
        """The last held-out loss."""
        return next((m.validation for m in reversed(self.metrics) if m.validation is not None), None)

    @cached_property
    def settled(self) -> Sequence[StepMetrics]:
        """The steps that rates are taken from: all but the first, which plans and warms up."""
        return [m for m in self.metrics[1:] if m.seconds > 0]

    @property
    def step_seconds(self) -> float | None:
        return median(m.seconds for m in self.settled) if self.settled else None

    @property
    def tokens_per_second(self) -> float | None:
        return median(m.tokens / m.seconds for m in self.settled) if self.settled else None

    def share(self, name: str) -> float | None:
        """The median of ``mfu`` or ``share_of_product``; None: the machine's profile had nothing to say to it."""
        known = [found for m in self.settled if (found := getattr(m, name)) is not None]
        return median(known) if known else None

    @property
    def peak(self) -> Mapping[Tier, int]:
        """The most memory that any step took."""
        tiers: tuple[Tier, ...] = ("device", "host")
        return {tier: max((m.peak.get(tier, 0) for m in self.metrics), default=0) for tier in tiers}

    @property
    def tokens(self) -> int:
        return sum(m.tokens for m in self.metrics)

    @property
    def written(self) -> int:
        return sum(m.written for m in self.metrics)

    @property
    def seconds(self) -> float:
        """In its steps."""
        return sum(m.seconds for m in self.metrics)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The run's settings by dotted names, without its folder, which is ``{run}`` where others are in it."""
        found = {key: _in_run(value, self.config.run) for key, value in flat(plain(self.config), numbered=True)}
        del found["run"]
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "model": self.config.model.name,
            "state": self.state,
            "step": self.step,
            "steps": self.config.steps,
            "ranks": self.ranks,
            "loss": self.loss,
            "validation_loss": self.validation,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.share("mfu"),
            "share_of_product": self.share("share_of_product"),
            "peak_bytes": dict(self.peak),
            "bytes_written": self.written,
            "last": self.last.isoformat(timespec="seconds"),
            "settings": dict(self.settings),
        }


def is_training(folder: Path) -> bool:
    """True if a process trains the run in a folder now."""
    return is_locked(folder, name=RUN_LOCK)


def read_run(folder: Path) -> RunFigures:
    """Raises ConfigError, StoreError: it is not a run's folder, or what is in it cannot be read."""
    record = RunRecord.read(folder)
    config = settings_of(folder)
    metrics = read_metrics(folder / METRICS)
    files = (folder / METRICS, settings_path(folder), folder / RUN_FILE)
    newest = next(file for file in files if file.exists())
    return RunFigures(
        folder=folder,
        config=config,
        ranks=1 if record is None else record.ranks,
        begun=record is None or record.pending is None,
        training=is_training(folder),
        metrics=metrics,
        last=datetime.fromtimestamp(newest.stat().st_mtime, tz=UTC),
    )


def read_all(paths: Sequence[Path]) -> tuple[list[RunFigures], list[str]]:
    """The runs in some folders, or that these are themselves, and why others cannot be read."""
    found, unreadable = list[RunFigures](), list[str]()
    for folder in dict.fromkeys(run for path in paths for run in _runs_in(path)):
        try:
            found.append(read_run(folder))
        except (ConfigError, StoreError, OSError) as error:
            unreadable.append(str(error) if str(folder) in str(error) else f"{folder}: {error}")
    return found, unreadable


def _runs_in(path: Path) -> list[Path]:
    """The folders of runs in a folder. A run has the name of its own place, and a link's where no other leads there;
    what is in its folder is its own.

    Raises:
        ConfigError: there is no such folder.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} {files.no_folder(path)}: give a folder that has runs in it, or the folder of a run")
    names = (RUN_FILE, settings_path(path).name)
    patterns = ("*/" * depth + name for depth in range(_DEEPEST + 1) for name in names)
    there = {path / Path(place).parent for pattern in patterns for place in iglob(pattern, root_dir=path)}
    found, top = dict[Path, Path](), path.resolve()
    for folder in sorted(there, key=lambda one: (one.resolve() != top / one.relative_to(path), len(one.parts), one)):
        found.setdefault(folder.resolve(), folder)
    return sorted(folder for real, folder in found.items() if found.keys().isdisjoint(real.parents))


def _in_run(value: Any, run: str) -> Any:
    if isinstance(value, list):
        return [_in_run(item, run) for item in value]
    if isinstance(value, str) and value.startswith(f"{run}/"):
        return f"{{run}}{value.removeprefix(run)}"
    return value
