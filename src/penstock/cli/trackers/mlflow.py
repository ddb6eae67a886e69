"""MLflow. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` hold, as everywhere."""

import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from penstock.cli.trackers.tracking import Ending, Tracked

_AT_ONCE = 100
"""Parameters that a server takes in one request."""

_LONGEST = 6000
"""Characters of a parameter's value that it keeps."""


class MLflow:
    """A run of the experiment that ``MLFLOW_EXPERIMENT_NAME`` names, else ``penstock``."""

    def start(self, run: Tracked) -> str:
        self._client = MlflowClient()
        if run.known is not None:
            self._id = run.known
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "penstock")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = str(self._client.create_run(number, run_name=run.name).info.run_id)
        settings = [Param(key, str(value)[:_LONGEST]) for key, value in run.settings.items()]
        for first in range(0, len(settings), _AT_ONCE):
            self._client.log_batch(self._id, params=settings[first : first + _AT_ONCE])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, ending: Ending) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending]
        self._client.set_terminated(self._id, status=status)
