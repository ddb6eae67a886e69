"""Where else a run's numbers go."""

from typing import Literal

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
