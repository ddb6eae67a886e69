"""Ends autograd's graph behind each block call: its outputs begin a graph of their own.

An output that may get a gradient is no leaf of autograd's but the result of a node that hands the gradient to the call
and ends there. So a model's code does with it what it does with any result of a module: changes it in place, hangs
hooks on it, asks for its gradient to be retained.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.compat.torch import gradient_hooks, is_view_of_parameter, storage_key, version
from penstock.errors import ModelError


class Leaf:
    """The gradient that has come so far to an output of a block call, where the graph was cut.

    It does not hold the tensor: once nothing else does, its memory is free.
    """

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> torch.Tensor | None:
        gradient, self.gradient = self.gradient, None
        return gradient


class _Cut(torch.autograd.Function):
    """Hands a tensor through, without its memory or what made it. ``handle`` is what autograd takes for its source."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
        ctx.leaf = leaf
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        ctx.leaf.add(gradient)
        return None, None, None


def is_cut(node: Any) -> bool:
    """True if a node of a graph is the end behind a block's output."""
    return isinstance(getattr(node, "leaf", None), Leaf)  # what a function of Python's own keeps is on its node


def leaf_of(tensor: torch.Tensor) -> Leaf | None:
    """The leaf of a block's output that is as the block returned it, and that no hook waits for the gradient of."""
    node: Any = tensor.grad_fn
    is_free = is_cut(node) and not gradient_hooks(tensor) and not tensor.retains_grad
    return node.leaf if is_free else None


def begun(tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """A tensor with which a graph begins, whose gradient comes to a leaf."""
    with torch.enable_grad():
        cut: Any = _Cut.apply
        new: torch.Tensor = cut(torch.empty(0, device=tensor.device, requires_grad=True), tensor, leaf)
    return new


class Cuts:
    """Cuts each output of one block call, once. An input that is handed through keeps its identity.

    In order of first sight: ``outputs``, what the model gets; ``leaves``, where the gradients of those come to; and
    ``originals``, the tensors that were cut.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], wants_gradient: Callable[[torch.Tensor], bool]) -> None:
        """``wants_gradient(tensor)``: whether an output may get a gradient."""
        self.outputs: list[torch.Tensor] = []
        self.leaves: list[Leaf] = []
        self.originals: list[torch.Tensor] = []
        self._passed = {id(t): t for t in inputs}
        self._wants_gradient = wants_gradient
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._passed or isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._cut(tensor)
        return self._made[id(tensor)]

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        leaf = Leaf()
        # The weight that an output is a view of leaves with the call.
        new = tensor.detach().clone() if is_view_of_parameter(tensor) else tensor.detach()
        if _can_have_gradient(tensor) and self._wants_gradient(tensor):
            new = begun(new, leaf)
        self.originals.append(tensor)
        self.leaves.append(leaf)
        self.outputs.append(new)
        return new


def _can_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class SharedMemory:
    """Watches outputs that lie in one memory. Each begins a graph of its own, so autograd cannot know that a change of
    one of them in place changes the others.
    """

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []  # until the first look: what has no name in the model's code may be changed
        self._watched: list[tuple[str, weakref.ref[torch.Tensor], int]] = []

    def watch(self, block: str, outputs: Sequence[torch.Tensor]) -> None:
        places = [storage_key(t) if t.layout == torch.strided else id(t) for t in outputs]
        count = Counter(places)
        shared = [t for place, t in zip(places, outputs, strict=True) if count[place] > 1 and t.requires_grad]
        self._held += shared
        self._watched += [(block, weakref.ref(t), version(t)) for t in shared]

    def look(self) -> None:
        """Raise ModelError if one of them has been changed."""
        held, self._held = self._held, []
        for block, ref, before in self._watched:
            tensor = ref()
            if tensor is not None and version(tensor) != before:
                raise ModelError(
                    f"an output of block {block!r} is changed in place, and another of its outputs lies in the same "
                    "memory, so the gradient of that one would be wrong: write the result to a new tensor"
                )
        del held
