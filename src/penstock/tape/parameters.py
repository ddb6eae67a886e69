"""Parameters as they must stay while an engine trains them, and the tape's own hooks on them, behind the user's."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from penstock.compat.modules import is_compiled
from penstock.compat.torch import gradient_hooks, version
from penstock.errors import ModelError
from penstock.tape.groups import ParamGroup, ParamSlice
from penstock.tape.refusals import COMPILED, refuse_accumulation_hooks

_AGAIN = "close the engine and wrap the model again"


class GradientHooks:
    """Calls ``of_tensor(parameter, gradient)`` with each gradient of a trainable parameter, after the hooks that others
    have on it, and ``after_accumulation(parameter)`` when one was added to ``.grad``.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        of_tensor: Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None],
        after_accumulation: Callable[[torch.Tensor], None],
    ) -> None:
        self._slices = list(_slices(groups))
        self._of_tensor = of_tensor
        self._after_accumulation = after_accumulation
        self._hooked: dict[int, tuple[Any, Any]] = {}  # by parameter: the handles of its two hooks

    def drop_gradients(self) -> None:
        """Drop what was added to ``.grad`` and not taken from there: the next gradient would be added to it."""
        for s in self._slices:
            s.parameter.grad = None

    def install(self) -> None:
        """Register the hooks, or register them again behind one that came since. Called before each step.

        Raises:
            ModelError: a parameter has hooks that cannot be honoured, or has been frozen or unfrozen.
        """
        for s in self._slices:
            if s.parameter.requires_grad is not s.trainable:
                now, was = ("trainable", "frozen") if s.parameter.requires_grad else ("frozen", "trainable")
                raise ModelError(f"parameter {s.name!r} is {now}, and was {was} when the model was wrapped: {_AGAIN}")
            if s.trainable:
                self._install_on(s)

    def remove(self) -> None:
        for hook in chain.from_iterable(self._hooked.values()):
            hook.remove()
        self._hooked.clear()

    def has_others(self, parameter: nn.Parameter) -> bool:
        """True if there are hooks on a parameter besides these."""
        return len(gradient_hooks(parameter)) > 1

    def _install_on(self, s: ParamSlice) -> None:
        parameter, hooks = s.parameter, self._hooked.get(id(s.parameter), ())
        refuse_accumulation_hooks(s.name, parameter, ours=bool(hooks))
        if hooks and next(reversed(gradient_hooks(parameter))) == hooks[0].id:
            return
        for hook in hooks:
            hook.remove()
        register: Any = parameter.register_hook
        register_after: Any = parameter.register_post_accumulate_grad_hook
        of_tensor = register(partial(self._of_tensor, parameter))
        self._hooked[id(parameter)] = of_tensor, register_after(self._after_accumulation)


def _slices(groups: Sequence[ParamGroup]) -> Iterator[ParamSlice]:
    return chain.from_iterable(group.slices for group in groups)


def versions(groups: Sequence[ParamGroup]) -> list[int]:
    """The number of times that each parameter of the groups was written to in place so far."""
    return [version(s.parameter) for s in _slices(groups)]


def refuse_written(groups: Sequence[ParamGroup], before: Sequence[int]) -> None:
    """Raise ModelError if a parameter was written to since it had the version ``before``: what is there between steps
    is a placeholder, or one of several copies."""
    for s, known in zip(_slices(groups), before, strict=True):
        if version(s.parameter) != known:
            raise ModelError(_written(repr(s.name)))


def refuse_left_over(model: nn.Module) -> None:
    """Raise ModelError if a parameter has a gradient, to which torch's own loop would add those of the first step."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ModelError(
                f"parameter {name!r} has a gradient already (.grad), which would have no part in the first step: call "
                "model.zero_grad() before the model is wrapped, and give what it is of to that step"
            )


def refuse_given_values(groups: Sequence[ParamGroup], dtype: torch.dtype) -> None:
    """Raise ModelError if a parameter has other data between steps than the placeholder that the engine left there
    (``ParamGroup.detach``): ``.data`` counts no versions. Or if it has a gradient, to which a step's would be added."""
    for s in _slices(groups):
        data = s.parameter.data
        if data.dtype is not dtype or any(data.stride()):
            raise ModelError(
                f"parameter {s.name!r} was given other data between steps (.data, or the model's to(), double(), "
                "half()), where the engine has its value: nothing would come of it. precision of penstock.wrap says "
                f"what computes, and the optimizer what changes; to go on with other values {_AGAIN}"
            )
        if s.parameter.grad is not None:
            raise ModelError(
                f"parameter {s.name!r} was given a gradient between steps (.grad, or a backward() outside of the "
                "engine), which has no part in one: add what it is of to the loss, and set .grad to None"
            )
    # A group's placeholders are one number, NaN, that ``fill_`` and the like can write to through any of them.
    first = [next((s for s in group.slices if s.numel), None) for group in groups]
    held = [(s.name, s.parameter.data.as_strided((), ())) for s in first if s is not None]
    if not bool(torch.stack([number for _, number in held]).isnan().all()):
        name = next(name for name, number in held if not bool(number.isnan()))
        raise ModelError(_written(f"{name!r}, or another that moves with it,"))


def _written(which: str) -> str:
    return (
        f"parameter {which} was written to in place between steps (clamp_, copy_), where the engine has its "
        "value: nothing would come of it. Let the model bound it where it is used (torch.clamp), or the "
        f"optimizer change it; to go on with other values {_AGAIN}"
    )


def refuse_changed(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Raise ModelError if the model has other parameters than those that were wrapped, or was compiled since."""
    if (name := next((name for name, module in model.named_modules() if is_compiled(module)), None)) is not None:
        raise ModelError(f"{repr(name) if name else 'the model'} {COMPILED}")
    known = {id(s.parameter): s.name for s in _slices(groups)}
    for name, parameter in model.named_parameters():
        was = known.pop(id(parameter), None)
        if was is None:
            raise ModelError(f"parameter {name!r} was added, or put in another's place, after wrap(): {_AGAIN}")
        if was != name:
            raise ModelError(
                f"parameter {was!r} is called {name!r} since wrap(), as modules were moved, or others put around them: "
                f"it would be saved by the name that it had. Move them before, or {_AGAIN}"
            )
    if known:
        gone = next(s.name for s in _slices(groups) if id(s.parameter) in known)
        raise ModelError(f"parameter {gone!r} was taken out of the model after wrap(): {_AGAIN}")
