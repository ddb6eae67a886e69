"""Learns a model's program: one micro-batch, forward and backward, on the real device, watched op by op.

Weights are loaded just before the first op that touches them and unloaded when the stage ends, so the probe needs no
more memory than a stage does. Sizes are measured, not modelled: every tensor that an op makes is followed until its
storage is freed. What an op uses inside itself (a library's workspace) is not seen.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.compat.torch import unwatched, without_functions, without_transforms
from penstock.errors import ModelError
from penstock.schedule.program import OF_BLOCK
from penstock.schedule.work import Work
from penstock.tape import early_stop, graph, trees
from penstock.tape.accesses import Accesses
from penstock.tape.again import Again, settle
from penstock.tape.asked import Asked
from penstock.tape.buffers import ModulesBefore, attributes_beside, copies, tensor_attributes
from penstock.tape.changes import Changes, Overwritten
from penstock.tape.facts import Learned, Site
from penstock.tape.handed import Calls, HandedOn
from penstock.tape.holders import Search
from penstock.tape.kept_graph import Footprint
from penstock.tape.likeness import FirstOutputs
from penstock.tape.losses import Losses
from penstock.tape.modes import TrainingFlags
from penstock.tape.parameters import versions
from penstock.tape.places import Holder, values_in
from penstock.tape.segments import InTwo, Seen, Segment, Stages, Usage, graph_of, left_on, refuse_kept
from penstock.tape.smuggled import Smuggled
from penstock.tape.suspended import Arrival, SuspendedForward
from penstock.tape.waits import Waits
from penstock.tape.watch import CHANGES, Ahead, Op, Operand, Watch, put_back
from penstock.tape.weight_views import WeightViews

if TYPE_CHECKING:
    from penstock.tape.tape import Tape


_NOT_A_BLOCK = (
    ". Where it leaves it as it was, name what does so as a block, blocks=[...]. What RWKV does to weights when it is "
    "evaluated, config.rescale_every = 0 switches off"
)


class Probe:
    """One probe of one micro-batch; see ``run``."""

    def __init__(self, tape: "Tape", load: Callable[[int], None], unload: Callable[[int], None], copied: bool) -> None:
        self._tape, self._running = tape, tape.running
        modules = frozenset(tape.model.modules())
        own = modules.difference(*(site.module.modules() for site in tape.sites))
        self._search, self._accesses = Search(own, modules, tape.loss_fn), Accesses(modules)
        self._changes = Changes(self._search.places(), (self._search.places_on(s.module.modules()) for s in tape.sites))
        tape.generators |= {id(g): g for g in self._search.generators()}
        self._load, self._unload, self._copied = load, unload, copied
        self._loaded: dict[int, list[int]] = {}  # groups -> versions of their weights, as they were brought
        self._usage = Usage()
        self._packer = graph.WeightPacker()
        self._group_of = {id(s.parameter): g.spec.index for g in tape.groups for s in g.slices}
        by_name = {g.spec.name: g.spec.index for g in tape.groups}
        self._own_group = [by_name.get(f"{OF_BLOCK}{site.name}") for site in tape.sites]
        self._calling: Site | None = None  # the block that runs, forward or again
        self._before: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}  # what a call has written to, as it was
        self._watch = Watch(self._group_of, self._touch, self._note_write, self._on_op)
        self._smuggled = Smuggled(self._watch, self._group_of, tape.aliases, tape.generators.values())
        names = {id(s.parameter): s.name for g in tape.groups for s in g.slices}
        self._views = WeightViews(self._packer, names, tape.aliases)
        self._ahead = Ahead(self._group_of, self._bring)
        self._segments: list[Segment] = []
        self._asked = Asked(self._block)
        self._sources: dict[int, int] = {}  # of a parameter with a hook: identity -> the segment of its gradient
        self._waits, self._waiting = Waits(), tape.device.type not in ("cpu", "meta")
        self._seen, self._losses = Calls(), Losses()
        self._lasting: dict[Holder, None] = {}  # places in what blocks are handed and the model keeps, on the way there
        self._handed: set[int] = set()  # objects, dicts and lists that blocks are handed, by identity
        self._made: weakref.ref[torch.Tensor] | None = None  # what the latest call has put out, if it was one tensor
        self._stopping: early_stop.Search | None = None
        self._forward_done = False  # what comes then is computed again, and waits again
        self._loss: float | None = None

    def run(self, micro_batch: Mapping[str, Any], train: bool, alone: bool) -> Learned:
        """Forward (and backward) of the micro-batch. The model, buffers and all, and random state end as they began."""
        tape = self._tape
        before = ModulesBefore(tape.model, generators=tape.generators.values())
        self._asked.train, self._alone = train, alone
        self._overwritten = Overwritten(trees.tensors(micro_batch), tape.model.buffers())
        on_gradient, flags = tape.on_gradient, TrainingFlags(tape.model.modules())

        def end() -> None:
            with ExitStack() as left:  # all of it, also where a forward that is closed raises on its way out
                left.callback(before.put_back)
                left.callback(self._changes.put_back)
                left.callback(self._overwritten.put_back)
                left.callback(setattr, tape, "on_gradient", on_gradient)
                left.callback(self._release)
                left.callback(self._smuggled.outside.release)
                left.callback(lambda: tape.switched.update(flags.seen))
                left.callback(tape.finish)  # which comes first

        with tape.undo.after(end):
            tape.on_gradient = self._note_gradient
            return self._run(micro_batch, train, before, flags)

    def _run(self, micro_batch: Mapping[str, Any], train: bool, before: ModulesBefore, flags: TrainingFlags) -> Learned:
        tape = self._tape
        given = trees.snapshot(micro_batch)
        self._smuggled.given(micro_batch)  # which is not kept: a probe lives on until a collection
        self._seen.given(micro_batch)
        tape.open(0, [micro_batch], train, flags=flags)
        self._running.learns = True
        suspended = tape.suspended[0]
        suspended.backward.outputs = FirstOutputs(bits=tape.keeps)
        suspended.backward.hooked, suspended.backward.outside = self._asked.hooked, self._smuggled.outside
        # torch.compile looks at what reads and assigns attributes, and would take the watch for code of the block.
        with nullcontext() if tape.compiled else self._accesses.watching():
            self._run_forward(suspended)
        self._forward_done = True
        self._refuse_replaced(tape.model)
        refuse_kept(self._segments)
        self._views.refuse()
        self._smuggled.refuse()
        carried = self._smuggled.carries(before, self._accesses)
        filled = tuple(self._smuggled.filled(before, tuple(self._overwritten.before)))
        suspects = (*self._accesses.suspects(self._watch.birth), *filled)
        before.refuse_unplaced()
        self._note_handed_on(suspended)
        found = Stages(self._segments)  # now: what is saved or touched in the backward must not count
        if train:
            self._run_backward(suspended)
            self._views.refuse()
            found.load_stepped()
        tape.moving |= {place for place, _ in self._overwritten.before}
        tape.changing |= {(buffer.module, buffer.name) for buffer in before.changed()}
        if self._changes.found or suspects:
            again = Again(
                tape=tape,
                micro_batch=given,
                train=train,
                segments=self._segments,
                before=before,
                flags=flags,
                overwritten=self._overwritten,
                weights=(self._bring, self._ahead, self._release),
            )
            loss = self._loss if self._alone else None
            found_again = settle(self._changes.found, suspects, again, loss, self._watch.birth, tries=carried is None)
            carried = self._smuggled.goes_on(*found_again) if found_again else carried
        calls = tuple(self._seen.calls.get(members[0]) for members in found.members)
        return Learned(
            stages=found.stages(),
            facts=found.facts(),
            work=found.work(),
            handed=HandedOn(calls=calls, shared=tuple(self._seen.shared)),
            waits=tuple(self._waits.found),
            losses=tuple(self._losses.seen),
            loss=self._loss,
            carried=carried,
        )

    # -- what is read ---------------------------------------------------------------------------------------------

    def _touch(self, group: int) -> None:
        self._usage.reads.add(group)
        self._bring(group)

    def _bring(self, group: int) -> None:
        if group not in self._loaded:
            with without_transforms(), without_functions(), unwatched():  # it is nothing that the model does
                self._load(group)
                self._loaded[group] = versions([self._tape.groups[group]])
            self._packer.add(s.parameter for s in self._tape.groups[group].slices)

    def _note_write(self, written: Operand) -> None:
        """A block may write to a parameter what is there already, as a clipping does within its bound: it is compared
        when the call has ended.
        """
        self._seen.wrote(written.storage)
        if not self._packer.has(written.storage):
            self._overwritten.note(written)
            return
        parameter = self._packer.parameter_of(written.tensor)
        if parameter is None or self._calling is None:
            self._refuse_changed("a parameter")
        elif id(parameter) not in self._before:
            with without_functions(), unwatched():
                self._before[id(parameter)] = (parameter, parameter.detach().clone())
            nbytes = parameter.numel() * parameter.element_size()
            self._watch.peak += nbytes  # a run, which knows of the write, has its copy from the call's start on
            self._watch.hold(nbytes)

    def _settle_writes(self) -> None:
        """Refuse parameters that a call has changed; note those that it has written to."""
        if put_back(self._before.values()):
            self._refuse_changed("a parameter")
        for parameter, _ in self._before.values():
            self._watch.hold(-parameter.numel() * parameter.element_size())
        segment = self._segments[self._watch.segment]
        if segment.site is self._calling:  # and not its recomputation
            segment.facts.written = tuple(parameter for parameter, _ in self._before.values())
        self._before.clear()

    def _refuse_moved(self) -> None:
        """Refuse parameters that lie elsewhere than they were put: ``parameter.data = ...`` is no op to be seen."""
        for group in self._loaded:
            for s in self._tape.groups[group].slices:
                if not self._packer.holds(s.parameter):
                    self._refuse_changed(f"parameter {s.name!r}")

    def _refuse_replaced(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if id(parameter) not in self._group_of:
                self._refuse_changed(f"parameter {name!r}")

    def _refuse_changed(self, what: str) -> NoReturn:
        who, way = "the model itself", _NOT_A_BLOCK
        if self._calling is not None:
            who, way = f"block {self._calling.name!r}", ""
        raise ModelError(CHANGES.format(who, what, "") + way)

    def _release(self) -> None:
        for group in sorted(self._loaded):
            self._unload(group)
        self._loaded.clear()
        self._packer.forget()

    @contextmanager
    def _measuring(self, usage: Usage, site: Site | None = None) -> Iterator[None]:
        """Watch what runs inside, with the weights of ``site`` loaded; on leaving, unload all."""
        watch, self._usage, self._calling = self._watch, usage, site
        own = None if site is None else self._own_group[site.index]
        if own is not None:
            self._touch(own)
        self._begin(usage)
        try:
            # Weights of a block stay where they are until the end of its segment, and torch.func forbids such hooks.
            packing = saved_tensors_hooks(self._pack, self._unpack) if site is None else nullcontext()
            with self._ahead, watch, packing:
                yield
            self._refuse_moved()
            self._settle_writes()
            if site is not None:
                self._refuse_replaced(site.module)
        finally:
            put_back(self._before.values())  # where the call was broken off, or refused
            usage.end, usage.peak, usage.work = watch.live, watch.peak, self._work() - usage.work
            self._release()

    def _begin(self, usage: Usage) -> None:
        usage.start = self._watch.peak = self._watch.live
        usage.work = self._work()

    def _work(self) -> Work:
        """All that was computed and sent so far."""
        return self._watch.work + Work(sent=self._tape.sent, exchanges=self._tape.exchanges)

    def _pack(self, tensor: torch.Tensor) -> graph.SavedTensor | graph.WeightView:
        group = self._group_of.get(id(tensor))
        if group is not None:  # what an op is handed in a list is saved before the op is seen, and has its place now
            self._touch(group)
        if (birth := self._watch.birth(tensor)) is not None:
            birth.saved.add(self._watch.segment)
        return self._packer.pack(tensor)

    def _unpack(self, packed: graph.SavedTensor | graph.WeightView) -> torch.Tensor:
        if isinstance(packed, graph.WeightView):
            self._touch(self._group_of[id(packed.parameter)])
        return self._packer.unpack(packed)

    def _note_gradient(self, parameter: nn.Parameter, segment: int, gradient: torch.Tensor) -> None:
        if not parameter.numel():  # there is nothing to step, and perhaps no room for nothing
            return
        self._segments[segment].gradients.add(self._group_of[id(parameter)])
        if self._running.hooks.has_others(parameter) and self._sources.setdefault(id(parameter), segment) != segment:
            name = next(s.name for g in self._tape.groups for s in g.slices if s.parameter is parameter)
            raise ModelError(
                f"parameter {name!r} has a hook and is used in several places, from which its gradient comes in parts: "
                "the hook would see each of them. Remove it"
            )

    def _on_op(self, op: Op) -> None:
        if self._stopping is not None:
            self._stopping.on_op(op)
        elsewhere = [o for o in op.written if not self._packer.has(o.storage)]  # parameters end as they were
        self._smuggled.on_op(op, elsewhere)
        self._views.on_op(self._who, op)
        if not self._forward_done:
            if self._waiting:
                self._waits.on_op(self._block(), op)
            self._note_trained(op)

    def _note_trained(self, op: Op) -> None:
        """Note if a call reads parameters that train, which need not be its block's own."""
        if self._calling is None:
            return
        facts = self._segments[self._watch.segment].facts
        if not facts.trains:
            facts.trains = any(id(o.tensor) in self._group_of and o.tensor.requires_grad for o in op.inputs)

    def _who(self) -> str:
        """The code that runs now, in words."""
        if self._calling is not None:
            return f"block {self._calling.name!r}"
        return "the backward of the model itself" if self._forward_done else "the model itself"

    def _block(self) -> str | None:
        site = self._segments[self._watch.segment].site
        return None if site is None else site.name

    # -- forward --------------------------------------------------------------------------------------------------

    def _run_forward(self, suspended: SuspendedForward) -> None:
        arrival = self._run_code(suspended)
        while arrival is not None:
            self._run_call(suspended, arrival)
            arrival = self._run_code(suspended)
        if len(self._segments) == 1:
            names = ", ".join(repr(s.name) for s in self._tape.sites[:3])
            raise ModelError(
                f"the model's forward calls none of its blocks ({names}, ...): name the submodules that it does call, "
                "blocks=[...]"
            )

    def _run_code(self, suspended: SuspendedForward) -> Arrival | None:
        """Run a segment of the model's own code. Returns the call at which it stopped; None at the end, where the loss
        is done too.
        """
        segment = self._start(None)
        held = suspended.outputs  # saved for a run's epilogue, also where the model has let go of them
        with self._measuring(segment.forward):
            self._smuggled.begin(self._watch.segment, None, ())
            watching = self._accesses.watching() if self._tape.compiled else nullcontext()
            with self._asked, self._losses, watching, self._accesses.during(self._watch.segment):
                event = self._running.run_code(suspended, self._watch.segment)
            self._smuggled.end(kept=() if event == "done" else self._search)  # nothing reads it any more
            suspended.own.update(values_in(self._accesses.written_in(self._watch.segment)))
            self._changes.look(self._watch.segment, ahead=suspended.arrival.site.index if suspended.arrival else None)
            if event == "done":
                assert suspended.loss is not None
                self._loss = None if suspended.loss.is_meta else float(suspended.loss.detach())
                self._running.run_loss(suspended, 1.0)
            held.clear()
        return suspended.arrival

    def _run_call(self, suspended: SuspendedForward, arrival: Arrival) -> None:
        site = arrival.site
        segment = self._start(site)
        self._see_call(suspended, arrival)
        if arrival.within:
            self._handed |= {id(place.of) for place, _ in arrival.within}
            self._lasting.update(dict.fromkeys(self._search.ways_to({place for place, _ in arrival.within})))
        segment.inputs = [self._see(place, t) for place, t in arrival.tensors.items()]
        before, attributes = ModulesBefore(site.module), tensor_attributes(site.module, site.name)
        products = len(self._watch.products)
        self._smuggled.begin(self._watch.segment, site.name, [*arrival.tensors.values(), *suspended.beside])
        during = nullcontext() if self._tape.compiled else self._accesses.during(self._watch.segment)
        self._overwritten.begin_call(site.module.buffers())
        with self._measuring(segment.forward, site), self._asked, during:
            self._running.run_call(suspended, self._watch.segment, segment.facts)
        segment.overwritten = self._overwritten.end_call()
        segment.products = self._watch.products[products:]
        found = self._search.tensors_in(self._accesses.found_by(self._watch.segment))
        self._smuggled.end([*suspended.outputs, *suspended.beside], found=found)
        returned, suspended.returned, suspended.beside = suspended.returned, None, []
        self._seen.returned(self._watch.segment, returned, suspended.outputs)
        self._made = weakref.ref(suspended.outputs[0]) if len(suspended.outputs) == 1 else None
        del returned
        changed = before.changed()
        buffers = copies((b.module, b.name, b.value) for b in changed)
        beside = attributes_beside(before.attributes, buffers)
        suspended.backward.amend(self._watch.segment, buffers=buffers, attributes=beside)
        seen = self._accesses.seen_by(self._watch.segment)
        segment.own = tuple((place, suspended.own[place]) for place in seen if place in suspended.own)
        suspended.own.update(values_in(self._accesses.written_in(self._watch.segment)))
        self._changes.look(self._watch.segment, block=site.index)
        segment.outputs = [self._see(place, t) for place, t in trees.places(suspended.outputs).items()]
        returned_births = {id(seen.birth) for seen in segment.outputs}
        segment.left = left_on(site, attributes, returned_births, self._watch.birth)
        segment.facts.buffers = tuple((b.module, b.name) for b in changed)
        segment.facts.reachable = self._watch.has_left(self._watch.segment, returned_births)

    def _note_handed_on(self, suspended: SuspendedForward) -> None:
        """Note behind which segments there are values that later ones read, and which calls find them."""
        self._changes.end(self._handed)
        plain, carried = [c for c in self._changes.found if c.is_plain()], self._smuggled.carried
        for index, segment in enumerate(self._segments):
            written = [pair for pair in segment.overwritten if carried.is_shared(pair[0].of)]
            segment.facts.finds = (*self._accesses.finds(index), *(place for place, _ in written))
            segment.facts.undoes = tuple(self._accesses.undoes(index))
            own = [*segment.own, *self._accesses.begun_with(index), *written]
            own = [pair for pair in own if pair[0] in segment.facts.finds]
            suspended.backward.amend(index, own=(*own, *((c.place, c.at(index)) for c in plain)))
        self._tape.restored |= self._accesses.restored()
        attributes = set[Holder]()
        for index, holder in self._accesses.handed_on():
            attributes.add(holder)
            self._segments[index].assigned.add(holder)
        for holder, last in {**self._smuggled.read, **dict.fromkeys(self._lasting, len(self._segments) - 1)}.items():
            if holder not in attributes:
                for segment in self._segments[:last]:
                    segment.assigned.add(holder)

    def _see_call(self, suspended: SuspendedForward, arrival: Arrival) -> None:
        """Note what a call is handed."""
        births = {id(t): self._watch.birth(t) for t in arrival.tensors.values()}
        born = {key: -1 if birth is None else birth.segment for key, birth in births.items()}
        before = None if self._made is None else self._made()
        name, segment = arrival.site.name, self._watch.segment
        self._seen.see(segment, name, arrival.inputs, suspended.modes, before=before, born=born)

    def _start(self, site: Site | None) -> Segment:
        self._segments.append(Segment(site=site))
        self._watch.segment = len(self._segments) - 1
        return self._segments[-1]

    def _see(self, place: trees.Place, tensor: torch.Tensor) -> Seen:
        return Seen(
            place=place,
            birth=self._watch.birth(tensor),
            nbytes=tensor.numel() * tensor.element_size(),
            movable=trees.is_movable(tensor, self._tape.device),
            needs_grad=tensor.requires_grad,
        )

    # -- backward -------------------------------------------------------------------------------------------------

    def _run_backward(self, suspended: SuspendedForward) -> None:
        for index in reversed(range(len(self._segments) - 1)):
            segment = self._segments[index]
            with self._measuring(segment.backward):
                self._running.backward_code(suspended, index)
            if segment.site is None:
                continue
            segment.reached = suspended.backward.reached(index)
            if any(segment.reached):
                self._call_elsewise(suspended, index)
                with self._measuring(segment.backward, segment.site):
                    segment.in_two = self._split(suspended, index) if self._tape.splits else None
                    self._begin(segment.backward)
                    footprint = Footprint(self._packer, self._watch) if self._tape.keeps else None
                    suspended.backward.footprint = footprint
                    self._run_back(suspended, index)
                    if footprint is not None:
                        segment.graph = graph_of(footprint, segment)
                        segment.facts.reachable |= footprint.older
                left_out = 0 if segment.facts.last is None else segment.facts.last.flops
                segment.backward.work -= Work(flops=left_out)
                segment.backward.work += Work(again=segment.forward.work.flops - left_out)
            else:
                with self._measuring(Usage(), segment.site):
                    self._running.refuse_unlike(suspended, index, segment.site.name)

    def _call_elsewise(self, suspended: SuspendedForward, index: int) -> None:
        """See ``Running.call_elsewise``. What a block's ops do is seen in its forward and its recomputation. Here they
        are watched, which takes most of the time of small ones, only where writes to weights have to be undone, or
        torch.compile would compile the block once more. ``Ahead`` loads weights that the forward has not read."""
        segment = self._segments[index]
        if self._copied and not (segment.facts.written or self._tape.compiled):
            for group in sorted(segment.forward.reads):
                self._bring(group)
            with self._ahead:
                self._running.call_elsewise(suspended, index)
            if all(versions([self._tape.groups[g]]) == before for g, before in self._loaded.items()):
                return
            self._release()  # copies that it has written to: once more, to see what it writes
        with self._measuring(Usage(), segment.site):
            self._running.call_elsewise(suspended, index)

    def _run_back(self, suspended: SuspendedForward, index: int) -> None:
        """Run a call's backward, and see what its recomputation can do without."""
        segment, search = self._segments[index], None
        if not self._tape.compiled and not segment.facts.written and suspended.backward.calls[index].is_plain:
            search = self._stopping = early_stop.Search(self._watch)
        suspended.backward.search = search
        try:
            self._running.backward_call(suspended, index)
        finally:
            self._stopping = None
        last, suspended.backward.last = suspended.backward.last, None
        if search is not None and last is not None and not search.has_left():
            segment.facts.last = last

    def _split(self, suspended: SuspendedForward, index: int) -> InTwo | None:
        """Run a call's backward in two parts, besides: what each takes. None: it can only be run as a whole."""
        watch, start = self._watch, self._watch.live
        watch.peak = start
        held = self._running.try_split(suspended, index)
        if held is None:
            return None
        first, kept = watch.peak - start, watch.live - start
        watch.peak = watch.live
        self._running.run_held(suspended, index, held)
        return InTwo(held=kept, first=first, second=watch.peak - start)
