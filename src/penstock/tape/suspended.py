"""The suspended forward of one micro-batch, and what its backward needs.

    forward     a greenlet that runs the model's own forward for one micro-batch
    arrival     the forward is suspended at a block call, its arguments in hand
    cut         the block has run without a graph, and autograd's graph ends behind its outputs (``cut``)
    call        what is kept of a block call for its recomputation: the inputs (the saved activation) and the leaves

All of it runs in one thread: greenlets are bound to the thread that made them.
"""

import contextvars
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.compat.torch import buffers_of, is_view_of_parameter, next_number, unwatched, version
from penstock.errors import ModelError
from penstock.tape import graph, opaque, trees
from penstock.tape.buffers import Attributes, attributes_of, set_attributes
from penstock.tape.cut import Cuts, Leaf, SharedMemory, leaf_of
from penstock.tape.kept_graph import Footprint, Keeping, KeptGraph, Leaves, is_closed, is_plain
from penstock.tape.kv_cache import without_caches
from penstock.tape.likeness import alike, fingerprint, sample
from penstock.tape.modes import Modes, Stacks, TrainingFlags, refuse_stacked
from penstock.tape.rng import RandomState, TorchState
from penstock.tape.split import Held, Splitting
from penstock.tape.watch import CHANGES, put_back

Event = Literal["call", "cut", "done"]
Buffer = tuple[nn.Module, str, torch.Tensor | None]
LossFn = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]


