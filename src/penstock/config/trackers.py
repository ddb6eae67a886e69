"""Names of the trackers that a run's numbers can go to, besides its own files."""

from typing import Literal

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
