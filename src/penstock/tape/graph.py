"""Autograd by pieces: one stage's part of a graph is run backward, wherever the weights live by then.

A model's own code between blocks builds one graph over many stages (a skip connection reaches from the last stage to
the first). Nodes carry the number at which they were made, so the nodes of a stage are those numbered from its start
on, once everything later has been run. The gradients that arrive at older nodes wait there for those nodes' stage.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks

from penstock.compat.torch import number_of, storage_key, version
from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.cut import is_cut

EdgeKey = tuple[Node, int]

CHECKPOINT = "CheckpointFunctionBackward"
"""The name of nodes of ``torch.utils.checkpoint(..., use_reentrant=True)``."""

CHANGED_IN_PLACE = (
    "a tensor of shape {} that the backward needs was changed in place after it was used (x += y, x[i] = y, relu_): "
    "write the result to a new tensor"
)


class Pending:
    """Gradients waiting at graph nodes until the stage that made the node is run backward."""

    def __init__(self) -> None:
        self._waiting: dict[EdgeKey, tuple[GradientEdge, torch.Tensor]] = {}

    def add(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        key = (edge.node, edge.output_nr)
        if key in self._waiting:
            gradient = self._waiting[key][1] + gradient
        self._waiting[key] = (edge, gradient)

    def waits(self, start: int) -> bool:
        """True if a gradient waits at a node numbered ``start`` or later."""
        return any(number_of(node) >= start for node, _ in self._waiting)

    def take(self, start: int) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Remove and return the gradients that wait at nodes numbered ``start`` or later."""
        keys = [key for key in self._waiting if number_of(key[0]) >= start]
        return [self._waiting.pop(key) for key in keys]


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The ends of a part of a graph: leaves, and edges into older nodes.

    ``cuts``: the nodes behind outputs of blocks that belong to it, whoever's stage made them: below them is nothing.
    ``reentrant``: it has ``torch.utils.checkpoint`` in it, which runs a backward of its own within the backward.
    """

    leaves: list[tuple[Node, torch.Tensor]]
    edges: list[GradientEdge]
    cuts: list[Node]
    reentrant: bool

    def is_closed(self) -> bool:
        """True if the older nodes can be left alone.

        Autograd runs every node above a target. So when one end lies below another (a tied weight that the older nodes
        use too), asking for both would run the nodes in between, and their gradients would be counted twice.
        """
        ends = {node for node, _ in self.leaves} | {edge.node for edge in self.edges}
        older = nodes_below(edge.node for edge in self.edges)
        return all(below not in ends for node in older for below, _ in node.next_functions)


def nodes_below(roots: Iterable[Node]) -> Iterator[Node]:
    """Each node of the graph from ``roots`` down."""
    stack = list(roots)
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)


def frontier(roots: Iterable[Node], start: int) -> Frontier:
    """The ends of the graph below ``roots`` that is made of nodes numbered ``start`` or later."""
    leaves: dict[Node, torch.Tensor] = {}
    edges: dict[EdgeKey, GradientEdge] = {}
    stack = list(roots)
    seen = set(stack)
    reentrant = False
    while stack:
        above = stack.pop()
        reentrant = reentrant or above.name() == CHECKPOINT
        for node, output in above.next_functions:
            if node is None:
                continue
            if hasattr(node, "variable"):
                leaves[node] = node.variable
            elif number_of(node) < start and not is_cut(node):
                edges.setdefault((node, output), GradientEdge(node, output))
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    cuts = [node for node in seen if is_cut(node)]
    return Frontier(leaves=list(leaves.items()), edges=list(edges.values()), cuts=cuts, reentrant=reentrant)


class Hooked:
    """Tensors in a graph that have hooks of the model's own, each of which must see its gradient whole, and once."""

    def __init__(self) -> None:
        self._found: dict[EdgeKey, str] = {}
        self._seen: set[Node] = set()

    def add(self, edge: GradientEdge, what: str) -> None:
        """Note a tensor that has a hook; ``what``: the method that was called on it."""
        self._found[edge.node, edge.output_nr] = what

    def check(self, ends: Frontier, start: int, *, shared: bool) -> None:
        """Raise ModelError where a part of a graph with these ends shows a hook a part of a gradient, or one twice.
        ``shared``: nodes numbered before ``start`` are run now and in their own turn."""
        if not self._found:
            return
        parts = [self._found[key] for e in ends.edges if (key := (e.node, e.output_nr)) in self._found]
        again = [self._found[key] for node in ends.cuts if node in self._seen and (key := (node, 0)) in self._found]
        self._seen.update(ends.cuts)
        twice = [what for (node, _), what in self._found.items() if shared and number_of(node) < start]
        if parts or again or twice:
            what = (parts + again + twice)[0]
            raise ModelError(
                f"{what} was called on a tensor that is used in several stages (before and after a block), whose "
                "gradient comes in parts: call it on the result of an operation of its own, x * 1, where it is used"
            )


