"""From an optimizer of ``torch.optim`` to the engine's own of the same arithmetic, for loops that bring one."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.compat.torch import hooks_of
from penstock.config.optimizer import SGD, Adam, AdamW, OptimizerSpec, Override
from penstock.errors import ConfigError

_KINDS: dict[type[torch.optim.Optimizer], type[OptimizerSpec]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}
HOW = frozenset({"foreach", "fused"})
"""Settings of a param group that are ways to compute the same thing: the engine has its own."""
_OFF: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "dampening": 0,
}
"""Settings that the engine does not have, with the value that asks for nothing."""
_DECOUPLED = "decoupled_weight_decay"
_PER_GROUP = ("lr", "weight_decay")


def spec_of(
    kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], overrides: Sequence[Override] = ()
) -> OptimizerSpec:
    """The engine's optimizer for a class of ``torch.optim`` and its keyword arguments.

    Raises:
        ConfigError: the class, or one of the settings, is something that the engine does not do.
    """
    mine = _kind(kind)
    off = _OFF | {_DECOUPLED: kind is torch.optim.AdamW}
    taken: dict[str, Any] = {}
    for key, value in settings.items():
        if key in mine.group_keys:
            taken[key] = tuple(map(_number, value)) if isinstance(value, list | tuple) else _number(value)
        elif key not in HOW and (key not in off or value != off[key]):
            raise ConfigError(f"{kind.__name__}({key}={value!r}) cannot be honoured by the engine: leave it out")
    return mine(**taken, overrides=tuple(overrides))


def spec_of_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerSpec:
    """The engine's optimizer that does what ``optimizer`` would: its settings, and those of its param groups.

    ``names``: the names of the trained parameters by their identity. They must all be in the optimizer.

    Raises:
        ConfigError: the optimizer has taken steps already, has hooks, leaves a trained parameter out, has one twice
            or one that is not trained, or its param groups differ in more than ``lr`` and ``weight_decay``.
    """
    _kind(type(optimizer))
    if optimizer.state:
        raise ConfigError("the optimizer has taken steps already, and its moments would be lost: set up a new one")
    if any(hooks_of(optimizer).values()):
        raise ConfigError(
            "the optimizer has hooks, which nobody would call: register them with the one that setup returns"
        )
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    if foreign := held.keys() - set(names):
        raise ConfigError(
            f"the optimizer has {len(foreign)} parameters that are not among the model's trained ones: give it those "
            "alone, as by [p for p in model.parameters() if p.requires_grad]"
        )
    if twice := [names[key] for key, times in held.items() if times > 1]:
        raise ConfigError(f"the optimizer has {twice[0]!r} more than once, which a step would change as often: once")
    if left_out := [name for key, name in names.items() if key not in held]:
        raise ConfigError(
            f"the optimizer leaves out {left_out[0]!r} and {len(left_out) - 1} more that require a gradient: freeze "
            "them (requires_grad_(False)), or give them to it"
        )
    groups = [group for group in optimizer.param_groups if group["params"]]
    first, *others = ({k: v for k, v in group.items() if k not in _BOOKKEEPING} for group in groups)
    overrides = []
    for settings, group in zip(others, groups[1:], strict=True):
        different = [key for key, value in settings.items() if key not in _PER_GROUP and value != first.get(key)]
        if different:
            raise ConfigError(f"the optimizer's param groups differ in {different[0]!r}: only lr and weight_decay may")
        own = {key: float(settings[key]) for key in _PER_GROUP}
        overrides.append(override_for([names[id(p)] for p in group["params"]], **own))
    return spec_of(type(optimizer), first, overrides)


def refuse_unsupported(group: Mapping[str, Any], *, decoupled: bool | None) -> None:
    """Look at a param group that others write to for settings of torch's that the engine does not have.

    ``decoupled``: weight decay is, of an Adam; None: of another optimizer.

    Raises:
        ConfigError: one asks for something.
    """
    off = _OFF if decoupled is None else _OFF | {_DECOUPLED: decoupled}
    for key in off.keys() & group.keys():
        if group[key] != off[key]:
            raise ConfigError(
                f"param_groups: {key}={group[key]!r} cannot be honoured by the engine: set it to {off[key]!r}"
            )


def _kind(kind: type[torch.optim.Optimizer]) -> type[OptimizerSpec]:
    if kind not in _KINDS:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind is torch.optim.Muon:
            raise ConfigError(
                f"{name} has matrices alone, and a step is of all parameters: give torch.optim.AdamW, Adam or SGD, "
                "or train with penstock.wrap(optimizer=penstock.Muon(adamw=...)), penstock train, or a Trainer's "
                "optimizer_cls_and_kwargs=(penstock.Muon, {...})"
            )
        raise ConfigError(f"{name} cannot be streamed: use torch.optim.AdamW, Adam or SGD")
    return _KINDS[kind]


def override_for(names: Sequence[str], **settings: float) -> Override:
    """Other settings for exactly these parameters."""
    return Override(match="^(?:" + "|".join(re.escape(name) for name in names) + ")$", **settings)


_OF_SCHEDULES = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Keys that learning rate schedules of torch write into param groups, for themselves."""
_BOOKKEEPING = {"params", "param_names"} | _OF_SCHEDULES
"""Keys of a param group that are no settings."""


def _number(value: Any) -> Any:
    """A tensor's number, which torch takes for a learning rate."""
    return value.item() if isinstance(value, torch.Tensor) else value
