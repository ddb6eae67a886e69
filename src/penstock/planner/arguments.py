"""What ``penstock.plan`` is given, checked before anything is computed: its callers need not use a type checker."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from penstock.config import Budget, GradDtype, OptimizerName, Precision
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.planner.fit import Family


def check_sources(model: object, machine: object, budget: object) -> None:
    """Raises ConfigError: one of them is of a type that means no model, machine or budget."""
    if not isinstance(model, str | Path | Mapping) and not callable(getattr(model, "profile", None)):
        raise ConfigError(
            f"model={_shown(model)}: must be a name, the path of a config.json, a configuration as a mapping or a "
            "ModelShape (penstock.shape.meta.from_callable makes one of a module)"
        )
    if machine is not None and not isinstance(machine, str | Path | Machine):
        raise ConfigError(f"machine={_shown(machine)}: must be a name, the path of a profile, a Machine or None")
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigError(f"budget={_shown(budget)}: must be a penstock.Budget or None")


def check_choices(
    *, precision: object, grad_dtype: object, optimizer: object, momentum: object, schedule: object
) -> None:
    """Raises ConfigError: one of them is none of the words that it may be."""
    _check_one_of("grad_dtype", grad_dtype, get_args(GradDtype))
    _check_one_of("optimizer", optimizer, get_args(OptimizerName))
    if precision is not None:
        _check_one_of("precision", precision, get_args(Precision))
    if schedule is not None:
        _check_one_of("schedule", schedule, get_args(Family))
    if not isinstance(momentum, bool):
        raise ConfigError(f"momentum={_shown(momentum)}: must be True or False")
    if momentum and optimizer != "sgd":
        raise ConfigError(f"momentum has no effect with optimizer={optimizer!r}: leave it out")


def check_split(*, batch: object, micro_batches: object, micro_batch_size: object, sequence_length: object) -> None:
    """Raises ConfigError: not whole numbers of at least 1, or a batch that is cut in two ways."""
    for name, value in (
        ("batch", batch),
        ("micro_batches", micro_batches),
        ("micro_batch_size", micro_batch_size),
    ):
        if value is not None:
            _check_whole(name, value, least=1)
    _check_whole("sequence_length", sequence_length, least=1)
    if (micro_batches is None) != (micro_batch_size is None):
        raise ConfigError("micro_batches and micro_batch_size belong together: give both, or batch")
    if micro_batches is not None and batch is not None:
        raise ConfigError("batch is cut into micro-batches by the planner: give it without micro_batches")


def check_amounts(*, clip_grad_norm: object, disk_free: object, tbw: object) -> None:
    """Raises ConfigError: norms and terabytes that are no positive numbers, or bytes that are no whole number."""
    for name, value in (("clip_grad_norm", clip_grad_norm), ("tbw", tbw)):
        if value is not None and not _is_positive(value):
            raise ConfigError(f"{name}={_shown(value)}: must be a number of more than 0, or None")
    if disk_free is not None:
        _check_whole("disk_free", disk_free, least=0)


def check_asked_means(*, speculate: object, delay: object) -> None:
    """Raises ConfigError: no answer to whether to speculate, or no number to delay by."""
    if speculate is not None and not isinstance(speculate, bool):
        raise ConfigError(f"speculate={_shown(speculate)}: must be True, False or None")
    if delay is not None and (isinstance(delay, bool) or not isinstance(delay, int | float)):
        raise ConfigError(f"delay={_shown(delay)}: must be a number from 0 to 1, or None")


def check_disk(budget: Budget, *, disk_free: int | None, tbw: float | None) -> None:
    """Raises ConfigError: something is said of a disk tier that is not there."""
    for name, value in (("disk_free", disk_free), ("tbw", tbw)):
        if value is not None and not budget.disk_paths:
            raise ConfigError(
                f"{name} has no effect without a disk tier: leave it out, or give a budget with a directory on disk"
            )


def _check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={_shown(value)}: must be one of {', '.join(known)}")


def _check_whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={_shown(value)}: must be a whole number of at least {least}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _shown(value: object) -> str:
    """As Python writes it, or its type where that is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"<a {type(value).__name__}>"


_SHOWN = 60
