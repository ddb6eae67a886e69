"""The backward of one micro-batch: its calls of blocks by recomputation, the model's own code piece by piece.

    call     what is kept of a block call from its forward on: its inputs (the saved activation), and the leaves where
             the gradients of its outputs come to
    pending  gradients that wait in the model's own code, whose graph ends at calls (``graph``)
    route    a gradient goes to what has made a tensor: an earlier call, or the model's own code

A call whose graph is kept (``kept_graph``) is not computed again.
"""

import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.compat.modules import buffers_of
from penstock.compat.torch import unwatched, version
from penstock.errors import ModelError
from penstock.tape import graph, trees
from penstock.tape.buffers import Buffer, attributes_beside, attributes_of, copies
from penstock.tape.cut import Leaf, leaf_of
from penstock.tape.early_stop import LastProduct, Search
from penstock.tape.facts import Site
from penstock.tape.kept_graph import Footprint, KeptGraph, Leaves, has_plain_arguments, on_leaves
from penstock.tape.likeness import FirstOutputs
from penstock.tape.modes import Modes, TrainingFlags
from penstock.tape.outside import Outside
from penstock.tape.places import Entry, Holder, held, values_in
from penstock.tape.places import Held as HeldValues
from penstock.tape.rng import RandomState
from penstock.tape.split import Held, Splitting


@dataclass(frozen=True, kw_only=True)
class Call:
    """One block call as it is kept for its recomputation. ``inputs`` is (args, kwargs, values of ``containers``) as
    they were before it; ``versions`` and ``needed`` are theirs: of each, its version, and whether it needed a gradient.
    ``buffers``: those that it may have changed, as they were before it, and ``attributes``: the plain ones of the
    modules that have them; ``own``: what was in the places that it ``finds`` something in (``StageFacts``), and
    ``handed``: in the objects, dicts and lists within its arguments. ``graph``: the one that its backward goes through;
    None: that has to be computed again, where it ``undoes`` what it changes in places. ``last``: the product that can
    be left out of that.
    """

    site: Site
    inputs: Any
    versions: tuple[int, ...]
    needed: tuple[bool, ...]
    containers: tuple[contextvars.ContextVar[Any], ...]
    context: contextvars.Context
    modes: Modes
    outputs: tuple[Leaf, ...]
    buffers: tuple[Buffer, ...]
    attributes: HeldValues
    own: HeldValues
    handed: HeldValues = ()
    undoes: tuple[Holder, ...] = ()
    graph: KeptGraph | None = None
    last: LastProduct | None = None

    @property
    def is_plain(self) -> bool:
        """True if it can be run several times."""
        return not self.buffers

    def apart(self) -> "Call":
        """The same call, to be run besides: what it changes is its own."""
        buffers = self.buffers
        if buffers:
            with unwatched():
                buffers = copies(buffers)
        return replace(self, buffers=buffers, context=self.context.copy())


