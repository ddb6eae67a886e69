"""The tape: runs an unmodified model stage by stage, for several micro-batches at once, in the order that it is told.

    begin(...)                              a step: its micro-batches, nothing run yet
    forward(stage, mb), ... forward(epilogue, mb)     the epilogue's backward runs at once after its forward
    backward(stage, mb)                     from the last stage but one down to stage 0; or of a call in two parts
                                            (``split``): backward_inputs(stage, mb), later backward_weights(stage, mb)
    finish()

For each micro-batch stages go up in the forward and down in the backward; between micro-batches any order will do and
gives the same bits. Weights must be attached while a stage that reads them runs. One thread makes all calls.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from penstock.compat.torch import buffers_of, next_number
from penstock.errors import ModelError
from penstock.schedule.program import Stage
from penstock.tape import graph, rng, trees
from penstock.tape.blocks import Block
from penstock.tape.buffers import ModulesBefore
from penstock.tape.compiled import compiled_forwards
from penstock.tape.elsewhere import Elsewhere
from penstock.tape.groups import ParamGroup
from penstock.tape.guard import set_at_work
from penstock.tape.handed import Handed, Kind
from penstock.tape.kept_graph import Keeping
from penstock.tape.kv_cache import CachesOff
from penstock.tape.losses import Compared
from penstock.tape.modes import TrainingFlags
from penstock.tape.parameters import GradientHooks, refuse_changed
from penstock.tape.probe import Probe
from penstock.tape.refusals import NOTHING_TRAINS
from penstock.tape.split import Held, NotInTwoError, Splitting
from penstock.tape.suspended import (
    Event,
    Facts,
    LossFn,
    Site,
    StageFacts,
    SuspendedForward,
    current_forward,
)
from penstock.tape.ulysses import Ulysses
from penstock.tape.waits import Wait

OnGradient = Callable[[nn.Parameter, int, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Movable:
    """A tensor of a saved activation. ``order``: its dimensions in the order of memory, by which its strides come back.

    Kernels may sum in another order for other strides, so a saved activation must return with the strides that it had.
    """

    tensor: torch.Tensor
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Movable":
        order = trees.memory_order(tensor)
        assert order is not None
        return cls(tensor=tensor, order=order)

    def contiguous(self) -> torch.Tensor:
        return self.tensor.detach().permute(self.order)

    def put(self, data: torch.Tensor) -> None:
        assert data.dtype == self.tensor.dtype
        assert data.shape == self.contiguous().shape
        assert data.is_contiguous()
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        self.tensor.data = data.detach().permute(back)


class Tape:
    """Runs a model's stages and hands out the gradients of its parameters as they appear.

    ``on_gradient(parameter, stage, gradient)`` is called in the backward with each parameter's gradient of one
    stage and one micro-batch, in the parameter's dtype; the gradient is the callee's to keep and read, not to write. On
    an accelerator it is called from autograd's thread, with the stream of the backward current.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        groups: Sequence[ParamGroup],
        loss_fn: LossFn,
        *,
        seed: int,
        device: torch.device,
        compile: str | None = None,  # noqa: A002  the name of the setting, and torch's word
        ulysses: Ulysses | None = None,
        splits: bool = False,
        keeps: bool = True,
    ) -> None:
        """``compile``: the backend of ``torch.compile`` that blocks are compiled by; None: they are not. ``ulysses``:
        the model's attention, of ranks that share each sequence; closed with the tape. ``splits``: the probe learns
        which calls' backwards can be run in two parts, and what that takes; ``keeps``: likewise, which graphs can be
        kept, of blocks that are not compiled."""
        self.model = model
        self.compiled = compile is not None
        self.splits = splits
        self.keeps = keeps and compile is None
        self.groups = tuple(groups)
        self.device = device
        self.on_gradient: OnGradient = _drop_gradient
        self.facts: tuple[StageFacts, ...] = ()
        self.flops: tuple[tuple[int, int], ...] = ()
        """FLOP of each stage's forward and backward, of the latest probe."""
        self.sent_by_stages: tuple[tuple[int, int], ...] = ()
        """Bytes that attention sends in each stage's forward and backward, by the latest probe."""
        self.compared: tuple[tuple[Compared, ...], float | None] = ((), None)
        """Losses of torch that the latest probe's code has called, and the value of the model's own."""
        self.handed: tuple[Handed | None, ...] = ()
        """The arguments of each stage's call in the latest probe; None of the model's own code."""
        self.shared: tuple[Kind, ...] = ()
        """The tensors that calls shared there."""
        self.elsewhere: Elsewhere | None = None
        """In a step of a rank of a pipeline: what is between its stages and those of others."""
        self.waits: tuple[Wait, ...] = ()
        """The waits for the device of the forward of the latest probe's micro-batch."""
        self.switched: set[nn.Module] = set()
        """The modules that forwards put into the other mode (``train()``, ``eval()``), as far as probes have seen."""
        self.changing: set[tuple[nn.Module, str]] = set()
        """The buffers, as (module, name), that forwards or backwards change, as far as probes have seen."""
        self._loss_fn = loss_fn
        self._ulysses = ulysses
        self._seed = seed
        forwards = [b.module.forward for b in blocks] if compile is None else compiled_forwards(blocks, compile)
        self.caches = CachesOff(model)
        self.sites = tuple(_site(i, b, f) for i, (b, f) in enumerate(zip(blocks, forwards, strict=True)))
        self._doing = Doing()
        self._replaced = [_install(site, self._doing) for site in self.sites]
        self.hooks = GradientHooks(self.groups, self._gradient_of_segment, self._gradient_of_call)
        self.suspended: list[SuspendedForward] = []
        self._stages: tuple[Stage, ...] = ()
        self._weights: tuple[float, ...] = ()
        self._next: list[int] = []
        self._saved_activations: dict[tuple[int, int], list[Movable]] = {}
        self._held: dict[tuple[int, int], Held] = {}  # of calls whose backward is half done
        self._waiting: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients that its first part makes
        self._losses: list[torch.Tensor | None] = []
        self._random: rng.RandomState | None = None
        self._step = self._first = 0
        self._train = True
        self._stage = 0  # whose backward is running
        self._holes: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    # -- installing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the model back as it was: the blocks' own forwards, its caches, and no hooks."""
        self.abort()
        for site, replaced in zip(self.sites, self._replaced, strict=True):
            site.module.__dict__.pop("forward", None)
            site.module.__dict__.update(replaced)
        self.caches.restore()
        self.hooks.remove()
        if self._ulysses is not None:
            self._ulysses.close()

    def probe(
        self,
        micro_batch: Mapping[str, Any],
        load: Callable[[int], None],
        unload: Callable[[int], None],
        train: bool = True,
    ) -> tuple[Stage, ...]:
        """Learn the model's stages from one micro-batch, run once on the device.

        ``load(group)`` attaches a group's weights, ``unload(group)`` detaches them; each stage's groups are loaded when
        it first touches them and unloaded when it ends. Random state, buffers and gradients are left as they were. With
        ``train=False`` only the forward is run, and what a stage's backward needs is empty.

        Raises:
            ModelError: the model cannot be run block by block, with the reason.
        """
        assert not self.suspended, "a step is open"
        probe = Probe(self, load, unload)
        stages, self.facts = probe.run(micro_batch, train)
        self.handed, self.shared = probe.handed, tuple(probe.seen.shared)
        self.sent_by_stages = probe.sent
        self.flops, self.compared = probe.flops, (tuple(probe.losses.seen), probe.loss)
        self.waits = tuple(probe.waits.found)
        return stages

    def before(self) -> ModulesBefore:
        """The model's buffers and plain attributes as they are now, to be put back behind a run that does not count.

        Not copied, to save memory, are buffers outside the ``state_dict`` (masks, rotary tables) that no probe has seen
        change: one that is written to in place for other values of a micro-batch alone stays as it is written.
        """
        return ModulesBefore(self.model, self.changing)

    @property
    def sent(self) -> int:
        """Bytes that attention has sent so far to ranks that share sequences with this one."""
        return 0 if self._ulysses is None else self._ulysses.sent

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        micro_batches: Sequence[Mapping[str, Any]],
        loss_weights: Sequence[float],
        *,
        stages: Sequence[Stage],
        scale: float = 1.0,
        train: bool = True,
        first: int = 0,
    ) -> None:
        """Start a step over ``micro_batches``, whose tensors are on the device already. Nothing runs yet.

        Each micro-batch's loss counts ``loss_weights[mb] * scale`` in the backward. ``first``: the number of the first
        one in the whole step, of which other ranks have the rest: random numbers depend on it.
        """
        assert not self.suspended, "the previous step is still open"
        assert len(stages) == len(self.facts), "these stages are not the ones that the probe found"
        assert len(micro_batches) == len(loss_weights)
        self.open(step, micro_batches, train, first, flags=TrainingFlags(self.switched))
        self._stages = tuple(stages)
        self._weights = tuple(weight * scale for weight in loss_weights)

    def open(
        self,
        step: int,
        micro_batches: Sequence[Mapping[str, Any]],
        train: bool,
        first: int = 0,
        *,
        flags: TrainingFlags,
    ) -> None:
        """``begin`` without a program: what the probe starts from. ``flags``: of modules that forwards may switch."""
        refuse_changed(self.model, self.groups)
        for site in self.sites:
            _check_installed(site)
        self.hooks.install()  # not earlier: a parameter that leaves the meta device loses its hooks
        self._step, self._train, self._first = step, train, first
        self._random = rng.RandomState.capture(self.device)
        self._losses = [None] * len(micro_batches)
        self._next = [0] * len(micro_batches)
        self.suspended = [
            SuspendedForward(
                model=self.model,
                loss_fn=self._code(i),
                micro_batch=mb,
                index=i,
                train=train,
                device=self.device,
                flags=flags,
            )
            for i, mb in enumerate(micro_batches)
        ]
        set_at_work(self.model, True)

    def _code(self, index: int) -> LossFn:
        """The code that the forward of a micro-batch runs."""
        runs_model = self.elsewhere is None or self.elsewhere.has(0)
        return self._loss_fn if runs_model or self.elsewhere is None else self.elsewhere.code(index)

    def forward(self, stage: int, mb: int, *, keep: bool = False) -> None:
        """Run one stage of one micro-batch; the epilogue's backward too, when training. ``keep``: the graph of a call
        (``Stage.graph``) for its backward, which then does not compute the block again.

        Raises:
            ModelError: the micro-batch takes another way through the model than the probe did.
        """
        between = range(self._next[mb], stage)
        assert self._next[mb] <= stage, f"stage {stage} of micro-batch {mb} is not next"
        assert all(self.elsewhere is not None and not self.elsewhere.has(k) for k in between), "nor those before it"
        try:
            if self.elsewhere is not None:
                self.elsewhere.before(self.suspended[mb], stage)
            self._forward(stage, self.suspended[mb], keep=keep)
            if self.elsewhere is not None:
                self.elsewhere.behind(self.suspended[mb], stage)
        except BaseException:
            self.abort()
            raise
        self._next[mb] = stage + 1

    def backward(self, stage: int, mb: int) -> None:
        """Run the backward of one stage but the epilogue's."""
        self._backward(stage, mb)

    def backward_inputs(self, stage: int, mb: int) -> None:
        """Run the first part of the backward of a call, and of the code behind it: the gradients of its inputs. Those
        of its weights come with ``backward_weights``, which needs no weights."""
        self._backward(stage, mb, Splitting())

    def backward_weights(self, stage: int, mb: int) -> None:
        """Run the second part of the backward of a call."""
        held = self._held.pop((stage, mb), None)
        if held is None:  # no gradient has come to the call
            return
        rng.seed(self._seed, self._step, self._first + mb, stage, rng.BACKWARD, self.device)
        try:
            self.run_held(held, stage)
        except BaseException:
            self.abort()
            raise

    def _backward(self, stage: int, mb: int, splitting: Splitting | None = None) -> None:
        assert self._train
        assert stage < len(self._stages) - 1
        suspended = self.suspended[mb]
        try:
            if self.elsewhere is not None:
                self.elsewhere.before_backward(suspended, stage)
            self.backward_code(suspended, stage)
            if self.facts[stage].site is not None:
                self.backward_call(suspended, stage, splitting)
            if self.elsewhere is not None:
                self.elsewhere.behind_backward(suspended, stage)
        except BaseException:
            self.abort()
            raise
        self._saved_activations.pop((stage, mb), None)
        self._drop_inputs(stage, mb)

    def losses(self) -> list[torch.Tensor]:
        """Each micro-batch's loss, detached, of no dimension, on the device, unscaled."""
        assert all(loss is not None for loss in self._losses), "not all micro-batches have a loss yet"
        return [loss for loss in self._losses if loss is not None]

    def finish(self) -> None:
        """End the step. The losses can still be asked for.

        Raises:
            ModelError: in an evaluation, the loss function has kept what was let go of.
        """
        movables = [] if self._train else [m for found in self._saved_activations.values() for m in found]
        let_go = [weakref.ref(movable.tensor) for movable in movables]
        del movables
        self.abort()
        _refuse_kept(let_go)

    def abort(self) -> None:
        """End the step wherever it is. Suspended forwards are closed; the tape is ready for the next ``begin``."""
        set_at_work(self.model, False)
        all_suspended, self.suspended = self.suspended, []
        self._saved_activations.clear()
        self._held.clear()
        self._waiting.clear()
        if self._random is not None:
            self._random.restore()
            self._random = None
        with ExitStack() as all_of_them:  # also those after one whose own clean-up raises
            for suspended in all_suspended:
                all_of_them.callback(suspended.close)

    # -- saved activations ----------------------------------------------------------------------------------------

    def saved_activation(self, stage: int, mb: int) -> list[torch.Tensor]:
        """The tensors that ``stage`` made and only stage + 1 reads, which may leave the device in between.

        Contiguous tensors without a graph, of the same shapes and dtypes and in the same order for every micro-batch of
        the same shape. They share memory with what the model holds until ``drop``.
        """
        return [movable.contiguous() for movable in self._saved_activations.get((stage, mb), ())]

    def drop(self, stage: int, mb: int) -> None:
        """Let go of the data of a saved activation. What is left reads as NaN."""
        for movable in self._saved_activations.get((stage, mb), ()):
            movable.tensor.data = self._hole(movable.tensor).expand(movable.tensor.shape)

    def restore(self, stage: int, mb: int, tensors: Sequence[torch.Tensor]) -> None:
        """Give a dropped saved activation its data again: ``tensors`` in the order of ``saved_activation``."""
        for movable, data in zip(self._saved_activations.get((stage, mb), ()), tensors, strict=True):
            movable.put(data)

    def _hole(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.dtype, tensor.device)
        if key not in self._holes:
            value = float("nan") if tensor.is_floating_point() else 0
            self._holes[key] = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        return self._holes[key]

    def _drop_inputs(self, stage: int, mb: int) -> None:
        """Let go of the saved activation that ``stage`` has read; its gradient is still needed."""
        if stage > 0:
            self.drop(stage - 1, mb)

    # -- one stage ------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, suspended: SuspendedForward, *, keep: bool) -> None:
        facts, last = self.facts[stage], len(self._stages) - 1
        if facts.site is None:
            with self._packing(stage):
                event = self.run_code(suspended, stage)
        else:
            self.expect_call(suspended, stage, facts.site)
            suspended.keeping = Keeping(self._packer(stage), next_number()) if keep else None
            self.run_call(suspended, stage, facts.call)
            event = "cut"
            if self.facts[stage + 1].site is not None and (self.elsewhere is None or self.elsewhere.goes_on):
                event = suspended.resume(stage)
        if self.elsewhere is None or self.elsewhere.goes_on:
            self._check_event(suspended, stage, event)
        self._note_saved_activation(suspended, stage)
        if stage == last:
            self._losses[suspended.index] = self.run_loss(suspended, self._weights[suspended.index])
        if not self._train or stage == last:
            self._drop_inputs(stage, suspended.index)

    def note_input(self, stage: int, mb: int, tensor: torch.Tensor) -> None:
        """The saved activation of a stage that another rank has is what it has sent."""
        self._saved_activations[stage, mb] = [Movable.of(tensor)]

    def _packing(self, stage: int) -> AbstractContextManager[None]:
        reads = self._stages[stage].forward_reads
        if not self._train or stage == len(self._stages) - 1 or not reads:
            return nullcontext()
        return self._packer(stage).hooks()

    def _packer(self, stage: int) -> graph.WeightPacker:
        """Knows the weights that a stage's forward reads."""
        reads = self._stages[stage].forward_reads
        return graph.WeightPacker(s.parameter for g in reads for s in self.groups[g].slices)

    def _note_saved_activation(self, suspended: SuspendedForward, stage: int) -> None:
        places = self.facts[stage].offload
        if places:
            arrival = suspended.arrival
            found = trees.places(suspended.outputs) if arrival is None else arrival.tensors
            # What can be moved in the largest micro-batches, which were probed, may be a view in this one.
            tensors = [found[p] for p in places if p in found]
            self._saved_activations[stage, suspended.index] = [
                Movable.of(t) for t in tensors if trees.is_movable(t, self.device)
            ]

    def run_code(self, suspended: SuspendedForward, stage: int) -> Event:
        """Let the model's own code run, as a stage of its own."""
        rng.seed(self._seed, self._step, self._first + suspended.index, stage, rng.FORWARD, self.device)
        suspended.starts[stage] = next_number()
        return suspended.resume(stage)

    def resume(self, suspended: SuspendedForward, stage: int) -> Event:
        """Let the model's own code go on from a call that was made elsewhere."""
        suspended.starts[stage] = next_number()
        return suspended.resume(stage)

    def run_call(self, suspended: SuspendedForward, stage: int, facts: Facts) -> None:
        """Run the block that a forward is suspended at, and cut the graph behind it."""
        rng.seed(self._seed, self._step, self._first + suspended.index, stage, rng.FORWARD, self.device)
        suspended.facts = facts
        event = suspended.resume(stage)
        assert event == "cut"

    def run_loss(self, suspended: SuspendedForward, weight: float) -> torch.Tensor:
        """Take the loss of a forward that has ended and run the epilogue backward. Returns the loss, detached."""
        loss, suspended.loss = suspended.loss, None
        assert loss is not None
        value = loss.detach()
        if self._train:
            if not loss.requires_grad:
                raise ModelError(NOTHING_TRAINS)
            root = (get_gradient_edge(loss), torch.full_like(value, weight))
            del loss
            last = max(suspended.starts)
            with self._backward_of(last, "segment"):
                suspended.backward_code(last, root)
        return value

    def backward_code(self, suspended: SuspendedForward, stage: int) -> None:
        """Backward of the model's own code that belongs to ``stage``."""
        rng.seed(self._seed, self._step, self._first + suspended.index, stage, rng.BACKWARD, self.device)
        with self._backward_of(stage, "segment"):
            suspended.backward_code(stage)

    def call_elsewise(self, suspended: SuspendedForward, stage: int) -> None:
        """See ``SuspendedForward.call_elsewise``; nothing is learned on the meta device."""
        if self.device.type != "meta":
            suspended.call_elsewise(stage)

    def backward_call(self, suspended: SuspendedForward, stage: int, splitting: Splitting | None = None) -> None:
        """Recompute a block call and run it backward; with ``splitting`` the first part of that."""
        rng.seed(self._seed, self._step, self._first + suspended.index, stage, rng.FORWARD, self.device)
        with self._backward_of(stage, "call" if splitting is None else "inputs"):
            held = self._run_back(suspended, stage, splitting)
        if held is not None:
            self._held[stage, suspended.index] = self._with_waiting(held)

    def _run_back(self, suspended: SuspendedForward, stage: int, splitting: Splitting | None) -> Held | None:
        try:
            return suspended.backward_call(stage, splitting)
        except NotInTwoError as error:
            site = self.facts[stage].site
            assert site is not None
            raise ModelError(
                f"block {site.name!r}: its backward can only be run as a whole for micro-batch {suspended.index}, and "
                "could be split for the first one of its shape: let it do the same for all, or give schedule='1f1b'"
            ) from error

    def try_split(self, suspended: SuspendedForward, stage: int) -> Held | None:
        """In a probe: run the first part of a call's backward, of which nothing comes to other stages. None: it cannot
        be run in two parts, or nothing would be left to the second."""
        rng.seed(self._seed, self._step, self._first + suspended.index, stage, rng.FORWARD, self.device)
        try:
            with self._backward_of(stage, "inputs"):
                held = suspended.try_split(stage)
        except (NotInTwoError, CheckpointError):  # a checkpoint within may save in other ways when it runs again
            held = None
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):  # which a transform of torch.func has no way to follow
                raise
            held = None
        if held is None or not held.products:
            self._waiting.clear()
            return None
        return self._with_waiting(held)

    def _with_waiting(self, held: Held) -> Held:
        """The rest of a backward, with the gradients of parameters that its first part has made itself."""
        held.waiting, self._waiting = self._waiting, []
        return held

    def run_held(self, held: Held, stage: int) -> None:
        """Run the second part of a call's backward, of which nothing is left then."""
        with self._backward_of(stage, "call"):
            while held.waiting:
                parameter, gradient = held.waiting.pop(0)
                self.on_gradient(parameter, stage, gradient)
                del gradient
            held.run()

    @contextmanager
    def _backward_of(self, stage: int, what: Literal["segment", "call", "inputs"]) -> Iterator[None]:
        self._stage, self._doing.what = stage, what
        try:
            yield
        finally:
            self._doing.what = "forward"

    # -- gradients ------------------------------------------------------------------------------------------------

    def _gradient_of_segment(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.suspended or self._doing.what != "segment":
            return None
        self.on_gradient(parameter, self._stage, _dense(gradient))
        # What autograd hands on from here is thrown away; one element instead of the gradient lets it be freed now.
        if gradient.is_sparse:  # which would have to be replaced by a sparse one, and is small
            return None
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(gradient)

    def _gradient_of_call(self, parameter: torch.Tensor) -> None:
        if not self.suspended or parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        gradient = _dense(gradient)
        if self._doing.what == "forward":
            raise ModelError(
                "backward() was called in the forward, where the gradients of weights would not be kept: add the "
                "tensor that it is called on to the loss"
            )
        if self._doing.what == "inputs":
            self._waiting.append((parameter, gradient))
        elif self._doing.what == "call":  # that of a segment has been seen before it was accumulated
            self.on_gradient(parameter, self._stage, gradient)

    # -- the same way for every micro-batch -----------------------------------------------------------------------

    def expect_call(self, suspended: SuspendedForward, stage: int, site: Site) -> None:
        """Raise ModelError where a forward is not suspended at the call of a block."""
        arrival = suspended.arrival
        if arrival is None or arrival.site is not site:
            came = "ends" if arrival is None else f"calls block {arrival.site.name!r}"
            raise ModelError(
                f"micro-batch {suspended.index} {came} where the first micro-batch calls block {site.name!r} "
                f"(stage {stage}): "
                "every micro-batch must take the same way through the blocks (is layer dropout switched on?)"
            )

    def _check_event(self, suspended: SuspendedForward, stage: int, event: Event) -> None:
        if stage == len(self._stages) - 1 and event != "done":
            assert suspended.arrival is not None
            raise ModelError(
                f"micro-batch {suspended.index} calls block {suspended.arrival.site.name!r} where the first one ended: "
                "every micro-batch must take the same way through the blocks (is layer dropout switched on?)"
            )
        if stage + 1 < len(self._stages) and event != "cut":
            following = self.facts[stage + 1].site
            if following is not None:
                self.expect_call(suspended, stage + 1, following)


@dataclass
class Doing:
    """A tape's present work: a forward (or nothing), or the backward of the model's own code, of a block call, or of a
    call's inputs alone."""

    what: Literal["forward", "segment", "call", "inputs"] = "forward"


class Boundary:
    """Stands in for a block's ``forward``: suspends a micro-batch's forward that arrives, and otherwise is not there.

    An object and not a closure, so that a deep copy of the model calls its own blocks.
    """

    def __init__(self, site: Site, doing: Doing) -> None:
        self._site = site
        self._doing = doing
        self.__wrapped__ = site.forward  # what inspect.signature looks at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        suspended = current_forward()
        if suspended is not None:
            return suspended.arrive(self._site, args, kwargs)
        if self._doing.what == "segment":
            raise ModelError(
                f"block {self._site.name!r} is called again in the backward (by torch.utils.checkpoint, or a function "
                "with a backward of its own, around the block): leave that out, as Penstock recomputes blocks by itself"
            )
        return self._site.forward(*args, **kwargs)


def _site(index: int, block: Block, forward: Callable[..., Any]) -> Site:
    trainable = any(p.requires_grad for p in block.module.parameters())
    buffered = tuple(m for m in block.module.modules() if buffers_of(m))
    return Site(
        index=index, name=block.name, module=block.module, forward=forward, trainable=trainable, buffered=buffered
    )


def _install(site: Site, doing: Doing) -> dict[str, Any]:
    """Put a boundary in front of a block. Returns what the module's ``__dict__`` must get back in the end."""
    attributes = vars(site.module)
    replaced = {key: attributes[key] for key in ("forward",) if key in attributes}
    attributes["forward"] = Boundary(site, doing)
    return replaced


def _check_installed(site: Site) -> None:
    if not isinstance(vars(site.module).get("forward"), Boundary):
        raise ModelError(
            f"the forward of block {site.name!r} was replaced after wrap(): replace it before, and wrap the model again"
        )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor: ``nn.Embedding(sparse=True)`` makes sparse ones."""
    if gradient.is_sparse and gradient.is_meta:  # of which torch makes none
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _drop_gradient(parameter: nn.Parameter, stage: int, gradient: torch.Tensor) -> None:
    raise AssertionError("Tape.on_gradient is not set")


def _refuse_kept(let_go: Sequence["weakref.ref[torch.Tensor]"]) -> None:
    """Refuse an evaluation whose outputs somebody keeps: he will read them, and they would read as NaN."""
    if any(ref() is not None for ref in let_go):
        gc.collect()  # or they are only part of a cycle
    for kept in (ref() for ref in let_go):
        if kept is not None:
            raise ModelError(
                f"a tensor of shape {tuple(kept.shape)} that one block hands to the next was kept after the evaluation "
                "(as hidden states are, in a model's output), and its memory is given to others when the next has run: "
                "in loss_fn, keep copies (output.hidden_states[1].clone()), or nothing of that kind"
            )
