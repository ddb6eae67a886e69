"""Stands in for the model in a loop: its calls are recorded in training, and run at once in evaluation."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import nn

from penstock.compat.fabric import drop_by
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, ModelError
from penstock.fabric.deferred import MODEL, Deferred, inputs_of, run, values_of
from penstock.fabric.pipelines import told_by_first
from penstock.ranks.group import Ranks
from penstock.tape import trees

ROOT = "penstock_deferred"
"""The key of what was recorded, in a micro-batch."""


class Recorder(nn.Module):
    """Stands in for the model in the loop: records a call in training, and runs it at once in evaluation."""

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        moment: Callable[[], tuple[int, int]],
        discard: Callable[[], None],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """``moment``: as of ``Deferred``, now. ``discard``: what ``zero_grad`` does, in the place of gradients that
        there are none of. ``ranks``: those of the engine, and ``device`` the one that this computes on."""
        super().__init__()
        self.module = module
        self._engine, self._moment, self._discard = engine, moment, discard
        self._ranks, self._device = ranks, device
        self._forward_at_setup = vars(module).get("forward")
        drop = _weakly(discard)  # the engine has the model: what leads from there to the engine keeps it for ever
        for part in module.modules():  # which a loop may have as they were before fabric.setup
            vars(part)["zero_grad"] = drop if part is module else _drop_in_part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if vars(self.module).get("forward") is not self._forward_at_setup:
            raise ConfigError("only the model's forward can be called: other methods would run outside of the engine")
        call = Deferred(MODEL, args, kwargs)
        if torch.is_grad_enabled() != self.training:
            raise ModelError(
                "to train, call model.train() and leave gradients on; to evaluate, call model.eval() under "
                f"torch.no_grad(): now training={self.training} and gradients are {'on' if self.training else 'off'}"
            )
        call.modes, call.moment = modes_of(self.module), self._moment()
        return call if self.training else self._evaluate(call)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._discard()

    def _evaluate(self, call: Deferred) -> Any:
        recorded, pipeline = Recorded(call, evaluates=True), self._ranks.stages > 1
        self._engine.evaluate([recorded.micro_batch(with_values=pipeline)], loss_weights=[1.0])
        if pipeline:
            return told_by_first(self._ranks, "outputs of the model", recorded.outputs, self._device)
        return recorded.outputs


drop_by(Recorder)


def _weakly(discard: Callable[[], None]) -> Callable[[bool], None]:
    """A ``zero_grad`` that calls a method for as long as somebody has its object."""
    method = WeakMethod(discard)

    def zero_grad(set_to_none: bool = True) -> None:
        if (found := method()) is not None:
            found()

    return zero_grad


def _drop_in_part(set_to_none: bool = True) -> NoReturn:
    raise ModelError(
        "zero_grad() of a part of the model cannot be honoured: gradients are computed within optimizer.step(). Call "
        "that of the model, or of the optimizer"
    )


def modes_of(module: nn.Module) -> tuple[bool, ...]:
    return tuple(part.training for part in module.modules())


class Recorded:
    """A recorded computation of a micro-batch, and the tensors that it was recorded from. It is no container: in one
    the engine would put other tensors in their place.
    """

    def __init__(self, root: Deferred, *, evaluates: bool = False) -> None:
        self.root = root
        self.inputs = inputs_of(root)
        self.evaluates = evaluates
        self.outputs: Any = None
        """outputs of the latest evaluation"""

    def micro_batch(self, *, with_values: bool) -> dict[str, Any]:
        """A micro-batch of the engine. ``with_values``: with the plain values that the model is called with, by which
        ranks of a pipeline call each other's blocks."""
        return (values_of(self.root) if with_values else {}) | self.inputs | {ROOT: self}


def loss_of_root(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """The engine's ``loss_fn``: carries out what was recorded, and keeps the outputs of an evaluation."""
    moved = dict(micro_batch)
    recorded = moved.pop(ROOT)
    result = run(recorded.root, model, recorded.inputs, moved)
    if recorded.evaluates:
        # Copied here, within the forward: so the engine sees that these are read, and keeps them until now.
        recorded.outputs = trees.replace(result, torch.Tensor.clone)
        return torch.zeros((), device=moved[next(iter(recorded.inputs))].device)
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise ModelError("fabric.backward() was given something that is not a single number")
    return result.reshape(())
