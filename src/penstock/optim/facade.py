"""The optimizer that users and ``torch.optim.lr_scheduler`` see: real param groups whose state lives elsewhere."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, get_args

import numpy as np
import torch

from penstock.compat.torch import note_step
from penstock.config.optimizer import (
    SGD,
    Adam,
    AdamW,
    AdjustLr,
    Lion,
    Moments,
    Muon,
    OptimizerSpec,
    check_eps,
    check_muon,
    check_rates,
)
from penstock.errors import ConfigError
from penstock.optim.formula import FIRST_HALVES, Hyper, Kind
from penstock.optim.from_torch import refuse_unsupported


class StreamedOptimizer(torch.optim.Optimizer):
    """``torch.optim.Optimizer`` with live ``param_groups`` for parameters that an engine updates.

    One param group holds the parameters that no override matches (if there are any), and one more for each override
    holds those that it is the first to match. Where the spec's weight decay spares norms and biases, those of each of
    these are in a group of their own, right behind it. With Muon, matrices are in groups before those of the others,
    whose settings are AdamW's. Whatever is written into ``param_groups`` holds from the next
    step. ``state_dict`` carries settings only; moments and master weights are saved by ``engine.save``.

    Args:
        spec: the optimizer and its settings.
        named: names and parameters, all that are trained.
        matrices: ids of those whose steps take them whole.

    Raises:
        ConfigError: there are no parameters, or an override matches none that an earlier one has not taken.
    """

    is_engines = True
    """Says that an engine's parameters may be among its own, as of no other optimizer (``tape.guard``)."""

    def __init__(
        self,
        spec: OptimizerSpec,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        matrices: Collection[int] = (),
    ) -> None:
        if not named:
            raise ConfigError(
                "the model has no parameter that is trained (requires_grad is False everywhere): set it for those that "
                "are to be"
            )
        self._sealed = False
        self.spec = spec
        groups, defaults = _param_groups(spec, named, matrices), spec.group_settings
        if isinstance(spec, Muon):  # its groups say all; what is here would be added to those of the other kind, too
            defaults = {key: defaults[key] for key in ("lr", "weight_decay")}
        super().__init__(groups, defaults)
        self._sealed, self._built = True, len(self.param_groups)
        self._group_of = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}

    def hypers(self) -> tuple[Hyper, ...]:
        """The settings of each param group that has parameters, as they are now.

        Raises:
            ConfigError: one is missing, no number, or out of the range that the optimizer's class allows, or asks for
                what the engine does not do; or the groups have not the parameters that they were built with.
        """
        groups = [group for group in self.param_groups if group["params"]]
        if len(groups) != self._built:
            raise ConfigError(
                f"param_groups: {len(groups)} have parameters, and {self._built} had when the engine was built: change "
                "their settings alone (lr=0 and weight_decay=0 leave parameters as they are)"
            )
        found = [(id(p), i) for i, group in enumerate(groups) for p in group["params"]]
        if len(found) != len(self._group_of) or dict(found) != self._group_of:
            raise ConfigError(
                "param_groups: their parameters, or their order, are other ones than when the engine was built, and a "
                "step goes by those: change settings alone, or wrap with overrides=(Override(...),)"
            )
        return tuple(_hyper(_kind(self.spec, group), group, self.spec.moments) for group in groups)

    def group_of(self, parameter: torch.nn.Parameter) -> int:
        """The index of the parameter's param group, among those that have any."""
        return self._group_of[id(parameter)]

    def record_step(self) -> None:
        """Tells LR schedulers that a step was taken, which they otherwise learn from ``step`` and warn without."""
        note_step(self)

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        """Refuses: the update happens while gradients stream through ``engine.step``.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("optimizer.step() has nothing to update: engine.step(micro_batches) does the whole step")

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> NoReturn:
        """Refuses: there is no call of ``step`` that it could come before.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a hook of optimizer.step() would never be called: do this around engine.step(micro_batches)")

    register_step_post_hook = register_step_pre_hook

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients never stay on the parameters between steps."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses once built.

        Raises:
            ConfigError: always; what is trained was fixed when the engine was built.
        """
        if self._sealed:
            raise ConfigError("param groups cannot be added to a running engine: use overrides=(Override(...),)")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over settings. The param groups stay the ones that they are: others may hold them, too.

        Raises:
            ConfigError: it is no optimizer's, holds moments, which would be lost here, or settings that a step would
                refuse. Nothing has changed then.
            ValueError: its param groups are of other parameters.
        """
        if not _is_state_dict(state_dict):
            raise ConfigError("this is no state_dict of an optimizer: there are no param_groups of params in it")
        if state_dict.get("state"):
            raise ConfigError("this state_dict holds moments, which engine.load restores; this loads settings only")
        groups = self.param_groups
        try:
            super().load_state_dict({"state": {}} | state_dict)
            loaded = self.param_groups
            self.hypers()
        finally:
            self.param_groups = groups
        for group, settings in zip(groups, loaded, strict=True):
            group.update(settings)


def _is_state_dict(found: Any) -> bool:
    groups = found.get("param_groups") if isinstance(found, dict) else None
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _elementwise(spec: OptimizerSpec) -> OptimizerSpec:
    """The optimizer of the parameters that are no matrices."""
    return spec.adamw if isinstance(spec, Muon) else spec


