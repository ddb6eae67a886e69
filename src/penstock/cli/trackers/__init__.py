"""Trackers that a run's numbers go to, too: TensorBoard, Weights & Biases, MLflow, each through its own package.

``tracking`` starts those that ``report_to`` names and keeps them from disturbing the run; each of the others holds one
adapter and imports its package when it starts. May import ``config``, ``errors`` and the run's folder.
"""

from penstock.cli.trackers.tracking import Tracker, Trackers, check_installed, start_trackers

__all__ = ["Tracker", "Trackers", "check_installed", "start_trackers"]
