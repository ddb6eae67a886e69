"""Refuses what a program has changed on a Trainer since the engine was made, where the library's own would heed it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.optim.driven import DrivenOptimizer

_OF_OPTIMIZER = ("learning_rate", "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def check_model(given: Any, own: nn.Module) -> None:
    """``given``: the model that is to be trained, evaluated or saved; ``own``: the engine's.

    Raises:
        ConfigError: they are two.
    """
    if given is not own:
        raise ConfigError(
            f"trainer.model: the engine was made for another {type(own).__name__} than the {type(given).__name__} that "
            "is to be used now, and holds the state of that one alone. End this trainer (trainer.end()), and make one "
            "for the new model; or set trainer.model, or trainer.model_wrapped, back"
        )


def settings_of_optimizer(trainer: Any) -> dict[str, Any]:
    """The settings of a Trainer, by their names, that the library makes an optimizer of when training begins."""
    of_args = {name: getattr(trainer.args, name) for name in _OF_OPTIMIZER}
    given = trainer.optimizer_cls_and_kwargs
    return of_args | {"optimizer_cls_and_kwargs": given and (given[0], dict(given[1]))}


def check_settings(now: Mapping[str, Any], made_with: Mapping[str, Any]) -> None:
    """Refuse settings of the optimizer that differ from those that the engine was ``made_with``, as by an evaluation
    before training.

    Raises:
        ConfigError: as said; it is named.
    """
    for name, value in now.items():
        if value != made_with[name]:
            raise ConfigError(
                f"{name}={value!r} was set after the engine was made, with {made_with[name]!r}, and cannot be "
                "honoured: set it before the first call of evaluate, predict or train, or make another trainer"
            )


def check_optimizer(given: Any, own: DrivenOptimizer | None) -> None:
    """``given``: what the loop is to take steps with, be it wrapped by accelerate; ``own``: the engine's.

    Raises:
        ConfigError: it is another one.
    """
    optimizer = getattr(given, "optimizer", given)
    if own is None or optimizer is not own:
        raise ConfigError(
            f"trainer.optimizer is {type(optimizer).__name__}, because it was set or create_optimizer was overridden: "
            "the engine's optimizer is the only one that it can use. Leave it None, and ask for another one by "
            "optim=... or optimizer_cls_and_kwargs=(torch.optim.SGD, {...})"
        )


def check_not_renewed(own: DrivenOptimizer | None) -> None:
    """Refuse a new optimizer where there is the engine's ``own``, whose moments and steps the library would forget.

    Raises:
        ConfigError: as said.
    """
    if own is not None:
        raise ConfigError(
            "trainer.optimizer was set to None: the library would begin with a new optimizer, and the engine keeps its "
            "moments. Leave it; or save the model (trainer.save_model), and make another trainer for that"
        )