class Backward:
    """The backward of one micro-batch, and what its forward has noted for it.

    | attribute | meaning |
    |---|---|
    | ``calls`` | stage -> the block call that has a backward |
    | ``starts`` | stage -> number of the first autograd node of its own code |
    | ``pending`` | gradients that wait in the model's own code |
    | ``hooked`` | in a probe: where the model has hooks of its own |
    | ``outside`` | in a probe: the tensors that are none of the model's |
    | ``outputs`` | in a probe: those of all calls, until they are recomputed |
    | ``footprint`` | in a probe: of the next call that is recomputed |
    | ``search`` | in a probe: for the last product of that |
    | ``last`` | in a probe: what that has found |
    """

    def __init__(self, *, device: torch.device, device_types: tuple[str, ...], flags: TrainingFlags) -> None:
        self.calls: dict[int, Call] = {}
        self.starts: dict[int, int] = {}
        self.pending = graph.Pending()
        self.hooked = graph.Hooked()
        self.outside: Outside | None = None
        self.outputs: FirstOutputs | None = None
        self.footprint: Footprint | None = None
        self.search: Search | None = None
        self.last: LastProduct | None = None
        self._device = device
        self._device_types = device_types
        self._flags = flags

    def clear(self) -> None:
        """Let go of everything that is still to be run."""
        self.calls.clear()
        self.pending = graph.Pending()

    def has_code(self, stage: int) -> bool:
        """True if a gradient waits in the model's own code that ran as part of ``stage``."""
        return self.pending.waits(self.starts[stage])

    def run_code(self, stage: int, root: tuple[GradientEdge, torch.Tensor] | None = None) -> None:
        """Backward of the model's own code that ran as part of ``stage``: from what waits there, and ``root``."""
        start = self.starts[stage]
        roots = self.pending.take(start)
        if root is not None:
            roots.append(root)
            del root
        starts = sorted({s for s in self.starts.values() if s <= start}, reverse=True)
        for edge, gradient in graph.backward_part(roots, starts, self.hooked):
            self.pending.add(edge, gradient)

    def reached(self, stage: int) -> tuple[bool, ...]:
        """One boolean for each output of a call: a gradient has come to it."""
        call = self.calls.get(stage)
        return () if call is None else tuple(leaf.gradient is not None for leaf in call.outputs)

    def run_call(self, stage: int, seed: Callable[[], None], splitting: Splitting | None = None) -> Held | None:
        """Recompute a block call with a graph and run it backward, if a gradient has come to it. ``seed``: has random
        numbers drawn as in the call, as they are when this begins; ``splitting``: the first part alone is run, and what
        the second one needs is returned."""
        call = self.calls.pop(stage, None)
        if call is None:
            return None
        held, found = self._run_back(stage, call, [leaf.take() for leaf in call.outputs], seed, splitting)
        for source, leaf_input in found:
            gradient, leaf_input.grad = leaf_input.grad, None
            if gradient is not None:
                self.route(source, gradient)
        return held

    def try_split(self, stage: int, seed: Callable[[], None]) -> Held | None:
        """In a probe: the first part of a call's backward, of which nothing comes to what was before the call, and
        nothing to what it is run back from as a whole."""
        call = self.calls[stage].apart()
        outputs, self.outputs = self.outputs, None  # they are compared when the call is run back as a whole
        try:
            held, found = self._run_back(stage, call, [leaf.gradient for leaf in call.outputs], seed, Splitting())
            for _, leaf_input in found:  # which what is held still leads to
                leaf_input.grad = None
            return held
        finally:
            self.outputs = outputs

    def _run_back(
        self,
        stage: int,
        call: Call,
        gradients: list[torch.Tensor | None],
        seed: Callable[[], None],
        splitting: Splitting | None,
    ) -> tuple[Held | None, Iterable[tuple[torch.Tensor, torch.Tensor]]]:
        """``run_call`` of one that gradients have come to. Returns besides each input and the leaf in its place,
        which has the gradient."""
        if all(g is None for g in gradients):
            return None, ()
        if call.graph is not None and call.graph.is_intact():
            assert splitting is None, "a backward in two parts computes its block again"
            return None, _run_kept(call, call.graph, gradients)
        call = replace(call, graph=None)  # one that was changed is not needed any more
        fresh: Leaves = {}
        with nullcontext() if splitting is None else splitting.hooks():
            made, edges = self._made_again(call, fresh, seed)
        if len(edges) != len(gradients):
            raise ModelError(
                f"block {call.site.name!r} made {len(gradients)} tensors in the forward and {len(edges)} when it was "
                "recomputed: a block must do the same on the same inputs"
            )
        if self.outputs is not None:
            self.outputs.compare(stage, call.site.name, made)
        if self.footprint is not None:
            if self.outputs is None or not self.outputs.are_same(stage, made):
                self.footprint.refused = True
            self.footprint.look(made, edges, _beside(call, fresh))
            self.footprint = None
        del made
        pairs = _pairs(edges, gradients)
        del edges, gradients
        held = None
        if pairs and splitting is not None:
            held = splitting.run_first(pairs, [leaf_input for _, leaf_input in fresh.values()])
        elif pairs:
            torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])
        return held, fresh.values()

    def _made_again(
        self, call: Call, fresh: Leaves, seed: Callable[[], None]
    ) -> tuple[list[torch.Tensor], list[GradientEdge | None]]:
        """The outputs of a block that is run again, and their edges. Where a product was left out there are only edges;
        where that turns out to be needed the block is run once more."""
        if call.last is not None and call.is_plain and call.last.can_be_left_out():
            edges_alone = self._made_without(call.last, call, fresh)
            if edges_alone is not None:
                return [], edges_alone
            call.last.needed = True
            fresh.clear()
            seed()
        search, self.search = self.search, None
        with nullcontext() if search is None else search.watching():
            made = self._recompute(call, fresh) if self.footprint is None else self._recompute_seen(call, fresh)
        edges = _edges(made)
        self.last = None if search is None else search.found(edges)
        return made, edges

    def _made_without(self, last: LastProduct, call: Call, fresh: Leaves) -> list[GradientEdge | None] | None:
        """The edges of what a block returns when it is run again without a product; None: that is needed."""
        with last.left_out() as left_out:
            try:
                edges = _edges(self._recompute(call.apart(), fresh))
            except Exception:  # perhaps for want of what was left out: if not it comes again
                if not left_out.numbers:
                    raise
                return None
        return edges if left_out.was_unread(edges) else None

    def is_alike(self, stage: int, *, grad: bool) -> bool:
        """In a probe: True if a call, run again, returns what it did; ``grad``: with a graph, as in a plain loop."""
        assert self.outputs is not None
        call = self.calls[stage].apart()
        made = self._recompute(replace(call, modes=replace(call.modes, grad=grad)), {})
        return self.outputs.are_alike(stage, made)

    def amend(self, stage: int, **seen: Any) -> None:
        """In a probe: keep for its recomputation more of what was seen of a call."""
        if stage in self.calls:
            self.calls[stage] = replace(self.calls[stage], **seen)

    def call_elsewise(self, stage: int) -> None:
        """In a probe: run the block on other numbers, as another micro-batch may between a call and its recomputation.

        A block that keeps something of what it saw, be it a mean or a count, gives itself away in the recomputation.
        """
        call = self.calls.get(stage)
        if call is None:
            return
        others: dict[int, torch.Tensor] = {}

        def other(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or tensor.dim() == 0 or isinstance(tensor, nn.Parameter):
                return tensor
            return others.setdefault(id(tensor), tensor.detach().flip(-1) * 0.5)

        call = call.apart()
        with self._as_it_was(call), torch.no_grad():
            call.context.run(_called, call, trees.replace(trees.snapshot(call.inputs), other))

    def route(self, source: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient goes to what has made a tensor: a call, or the model's own code."""
        if self.outside is not None:
            self.outside.came_to(source)
        leaf = leaf_of(source)
        if leaf is not None:
            leaf.add(gradient)
        elif source.grad_fn is not None:
            self.pending.add(get_gradient_edge(source), gradient)

    def _recompute_seen(self, call: Call, fresh: Leaves) -> list[torch.Tensor]:
        """In a probe: ``_recompute``, with a look at what the graph saves."""
        assert self.footprint is not None
        self.footprint.refused = not has_plain_arguments(call.inputs)
        random, tried = RandomState.capture(self._device), call.apart()
        try:
            with self.footprint.hooks(trees.tensors(call.inputs)):
                made = self._recompute(tried, fresh)
            self.footprint.refused |= not random.only_torch_has_drawn()
            return made
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):  # which a transform of torch.func has no way to follow
                raise
            self.footprint.refused = True
        fresh.clear()
        random.restore()
        return self._recompute(call, fresh)

    def _recompute(self, call: Call, fresh: Leaves) -> list[torch.Tensor]:
        """Run the block again on leaves (noted in ``fresh``). Returns its outputs, in the order of the forward's."""
        _check_unchanged(call)
        live = on_leaves(trees.snapshot(call.inputs), fresh)
        with self._as_it_was(call):
            return call.context.run(_run_again, call, live)

    @contextmanager
    def _as_it_was(self, call: Call) -> Iterator[None]:
        """Inside, a block has the buffers, the attributes beside them, and the values and modes of its call."""
        outer = Modes.capture(self._device_types, self._flags)
        owners = dict.fromkeys(module for module, _, _ in call.buffers)
        beside = attributes_beside(((module, attributes_of(module)) for module in owners), call.buffers)
        left = (*values_in(call.undoes), *beside)
        buffers = tuple((Entry(of=buffers_of(module), key=name), buffer) for module, name, buffer in call.buffers)
        with (
            held(left),
            held(call.own),
            held(call.handed),
            held((*buffers, *call.attributes)),
        ):
            try:
                call.modes.printing_as(outer).apply(self._flags, outer)
                yield
            finally:
                outer.apply(self._flags, Modes.capture(self._device_types, self._flags))


def _beside(call: Call, leaves: Leaves) -> set[int]:
    """The identities of the leaves in place of what is in the ``containers`` of a call: in the forward a block finds
    there what the model's own code has put in."""
    return {id(leaves[id(t)][1]) for t in trees.tensors(call.inputs[-1]) if id(t) in leaves}


def _check_unchanged(call: Call) -> None:
    inputs = trees.tensors(call.inputs)
    if any(version(t) != v for t, v in zip(inputs, call.versions, strict=True)):
        raise ModelError(
            f"an input of block {call.site.name!r} was changed in place after the block had run, so the block "
            "cannot be recomputed from it: write the result to a new tensor"
        )
    if any(needed and not t.requires_grad for t, needed in zip(inputs, call.needed, strict=True)):
        raise ModelError(
            f"an input of block {call.site.name!r} was detached in place after the block had run (x.detach_()), so its "
            "gradient would be lost: write x = x.detach()"
        )


def _edges(made: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
    return [get_gradient_edge(t) if t.requires_grad else None for t in made]


def _pairs(
    edges: Iterable[GradientEdge | None], gradients: Iterable[torch.Tensor | None]
) -> list[tuple[GradientEdge, torch.Tensor]]:
    """The edges that a gradient has come to, each with it."""
    return [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]


def _run_kept(
    call: Call, kept: KeptGraph, gradients: list[torch.Tensor | None]
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Run a graph backward that was kept since the forward. Returns each input and its leaf, which has the gradient."""
    _check_unchanged(call)
    pairs = _pairs(kept.edges, gradients)
    gradients.clear()
    kept.random.restore()  # as behind a recomputation
    if pairs:
        torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])
    return kept.leaves.values()


def _called(call: Call, live: Any) -> Any:
    """Run a block on arguments in place of its call's. Returns what it returns."""
    args, kwargs, values = live
    for var, value in zip(call.containers, values, strict=True):
        var.set(value)
    return call.site.forward(*args, **kwargs)


def _run_again(call: Call, live: Any) -> list[torch.Tensor]:
    """Run a block as it was called. Returns the tensors that it has made, in the order of the forward's."""
    before = trees.snapshot(live)
    passed = {id(t) for t in trees.tensors(before)}
    output = _called(call, live)
    made: dict[int, torch.Tensor] = {}

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in passed and not isinstance(tensor, nn.Parameter):
            made.setdefault(id(tensor), tensor)
        return tensor

    trees.replace(output, collect)
    trees.settle(live, before, collect)
    return list(made.values())
