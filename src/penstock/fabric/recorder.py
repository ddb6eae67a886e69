"""Stands in for the model in a loop: its calls are recorded in training, and run at once in evaluation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import nn

from penstock.compat.fabric import drop_by
from penstock.engine.batch import LABELS
from penstock.engine.engine import Engine
from penstock.engine.spans import Beside
from penstock.errors import ConfigError, ModelError
from penstock.fabric.deferred import MODEL, Deferred, There, calls_of, in_dtype, inputs_of, run, switches_of, values_of
from penstock.fabric.pipelines import told_by_first
from penstock.ranks.group import Ranks
from penstock.tape import trees

ROOT = "penstock_deferred"
"""The key of what was recorded, in a micro-batch."""
_UNNAMED, _READ = "penstock_unnamed", "penstock_read"
"""The keys of the tensors that the model is called with, but not by name; and of those that the loop alone reads."""


@dataclass(frozen=True, kw_only=True)
class Computing:
    """``dtype``: in which the model computes. ``widens``: its outputs are handed to the loop in fp32, as Fabric does
    where it was asked for 16 bits."""

    dtype: torch.dtype
    widens: bool


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
        computing: Computing,
    ) -> None:
        """``moment``: as of ``Deferred``, now. ``discard``: what ``zero_grad`` does, in the place of gradients that
        there are none of. ``ranks``: those of the engine, and ``device`` the one that this computes on."""
        super().__init__()
        self.module = module
        self.engine, self._moment, self._discard = engine, moment, discard
        self._ranks, self._device, self._computing = ranks, device, computing
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
        recorded, pipeline = Recorded(call, self._computing, evaluates=True), self._ranks.stages > 1
        self.engine.evaluate([recorded.micro_batch(with_values=pipeline)], loss_weights=[1.0])
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


class Recorded(Beside):
    """A recorded computation of a micro-batch, and the tensors that it was recorded from. It is no container: in one
    the engine would put other tensors in their place.

    What the loop itself reads keeps its precision, as the targets of a regression; the model is called with a copy in
    the dtype that it computes in.
    """

    def __init__(self, root: Deferred, computing: Computing, *, evaluates: bool = False) -> None:
        self.root = root
        self.computing = computing
        self.inputs = inputs_of(root)
        of_both = {name for name, tensor in self._named() if id(tensor) in self.inputs.of_both}
        self.exact = (_READ, *of_both - {*LABELS})
        calls = len(calls_of(root))
        self.way = ", ".join(([] if calls == 1 else [f"{calls} calls of the model"]) + switches_of(root))
        self.evaluates = evaluates
        self.outputs: Any = None
        """outputs of the latest evaluation"""

    def micro_batch(self, *, with_values: bool) -> dict[str, Any]:
        """A micro-batch of the engine. ``with_values``: with the plain values that the model is called with, by which
        ranks of a pipeline call each other's blocks."""
        inputs = {**self.inputs.named, _UNNAMED: [*self.inputs.unnamed], _READ: [*self.inputs.read]}
        return (values_of(self.root) if with_values else {}) | inputs | {ROOT: self}

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor that the model is called with, and the key that it is under."""
        yield from self.inputs.named.items()
        yield from ((_UNNAMED, tensor) for tensor in self.inputs.unnamed)

    def there(self, moved: Mapping[str, Any]) -> There:
        """The tensors of ``micro_batch`` as it is on the device."""
        dtype = self.computing.dtype
        copies = [*(moved[name] for name in self.inputs.named), *moved[_UNNAMED]]
        given = {id(tensor): copy for (_, tensor), copy in zip(self._named(), copies, strict=True)}
        exact = (tensor for name, tensor in self._named() if name in self.exact)
        narrowed = {id(tensor): in_dtype(given[id(tensor)], dtype) for tensor in exact}
        read = {id(tensor): copy for tensor, copy in zip(self.inputs.read, moved[_READ], strict=True)}
        return There(dtype=dtype, for_model=given | narrowed, for_loop=given | read)


def loss_of_root(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """The engine's ``loss_fn``: carries out what was recorded, and keeps the outputs of an evaluation."""
    recorded = micro_batch[ROOT]
    widens = recorded.computing.widens
    result = run(recorded.root, model, recorded.there(micro_batch), widens=widens)
    if recorded.evaluates:
        # Copied here, within the forward: so the engine sees that these are read, and keeps them until now.
        result = in_dtype(result, torch.get_default_dtype()) if widens else result
        recorded.outputs = trees.replace(result, torch.Tensor.clone)
        return torch.zeros((), device=trees.tensors(micro_batch)[0].device)
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise ModelError("fabric.backward() was given something that is not a single number")
    return result.reshape(())
