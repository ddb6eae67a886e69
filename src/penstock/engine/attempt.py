"""A step under way: runs of one plan until one of them counts, or none does.

A step that speculates changes nothing that counts: what it writes to disk lies beside the state that the last commit
names. Once its norm is known it is

    within the limit    what it has written counts from now on
    over the limit      dropped, and run again with the factor known: the same random numbers, so the same gradients
    infinite or NaN     dropped, and skipped: the sums of squares that the norm is made of say which gradient it was

What is not on disk waits for the norm, and is left alone by a run that is dropped. Copies of weights in memory are new
already, though: they are read again from what counts.

What happens when is the machine's to say (``fate``); here is how each action is done.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.engine import batch
from penstock.engine.durability import Actions, Durability
from penstock.engine.fate import Action, Event, State
from penstock.engine.resources import EngineResources
from penstock.engine.runner import Runner
from penstock.engine.trace import MemorySample, TraceEvent
from penstock.errors import ModelError, NonFiniteError
from penstock.runtime.context import StepContext, Verdict
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.program import ALIGN
from penstock.state.stats import StepStats
from penstock.tape.buffers import ModulesBefore
from penstock.tape.groups import groups_of

log = logging.getLogger("penstock")

_EVENTS: Mapping[Verdict | None, Event] = {
    Verdict.WITHIN: Event.WITHIN,
    Verdict.OVER: Event.OVER,
    Verdict.NOT_FINITE: Event.NOT_FINITE,
}


@dataclass(kw_only=True)
class Attempt:
    """One step, with what it has found out so far."""

    runner: Runner
    context: StepContext
    """the context of the run that counts, or of the last one"""
    micro_batches: Sequence[Mapping[str, Any]]
    """as they were given: each run has copies of its own"""
    loss_weights: Sequence[float]
    durability: Durability
    resources: EngineResources
    before: ModulesBefore
    """the model's buffers and plain attributes, from before the step"""
    flops: float
    """FLOP that this rank computes of the model in it"""
    began: float
    """in ``perf_counter`` seconds"""
    origin: float
    """the instant at which ``trace`` begins, in ``perf_counter`` seconds"""
    count: Callable[["Attempt"], None]
    """makes the run one step further"""
    losses: Sequence[float] = ()
    repeats: int = 0
    """runs besides the first"""
    non_finite: str | None = None
    """the gradient that was infinite or NaN, if one was"""
    trace: Sequence[TraceEvent] = ()
    samples: Sequence[MemorySample] = ()
    stats: StepStats | None = None
    _moved: defaultdict[Lane, int] = field(default_factory=lambda: defaultdict(int))
    _busy: defaultdict[Lane, float] = field(default_factory=lambda: defaultdict(float))
    """bytes that its runs have moved so far, with what was read to drop them, and the seconds of both, by lane"""

    @property
    def actions(self) -> Actions:
        """The functions by which a step carries out the actions that ``fate`` asks for."""
        return {
            Action.MARK: partial(self.durability.mark, f"step {self.context.step} was not taken"),
            Action.MARK_PENDING: self.durability.mark_pending,
            Action.RUN: self._run,
            Action.DROP: self._drop,
            Action.REPEAT: self._repeat,
            Action.FILL: self._fill,
            Action.FLIP: self._flip,
            Action.COUNT: self._count,
            Action.COMMIT: self.durability.commit,
        }

    @property
    def skipped(self) -> bool:
        return self.context.verdict is Verdict.NOT_FINITE

    def missed(self) -> dict[str, int]:
        """The number of updates that each parameter has been passed over in, once this step's is counted. In a pipeline
        each rank knows it of its own parameters."""
        held, ranks = self.resources.held, self.resources.ranks
        missed = self.context.update.missed_after(held)
        if not ranks.are_pipeline:
            return missed
        own = {s.name for group in held for s in group.slices}
        said = ranks.gather_objects("parameters without a gradient", {n: missed[n] for n in own & missed.keys()})
        return {name: count for by_rank in said for name, count in by_rank.items()}

    def _run(self) -> Event:
        resources = self.resources
        inputs = batch.all_to_device(self.micro_batches, resources.device, resources.dtype)
        self.losses = self.runner.run(self.context, inputs, self.loss_weights)
        if self.durability.state is State.FINISHING:  # what the step before had left to do was all in memory
            self.durability.complete()
        failure, self.context.failure = self.context.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame, which would hold it and the micro-batches
        self.before.refuse_unplaced()
        self._sync_buffers()
        if self.skipped:
            self.non_finite = self._find_not_finite()
            if not resources.arrays.droppable:
                raise NonFiniteError(
                    f"{self._not_finite}, and the state was updated with it. Load a snapshot; with clip_grad_norm set "
                    "such a step is skipped"
                )
            if not resources.settings.needs_norm:
                raise NonFiniteError(
                    f"{self._not_finite}. Nothing was updated; with clip_grad_norm set such a step is skipped"
                )
        return _EVENTS[self.context.verdict]

    def _find_not_finite(self) -> str:
        """The parameter whose gradient is infinite or NaN, or the few that share its sum of squares: of the first group
        in the order of the backward the last, which is behind the others in most blocks. A group that several stages
        use is taken for the last one's of the backward: what spoils an earlier one's spoils those between them, too."""
        stages = {g: stage for stage in reversed(self.runner.plan.program.stages) for g in stage.gradients}
        found: tuple[int, str] | None = None
        for g, stage in stages.items():
            bad = np.flatnonzero(~np.isfinite(self.context.partials[g]))
            if bad.size and (found is None or stage.index > found[0]):
                first, end = int(bad[-1]) * ALIGN, (int(bad[-1]) + 1) * ALIGN
                own = [s for s in self.resources.groups[g].slices if s.trainable]
                names = [s.name for s in own if s.offset < end and first < s.offset + s.numel]
                which = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
                found = stage.index, f"the gradient of {which} ({stage.name})"
        of_all = self.resources.ranks.gather_objects("gradient that is not finite", found)
        return max((one for one in of_all if one is not None), default=(0, "a gradient"))[1]

    @property
    def _not_finite(self) -> str:
        return f"step {self.context.step}: {self.non_finite} was infinite or NaN"

    def _sync_buffers(self) -> None:
        """Each rank has its own micro-batches, and changes buffers of the model in its own way: from here on all have
        the same ones, or each its own, as the settings say."""
        ranks, buffers, how = self.resources.ranks, self.resources.buffers, self.resources.settings.sync_buffers
        if ranks.size == 1 or how == "own" or not buffers.tensors():
            return
        said = ranks.gather_objects("buffers that the forward has changed", buffers.changed(self.before.copies()))
        changed = sorted({name for names in said for name in names})
        if not changed:
            return
        refused = None
        if ranks.are_pipeline:
            refused = (
                f"{changed[0]!r}, and of a pipeline each rank would have its own. Let it be (module.eval()), or train "
                "with ranks that share all state (without a pipeline)"
            )
        elif how is None:
            refused = (
                f"{changed[0]!r}, each rank in its own way. Say what ranks go on with, sync_buffers='mean' or 'first' "
                "for all, or 'own' for each its own; or let it be (module.eval())"
            )
        elif (differs := buffers.synchronise(changed, ranks, how)) is not None:
            refused = (
                f"{differs!r} to other whole numbers on each rank, of which there is no mean: sync_buffers='first' "
                "takes the first rank's, and 'own' leaves each its own"
            )
        if refused is not None:
            raise ranks.of_all(ModelError(f"the forward changes {refused}"))

    def _drop(self) -> Event:
        began = time.perf_counter()
        if nbytes := self.resources.arrays.drop_step():
            self._moved["read"] += nbytes
            self._busy["read"] += time.perf_counter() - began
        self.runner.count(self._moved, self._busy)
        self.before.put_back()
        if self.durability.state is State.SKIPPING:
            log.warning("%s; nothing was updated", self._not_finite)
            self._report()
        return Event.DROPPED

    def _repeat(self) -> Event:
        """Run the step anew, with the factor that is known now. What the step before had left is done."""
        self.repeats += 1
        before = self.context
        self.context = StepContext(
            step=before.step,
            update=replace(before.update, touched=set()),
            repeats=True,
            clip=before.clip,
            loss_scale=before.loss_scale,
        )
        return self._run()

    def _fill(self) -> Event:
        self.runner.count(self._moved, self._busy)
        self._report()
        self.resources.arrays.complete_step(self.runner.bound.late_elements)
        return Event.FILLED

    def _flip(self) -> Event:
        touched = groups_of(self.context.update.touched, self.resources.groups)
        self.resources.arrays.flip_step(self.runner.bound.late_elements, touched)
        return Event.FILLED

    def _count(self) -> Event:
        self.count(self)
        if self.skipped or not self.runner.bound.late_elements:
            return Event.COUNTED
        self.durability.hold(self.context.step, self.context.update, self.resources.buffers.tensors())
        return Event.DELAYED

    def _report(self) -> None:
        """Set the step's trace, samples and statistics, all but those of its commit."""
        context, runner, ranks = self.context, self.runner, self.resources.ranks.sharing
        assert context.norm is not None
        self.trace, self.samples = runner.trace(context.step, self.origin), runner.samples(self.origin)
        hypers = context.update.hypers
        tokens = sum(batch.tokens(mb) for mb in self.micro_batches)
        own = self.flops, tokens, batch.weighted(self.loss_weights, self.losses)
        told = ranks.gather_objects("figures of the step", own)
        self.stats = StepStats(
            step=context.step,
            loss=batch.mean_loss(terms for *_, terms in told),
            grad_norm=context.norm,
            tokens=sum(tokens for _, tokens, _ in told),
            seconds=time.perf_counter() - self.began,
            lr=float(hypers[0].lr) if hypers else 0.0,
            clipped=context.clip is not None and not self.skipped and context.norm > context.clip,
            skipped=self.skipped,
            repeats=self.repeats,
            non_finite=self.non_finite,
            loss_scale=context.loss_scale,
            flops=math.fsum(flops for flops, *_ in told),
            bytes_moved=dict(self._moved),
            lane_seconds=dict(self._busy),
            peak_bytes=dict(runner.pools.peak),
        )
