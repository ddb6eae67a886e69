"""The suspended forward of one micro-batch, which notes what its backward needs (``backward``).

    forward     a greenlet that runs the model's own forward for one micro-batch
    arrival     the forward is suspended at a block call, its arguments in hand
    cut         the block has run without a graph, and autograd's graph ends behind its outputs (``cut``)

All of it runs in one thread: greenlets are bound to the thread that made them.
"""

import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.compat.modules import buffers_of
from penstock.compat.torch import is_view_of_parameter, next_number, version
from penstock.errors import ModelError
from penstock.tape import opaque, trees
from penstock.tape.backward import Backward, Call
from penstock.tape.buffers import Buffer, attributes_beside, attributes_of, copies, replaced
from penstock.tape.cut import Cuts, SharedMemory
from penstock.tape.facts import Site, StageFacts
from penstock.tape.holders import places_handed
from penstock.tape.kept_graph import Keeping, KeptGraph, has_plain_arguments, is_closed, on_leaves
from penstock.tape.kv_cache import without_caches
from penstock.tape.modes import Modes, Stacks, TrainingFlags, refuse_stacked
from penstock.tape.places import Contents, Held, Holder, put, values_in
from penstock.tape.rng import TorchState
from penstock.tape.watch import CHANGES, put_back

Event = Literal["call", "cut", "done"]
LossFn = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]

