"""The tape: runs an unmodified model stage by stage, for several micro-batches at once, in the order that it is told.

    begin(...)                              a step: its micro-batches, nothing run yet
    forward(stage, mb), ... forward(epilogue, mb)     the epilogue's backward runs at once after its forward
    backward(stage, mb)                     from the last stage but one down to stage 0; or of a call in two parts
                                            (``split``): backward_inputs(stage, mb), later backward_weights(stage, mb)
    finish()

For each micro-batch stages go up in the forward and down in the backward; between micro-batches any order will do and
gives the same bits. Weights must be attached while a stage that reads them runs. One thread makes all calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from penstock.compat.torch import next_number
from penstock.errors import ModelError
from penstock.schedule.program import Stage
from penstock.tape import graph, rng, trees
from penstock.tape.blocks import Block
from penstock.tape.boundary import check_installed, install, remove, site_of
from penstock.tape.buffers import ModulesBefore
from penstock.tape.compiled import compiled_forwards
from penstock.tape.elsewhere import Elsewhere
from penstock.tape.facts import Learned, StageFacts
from penstock.tape.generators import Generator
from penstock.tape.groups import ParamGroup
from penstock.tape.guard import set_at_work
from penstock.tape.kept_graph import Keeping
from penstock.tape.kv_cache import CachesOff
from penstock.tape.let_go import LetGoError
from penstock.tape.modes import TrainingFlags
from penstock.tape.parameters import refuse_changed, refuse_written, versions
from penstock.tape.places import Holder, held, put, values_in
from penstock.tape.probe import Probe
from penstock.tape.running import OnGradient, Running
from penstock.tape.saved_activations import SavedActivations, refuse_kept
from penstock.tape.split import Held, NotInTwoError, Splitting
from penstock.tape.suspended import Event, LossFn, SuspendedForward
from penstock.tape.ulysses import Ulysses
from penstock.tape.undo import Undo
from penstock.tape.weight_views import Alias


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
        aliases: Sequence[Alias] = (),
    ) -> None:
        """``compile``: the backend of ``torch.compile`` that blocks are compiled by; None: they are not. ``ulysses``:
        the model's attention, of ranks that share each sequence; closed with the tape. ``splits``: the probe learns
        which calls' backwards can be run in two parts, and what that takes; ``keeps``: likewise, which graphs can be
        kept, of blocks that are not compiled. ``aliases``: of the model's weights, from before they left it."""
        self.model = model
        self.compiled = compile is not None
        self.splits = splits
        self.keeps = keeps and compile is None
        self.groups = tuple(groups)
        self.aliases = tuple(aliases)
        self.device = device
        self.facts: tuple[StageFacts, ...] = ()
        """Of the stages that the next step runs."""
        self.elsewhere: Elsewhere | None = None
        """In a step of a rank of a pipeline: what is between its stages and those of others."""
        self.switched: set[nn.Module] = set()
        """The modules that forwards put into the other mode (``train()``, ``eval()``), as far as probes have seen."""
        self.changing: set[tuple[nn.Module, str]] = set()
        """The buffers, as (module, name), that forwards or backwards change, as far as probes have seen."""
        self.restored: set[Holder] = set()
        """The places that forwards leave as they have found them, having changed them in between, as far as probes have
        seen: each micro-batch finds them so, also where others are under way."""
        self.flowing: set[Holder] = set()
        """The places outside of modules that one stage alone changes, and goes on with from micro-batch to micro-batch,
        while later ones may read what their own has left there, as far as probes have seen."""
        self.moving: set[Holder] = set()
        """The places outside of modules that forwards change, as far as probes have seen."""
        self.generators: dict[int, Generator] = {}
        """The model's own, by identity, as far as probes have seen."""
        self.loss_fn = loss_fn
        self.undo = Undo()
        """Takes back the temporary changes that calls have made of the model."""
        self._ulysses = ulysses
        forwards = [b.module.forward for b in blocks] if compile is None else compiled_forwards(blocks, compile)
        self.caches = CachesOff(model)
        self.sites = tuple(site_of(i, b, f) for i, (b, f) in enumerate(zip(blocks, forwards, strict=True)))
        self.running = Running(self.groups, seed=seed, device=device)
        """Runs one stage at a time."""
        self._replaced = [install(site, self.running.doing) for site in self.sites]
        self.saved_activations = SavedActivations()
        self.suspended: list[SuspendedForward] = []
        self._stages: tuple[Stage, ...] = ()
        self._weights: tuple[float, ...] = ()
        self._next: list[int] = []
        self._held: dict[tuple[int, int], Held] = {}  # of calls whose backward is half done
        self._losses: list[torch.Tensor | None] = []
        self._random: rng.RandomState | None = None
        self._train = True
        self._versions = versions(self.groups)
        """versions of the parameters, as the last step has left them"""

    @property
    def on_gradient(self) -> OnGradient:
        return self.running.on_gradient

    @on_gradient.setter
    def on_gradient(self, callee: OnGradient) -> None:
        self.running.on_gradient = callee

    # -- installing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the model back as it was: the blocks' own forwards, its caches, and no hooks."""
        with ExitStack() as left:  # all of it, also where a forward that is closed raises on its way out
            if self._ulysses is not None:
                left.callback(self._ulysses.close)
            left.callback(self.running.hooks.remove)
            left.callback(self.caches.restore)
            for site, replaced in zip(self.sites, self._replaced, strict=True):
                left.callback(remove, site, replaced)
            left.callback(self.abort)  # which comes first

    def probe(
        self,
        micro_batch: Mapping[str, Any],
        load: Callable[[int], None],
        unload: Callable[[int], None],
        *,
        all_copies: bool,
        train: bool = True,
        alone: bool = False,
    ) -> Learned:
        """Learn the model's stages from one micro-batch, run once on the device.

        ``load(group)`` attaches a group's weights, ``unload(group)`` detaches them; each stage's groups are loaded when
        it first touches them and unloaded when it ends. ``all_copies``: all are copies, of which writes are lost.
        Random state, buffers and gradients are left as they were. With ``train=False`` only the forward is run, and
        what a stage's backward needs is empty. ``alone``: no other rank has to bring weights, or send anything, for a
        forward, so that one more may be run to see what goes on from micro-batch to micro-batch (``changes``).

        Raises:
            ModelError: the model cannot be run block by block, with the reason.
        """
        assert not self.suspended, "a step is open"
        return Probe(self, load, unload, all_copies).run(micro_batch, train, alone)

    def before(self, *, train: bool) -> ModulesBefore:
        """The model's buffers and plain attributes as they are now, to be put back behind a run that does not count;
        with ``train`` also what forwards change elsewhere, which an evaluation does not put back.

        Not copied, to save memory, are buffers outside the ``state_dict`` (masks, rotary tables) that no probe has seen
        change: one that is written to in place for other values of a micro-batch alone stays as it is written.
        """
        return ModulesBefore(self.model, self.changing, self.generators.values(), self.moving if train else ())

    @property
    def sent(self) -> int:
        """Bytes that attention has sent so far to ranks that share sequences with this one."""
        return 0 if self._ulysses is None else self._ulysses.sent

    @property
    def exchanges(self) -> int:
        """The number of exchanges in which attention has sent these."""
        return 0 if self._ulysses is None else self._ulysses.exchanges

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
        assert len(stages) == len(self.facts), "the tape has the facts of other stages"
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
        refuse_written(self.groups, self._versions)
        for site in self.sites:
            check_installed(site)
        self.running.hooks.install()  # not earlier: a parameter that leaves the meta device loses its hooks
        self._train = train
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
        self.running.begin(step, train=train, first=first)
        set_at_work(self.model, True)

    def _code(self, index: int) -> LossFn:
        """The code that the forward of a micro-batch runs."""
        elsewhere = self.elsewhere
        return self.loss_fn if elsewhere is None or elsewhere.has(0) else elsewhere.code(index)

    def forward(self, stage: int, mb: int, *, keep: bool = False, stay: bool = False) -> None:
        """Run one stage of one micro-batch; the epilogue's backward too, when training. ``keep``: the graph of a call
        (``Stage.graph``) for its backward, which then does not compute the block again; ``stay``: until that the
        weights that the stage reads stay where they are.

        Behind an error the step is to be ended (``abort``), once nobody works on what it has made any more.

        Raises:
            ModelError: the micro-batch takes another way through the model than the probe did.
        """
        between = range(self._next[mb], stage)
        assert self._next[mb] <= stage, f"stage {stage} of micro-batch {mb} is not next"
        assert all(self.elsewhere is not None and not self.elsewhere.has(k) for k in between), "nor those before it"
        suspended = self.suspended[mb]
        last = stage == len(self._stages) - 1
        others = self.flowing.difference(self.facts[stage].assigned)
        shared = values_in(others if last else self.restored | others)
        with self._named(stage, mb), held(shared):
            put(suspended.own.items())
            if self.elsewhere is not None:
                self.elsewhere.before(suspended, stage)
            self._forward(stage, suspended, keep=keep, stay=stay)
            suspended.own.update(values_in(self.facts[stage].assigned))
            if self.elsewhere is not None:
                self.elsewhere.behind(suspended, stage)
            if last:
                suspended.own.clear()
        self._next[mb] = stage + 1

    def backward_inputs(self, stage: int, mb: int) -> None:
        """Run the first part of the backward of a call, and of the code behind it: the gradients of its inputs. Those
        of its weights come with ``backward_weights``, which needs no weights."""
        self.backward(stage, mb, Splitting())

    def backward_weights(self, stage: int, mb: int) -> None:
        """Run the second part of the backward of a call."""
        held = self._held.pop((stage, mb), None)
        if held is None:  # no gradient has come to the call
            return
        with self._named(stage, mb):
            self.running.run_held(self.suspended[mb], stage, held)

    def backward(self, stage: int, mb: int, splitting: Splitting | None = None) -> None:
        """Run the backward of one stage but the epilogue's. ``splitting``: the first part alone."""
        assert self._train
        assert stage < len(self._stages) - 1
        suspended = self.suspended[mb]
        with self._named(stage, mb):
            if self.elsewhere is not None:
                self.elsewhere.before_backward(suspended, stage)
            self.running.backward_code(suspended, stage)
            if self.facts[stage].site is not None:
                self._backward_call(suspended, stage, splitting)
            if self.elsewhere is not None:
                self.elsewhere.behind_backward(suspended, stage)
        self.saved_activations.forget(stage, mb)
        self._drop_inputs(stage, mb)

    @contextmanager
    def _named(self, stage: int, mb: int) -> Iterator[None]:
        """Inside, a read of what has been let go of is an error that says what may not be."""
        try:
            yield
        except LetGoError as error:
            raise ModelError(
                f"{error.what} is read in stage {stage} ({self._stages[stage].name}) of micro-batch {mb}, which the "
                "micro-batch that the plan was made from did not do there, so that it is elsewhere by now. What is "
                "read where must not depend on the values of the data: where the model leaves it out, let it add "
                "0 * x.sum() of it to what it computes"
            ) from error

    def _backward_call(self, suspended: SuspendedForward, stage: int, splitting: Splitting | None) -> None:
        try:
            held = self.running.backward_call(suspended, stage, splitting)
        except NotInTwoError as error:
            site = self.facts[stage].site
            assert site is not None
            raise ModelError(
                f"block {site.name!r}: its backward can only be run as a whole for micro-batch {suspended.index}, and "
                "could be split for the first one of its shape: let it do the same for all, or give schedule='1f1b'"
            ) from error
        if held is not None:
            self._held[stage, suspended.index] = held

    def losses(self) -> list[torch.Tensor]:
        """Each micro-batch's loss, detached, of no dimension, on the device, unscaled."""
        assert all(loss is not None for loss in self._losses), "not all micro-batches have a loss yet"
        return [loss for loss in self._losses if loss is not None]

    def finish(self) -> None:
        """End the step. The losses can still be asked for.

        Raises:
            ModelError: in an evaluation, the loss function has kept what was let go of.
        """
        let_go = [] if self._train else self.saved_activations.references()
        self.abort()
        refuse_kept(let_go)

    def abort(self) -> None:
        """End the step wherever it is. Suspended forwards are closed; the tape is ready for the next ``begin``."""
        set_at_work(self.model, False)
        for group in self.groups:  # forwards that are closed may read a weight on their way out
            group.take_back()
        self.running.end()
        self.saved_activations.clear()
        self._held.clear()
        if self._random is not None:
            self._random.restore()
        with ExitStack() as all_of_them:  # also those after one whose own clean-up raises
            all_of_them.callback(self._closed)
            for suspended in self.suspended:
                all_of_them.callback(suspended.close)

    def _closed(self) -> None:
        """All forwards are closed. Last: where something before breaks off, all of it can be done again."""
        self.suspended = []
        if self._random is not None:  # else nothing was opened
            self._versions = versions(self.groups)
            self._random = None

    def _drop_inputs(self, stage: int, mb: int) -> None:
        """Let go of the saved activation that ``stage`` has read; its gradient is still needed."""
        if stage > 0:
            self.saved_activations.drop(stage - 1, mb)

    # -- one stage ------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, suspended: SuspendedForward, *, keep: bool, stay: bool) -> None:
        facts, last = self.facts[stage], len(self._stages) - 1
        if facts.site is None:
            with self._packing(stage):
                event = self.running.run_code(suspended, stage)
        else:
            suspended.expect_call(stage, facts.site)
            apart = stay and not facts.reachable
            suspended.keeping = Keeping(None if apart else self._packer(stage), next_number()) if keep else None
            goes_on = self.facts[stage + 1].site is not None and (self.elsewhere is None or self.elsewhere.goes_on)
            event = self.running.run_call(suspended, stage, facts, goes_on=goes_on)
        if self.elsewhere is None or self.elsewhere.goes_on:
            self._check_event(suspended, stage, event)
        self._note_saved_activation(suspended, stage)
        if stage == last:
            self._losses[suspended.index] = self.running.run_loss(suspended, self._weights[suspended.index])
        if not self._train or stage == last:
            self._drop_inputs(stage, suspended.index)

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
            movable = [t for t in tensors if trees.is_movable(t, self.device)]
            self.saved_activations.note(stage, suspended.index, movable)

    def _check_event(self, suspended: SuspendedForward, stage: int, event: Event) -> None:
        if stage == len(self._stages) - 1 and event != "done":
            assert suspended.arrival is not None
            raise ModelError(
                f"micro-batch {suspended.index} calls block {suspended.arrival.site.name!r} where the one that the "
                "plan was made from ended: every micro-batch must take the same way through the blocks (is layer "
                "dropout switched on?)"
            )
        if stage + 1 < len(self._stages) and event != "cut":
            following = self.facts[stage + 1].site
            if following is not None:
                suspended.expect_call(stage + 1, following)
