"""A block call's graph that is kept from its forward to its backward, which then does not compute the block again.

The block then runs with a graph at once, on leaves in place of its inputs, as it otherwise does in its recomputation:
the same operations on the same numbers. What the graph has saved stays on the device; weights leave and come back, so
it keeps places in them (``graph.WeightPacker``).

Whether that gives the same bits, and what it holds, is found out in the probe, from the recomputation there
(``Footprint``). A graph is not kept

- where a block puts out other bits with a graph than without (a kernel that is chosen by whether a gradient is asked
  for);
- where it is handed containers, which would have to be the caller's own, or reads what others have put into those of a
  context variable;
- where a backward is written in Python, which may keep a view of a weight, where weights are needed under another
  dtype, and where it goes through a transform of torch.func, which knows no packing of what is saved;
- where a call changes buffers or writes to weights, which its graph would find changed;
- where it draws from the generators of Python or numpy, as a hook of its backward may draw what comes next.

Where a model changes what a block has returned, which may be in the block's graph, that call is computed again.
"""

import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from penstock.compat.torch import is_of_python, number_of, storage_key, version
from penstock.tape import graph, trees
from penstock.tape.let_go import is_elsewhere
from penstock.tape.rng import TorchState
from penstock.tape.watch import Watch

Leaves = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Identity of an input -> the input, and the leaf that a block was run on in its place."""


def on_leaves(value: Any, leaves: Leaves) -> Any:
    """Arguments of a block, with leaves in place of the inputs that need a gradient, which are noted in ``leaves``.
    What is elsewhere stays as it is: outputs of earlier blocks, in a list to which the block adds its own."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter) or is_elsewhere(tensor):
            return tensor
        if id(tensor) not in leaves:
            leaves[id(tensor)] = (tensor, tensor.detach().requires_grad_())
        return leaves[id(tensor)][1]

    return trees.replace(value, leaf)


class Keeping:
    """The graph of a call is to be kept. ``packer``: of what it saves; None: the weights stay where they are, and it
    saves nothing that others reach (``StageFacts.reachable``), so that autograd keeps it by itself. ``number``: of the
    first node that the call makes; ``leaves``: those that it is run on."""

    def __init__(self, packer: graph.WeightPacker | None, number: int) -> None:
        self._packer = packer
        self.number = number
        self.leaves: Leaves = {}
        self._saved: list[weakref.ref[graph.SavedTensor]] = []  # a node that is dropped lets go of its own

    def hooks(self) -> AbstractContextManager[None]:
        """On while the call runs."""
        return nullcontext() if self._packer is None else saved_tensors_hooks(self._pack, self._packer.unpack)

    def _pack(self, tensor: torch.Tensor) -> graph.SavedTensor | graph.WeightView:
        assert self._packer is not None
        packed = self._packer.pack(tensor)
        if isinstance(packed, graph.SavedTensor):
            self._saved.append(weakref.ref(packed))
        return packed

    def watched(self, made: Iterable[torch.Tensor]) -> tuple["weakref.ref[graph.SavedTensor] | graph.SavedTensor", ...]:
        """The tensors by which it is seen that something of the graph was changed before its backward. ``made``: those
        that the call returns, of which others' code gets views: no other one reaches what autograd keeps by itself."""
        return tuple(self._saved) if self._packer is not None else tuple(map(_counted, made))


def _counted(tensor: torch.Tensor) -> graph.SavedTensor:
    """A tensor that counts changes of another one in place, whose memory it does not hold, unless that is of several
    pieces."""
    counter = tensor.detach()
    if trees.has_storage(tensor):
        counter.data = tensor.new_empty(0)
    return graph.SavedTensor(counter, version(tensor))


@dataclass(frozen=True, kw_only=True)
class KeptGraph:
    """The graph of one call. ``edges``: of its outputs, in their order, None of those without a gradient. ``random``:
    as the block has left it; ``watched``: as of ``Keeping``."""

    edges: tuple[GradientEdge | None, ...]
    leaves: Leaves
    random: TorchState
    watched: Sequence["weakref.ref[graph.SavedTensor] | graph.SavedTensor"]

    def is_intact(self) -> bool:
        """True if nothing that is watched was changed since: what a block returns may be, and is in its graph too."""
        found = (saved() if isinstance(saved, weakref.ref) else saved for saved in self.watched)
        return all(packed.version == version(packed.tensor) for packed in found if packed is not None)


