"""Progress of a run: all that it is besides its arrays and buffers. Random state is a function of seed and step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.engine.batch import read_back
from penstock.errors import ConfigError
from penstock.optim.facade import StreamedOptimizer
from penstock.optim.from_torch import HOW
from penstock.optim.precision import LossScale
from penstock.state.record import NAMES, check_progress
from penstock.state.stats import StepStats


@dataclass(kw_only=True)
class Progress:
    """A run's progress as commits and snapshots keep it: ``record`` writes it, and ``adopt`` reads it."""

    seed: int
    trained: Sequence[str]
    """names of the trained parameters"""
    optimizer: StreamedOptimizer
    scale: LossScale
    step: int = 0
    """steps taken, skipped ones included"""
    updates: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)
    """by name, how many updates a parameter has been passed over in, if any"""
    last: StepStats | None = None
    position: Mapping[str, Any] | None = None

    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's settings, by param group.

        Raises:
            ConfigError: JSON does not hold one of them; of those that a step takes it says what they must be.
        """
        left_out = HOW | {"params"}
        groups = [{k: _plain(v) for k, v in g.items() if k not in left_out} for g in self.optimizer.param_groups]
        for group in groups:
            read_back(group.get(NAMES), f"param_groups: {NAMES}", finite=False, most=None)  # as many as the model has
            settings = {key: value for key, value in group.items() if key != NAMES}
            try:
                read_back(settings, "param_groups", finite=False)
            except ConfigError:
                self.optimizer.hypers()  # of one that a step takes it says what it must be
                for key, value in settings.items():
                    read_back(value, f"param_groups: {key}", finite=False)
                raise
        return groups

    def record(self) -> dict[str, Any]:
        """Raises:
        ConfigError: as ``settings``.
        """
        return {
            "step": self.step,
            "updates": self.updates,
            "missed": {str(i): self.missed[name] for i, name in enumerate(self.trained) if name in self.missed},
            "seed": self.seed,
            "loss_scale": asdict(self.scale),
            "param_groups": self.settings(),
            "last": None if self.last is None else self.last.numbers(),
            "position": self.position,
        }

    def check(self, record: Mapping[str, Any], where: str) -> None:
        """Check that a record, and ``where`` that stands, is one of this run's.

        Raises:
            StoreError: it is not what a run writes.
            ConfigError: it is of a run with another seed.
        """
        check_progress(record, where, trained=len(self.trained), seed=self.seed)

    def adopt(self, record: Mapping[str, Any]) -> None:
        """Go on from a record, which has been checked. The optimizer's settings stay as they are."""
        self.step, self.updates = record["step"], record["updates"]
        self.missed = {self.trained[int(i)]: count for i, count in record["missed"].items()}
        self.scale = LossScale(**record["loss_scale"])
        self.last = None if record["last"] is None else StepStats(**record["last"])
        self.position = record["position"]

    def count(self, stats: StepStats, missed: Mapping[str, int], position: Mapping[str, Any] | None) -> None:
        """A step has been taken. ``missed``: after it; ``position``: of the data behind it."""
        self.step, self.last, self.position = self.step + 1, stats, position
        if not stats.skipped:
            self.updates += 1
            self.missed = missed
        self.scale.update(overflow=stats.skipped)
        self.optimizer.record_step()


def _plain(value: Any) -> Any:
    """A setting as JSON has it: whoever schedules it may have put a number of numpy's or torch's there."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
