"""The optimizer and the learning rate that the settings describe."""

import math
from collections.abc import Callable, Mapping

from penstock.config import LrScheduleConfig, OptimizerConfig, OptimizerName
from penstock.optim.spec import SGD, Adam, AdamW, Lion, OptimizerSpec, Override

_OPTIMIZERS: Mapping[OptimizerName, type[OptimizerSpec]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "lion": Lion}


def optimizer_spec(config: OptimizerConfig) -> OptimizerSpec:
    """The optimizer that the settings describe; what they leave out keeps the spec's default."""
    overrides = tuple(Override(match=o.match, lr=o.lr, weight_decay=o.weight_decay) for o in config.overrides)
    return _OPTIMIZERS[config.name](**config.given(), overrides=overrides)


def lr_factor(config: LrScheduleConfig, steps: int) -> Callable[[int], float]:
    """The factor on the learning rate of each step, from 0: warm-up to 1, then a decay that ends at ``final``."""
    final = config.final or 0.0

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.kind == "constant":
            return 1.0
        progress = min((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
        down = progress if config.kind == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return 1.0 + (final - 1.0) * down

    return factor