def has_plain_arguments(inputs: Any) -> bool:
    """True if the arguments of a call are handed in tuples alone, so that a copy of them will do for the block.
    ``inputs``: (args, kwargs, values of context variables)."""
    args, kwargs, _ = inputs
    return _is_plain((args, *kwargs.values()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return not trees.is_container(value)


class Footprint:
    """In a probe: what a call's graph holds, seen while the call is recomputed. ``nbytes``: besides weights and the
    call's inputs, None where it cannot be kept; ``peak``: of live bytes, when the call had run; ``older``: it has
    tensors from before the call besides, which a later one may change in place, as a table that grows; ``products``: as
    of ``Watch``, those of the call."""

    def __init__(self, packer: graph.WeightPacker, watch: Watch) -> None:
        self._packer = packer
        self._watch = watch
        self._start = watch.live
        self._first = len(watch.products)
        self.products: list[int] = []
        self._inputs: set[int] = set()
        self._saved: list[weakref.ref[graph.SavedTensor]] = []  # a node that is dropped lets go of its own
        self.nbytes: int | None = None
        self.peak = 0
        self.older = False
        self.refused = False

    def hooks(self, inputs: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """On while the call with these inputs is recomputed."""
        self._inputs = {storage_key(t) for t in inputs if trees.has_storage(t)}
        self._start = self._watch.live
        self._first = len(self._watch.products)
        return saved_tensors_hooks(self._pack, self._packer.unpack)

    def _pack(self, tensor: torch.Tensor) -> graph.SavedTensor | graph.WeightView:
        weight = self._packer.parameter_of(tensor) if trees.has_storage(tensor) else None
        if not trees.has_storage(tensor) or (weight is not None and not graph.is_plain_view(tensor, weight)):
            self.refused = True
            return graph.SavedTensor(tensor.detach(), version(tensor))
        packed = self._packer.pack(tensor)
        if isinstance(packed, graph.SavedTensor) and storage_key(tensor) not in self._inputs:
            self._saved.append(weakref.ref(packed))
            birth = self._watch.birth(tensor)
            self.older |= birth is None or birth.segment != self._watch.segment
        return packed

    def look(self, made: Iterable[torch.Tensor], edges: Sequence[GradientEdge | None], beside: Collection[int]) -> None:
        """The call has been recomputed, and has ``made`` these outputs. ``edges``: of them; ``beside``: identities of
        leaves in place of tensors that would not be leaves if the graph was made in the forward."""
        self.peak = self._watch.peak
        self.products = self._watch.products[self._first :]
        if self.refused or not is_closed(edges, beside):
            return
        held = _sizes(packed.tensor for saved in self._saved if (packed := saved()) is not None)
        own = (t for t in made if not (trees.has_storage(t) and self._packer.holds(t)))  # and no view of a weight
        outputs = {key: size for key, size in _sizes(own).items() if key not in held}
        more = self._watch.live - self._start - sum(outputs.values())  # what functions within it have kept, too
        self.nbytes = max(sum(held.values()), more)


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the storages of tensors, by their identity."""
    return {storage_key(t): t.untyped_storage().nbytes() for t in tensors if trees.has_storage(t)}


def is_closed(edges: Iterable[GradientEdge | None], beside: Collection[int] = (), number: int = 0) -> bool:
    """True if a graph ends in leaves alone, none of them ``beside`` (by identity), all of its nodes were made from
    ``number`` on, and no backward in it is written in Python, as is the one at the end of the model's own code
    (``cut``)."""
    return not any(
        is_of_python(node) or number_of(node) < number or id(getattr(node, "variable", None)) in beside
        for node in graph.nodes_below(edge.node for edge in edges if edge is not None)
    )
