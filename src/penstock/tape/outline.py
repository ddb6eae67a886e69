"""The outline of a model: what of it decides which way its forward goes, and can be changed between two steps.

A probe is of a model as it was then. In another mode, with a module in another's place, with a hook or a switch more, a
forward may keep what it did not keep, read what it did not read, or change buffers that it left alone.
"""

import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from penstock.compat.modules import hooks_of, parts_of
from penstock.tape.guard import is_guard

Outline = tuple[tuple[Any, ...], ...]


def outline_of(model: nn.Module) -> Outline:
    """The modules of a model, each with the hooks on it and the names of its attributes that are True, ``training``
    among them; and those of their configurations.

    Numbers and text are left out: models are told their step, or a factor, in them, and go the same way. A hook that is
    taken off and hung up again is the same one: some are there for as long as a step takes.
    """
    found: list[tuple[Any, ...]] = []
    configs: dict[int, Mapping[str, Any]] = {}
    todo, seen = [model], {model}
    while todo:  # each step comes here: ``model.modules()`` takes as long as all else
        module = todo.pop()
        own = vars(module)
        hooks = [(kind, _again(number, hook)) for kind, number, hook in hooks_of(module) if not is_guard(hook)]
        found.append((weakref.ref(module), *hooks, *[name for name, value in own.items() if value is True]))
        if (config := own.get("config")) is not None:
            configs[id(config)] = getattr(config, "__dict__", {})
        for child in parts_of(module):
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return (*found, *[tuple([name for name, value in of.items() if value is True]) for of in configs.values()])


def _again(number: int, hook: Callable[..., Any]) -> object:
    """Something that is equal for the same hook, whatever ``number`` it has, and does not keep it."""
    try:
        return weakref.WeakMethod(hook) if isinstance(hook, MethodType) else weakref.ref(hook)
    except TypeError:  # of a kind that cannot be looked at so
        return number
