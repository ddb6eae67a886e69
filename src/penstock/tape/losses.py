"""Sees the targets that a model's loss is computed for, while the model's own code runs."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.compat.torch import unwatched

_ENTROPIES = {f: inspect.signature(f) for f in (functional.cross_entropy, functional.nll_loss)}
_CTC = inspect.signature(functional.ctc_loss)

ValueOf = Callable[[torch.Tensor], torch.Tensor | None]
"""The values of a tensor, where they can be known."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A call of one of torch's losses.

    ``targets``: int64 [n], those that are not ignored, in their order, on the CPU; None where they are not known or are
    no class ids. ``mean``: it gives their mean. ``total``: the sum of their losses, where it gives one for
    each. ``summed``: their sum as it gives it, where it does. ``ctc``: it is connectionist: of rows, not of targets.
    ``ignored``: the class id of targets that are ignored. ``positions``: the number of targets with those. ``each``:
    all targets, int64 [n], and the loss of each, fp32 [n], on the CPU, where it gives one for each.
    """

    targets: torch.Tensor | None
    mean: bool
    ignored: int = -100
    total: float | None = None
    summed: torch.Tensor | None = None
    ctc: bool = False
    positions: int = 0
    each: tuple[torch.Tensor, torch.Tensor] | None = None


class Losses(TorchFunctionMode):
    """Notes the calls of torch's losses. ``seen``: in the order of the calls."""

    def __init__(self, value_of: ValueOf = lambda tensor: None if tensor.is_meta else tensor) -> None:
        super().__init__()
        self.seen: list[Compared] = []
        self._value_of = value_of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ENTROPIES:
            given = _ENTROPIES[func].bind(*args, **kwargs)
            given.apply_defaults()
            with unwatched():  # what is noted is none of the model's memory
                self.seen.append(self._compared(given.arguments, result))
        elif func is functional.ctc_loss:
            given = _CTC.bind(*args, **kwargs)
            given.apply_defaults()
            self.seen.append(Compared(targets=None, mean=given.arguments["reduction"] == "mean", ctc=True))
        return result

    def _compared(self, given: dict[str, Any], result: torch.Tensor) -> Compared:
        found = None if given["target"].is_floating_point() else self._value_of(given["target"])
        every = None if found is None else found.detach().flatten().long().cpu()
        ignored = int(given["ignore_index"])
        targets = None if every is None else every[every != ignored]
        plain = given["weight"] is None and given["size_average"] is None and given["reduce"] is None
        if given["reduction"] == "mean" or not plain:
            return Compared(targets=targets if plain else None, mean=plain, ignored=ignored)
        # A sum is divided by what its caller has counted, which may be another number in the next step.
        if given["reduction"] == "sum":
            summed = None if result.is_meta else result.detach().cpu().clone()
            return Compared(targets=targets, mean=False, summed=summed, ignored=ignored)
        losses = None if result.is_meta else result.detach().float().flatten().cpu()
        return Compared(
            targets=targets,
            mean=False,
            total=None if losses is None else float(losses.sum()),
            ignored=ignored,
            positions=given["target"].numel(),
            each=None if every is None or losses is None else (every, losses),
        )
