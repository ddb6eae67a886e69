"""Views of weights that are read when the weight has left, and its buffer may hold another one.

A view that a block is handed or returns is copied at its boundary (``suspended``, ``cut``), as far as autograd knows it
as a view. So in a probe all ops are watched for those that read a view of a weight that is no longer there. One that
was taken before the engine had the model (a buffer in a weight's memory) still has what the weight was then.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from penstock.compat.modules import buffers_of
from penstock.compat.torch import storage_key
from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.buffers import attributes_of
from penstock.tape.graph import WeightPacker
from penstock.tape.watch import Op

Alias = tuple["weakref.ref[torch.Tensor]", str]
"""A buffer or attribute in the memory of a parameter that is trained, and the name of that."""


def aliases_of(model: nn.Module) -> list[Alias]:
    """The aliases in a model whose parameters have their own memory still."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel() and not p.is_meta}
    packer = WeightPacker(trained.values())
    names = {id(parameter): name for name, parameter in trained.items()}
    found: list[Alias] = []
    for module in model.modules():
        for tensor in trees.tensors([*buffers_of(module).values(), *attributes_of(module).values()]):
            if isinstance(tensor, nn.Parameter) or tensor.is_meta or not trees.has_storage(tensor):
                continue
            parameter = packer.parameter_of(tensor)
            if parameter is not None:
                found.append((weakref.ref(tensor), names[id(parameter)]))
    return found


class WeightViews:
    """Follows views of weights, op by op. ``packer`` knows the weights that are there, ``names`` those of all
    parameters, by identity."""

    def __init__(self, packer: WeightPacker, names: Mapping[int, str], aliases: Sequence[Alias] = ()) -> None:
        """``aliases``: of the model, before its weights left it."""
        self._packer = packer
        self._names = names
        self._taken: dict[int, dict[int, str]] = {}  # storage -> where in it a view begins -> the parameter's name
        self._aliases = [(tensor, name) for ref, name in aliases if (tensor := ref()) is not None]
        for tensor, name in self._aliases:
            self._taken.setdefault(storage_key(tensor), {})[int(tensor.storage_offset())] = name
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._found: str | None = None

    def on_op(self, who: Callable[[], str], op: Op) -> None:
        """Take note of an op. ``who()``: the code that runs it, in words."""
        for tensor, storage, _ in op.inputs:
            taken = self._taken.get(storage)
            if taken is not None and not self._packer.has(storage) and not isinstance(tensor, nn.Parameter):
                self._find(who(), tensor, taken)
        for tensor, storage, _ in op.results:
            if not self._packer.has(storage) or isinstance(tensor, nn.Parameter):
                continue
            parameter = self._packer.parameter_of(tensor)
            if parameter is not None:
                self._follow(tensor)[int(tensor.storage_offset())] = self._names[id(parameter)]

    def refuse(self) -> None:
        """Raises:
        ModelError: a view was read when its weight had left.
        """
        if self._found is not None:
            raise ModelError(
                f"{self._found} that was taken earlier (weight[i], weight.t(), weight.detach(), weight.data), and the "
                "weight leaves the device in between: take the view where it is used, or keep a copy of it (.clone())"
            )

    def _find(self, who: str, tensor: torch.Tensor, taken: Mapping[int, str]) -> None:
        if self._found is None:
            of = taken.get(int(tensor.storage_offset()))
            whose = "a weight" if of is None else f"parameter {of!r}"
            self._found = f"{who} reads a view of {whose}, of shape {tuple(tensor.shape)},"

    def _follow(self, tensor: torch.Tensor) -> dict[int, str]:
        """The views of a storage, until that is no more."""
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key not in self._taken:

            def freed(_: object) -> None:
                self._taken.pop(key, None)
                self._alive.pop(key, None)

            self._taken[key], self._alive[key] = {}, weakref.ref(storage, freed)
        return self._taken[key]