def backward_part(
    roots: list[tuple[GradientEdge, torch.Tensor]], starts: Sequence[int], hooked: Hooked
) -> list[tuple[GradientEdge, torch.Tensor]]:
    """Run a stage's part of a graph backward from ``roots`` (emptied). Returns the gradients that reached older nodes.

    ``starts`` are the first node numbers of the stage and of all earlier ones, descending. Where the stage cannot be
    separated from an earlier one, the earlier one's nodes are run along with it, and kept for their own turn; the sums
    are the same, as backwards are linear in their gradients (one of the user's own need not be). Nothing is accumulated
    into ``.grad``; hooks on leaves see their gradient and may replace it.

    Raises:
        ModelError: a hook would see a part of its tensor's gradient, or see it twice; or a checkpoint of torch's within
            the part wants to have all of the graph run.
    """
    shared = False
    for start in starts:
        ends = frontier((edge.node for edge, _ in roots), start)
        if ends.is_closed():
            break
        shared = True
    targets = [*(GradientEdge(node, 0) for node, _ in ends.leaves), *ends.edges]
    if not targets:
        roots.clear()
        return []
    hooked.check(ends, starts[0], shared=shared)
    edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
    roots.clear()
    if ends.reentrant:
        _backward_with_checkpoints(edges, gradients, ends, shared=shared)
        return []
    got: Sequence[torch.Tensor | None] = torch.autograd.grad(
        edges, targets, gradients, allow_unused=True, retain_graph=shared
    )
    arrived = got[len(ends.leaves) :]
    return [(e, g) for e, g in zip(ends.edges, arrived, strict=True) if g is not None]


def _backward_with_checkpoints(
    edges: list[GradientEdge], gradients: list[torch.Tensor], ends: Frontier, *, shared: bool
) -> None:
    """``torch.utils.checkpoint(..., use_reentrant=True)`` only works where all of a graph is run backward. So it is,
    where nothing lies below but what blocks have returned; gradients of parameters are seen by their hooks. ``shared``:
    nodes of earlier stages are kept for their own turn.
    """
    if ends.edges:
        raise ModelError(
            "torch.utils.checkpoint with use_reentrant=True is called around a block, or with a tensor that was "
            "computed before an earlier block. Around blocks leave it out, as Penstock recomputes them by itself; "
            "elsewhere pass use_reentrant=False"
        )
    torch.autograd.backward(edges, gradients, retain_graph=shared)


@dataclass(eq=False, slots=True)  # not frozen: one is made of each tensor that a graph saves, in half of the time
class WeightView:
    """A weight as autograd keeps it: the parameter, and the view of it that was saved (None: all of it)."""

    parameter: nn.Parameter
    geometry: tuple[torch.Size, tuple[int, ...], int] | None


@dataclass(eq=False, slots=True, weakref_slot=True)  # as above
class SavedTensor:
    """Any other tensor as autograd keeps it, without its graph, which would hold itself; and its version."""

    tensor: torch.Tensor
    version: int


_FIRST = itemgetter(0)
_Span = tuple[int, int, nn.Parameter]
"""The bytes of a storage in which a parameter lies: where it begins and ends."""


def _first_byte(tensor: torch.Tensor) -> int:
    """The place in its storage where a tensor begins."""
    return int(tensor.storage_offset()) * tensor.element_size()


def is_plain_view(tensor: torch.Tensor, parameter: nn.Parameter) -> bool:
    """True if a view of a parameter can be made again from its place alone."""
    return tensor.dtype == parameter.dtype and not (tensor.is_conj() or tensor.is_neg())


class WeightPacker:
    """Lets a graph outlive its weights' place in memory.

    Between a segment's forward and its backward its weights may leave the device and come back elsewhere. Saved tensors
    that are views of a parameter are therefore kept as (parameter, view), and made again from where the parameter lives
    when the backward asks for them. Of all others the version is looked at, as autograd does not where there are hooks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._known: dict[int, nn.Parameter] = {}
        self._places: dict[int, list[_Span]] = {}  # of each storage, in order
        self.add(parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Know parameters by their identity from here on, and by the storage that they live in now."""
        for p in parameters:
            self._known[id(p)] = p
            spans, first = self._places.setdefault(storage_key(p), []), _first_byte(p)
            if p.numel():
                insort(spans, (first, first + p.numel() * p.element_size(), p), key=_FIRST)

    def hooks(self) -> AbstractContextManager[None]:
        """Packs what graphs save inside."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def forget(self) -> None:
        """Forget every place: the weights have left. What was packed stays good."""
        self._known.clear()
        self._places.clear()

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a tensor lies where a known parameter does."""
        return self.has(storage_key(tensor))

    def has(self, storage: int) -> bool:
        """True if a known parameter lies in a storage (``storage_key``)."""
        return storage in self._places

    def pack(self, tensor: torch.Tensor) -> SavedTensor | WeightView:
        p = self._known.get(id(tensor))
        if p is not None:
            return WeightView(p, None)
        if trees.has_storage(tensor):
            p = self.parameter_of(tensor)
            if p is not None:
                if not is_plain_view(tensor, p):
                    raise ModelError(
                        f"a view of a weight of shape {tuple(p.shape)} is needed for the backward under another dtype, "
                        "or conjugated, and the weight leaves the device in between: copy the view (.clone())"
                    )
                offset = int(tensor.storage_offset()) - int(p.storage_offset())
                return WeightView(p, (tensor.size(), tensor.stride(), offset))
        return SavedTensor(tensor.detach(), version(tensor))

    def parameter_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The known parameter that a tensor begins in."""
        spans = self._places.get(storage_key(tensor))
        if not spans:
            return None
        start = _first_byte(tensor)  # not its first element: that of a view under another dtype has another number
        before = bisect_right(spans, start, key=_FIRST)
        _, end, p = spans[before - 1]
        return p if before and start < end else None

    def unpack(self, packed: SavedTensor | WeightView) -> torch.Tensor:
        """Raises:
        ModelError: what was saved has been changed in place.
        """
        if isinstance(packed, SavedTensor):
            if version(packed.tensor) != packed.version:
                raise ModelError(CHANGED_IN_PLACE.format(tuple(packed.tensor.shape)))
            return packed.tensor
        now = packed.parameter.detach()
        if packed.geometry is None:
            return now
        size, stride, offset = packed.geometry
        return now.as_strided(size, stride, now.storage_offset() + offset)
