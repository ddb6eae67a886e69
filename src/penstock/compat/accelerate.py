"""Private names of accelerate: its wrapper of an optimizer."""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer


def note_skipped(optimizer: Any, skipped: bool) -> None:
    """Tell accelerate's wrapper of an optimizer whether the step was skipped, if this is one: the learning rate stays.

    Without: learning rate schedules would go on past steps that were not taken.
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer._is_overflow = skipped
