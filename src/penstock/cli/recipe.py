"""The learning rate that the settings describe."""

import math
from collections.abc import Callable, Mapping

from penstock.config import LrScheduleConfig


def lr_factor(config: LrScheduleConfig, steps: int) -> Callable[[int], float]:
    """The factor on the learning rate of each step, from 0: warm-up to 1, then a decay that ends at ``final``.

    ``wsd`` stays at 1 in between; its ``1-sqrt`` is Hägele et al., arXiv 2405.18392.
    """
    warmup, decay = config.phases(steps)
    down = _DECAYS["1-sqrt" if config.kind == "wsd" else config.kind]
    if config.decay_shape is not None:
        down = _DECAYS[config.decay_shape]
    final = config.final or 0.0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if not decay:
            return 1.0
        progress = min(max((step - (steps - decay)) / decay, 0.0), 1.0)
        return 1.0 + (final - 1.0) * down(progress)

    return factor


_DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 0.0,
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "1-sqrt": math.sqrt,
}
"""By the shape of a decay: its progress from 0 to 1 after a share of its steps, also from 0 to 1."""
