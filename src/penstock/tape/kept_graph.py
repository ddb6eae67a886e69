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
- where a backward is written in Python, which may keep a view of a weight, and where it goes through a transform of
  torch.func, which knows no packing of what is saved;
- where a call changes buffers or writes to weights, which its graph would find changed.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from penstock.compat.torch import is_of_python, storage_key
from penstock.tape import graph, trees
from penstock.tape.rng import RandomState

Leaves = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Identity of an input -> the input, and the leaf that a block was run on in its place."""


@dataclass(frozen=True, kw_only=True)
class KeptGraph:
    """The graph of one call. ``edges``: of its outputs, in their order, None of those without a gradient. ``random``:
    as the block has left it."""

    edges: tuple[GradientEdge | None, ...]
    leaves: Leaves
    random: RandomState


def is_plain(value: Any) -> bool:
    """True if arguments are handed in tuples alone, so that a copy of them will do for the block."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return not (trees.is_mutable_container(value) or trees.is_record(value))


class Footprint:
    """In a probe: what a call's graph holds, seen while the call is recomputed. ``nbytes``: besides weights and the
    call's inputs, None where it cannot be kept; ``peak``: of live bytes, when the call had run."""

    def __init__(self, packer: graph.WeightPacker, peak: Callable[[], int]) -> None:
        """``peak``: the most live bytes so far."""
        self._packer = packer
        self._peak = peak
        self._inputs: set[int] = set()
        self._saved: list[weakref.ref[graph.SavedTensor]] = []  # a node that is dropped lets go of its own
        self.nbytes: int | None = None
        self.peak = 0
        self.refused = False

    def hooks(self, inputs: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """On while the call with these inputs is recomputed."""
        self._inputs = {storage_key(t) for t in inputs if trees.has_storage(t)}
        return saved_tensors_hooks(self._pack, self._packer.unpack)

    def _pack(self, tensor: torch.Tensor) -> graph.SavedTensor | graph.WeightView:
        packed = self._packer.pack(tensor)
        if isinstance(packed, graph.SavedTensor):
            if not trees.has_storage(tensor):
                self.refused = True
            elif storage_key(tensor) not in self._inputs:
                self._saved.append(weakref.ref(packed))
        return packed

    def look(self, edges: Sequence[GradientEdge | None], beside: Collection[int]) -> None:
        """The call has been recomputed. ``edges``: of its outputs; ``beside``: identities of leaves in place of tensors
        that would not be leaves if the graph was made in the forward."""
        self.peak = self._peak()
        if not self.refused and is_closed(edges, beside):
            held = [packed.tensor for saved in self._saved if (packed := saved()) is not None]
            self.nbytes = sum({storage_key(t): t.untyped_storage().nbytes() for t in held}.values())


def is_closed(edges: Iterable[GradientEdge | None], beside: Collection[int] = ()) -> bool:
    """True if a graph ends in leaves alone, none of them ``beside`` (by identity), and no backward in it is written in
    Python, as is the one at the end of the model's own code (``cut``)."""
    stack = [edge.node for edge in edges if edge is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if is_of_python(node) or id(getattr(node, "variable", None)) in beside:
            return False
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)
    return True
