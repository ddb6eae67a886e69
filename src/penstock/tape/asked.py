"""A model's own calls of autograd in its forward: seen in a probe, refused where their answers would be others.

Behind each block's output the graph ends, so a derivative taken in the forward does not pass through blocks; and
gradients come stage by stage, so a hook on a tensor that several stages use would see parts of its gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from penstock.compat.modules import are_all_hooked
from penstock.compat.torch import number_of
from penstock.errors import ModelError
from penstock.tape import graph, trees
from penstock.tape.cut import is_cut

_HOOKS = {torch.Tensor.register_hook: "register_hook", torch.Tensor.retain_grad: "retain_grad"}


class Asked(TorchFunctionMode):
    """Sees calls of autograd while a model's forward runs. ``block()``: the name of the block that runs; None: the
    model's own code does.

    ``hooked``: the tensors that have hooks, or retain their gradient.
    """

    def __init__(self, block: Callable[[], str | None]) -> None:
        super().__init__()
        self._block = block
        self.hooked = graph.Hooked()
        self.train = True
        """False: it is an evaluation, in which hooks on tensors see nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            self._refuse_through_blocks(*args, **kwargs)
        elif func in (torch.autograd.backward, torch.Tensor.backward):
            raise ModelError(
                f"{self._who()} calls backward() in its forward, where the gradients of weights would not be kept: add "
                "the tensor that it is called on to the loss"
            )
        elif func in _HOOKS:
            self._note_hook(args[0], _HOOKS[func])
        return func(*args, **kwargs)

    def _who(self) -> str:
        name = self._block()
        return "the model itself" if name is None else f"block {name!r}"

    def _note_hook(self, tensor: torch.Tensor, what: str) -> None:
        if isinstance(tensor, nn.Parameter):
            raise ModelError(
                f"{self._who()} calls {what} on a parameter in its forward, once for each micro-batch and again in the "
                "recomputation: register it once, before training"
            )
        if not (tensor.requires_grad and self.train):
            return
        if self._block() is not None and are_all_hooked():
            raise ModelError(
                f"a hook on all modules (as of torch's FlopCounterMode), or {self._who()} itself, calls {what} on one "
                "of the block's inputs, while what a step is to compute is found out: have such hooks after the first "
                "step only, whose FLOP are in engine.last_step.flops"
            )
        if self._block() is not None:
            raise ModelError(
                f"{self._who()} calls {what} on one of its inputs, whose gradient has other parts from elsewhere: use "
                "a result of its own (x = x * 1), or do it where the block is called"
            )
        if tensor.grad_fn is not None:
            self.hooked.add(get_gradient_edge(tensor), what)

    def _refuse_through_blocks(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> None:
        """Refuse a derivative through a block, whose output may depend on anything that was there before it."""
        sources = [t.grad_fn for t in trees.tensors([inputs])]
        roots = [t.grad_fn for t in trees.tensors([outputs]) if t.grad_fn is not None]
        first = min((-1 if node is None else number_of(node) for node in sources), default=-1)
        for node in graph.nodes_below(roots):
            if is_cut(node) and node not in sources and number_of(node) > first:
                raise ModelError(
                    f"{self._who()} takes a gradient in its forward (torch.autograd.grad) that goes through blocks, "
                    "whose graphs are not kept: take it with respect to what the last block returned, or name other "
                    "blocks, blocks=[...], of which none is on the way"
                )