def _param_groups(
    spec: OptimizerSpec, named: Sequence[tuple[str, torch.nn.Parameter]], matrices: Collection[int]
) -> list[dict[str, Any]]:
    members: list[list[tuple[str, torch.nn.Parameter]]] = [[] for _ in range(len(spec.overrides) + 1)]
    for name, parameter in named:
        members[_override_index(spec, name)].append((name, parameter))
    for override, matched in zip(spec.overrides, members[1:], strict=True):
        if not matched:
            raise ConfigError(
                f"override match={override.match!r} is the first match of no trained parameter; names are like "
                f"{', '.join(name for name, _ in named[:3])}"
            )
    settings: list[dict[str, Any]] = [{}, *(dict(override.settings) for override in spec.overrides)]
    found: list[dict[str, Any]] = []
    for whole in (True, False):
        ruled = spec if whole else _elementwise(spec)
        own = ruled.group_settings if isinstance(spec, Muon) else {}
        cut = [[(n, p) for n, p in group if (id(p) in matrices) is whole] for group in members]
        parts = [part for pair in zip(cut, settings, strict=True) for part in _by_decay(ruled, *pair)]
        found += [{"params": group} | own | more for group, more in parts if group]
    return found


def _by_decay(
    spec: OptimizerSpec, members: list[tuple[str, torch.nn.Parameter]], settings: dict[str, Any]
) -> list[tuple[list[tuple[str, torch.nn.Parameter]], dict[str, Any]]]:
    """A group's parameters with their settings: all of them, or what decays and what the spec's decay spares."""
    if spec.decay_norms_and_biases or not spec.weight_decay or "weight_decay" in settings:
        return [(members, settings)]
    spared = [(name, parameter) for name, parameter in members if is_norm_or_bias(name, parameter)]
    rest = [(name, parameter) for name, parameter in members if not is_norm_or_bias(name, parameter)]
    return [(rest, settings), (spared, settings | {"weight_decay": 0.0})]


def is_norm_or_bias(name: str, parameter: torch.nn.Parameter) -> bool:
    """True if a parameter is one that weight decay usually spares: a vector or a scalar, or by its name a bias, as
    those of stacked experts, which have two dimensions, are."""
    return parameter.ndim < 2 or name.rpartition(".")[2].endswith("bias")


def _override_index(spec: OptimizerSpec, name: str) -> int:
    """0: no override matches; else one more than the first that does."""
    return next((i for i, o in enumerate(spec.overrides, start=1) if re.search(o.match, name)), 0)


def rate_name(spec: OptimizerSpec, precision: str) -> str:
    """A machine profile's name for the rate of an optimizer's step: ``"adamw.bf16"``, of Muon AdamW's: what it does on
    the host is bound by the same bytes."""
    return f"{_kind(spec)}.{precision}"


def _kind(spec: OptimizerSpec, group: Mapping[str, Any] | None = None) -> Kind:
    """The kind of a spec, or of what rules one of its torch param groups."""
    match spec:
        case Muon(adamw=adamw):
            if group is None or "ns_steps" not in group:
                return _kind(adamw)
            return "nesterov-muon" if _setting(group, "nesterov") else "muon"
        case Adam():
            return "adam"
        case AdamW():
            return "adamw"
        case Lion():
            return "lion"
        case SGD(momentum=0.0):
            return "sgd"
        case SGD(nesterov=nesterov):
            return "nesterov" if (nesterov if group is None else _setting(group, "nesterov")) else "momentum"
    raise ConfigError(f"{type(spec).__name__} is not an optimizer: use AdamW, Adam, SGD, Lion or Muon")


def _hyper(kind: Kind, group: Mapping[str, Any], moments: Moments) -> Hyper:
    refuse_unsupported(group, decoupled=kind == "adamw" if kind in ("adam", "adamw") else None)
    keys = {"adam": ("betas", "eps"), "adamw": ("betas", "eps"), "lion": ("betas",)}.get(kind, ("momentum",))
    given = {key: _setting(group, key, _pair if key == "betas" else _number) for key in ("lr", "weight_decay", *keys)}
    check_rates("param_groups: ", given)
    if kind == "adam":
        check_eps("param_groups: ", given["eps"], moments)
    if kind == "sgd" and given["momentum"]:
        raise ConfigError(f"momentum={given['momentum']} was set on an SGD built without: it has no momentum buffer")
    betas: tuple[float, float] = given["betas"] if "betas" in given else (given["momentum"], 0.0)
    hyper = Hyper(kind=kind, lr=given["lr"], betas=betas, eps=given.get("eps", 0.0), weight_decay=given["weight_decay"])
    if kind not in FIRST_HALVES:
        return hyper
    steps: Any = _setting(group, "ns_steps")
    adjust: Any = _setting(group, "adjust_lr_fn") or "original"
    if adjust not in get_args(AdjustLr) or not isinstance(steps, int):
        raise ConfigError(
            f"param_groups: adjust_lr_fn={adjust!r}, ns_steps={steps!r}: must be one of "
            f"{', '.join(get_args(AdjustLr))}, and a whole number"
        )
    check_muon("param_groups: ", given["momentum"], steps, None)
    return replace(hyper, ns_steps=steps, adjust=adjust)


def _setting(group: Mapping[str, Any], key: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """A setting of a torch param group, which may be a number of numpy's or a tensor of one."""
    if key not in group:
        raise ConfigError(f"param_groups: there is no {key}, which this optimizer has: set it")
    try:
        return convert(group[key])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        what = "two numbers" if key == "betas" else "a number"
        raise ConfigError(f"param_groups: {key}={group[key]!r}: must be {what}") from None


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor | np.generic):
        value = value.item()
    if isinstance(value, str | bool):  # a snapshot with one would not be taken for this optimizer's
        raise TypeError
    return float(value)


def _pair(value: Any) -> tuple[float, float]:
    first, second = value
    return _number(first), _number(second)
