"""Weights & Biases. ``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_ENTITY`` and the like hold, as everywhere."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock.cli.trackers.tracking import Ending, Tracked


class WeightsAndBiases:
    """A run of the project that ``WANDB_PROJECT`` names, else ``penstock``."""

    def start(self, run: Tracked) -> str:
        with _temporary_files_in(run.folder / "wandb"):
            import wandb
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


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Inside, Python makes temporary files in ``folder``.

    When it is imported, the package makes two folders that are removed at the end of the process, but not when that is
    killed. In the run's folder they are known for what they are, and go when it goes.
    """
    folder.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
