"""Arguments of ``wrap`` and of what passes them on, checked for their types: what is wrong says what to write."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.config import Budget, GradDtype, Precision
from penstock.config.checked import check_value
from penstock.documents.typed import shown
from penstock.errors import ConfigError
from penstock.optim.from_torch import spec_of
from penstock.optim.spec import SGD, Adam, AdamW, Lion, OptimizerSpec

_PLAIN: Mapping[str, Any] = {
    "precision": Precision | None,
    "clip_grad_norm": float | None,
    "device": torch.device | str | None,
    "seed": int,
    "io_threads": int,
    "overlap": bool,
    "speculate": bool | None,
    "delay": float | None,
    "grad_dtype": GradDtype | None,
    "compile": bool | str,
    "init": bool,
    "run": str | Path | None,
}
_SPECS = (AdamW, Adam, SGD, Lion)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check those of ``wrap``'s arguments that are ``given``, by their names.

    Raises:
        ConfigError: one is not what it must be; with what to write instead, where that is known.
    """
    for key, hint in _PLAIN.items():
        if key in given:
            check_value(key, given[key], hint)
    for key, check in _CHECKS.items():
        if key in given:
            check(given[key])
    if given.get("seed", 0) < 0:
        raise ConfigError(f"seed={shown(given['seed'])}: must be at least 0")


def _model(value: Any) -> None:
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise ConfigError(f"model is the class {value.__name__}: give a model of it, {value.__name__}(...)")
    if isinstance(value, str):
        raise ConfigError(
            f"model={shown(value)}: give a module. One from a folder: loaded = penstock.hf.load({value!r}), then "
            "wrap(loaded.model, weights=loaded.weights, ...)"
        )
    if not isinstance(value, nn.Module):
        raise ConfigError(f"model is {_a(value)}: give a torch.nn.Module")


def _optimizer(value: Any) -> None:
    if isinstance(value, OptimizerSpec) and type(value) is not OptimizerSpec:
        return
    names = ", ".join(f"penstock.{spec.__name__}(...)" for spec in _SPECS)
    if isinstance(value, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is one of torch's ({type(value).__name__}), which would hold all of the state in memory. The "
            f"engine needs only to be told which: {_translated(value) or f'one of {names}'}. The learning rate is "
            "scheduled by engine.optimizer.param_groups"
        )
    if isinstance(value, type) and issubclass(value, (*_SPECS, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer is the class {value.__name__}: give its settings too, one of {names}")
    near = difflib.get_close_matches(str(value).lower(), [spec.__name__.lower() for spec in _SPECS], n=1)
    found = next((spec for spec in _SPECS if near and spec.__name__.lower() == near[0]), None)
    hint = f"penstock.{found.__name__}(lr=...)" if isinstance(value, str) and found else f"one of {names}"
    raise ConfigError(f"optimizer is {_a(value)}: give {hint}")


def _translated(optimizer: torch.optim.Optimizer) -> str | None:
    """The engine's optimizer that does what one of torch's would; None: there is none."""
    first, *others = ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    try:
        spec = spec_of(type(optimizer), first)
    except ConfigError:
        return None
    settings = ", ".join(f"{key}={value!r}" for key, value in spec.group_settings.items())
    overrides = ", overrides=(penstock.Override(match=..., ...), ...)" if any(o != first for o in others) else ""
    return f"penstock.{type(spec).__name__}({settings}{overrides})"


def check_budget(value: Any) -> None:
    """Raises:
    ConfigError: it is no ``penstock.Budget``, with the one that is meant where that is clear.
    """
    if isinstance(value, Budget):
        return
    written = 'penstock.Budget(device="4GiB", host="8GiB", disk="/ssd/run")'
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        written = f"penstock.Budget({', '.join(f'{key}={shown(item)}' for key, item in value.items())})"
    which = " does not say of which memory" if isinstance(value, str | int) and not isinstance(value, bool) else ""
    raise ConfigError(f"budget={shown(value)}{which}: give a budget, as {written}")


def _blocks(value: Any) -> None:
    wrong = not isinstance(value, Iterable) or isinstance(value, str | type)
    if value is not None and (wrong or not all(isinstance(block, nn.Module) for block in value)):
        raise ConfigError(f"blocks is {_a(value)}: give a list of the model's own modules, or None to have them found")


def _loss_fn(value: Any) -> None:
    if value is not None and not callable(value):
        raise ConfigError(f"loss_fn is {_a(value)}: give a function of (model, micro-batch), or None")


def _weights(value: Any) -> None:
    source = callable(getattr(value, "fill", None)) and hasattr(type(value), "__contains__")
    if value is not None and (isinstance(value, type) or not source):
        raise ConfigError(f"weights is {_a(value)}: give penstock.hf.load(folder).weights, or None")


def _compile(value: Any) -> None:
    if isinstance(value, str) and value not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ConfigError(
            f"compile={shown(value)} is no backend of torch.compile's: give True, or one of {', '.join(known)}"
        )


def _a(value: Any) -> str:
    """A value for a message: its type, and itself where that is short."""
    return f"{shown(value, 60)}, {type(value).__name__}" if value is not None else "None"


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "model": _model,
    "optimizer": _optimizer,
    "budget": check_budget,
    "blocks": _blocks,
    "loss_fn": _loss_fn,
    "weights": _weights,
    "compile": _compile,
}
