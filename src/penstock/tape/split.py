"""A block's backward in two parts: first the gradients of its inputs, later those of its weights.

The first part recomputes the block with its graph and runs that backward as far as the inputs ask for. A *product* of
matrices on the way to an input, with weights beside it that train, is kept for the second part: the node, the gradient
that has come to it, and the factor that it has saved. The second part runs each such node once more, for its weights
alone. Nothing is computed twice, as a product makes the gradient of each factor by itself, and every sum has the order
that an undivided backward gives it (zero bubble: Qi et al., arXiv 2401.10241).

The gradients of all other parameters are made with those of the inputs, and wait: those of norms and of biases that are
added apart cost little, and what makes them often makes the input's at once; a parameter of several products has a sum
with an order; and what follows from other weights (two matrices that are multiplied first) would read these again. So
the second part reads no weights, which may have left the device by then.

What a node has saved is let go of once the node has run, unless it is kept: a graph that is only in part run backward
would hold all of it.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from penstock.compat.torch import is_of_python, next_number, number_of
from penstock.tape.graph import CHECKPOINT

_PRODUCTS = frozenset(("AddmmBackward0", "BaddbmmBackward0", "BmmBackward0", "GroupedMmBackward0", "MmBackward0"))

Gradients = tuple[torch.Tensor | None, ...]
"""The gradients with respect to the results of a node."""


class NotInTwoError(Exception):
    """A graph can only be run backward as a whole."""


class Product:
    """A node on the way to an input, with the edges to the ``parameters`` beside it, whose weights may have left when
    it runs for them. ``gradients``: those that have come to it."""

    __slots__ = ("gradients", "node", "parameters")

    def __init__(self, node: Node, parameters: Sequence[nn.Parameter]) -> None:
        self.node = node
        self.parameters = tuple(map(get_gradient_edge, parameters))
        self.gradients: Gradients = ()

    def keep(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def run(self) -> None:
        """Run the node for its parameters alone."""
        came = [(GradientEdge(self.node, i), g) for i, g in enumerate(self.gradients) if g is not None]
        if not came:
            return
        # A hook on the node's result has changed the gradient already; what it makes of it now does not count.
        handle = self.node.register_prehook(lambda _: self.gradients)
        try:
            torch.autograd.backward([edge for edge, _ in came], [g for _, g in came], inputs=self.parameters)
        finally:
            handle.remove()


class Held:
    """The rest of a backward, after its first part. ``waiting``: the gradients that are there already."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = list(products)
        self.waiting: list[tuple[nn.Parameter, torch.Tensor]] = []

    def run(self) -> None:
        """Run the second part. Parameters get their gradients one product after the other, and nothing is left."""
        while self.products:
            self.products.pop(0).run()


class _Saved:
    """A tensor that a node has saved, and the node's number."""

    __slots__ = ("number", "tensor")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self.tensor: torch.Tensor | None = tensor


class Splitting:
    """One backward in two parts: ``hooks`` are on while the block is recomputed, then comes ``run_first``."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        """numbers of the nodes that have saved a tensor"""
        self._kept: frozenset[int] = frozenset()
        self._runs = False
        self._read: list[_Saved] = []
        """the tensors of the node that runs"""

    def hooks(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        number = next_number() - 1  # a node has its number before it saves anything
        self._numbers.add(number)
        return _Saved(number, tensor.detach())

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if self._read and self._read[-1].number != saved.number:
            self._let_go()
        if self._runs and saved.number not in self._kept:
            self._read.append(saved)  # until another node runs: a function may ask for what it has saved several times
        if saved.tensor is None:
            raise NotInTwoError  # a function that runs a graph of its own, which it has kept, between two looks
        return saved.tensor

    def _let_go(self) -> None:
        for saved in self._read:
            saved.tensor = None
        self._read.clear()

    def run_first(self, roots: Sequence[tuple[GradientEdge, torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Held:
        """Run a graph backward to ``inputs``, which are leaves, and to those parameters whose gradients cannot wait to
        be made: both get them in ``.grad``.

        Raises:
            NotInTwoError: a checkpoint of torch's within it wants to have all of it run.
        """
        products, reached, at_once = self._cut([edge.node for edge, _ in roots], {id(t) for t in inputs})
        wanted = [t for t in inputs if id(t) in reached] + at_once
        self._kept = frozenset(number_of(product.node) for product in products)
        self._runs = True
        handles = [product.node.register_prehook(product.keep) for product in products]
        try:
            if wanted:
                edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=wanted)
        finally:
            for handle in handles:
                handle.remove()
        self._runs = False
        self._let_go()
        return Held([product for product in products if product.gradients])

    def _cut(self, roots: Sequence[Node], inputs: set[int]) -> tuple[list[Product], set[int], list[nn.Parameter]]:
        """The products that wait, in the order of a backward; of ``inputs``, which are identities of leaves, those that
        the graph reaches; and the parameters whose gradients do not wait."""
        below = _graph(roots)
        way, weighty, reached = set[Node](), set[Node](), set[int]()
        for node, following in below.items():
            if node.name() == CHECKPOINT:
                raise NotInTwoError
            leaf = getattr(node, "variable", None)
            if id(leaf) in inputs:
                reached.add(id(leaf))
                way.add(node)
            elif isinstance(leaf, nn.Parameter):
                weighty.add(node)
            if not way.isdisjoint(following):
                way.add(node)
            if not weighty.isdisjoint(following):
                weighty.add(node)
        sides = {node: [n for n in below[node] if n in weighty and n not in way] for node in way}
        beside = {node: _graph(side) for node, side in sides.items() if side}
        others = _graph([node for node in roots if node not in way])
        uses = Counter(node for nodes in (*beside.values(), others) for node in nodes)
        products, waiting = list[Product](), set[Node]()
        for node in sorted(beside, key=number_of, reverse=True):
            nodes = beside[node]
            if self._is_product(node) and all(uses[n] == 1 and self._is_plain(n) for n in nodes):
                products.append(Product(node, [p for n in nodes if (p := _parameter(n)) is not None]))
                waiting.update(nodes)
        at_once = [p for node in below if node not in waiting and (p := _parameter(node)) is not None]
        return products, reached, at_once

    def _is_product(self, node: Node) -> bool:
        """True if a node is a product of matrices, whose factors are saved here and not by somebody else's hooks."""
        return node.name() in _PRODUCTS and number_of(node) in self._numbers

    def _is_plain(self, node: Node) -> bool:
        """True if a node between a product and a parameter needs nothing for its backward: a view, or a cast."""
        return number_of(node) not in self._numbers and not is_of_python(node)


def _parameter(node: Node) -> nn.Parameter | None:
    """The parameter that trains whose gradient a node of the graph takes in; None: it takes none in."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, nn.Parameter) else None


def _graph(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """The nodes from ``roots`` down, each with those that it leads to, which come before it."""
    found: dict[Node, list[Node]] = {}
    begun: dict[Node, list[Node]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in begun:
            stack.pop()
            found.setdefault(node, begun[node])
        else:
            begun[node] = [following for following, _ in node.next_functions if following is not None]
            stack += (following for following in begun[node] if following not in begun)
    return found
