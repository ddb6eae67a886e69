"""Weights & Biases. ``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_ENTITY`` and the like hold, as everywhere."""

import os
from collections.abc import Mapping

import wandb

from penstock.cli.trackers.tracking import Ending, Tracked


class WeightsAndBiases:
    """A run of the project that ``WANDB_PROJECT`` names, else ``penstock``."""

    def start(self, run: Tracked) -> str:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "penstock"),
            name=run.name,
            id=run.known,
            resume=None if run.known is None else "allow",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off"),  # it would stand between the run and its terminal
        )
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=0 if ending == "done" else 1)
