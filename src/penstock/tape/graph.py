"""Autograd by pieces: one stage's part of a graph is run backward without touching the rest, or the weights' addresses.

A model's own code between blocks builds one graph over many stages (a skip connection reaches from the last stage to the
first). Nodes carry the number at which they were made, so the nodes of a stage are those numbered from its start on,
once everything later has been run. The gradients that arrive at older nodes are kept until those nodes' stage is run.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

EdgeKey = tuple[Node, int]


def next_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


class Pending:
    """Gradients waiting at graph nodes until the stage that made the node is run backward."""

    def __init__(self) -> None:
        self._waiting: dict[EdgeKey, tuple[GradientEdge, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        key = (edge.node, edge.output_nr)
        if key in self._waiting:
            gradient = self._waiting[key][1] + gradient
        self._waiting[key] = (edge, gradient)

    def take(self, start: int) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Remove and return what waits at nodes numbered ``start`` or later."""
        keys = [key for key in self._waiting if key[0]._sequence_nr() >= start]  # type: ignore[attr-defined]
        return [self._waiting.pop(key) for key in keys]


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Where one stage's part of a graph ends: leaves, and edges into nodes of earlier stages."""

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]


def frontier(roots: Iterable[Node], start: int) -> Frontier:
    """The ends of the graph below ``roots`` that is made of nodes numbered ``start`` or later."""
    leaves: dict[int, torch.Tensor] = {}
    edges: dict[EdgeKey, GradientEdge] = {}
    stack = list(roots)
    seen = set(stack)
    while stack:
        for node, output in stack.pop().next_functions:
            if node is None:
                continue
            if hasattr(node, "variable"):
                leaves.setdefault(id(node.variable), node.variable)
            elif node._sequence_nr() < start:  # type: ignore[attr-defined]
                edges.setdefault((node, output), GradientEdge(node, output))
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    return Frontier(leaves=list(leaves.values()), edges=list(edges.values()))


def backward_to_frontier(
    roots: list[tuple[GradientEdge, torch.Tensor]], start: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[GradientEdge, torch.Tensor]]]:
    """Run the nodes numbered ``start`` or later backward from ``roots`` (emptied), and free them.

    Returns the gradients that reached leaves and those that reached edges to older nodes. Nothing is accumulated into
    ``.grad``; hooks on leaves see their gradient and may replace it.
    """
    ends = frontier((edge.node for edge, _ in roots), start)
    targets: list[torch.Tensor | GradientEdge] = [*ends.leaves, *ends.edges]
    if not targets:
        roots.clear()
        return [], []
    edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
    roots.clear()
    results = torch.autograd.grad(edges, targets, gradients, allow_unused=True)  # type: ignore[arg-type]
    split = len(ends.leaves)
    at_leaves = [(t, g) for t, g in zip(ends.leaves, results[:split], strict=True) if g is not None]
    at_edges = [(e, g) for e, g in zip(ends.edges, results[split:], strict=True) if g is not None]
    return at_leaves, at_edges


@dataclass(frozen=True, kw_only=True)
class WeightView:
    """What autograd keeps instead of a weight: which parameter, and which view of it (None: all of it)."""

    parameter: nn.Parameter
    geometry: tuple[torch.Size, tuple[int, ...], int] | None


class WeightPacker:
    """Lets a graph outlive its weights' place in memory.

    Between a segment's forward and its backward its weights may leave the device and come back elsewhere. Saved tensors
    that are views of a parameter are therefore kept as (parameter, view), and made again from where the parameter lives
    when the backward asks for them. Use with ``torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack)``.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._known: dict[int, nn.Parameter] = {}
        self._places: dict[int, list[nn.Parameter]] = {}
        self.add(parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Parameters from here on known by identity, and by the storage that they live in now."""
        for p in parameters:
            self._known[id(p)] = p
            self._places.setdefault(p.untyped_storage()._cdata, []).append(p)

    def forget(self) -> None:
        """Forget every place: the weights have left. What was packed stays good."""
        self._known.clear()
        self._places.clear()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | WeightView:
        if id(tensor) in self._known:
            return WeightView(parameter=self._known[id(tensor)], geometry=None)
        for p in self._places.get(tensor.untyped_storage()._cdata, ()):
            offset = tensor.storage_offset() - p.storage_offset()
            if 0 <= offset < p.numel():
                assert tensor.dtype == p.dtype, "a weight was saved under another dtype"
                return WeightView(parameter=p, geometry=(tensor.size(), tensor.stride(), offset))
        return tensor

    def unpack(self, packed: torch.Tensor | WeightView) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        now = packed.parameter.detach()
        if packed.geometry is None:
            return now
        size, stride, offset = packed.geometry
        return now.as_strided(size, stride, now.storage_offset() + offset)
