"""Tensors that need a gradient and are none of the model's, nor made by its forward.

A parameter in a plain list or of a loss function, an output of another model that trains: in a plain loop
``backward()`` adds to their ``grad``. Here gradients go to the model's parameters alone, and blocks are run backward
more often than steps count. So in a probe each such tensor has a hook, with which a gradient that comes to it is
refused.
"""

import weakref
from collections.abc import Callable, Collection
from typing import NoReturn

import torch
from torch import nn

from penstock.compat.torch import unwatched, without_functions
from penstock.errors import ModelError
from penstock.tape.watch import Op


class Outside:
    """The tensors from outside that a forward reads, and their hooks. ``known``: identities of the model's parameters,
    and of tensors in their memory."""

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._views: dict[int, weakref.ref[torch.Tensor]] = {}  # made in the forward, of memory from before it
        self._found: dict[int, tuple[torch.Tensor, str, Callable[[], None]]] = {}  # with what takes the hook away

    def on_op(self, op: Op, own: Collection[int], who: str) -> None:
        """Take note of an op of the forward. ``own``: storages of the micro-batch, whose tensors are asked for
        gradients in forwards; ``who``: the code that runs it, in words."""
        for tensor, storage, birth in op.inputs:
            if birth is None and tensor.requires_grad and storage not in own and self._is_outside(tensor):
                self._follow(tensor, who)
        for operand in op.results:
            if operand.birth is None:
                self._views[id(operand.tensor)] = weakref.ref(operand.tensor)

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._known or id(tensor) in self._found:
            return False
        view = self._views.get(id(tensor))
        return view is None or view() is not tensor

    def _follow(self, tensor: torch.Tensor, who: str) -> None:
        def arrived(gradient: torch.Tensor) -> None:
            self._refuse(tensor, who)

        with without_functions(), unwatched():  # it is no hook of the model's
            hook = tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
            self._found[id(tensor)] = (tensor, who, hook.remove)

    def came_to(self, tensor: torch.Tensor) -> None:
        """A gradient has come to a tensor that a block was handed. Raises ModelError if it is one of these."""
        found = self._found.get(id(tensor))
        if found is not None:
            self._refuse(tensor, found[1])

    def _refuse(self, tensor: torch.Tensor, who: str) -> NoReturn:
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
        raise ModelError(
            f"{who} reads a {kind} of shape {tuple(tensor.shape)} that needs a gradient and is none of the model's "
            "parameters, so that the gradient would not be its own: register it (nn.ParameterList in place of a list; "
            "for a loss or another model that trains as well, wrap a module that has both), or let it need none "
            "(requires_grad_(False), .detach())"
        )

    def release(self) -> None:
        """Take the hooks away."""
        for _, _, remove in self._found.values():
            remove()
        self._found.clear()
        self._views.clear()