_NO_GRAPH = re.compile(r"does not require grad|doesn't require grad|requires_grad=False", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A suspended block call: the block, its (args, kwargs), the distinct tensors among these, by their places, and
    what is in the objects, dicts and lists ``within`` them and context variables, as the micro-batch has left it."""

    site: Site
    inputs: Any
    tensors: dict[trees.Place, torch.Tensor]
    within: Held


def current_forward() -> "SuspendedForward | None":
    """The forward that is running now, or None outside of one, in a recomputation, or inside a block."""
    suspended: SuspendedForward | None = getattr(getcurrent(), "penstock_forward", None)
    return None if suspended is None or suspended.in_block else suspended


class SuspendedForward:
    """The forward of one micro-batch, suspended between events, with its ``backward``."""

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
        self.facts = StageFacts()
        self.own: dict[Holder, Any] = {}  # what its code has put into places that it shares with others
        self.handed: Held = ()  # of the call that runs, ``Arrival.within``
        self.keeping: Keeping | None = None  # of the next call, whose graph is kept
        self.answer: Callable[[], Any] | None = (
            None  # what the call it is suspended at returns, which is made elsewhere
        )
        self.returned: Any = None  # by the latest call, in a probe
        self.beside: list[torch.Tensor] = []  # in a probe, beside ``outputs`` and an arrival's tensors
        self._stage = 0
        self._goes_on = False
        self._device = device
        self._device_types = ("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type)
        self.backward = Backward(device=device, device_types=self._device_types, flags=flags)
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

    def modes_now(self) -> Modes:
        """torch's switches as they stand for whoever runs."""
        return Modes.capture(self._device_types, self.flags)

    @property
    def _in_probe(self) -> bool:
        return self.backward.outputs is not None

    def resume(self, stage: int, *, goes_on: bool = False) -> Event:
        """Let the model's code run on, as part of ``stage``, up to its next event; with ``goes_on`` that a call has
        been cut is none."""
        assert self._carrier is not None, "the forward has ended"
        self._stage, self._goes_on = stage, goes_on
        outer, self._stacks = self.modes_now(), Stacks.capture()
        if self._modes is None:
            torch.set_grad_enabled(self.train)
        else:
            self._modes.apply(self.flags, outer)
        try:
            event: Event = self._carrier.switch()
        finally:
            self._modes = self.modes_now()
            outer.apply(self.flags, self._modes)
        if event == "done":
            self._end()
        return event

    def close(self) -> None:
        """End the forward wherever it is, and let go of everything."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.penstock_forward = None
            outer = self.modes_now()
        try:
            if carrier:  # started and not ended: its context managers are left in passing
                carrier.throw()
        finally:
            if carrier is not None:
                outer.apply(self.flags, self.modes_now())
            self.arrival = None
            self.outputs, self.handed = [], ()
            self._copies.clear()
            self.backward.clear()
            self.own.clear()

    def expect_call(self, stage: int, site: Site) -> None:
        """Raise ModelError where it is not suspended at the call of a block."""
        if self.arrival is None or self.arrival.site is not site:
            came = "ends" if self.arrival is None else f"calls block {self.arrival.site.name!r}"
            raise ModelError(
                f"micro-batch {self.index} {came} where the one that the plan was made from calls block {site.name!r} "
                f"(stage {stage}): every micro-batch must take the same way through the blocks (is layer dropout "
                "switched on?)"
            )

    def arrive(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block call inside the greenlet: suspended, then run and cut, then suspended again."""
        refuse_stacked(site.name, self._stacks)
        args, kwargs = self._copied(without_caches(site.name, site.forward, args, kwargs))
        self.arrival = Arrival(
            site=site,
            inputs=(args, kwargs),
            tensors=trees.places((args, kwargs)),
            within=_within(args, kwargs),
        )
        if any(t.is_nested for t in self.arrival.tensors.values()):
            raise ModelError(f"block {site.name!r} is handed a nested tensor: pad it, or nest it within the block")
        self._look_beside((args, kwargs))
        self._suspend("call")
        (args, kwargs), self.handed = self.arrival.inputs, self.arrival.within
        self.arrival = None
        _put_back(self.handed)
        answer, self.answer = self.answer, None
        if answer is not None:
            output = answer()
        else:
            output = self._run_and_cut(site, args, kwargs) if self.train else self._run_only(site, args, kwargs)
        if self._in_probe:
            self.returned = output
        self.handed = ()
        left = () if self._goes_on else _within(args, kwargs)
        del args, kwargs, answer
        if not self._goes_on:
            self._suspend("cut")
            _put_back(left)
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
        if self._in_probe:
            value = (value, list(contextvars.copy_context().values()))
            self.beside = [*opaque.tensors_in(value), *trees.tensors(value)]

    def _run(self, model: nn.Module, loss_fn: LossFn, micro_batch: Mapping[str, Any]) -> Event:
        with _explained("the model itself"):
            loss: object = loss_fn(model, micro_batch)
        self._shared.look()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
            got = type(loss).__name__
            if isinstance(loss, torch.Tensor):
                got = f"a {'complex ' * loss.is_complex()}tensor of shape {tuple(loss.shape)}"
            raise ModelError(
                f"the loss must be a real tensor of one element, but loss_fn returned {got}: "
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
        modes = self.modes  # which it goes on in from the call on
        wanted = modes.grad and (site.trainable or self.facts.trains or any(needed))
        own = values_in(self.facts.finds)
        hidden = opaque.hidden(live)
        opaque.refuse_inputs(site.name, hidden)
        beside = [tensor for _, tensor in hidden.values() if tensor is not None]
        numbers = [(t, version(t)) for t in (*inputs, *beside, *self.beside) if _can_lose_gradient(t)]
        keeping, self.keeping = self.keeping, None
        if keeping is not None and not (wanted and self._can_keep(before)):
            keeping = None
        if keeping is not None:  # it is run with the graph that its recomputation would make
            args, kwargs = on_leaves((args, kwargs), keeping.leaves)
        # Where there is nothing to train it keeps its grad mode, which it may ask for: it is not computed again.
        enabled = modes.grad and (keeping is not None or not wanted)
        hooks = nullcontext() if keeping is None else keeping.hooks()
        with self._in_block(site), torch.set_grad_enabled(enabled), hooks, _explained(f"block {site.name!r}"):
            output = site.forward(*args, **kwargs)
        changed = any(version(t) != v for t, v in zip(inputs, versions, strict=True))
        wanted = wanted or (modes.grad and self.facts.trains)  # which a probe has found out
        # Of what it was handed and hands on in passing the graph is not cut, so that its gradient would be lost.
        lost = wanted and any(version(t) != v for t, v in numbers)
        del numbers, beside
        self._look_beside((output, live))
        if wanted:
            opaque.refuse_outputs(site.name, output, live, hidden)
            saved += replaced(site.name, others)
        self.backward.starts[self._stage] = next_number()
        # Without grad mode an output has a gradient only if the block has switched it on.
        cuts = Cuts(inputs, lambda tensor: wanted if modes.grad else tensor.requires_grad)
        sources = {} if keeping is None else {id(leaf): source for source, leaf in keeping.leaves.values()}

        def outwards(tensor: torch.Tensor) -> torch.Tensor:
            return cuts(sources.get(id(tensor), tensor))

        output = trees.replace(output, outwards)
        trees.settle(live, before, outwards)
        self.outputs = cuts.outputs
        if self.backward.outputs is not None:
            self.backward.outputs.note(self._stage, self.outputs)
            self._shared.watch(site.name, self.outputs)
        needs_backward = any(t.requires_grad for t in self.outputs)
        if lost or (changed and needs_backward):
            raise ModelError(
                f"block {site.name!r} changes one of its inputs in place, so it cannot be recomputed from them: "
                "write the result to a new tensor"
            )
        if needs_backward:
            self.backward.calls[self._stage] = Call(
                site=site,
                inputs=before,
                versions=versions,
                needed=needed,
                containers=tuple(var for var, _ in held),
                context=context,
                modes=modes,
                outputs=tuple(cuts.leaves),
                buffers=saved,
                attributes=attributes_beside(attributes, saved),
                own=own,
                handed=self.handed,
                graph=None if keeping is None else self._kept(cuts.originals, before, keeping),
                undoes=self.facts.undoes,
                last=self.facts.last,
            )
        return output

    def _can_keep(self, inputs: Any) -> bool:
        """True if a call's graph can be kept, as far as can be told before it runs. ``inputs``: as of ``Call``."""
        return not (self.facts.buffers or self.facts.written) and has_plain_arguments(inputs)

    def _kept(self, made: Sequence[torch.Tensor], inputs: Any, keeping: Keeping) -> KeptGraph | None:
        """The graph behind what a call has made; None: it reaches into that of the model's own code, by what is in the
        ``containers`` of the call."""
        edges = tuple(get_gradient_edge(t) if t.requires_grad else None for t in made)
        reads = any(t.requires_grad for t in trees.tensors(inputs[-1]))
        if reads and not is_closed(edges, number=keeping.number):
            return None
        random = TorchState.capture(self._device)
        return KeptGraph(edges=edges, leaves=keeping.leaves, random=random, watched=keeping.watched(made))

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
        if self._in_probe:  # which finds out which change
            return changed, ()
        found = ((m, name, b) for m in site.buffered for name, b in buffers_of(m).items() if (id(m), name) not in known)
        return changed, tuple(((m, name, b), 0 if b is None else version(b)) for m, name, b in found)


def _within(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held:
    """The contents of the objects, dicts and lists within arguments and context variables."""
    return places_handed((*args, *kwargs.values(), *contextvars.copy_context().values()))


def _put_back(within: Held) -> None:
    """A forward goes on: what it has left is there again, but for lists, which may be there to be added to."""
    put((holder, value) for holder, value in within if not isinstance(holder, Contents))


def _can_lose_gradient(tensor: torch.Tensor) -> bool:
    """True if a block that writes to a tensor may give it a gradient. What it does to parameters is seen elsewhere."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not isinstance(tensor, nn.Parameter)


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
