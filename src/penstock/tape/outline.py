"""The outline of a model: what of it decides which way its forward goes, and can be changed between two steps.

A probe is of a model as it was then. In another mode, with a module in another's place, with a hook or a switch more, a
forward may keep what it did not keep, read what it did not read, or change buffers that it left alone.
"""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from penstock.compat.modules import hooks_of
from penstock.tape.guard import is_guard

Outline = tuple[tuple[Any, ...], ...]


def outline_of(model: nn.Module) -> Outline:
    """The modules of a model, each with the numbers of the hooks on it and the names of its attributes that are True,
    ``training`` among them; and those of their configurations.

    Numbers and text are left out: models are told their step, or a factor, in them, and go the same way.
    """
    modules = [
        (
            weakref.ref(module),
            *[number for number, hook in hooks_of(module).items() if not is_guard(hook)],
            *_switched_on(vars(module)),
        )
        for module in model.modules()
    ]
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    return (*modules, *[tuple(_switched_on(getattr(config, "__dict__", {}))) for config in configs.values()])


def _switched_on(attributes: Mapping[str, Any]) -> list[str]:
    return [name for name, value in attributes.items() if value is True]
