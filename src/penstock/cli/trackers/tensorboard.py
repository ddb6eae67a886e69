"""TensorBoard: event files in the run's folder."""

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from penstock.cli.trackers.tracking import Ending, Tracked

FOLDER = "tensorboard"


class TensorBoard:
    """Writes into ``tensorboard/`` in the run's folder: ``tensorboard --logdir RUN``."""

    def start(self, run: Tracked) -> str:
        # Steps that a kill has undone are done again: what was logged of them before is not shown.
        purge = run.done + 1 if run.known is not None else None
        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=purge)
        if run.known is None:
            rows = "\n".join(f"| {name} | {value} |" for name, value in run.settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")
        return FOLDER

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        self._writer.close()