_NO_GRAPH = re.compile(r"does not require grad|doesn't require grad|requires_grad=False", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A block with its own forward, which the boundary stands in front of. ``buffered``: its modules with buffers."""

    index: int
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    trainable: bool
    buffered: tuple[nn.Module, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about one block call that the probe has learned and a run has to know beforehand.

    Not which outputs need a gradient: that may depend on the data, and an output without one would lose another
    micro-batch's. ``buffers``: the buffers that the call changes, as (module, name). ``written``: parameters that it
    writes to, and that are to be what they were. ``trains``: it reads parameters that train, be they the block's own.
    """

    buffers: tuple[tuple[nn.Module, str], ...] = ()
    written: tuple[nn.Parameter, ...] = ()
    trains: bool = False


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """Facts about a stage that the probe has learned and no schedule needs.

    ``site``: the block of a call, None for the model's own code. ``offload``: which tensors are the stage's saved
    activation, by their places among the next call's inputs, or (before the epilogue) in the order of this call's
    outputs. Places and not numbers, as another micro-batch may have no tensor where this one has a mask.
    """

    site: Site | None
    call: Facts
    offload: tuple[trees.Place, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One block call as it is kept for its recomputation. ``inputs`` is (args, kwargs, values of ``containers``) as
    they were before it; ``versions`` and ``needed`` are theirs: of each, its version, and whether it needed a gradient.
    ``buffers``: those that it may have changed, as they were before it, and ``attributes``: the plain ones of the
    modules that have them. ``graph``: the one that its backward goes through; None: that has to be computed again.
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
    attributes: tuple[Attributes, ...]
    graph: KeptGraph | None = None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A suspended block call: the block, its (args, kwargs), and the distinct tensors among these, by their places."""

    site: Site
    inputs: Any
    tensors: dict[trees.Place, torch.Tensor]


def current_forward() -> "SuspendedForward | None":
    """The forward that is running now, or None outside of one, in a recomputation, or inside a block."""
    suspended: SuspendedForward | None = getattr(getcurrent(), "penstock_forward", None)
    return None if suspended is None or suspended.in_block else suspended


class SuspendedForward:
    """The forward of one micro-batch, suspended between events, and its state until its backward is done."""

    def __init__(
        self,
        *,
        model: nn.Module,
        loss_fn: LossFn,
        micro_batch: Mapping[str, Any],
        index: int,
        train: bool,
        device: torch.device,
        flags: TrainingFlags,
    ) -> None:
        self.index = index
        self.flags = flags
        self.train = train
        self.in_block = False
        self.arrival: Arrival | None = None
        self.outputs: list[torch.Tensor] = []  # what the latest call made, until the next event
        self.loss: torch.Tensor | None = None
        self.facts = Facts()
        self.keeping: Keeping | None = None  # of the next call, whose graph is kept
        self.samples: dict[int, list[torch.Tensor]] | None = None  # of each call's outputs, in a probe
        self.prints: dict[int, list[int]] | None = None  # likewise: all of their bits, where graphs may be kept
        self.footprint: Footprint | None = None  # of the next call that is recomputed, in a probe
        self.answer: Callable[[], Any] | None = (
            None  # what the call it is suspended at returns, which is made elsewhere
        )
        self.returned: Any = None  # by the latest call, in a probe
        self.beside: list[torch.Tensor] = []  # in a probe, beside ``outputs`` and an arrival's tensors
        self.starts: dict[int, int] = {}  # stage -> number of the first autograd node of its segment code
        self.calls: dict[int, Call] = {}
        self.pending = graph.Pending()
        self.hooked = graph.Hooked()  # in a probe: where the model has hooks of its own
        self._stage = 0
        self._device = device
        self._device_types = ("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type)
        self._modes: Modes | None = None
        self._stacks = Stacks.capture()
        self._shared = SharedMemory()  # in a probe
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of views of weights, see ``_copy``
        self._carrier: Any = greenlet(lambda: self._run(model, loss_fn, micro_batch))
        self._carrier.penstock_forward = self  # a block's boundary finds it there
        self._carrier.gr_context = contextvars.copy_context()

    @property
    def modes(self) -> Modes:
        """torch's switches where it is suspended."""
        assert self._modes is not None, "it has not begun, or has ended"
        return self._modes

    # -- forward ------------------------------------------------------------------------------------------------

    def resume(self, stage: int) -> Event:
        """Let the model's code run on, as part of ``stage``, up to its next event."""
        assert self._carrier is not None, "the forward has ended"
        self._stage = stage
        outer, self._stacks = Modes.capture(self._device_types, self.flags), Stacks.capture()
        if self._modes is None:
            torch.set_grad_enabled(self.train)
        else:
            self._modes.apply(self.flags)
        try:
            event: Event = self._carrier.switch()
        finally:
            self._modes = Modes.capture(self._device_types, self.flags)
            outer.apply(self.flags)
        if event == "done":
            self._end()
        return event

    def close(self) -> None:
        """End the forward wherever it is, and let go of everything."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.penstock_forward = None
            outer = Modes.capture(self._device_types, self.flags)
            try:
                if carrier:  # started and not ended: its context managers are left in passing
                    carrier.throw()
            finally:
                outer.apply(self.flags)
        self.arrival = None
        self.outputs = []
        self.calls.clear()
        self._copies.clear()
        self.pending = graph.Pending()

    def arrive(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block call inside the greenlet: suspended, then run and cut, then suspended again."""
        refuse_stacked(site.name, self._stacks)
        args, kwargs = self._copied(without_caches(site.name, site.forward, args, kwargs))
        self.arrival = Arrival(site=site, inputs=(args, kwargs), tensors=trees.places((args, kwargs)))
        if any(t.is_nested for t in self.arrival.tensors.values()):
            raise ModelError(f"block {site.name!r} is handed a nested tensor: pad it, or nest it within the block")
        self._look_beside((args, kwargs))
        self._suspend("call")
        args, kwargs = self.arrival.inputs
        self.arrival = None
        answer, self.answer = self.answer, None
        if answer is not None:
            output = answer()
        else:
            output = self._run_and_cut(site, args, kwargs) if self.train else self._run_only(site, args, kwargs)
        if self.samples is not None:
            self.returned = output
        del args, kwargs, answer
        self._suspend("cut")
        self.outputs = []
        return output

    def _copied(self, value: Any) -> Any:
        """Arguments or results of a block, with copies of the views of weights in them: the weights leave."""
        if any(map(is_view_of_parameter, trees.tensors(value))):
            return trees.settle(value, None, self._copy)
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a view of a weight, the same one for all calls that are handed the view; others are handed on."""
        if not is_view_of_parameter(tensor):
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = (tensor, tensor.clone())
        return self._copies[id(tensor)][1]

    def _look_beside(self, value: Any) -> None:
        """In a probe: note the tensors that objects in ``value``, and in context variables, hold and ``trees`` does not
        see.
        """
        if self.samples is not None:
            value = (value, list(contextvars.copy_context().values()))
            self.beside = [*opaque.tensors_in(value), *trees.tensors(value)]

    def _run(self, model: nn.Module, loss_fn: LossFn, micro_batch: Mapping[str, Any]) -> Event:
        with _explained("the model itself"):
            loss: object = loss_fn(model, micro_batch)
        self._shared.look()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ModelError(
                f"the loss must be a tensor of one element, but loss_fn returned {got}: "
                "return the mean loss of the micro-batch (do its labels go with it?)"
            )
        self.loss = loss.reshape(())
        return "done"

    def _suspend(self, event: Event) -> None:
        if event == "call":
            self._shared.look()
        self._carrier.parent.switch(event)

    def _end(self) -> None:
        assert self._carrier is not None
        self._carrier.penstock_forward = None
        self._carrier = None
        self._modes = None
        self._copies.clear()

    def _run_only(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._in_block(site):
            output = self._copied(site.forward(*args, **kwargs))
        self.outputs = trees.tensors(output)
        self._look_beside((output, args, kwargs))
        return output

    def _run_and_cut(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = contextvars.copy_context()
        held = [(var, value) for var, value in context.items() if trees.is_mutable_container(value)]
        live = (args, kwargs, [value for _, value in held])
        before = trees.snapshot(live)
        inputs = trees.tensors(before)
        versions, needed = tuple(version(t) for t in inputs), tuple(t.requires_grad for t in inputs)
        saved, others = self._buffers(site)
        attributes = [(module, attributes_of(module)) for module in site.buffered]
        context.run(_forget, held)
        modes = Modes.capture(self._device_types, self.flags)
        wanted = modes.grad and (site.trainable or self.facts.trains or any(needed))
        hidden = opaque.hidden(live)
        opaque.refuse_inputs(site.name, hidden)
        keeping, self.keeping = self.keeping, None
        leaves: Leaves | None = None
        if keeping is not None and wanted and self._can_keep(before):
            leaves = {}
            output = self._run_with_graph(site, args, kwargs, keeping, leaves)
        else:
            with self._in_block(site), torch.no_grad(), _explained(f"block {site.name!r}"):
                output = site.forward(*args, **kwargs)
        changed = any(version(t) != v for t, v in zip(inputs, versions, strict=True))
        wanted = wanted or (modes.grad and self.facts.trains)  # which a probe has found out
        self._look_beside((output, live))
        if wanted:
            opaque.refuse_outputs(site.name, output, live, hidden)
            saved += _replaced(site.name, others)
        self.starts[self._stage] = next_number()
        # Without grad mode an output has a gradient only if the block has switched it on.
        cuts = Cuts(inputs, lambda tensor: wanted if modes.grad else tensor.requires_grad)
        sources = {id(leaf): source for source, leaf in leaves.values()} if leaves else {}

        def outwards(tensor: torch.Tensor) -> torch.Tensor:
            return cuts(sources.get(id(tensor), tensor))

        output = trees.replace(output, outwards)
        trees.settle(live, before, outwards)
        self.outputs = cuts.outputs
        if self.samples is not None:
            self.samples[self._stage] = [sample(t) for t in self.outputs]
            if self.prints is not None:
                self.prints[self._stage] = [fingerprint(t) for t in self.outputs]
            self._shared.watch(site.name, self.outputs)
        if any(t.requires_grad for t in self.outputs):
            if changed:
                raise ModelError(
                    f"block {site.name!r} changes one of its inputs in place, so it cannot be recomputed from them: "
                    "write the result to a new tensor"
                )
            self.calls[self._stage] = Call(
                site=site,
                inputs=before,
                versions=versions,
                needed=needed,
                containers=tuple(var for var, _ in held),
                context=context,
                modes=modes,
                outputs=tuple(cuts.leaves),
                buffers=saved,
                attributes=_beside_buffers(attributes, saved),
                graph=self._kept(cuts.originals, leaves, before, keeping),
            )
        return output

    def _can_keep(self, inputs: Any) -> bool:
        """True if a call's graph can be kept, as far as can be told before it runs. ``inputs``: as of ``Call``."""
        args, kwargs, _ = inputs
        return not (self.facts.buffers or self.facts.written) and is_plain((args, *kwargs.values()))

    def _run_with_graph(
        self,
        site: Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeping: Keeping,
        leaves: Leaves,
    ) -> Any:
        """Run a block on ``leaves``, which are noted, with the graph that its recomputation would make."""
        args, kwargs = trees.replace((args, kwargs), partial(_leaf, leaves))
        with self._in_block(site), keeping.hooks(), _explained(f"block {site.name!r}"):
            return site.forward(*args, **kwargs)

    def _kept(
        self, made: Sequence[torch.Tensor], leaves: Leaves | None, inputs: Any, keeping: Keeping | None
    ) -> KeptGraph | None:
        """The graph behind what a call has made, if it was run with one; None: it reaches into that of the model's own
        code, by what is in the ``containers`` of the call."""
        if leaves is None or keeping is None:
            return None
        edges = tuple(get_gradient_edge(t) if t.requires_grad else None for t in made)
        reads = any(t.requires_grad for t in trees.tensors(inputs[-1]))
        if reads and not is_closed(edges, number=keeping.number):
            return None
        random = TorchState.capture(self._device)
        return KeptGraph(edges=edges, leaves=leaves, random=random, saved=keeping.saved)

    @contextmanager
    def _in_block(self, site: Site) -> Iterator[None]:
        """Inside, a block runs. The parameters that it is known to write to end as they began.

        Raises:
            ModelError: it has changed one.
        """
        weights = [(p, p.detach().clone()) for p in self.facts.written]
        self.in_block = True
        try:
            yield
        finally:
            self.in_block = False
            changed = put_back(weights)
        if changed:
            raise ModelError(
                CHANGES.format(f"block {site.name!r}", "a parameter", ", which it has left as it was until now")
            )

    def _buffers(self, site: Site) -> tuple[tuple[Buffer, ...], tuple[tuple[Buffer, int], ...]]:
        """Copies of the buffers that a call will change, and in a run the others, with their versions."""
        known = {(id(module), name) for module, name in self.facts.buffers}
        changed = copies((m, name, buffers_of(m)[name]) for m, name in self.facts.buffers)
        if self.samples is not None:  # a probe finds out which change
            return changed, ()
        found = ((m, name, b) for m in site.buffered for name, b in buffers_of(m).items() if (id(m), name) not in known)
        return changed, tuple(((m, name, b), 0 if b is None else version(b)) for m, name, b in found)

    # -- backward -----------------------------------------------------------------------------------------------

    def backward_code(self, stage: int, root: tuple[GradientEdge, torch.Tensor] | None = None) -> None:
        """Backward of the model's own code that ran as part of ``stage``: from what waits there, and ``root``."""
        start = self.starts[stage]
        roots = self.pending.take(start)
        if root is not None:
            roots.append(root)
            del root
        if not roots:
            return
        starts = sorted({s for s in self.starts.values() if s <= start}, reverse=True)
        for edge, gradient in graph.backward_part(roots, starts, self.hooked):
            self.pending.add(edge, gradient)

    def reached(self, stage: int) -> tuple[bool, ...]:
        """One boolean for each output of a call: a gradient has come to it."""
        call = self.calls.get(stage)
        return () if call is None else tuple(leaf.gradient is not None for leaf in call.outputs)

    def backward_call(self, stage: int, splitting: Splitting | None = None) -> Held | None:
        """Recompute a block call with a graph and run it backward, if a gradient has come to it. ``splitting``: the
        first part alone is run, and what the second one needs is returned."""
        call = self.calls.pop(stage, None)
        if call is None:
            return None
        held, found = self._run_back(stage, call, [leaf.take() for leaf in call.outputs], splitting)
        for source, leaf_input in found:
            gradient, leaf_input.grad = leaf_input.grad, None
            if gradient is not None:
                self.route(source, gradient)
        return held

    def try_split(self, stage: int) -> Held | None:
        """In a probe: the first part of a call's backward, of which nothing comes to what was before the call, and
        nothing to what it is run back from as a whole."""
        call = self.calls[stage]
        with unwatched():
            buffers = copies(call.buffers)
        call = replace(call, buffers=buffers, context=call.context.copy())
        samples, self.samples = self.samples, None  # the outputs are compared when the call is run back as a whole
        try:
            held, found = self._run_back(stage, call, [leaf.gradient for leaf in call.outputs], Splitting())
            for _, leaf_input in found:  # which what is held still leads to
                leaf_input.grad = None
            return held
        finally:
            self.samples = samples

    def _run_back(
        self, stage: int, call: Call, gradients: list[torch.Tensor | None], splitting: Splitting | None
    ) -> tuple[Held | None, Iterable[tuple[torch.Tensor, torch.Tensor]]]:
        """``backward_call`` of one that gradients have come to. Returns besides each input and the leaf in its place,
        which has the gradient."""
        if all(g is None for g in gradients):
            return None, ()
        if call.graph is not None and call.graph.is_intact():
            assert splitting is None, "a backward in two parts computes its block again"
            return None, _run_kept(call, call.graph, gradients)
        call = replace(call, graph=None)  # one that was changed is not needed any more
        fresh: Leaves = {}
        with nullcontext() if splitting is None else splitting.hooks():
            made = self._recompute(call, fresh) if self.footprint is None else self._recompute_seen(call, fresh)
        if len(made) != len(gradients):
            raise ModelError(
                f"block {call.site.name!r} made {len(gradients)} tensors in the forward and {len(made)} when it was "
                "recomputed: a block must do the same on the same inputs"
            )
        self._compare(stage, call.site, made)
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in made]
        if self.footprint is not None:
            if self.prints is None or self.prints.pop(stage) != [fingerprint(t) for t in made]:
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

    def see_buffers(self, stage: int, buffers: tuple[Buffer, ...], attributes: tuple[Attributes, ...]) -> None:
        """In a probe: keep the buffers that a call has changed, and the plain attributes of their modules, as they were
        before it, for its recomputation."""
        if stage in self.calls:
            self.calls[stage] = replace(self.calls[stage], buffers=buffers, attributes=attributes)

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

        buffers = copies(call.buffers)
        with self._as_it_was(call, buffers):
            call.context.copy().run(_run_only_again, call, trees.replace(call.inputs, other))

    def route(self, source: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient goes to what has made a tensor: a call, or the model's own code."""
        leaf = leaf_of(source)
        if leaf is not None:
            leaf.add(gradient)
        elif source.grad_fn is not None:
            self.pending.add(get_gradient_edge(source), gradient)

    def _compare(self, stage: int, site: Site, made: list[torch.Tensor]) -> None:
        """In a probe: check that the recomputed outputs are those of the forward, but for rounding."""
        if self.samples is None:
            return
        for before, tensor in zip(self.samples.pop(stage), made, strict=True):
            if not alike(before, tensor):
                raise ModelError(
                    f"block {site.name!r} returned other numbers when it was recomputed from the same inputs: it keeps "
                    "something from one call to the next that is no buffer, or draws random numbers from other "
                    "generators than the global ones of torch, numpy and Python. A block must do the same on the same "
                    "inputs"
                )

    def _recompute_seen(self, call: Call, fresh: Leaves) -> list[torch.Tensor]:
        """In a probe: ``_recompute``, with a look at what the graph saves."""
        assert self.footprint is not None
        self.footprint.refused = not self._can_keep(call.inputs)
        random = RandomState.capture(self._device)
        with unwatched():
            buffers = copies(call.buffers)
        tried = replace(call, buffers=buffers, context=call.context.copy())
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
        live = trees.replace(call.inputs, partial(_leaf, fresh))
        with self._as_it_was(call, call.buffers):
            return call.context.run(_run_again, call, live)

    @contextmanager
    def _as_it_was(self, call: Call, buffers: tuple[Buffer, ...]) -> Iterator[None]:
        """Inside, a block has ``buffers``, the attributes beside them, and the modes that it was called in."""
        outer = Modes.capture(self._device_types, self.flags)
        current = [(module, name, buffers_of(module)[name]) for module, name, _ in buffers]
        attributes = [(module, attributes_of(module)) for module, _ in call.attributes]
        for module, name, before in buffers:
            buffers_of(module)[name] = before
        for module, beside in call.attributes:
            set_attributes(module, beside)
        try:
            call.modes.apply(self.flags)
            yield
        finally:
            outer.apply(self.flags)
            for module, name, buffer in current:
                buffers_of(module)[name] = buffer
            for module, beside in attributes:
                set_attributes(module, beside)


def copies(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return tuple((module, name, None if buffer is None else buffer.clone()) for module, name, buffer in buffers)


def _beside_buffers(attributes: Iterable[Attributes], buffers: Iterable[Buffer]) -> tuple[Attributes, ...]:
    """The attributes of the modules that have these buffers."""
    owners = {module for module, _, _ in buffers}
    return tuple((module, beside) for module, beside in attributes if module in owners)


def _leaf(leaves: Leaves, tensor: torch.Tensor) -> torch.Tensor:
    """The leaf that a block is run on in place of an input, which is noted; what has no gradient is handed on."""
    if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
        return tensor
    if id(tensor) not in leaves:
        leaves[id(tensor)] = (tensor, tensor.detach().requires_grad_())
    return leaves[id(tensor)][1]


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


def _replaced(block: str, buffers: Sequence[tuple[Buffer, int]]) -> tuple[Buffer, ...]:
    """Buffers that a call has put others in the place of, though the probe has not seen them change, as they were.

    Raises:
        ModelError: one was written to, and nobody has a copy of what it held.
    """
    found = []
    for (module, name, before), at in buffers:
        if buffers_of(module).get(name) is not before:
            found.append((module, name, before))
        elif before is not None and version(before) != at:
            raise ModelError(
                f"block {block!r} changes its buffer {name!r} for this micro-batch, and did not for the first one of "
                "its shape, so what the buffer held before is not known where the block is recomputed: write to it in "
                f"every call, or put a new tensor in its place (self.{name} = ...)"
            )
    return tuple(found)


@contextmanager
def _explained(who: str) -> Iterator[None]:
    """Say in words of ours why autograd has nothing to give to code that asks it for a gradient or a hook."""
    try:
        yield
    except RuntimeError as error:
        if _NO_GRAPH.search(str(error)):
            raise ModelError(
                f"{who} asks for a graph in its forward ({error}), but blocks first run without one, and again with "
                "one for their backward. Ask only where x.requires_grad, or compute within torch.enable_grad()"
            ) from error
        if "support saved tensor hooks" in str(error):
            raise ModelError(
                f"{who} uses a transform of torch.func where its weights may leave before the backward, which the "
                "transform has no way to follow: do it within a block, or with torch.autograd.grad"
            ) from error
        raise


def _forget(held: list[tuple[contextvars.ContextVar[Any], Any]]) -> None:
    """Let a copied context not hold on to the containers of the running forward, which fill up with tensors."""
    for var, _ in held:
        var.set(None)


def _run_only_again(call: Call, live: Any) -> None:
    args, kwargs, values = live
    for var, value in zip(call.containers, values, strict=True):
        var.set(value)
    with torch.no_grad():
        call.site.forward(*args, **kwargs)


def _run_again(call: Call, live: Any) -> list[torch.Tensor]:
    """Run a block as it was called, with the grad mode that it was called with."""
    args, kwargs, values = live
    before = trees.snapshot(live)
    passed = {id(t) for t in trees.tensors(before)}
    for var, value in zip(call.containers, values, strict=True):
        var.set(value)
    output = call.site.forward(*args, **kwargs)
    made: dict[int, torch.Tensor] = {}

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in passed and not isinstance(tensor, nn.Parameter):
            made.setdefault(id(tensor), tensor)
        return tensor

    trees.replace(output, collect)
    trees.settle(live, before, collect)
    return list(made.values())
