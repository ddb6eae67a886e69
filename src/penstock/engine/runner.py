"""A plan made executable: its pools, its lanes, and the one thing they all run."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.engine import batch
from penstock.engine.dealt import schedules_of
from penstock.engine.interrupt import holding
from penstock.engine.resources import EngineResources
from penstock.engine.trace import MemorySample, TraceEvent
from penstock.errors import NonFiniteError, StoreError
from penstock.planner.plan import Plan
from penstock.runtime.actions import Actions
from penstock.runtime.bound import Bound
from penstock.runtime.context import StepContext
from penstock.runtime.executor import Executor
from penstock.runtime.pools import Pools
from penstock.runtime.serial import SerialExecutor
from penstock.runtime.staging import Staging
from penstock.runtime.stepping import Stepping
from penstock.runtime.streams import Mark
from penstock.schedule.check.order import run_orders
from penstock.schedule.dealt import message_piece
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op, Schedule
from penstock.schedule.program import ALIGN
from penstock.sim.result import covered
from penstock.state.numa import binding_for
from penstock.store.facts import store_exists
from penstock.store.layout import Layout
from penstock.store.removal import delete_store
from penstock.store.store import Store
from penstock.tape.elsewhere import Elsewhere
from penstock.tape.facts import StageFacts
from penstock.tape.handed import HandedOn


class Runner:
    """Runs steps of one plan. Holds all memory that the plan's pools need until it is closed."""

    def __init__(
        self,
        plan: Plan,
        facts: tuple[StageFacts, ...],
        shared: EngineResources,
        handed: Mapping[batch.Shapes, HandedOn] | None = None,
    ) -> None:
        """``handed``: in a pipeline, by shape of micro-batch, what calls are handed and what they share."""
        self.plan = plan
        self._handed = handed or {}
        self._before = 0, 0.0
        """bytes that the last run has read before its first op, and seconds that this took"""
        self.runs = 0
        """steps and evaluations that came to their end"""
        self._facts = facts
        self._shared = shared
        self._streams = shared.streams
        self._ranks = shared.ranks
        self.bound = Bound(schedule=plan.schedule, program=plan.program, share=shared.share)
        grad_dtype = torch.bfloat16 if plan.settings.grad_dtype == "bf16" else torch.float32
        stepping = Stepping(shared.groups, shared.runs, shared.threads, grad_dtype, shared.share, shared.matrices)
        self._partials = {
            g.spec.index: np.zeros(g.spec.trainable // ALIGN, dtype=np.float64)
            for g in shared.groups
            if g.spec.trainable
        }
        with ExitStack() as undo:  # what is made is given back if what comes after it fails, and by ``close``
            self.scratch = _scratch(self.bound, shared)
            """the store in which saved activations and gradients wait on disk; None: none do"""
            if self.scratch is not None:
                undo.callback(_remove, self.scratch, shared.scratch_paths)
            self.pools, self._messages = Pools(plan.schedule, shared.device), None
            undo.callback(self._close_pools)
            self._messages = self._staging()
            self.actions = Actions(
                self.bound,
                self.pools,
                shared.groups,
                shared.arrays,
                shared.tape,
                self.scratch,
                self._streams,
                stepping,
                shared.ranks,
                self._messages,
            )
            undo.callback(self.actions.release)
            self._executor = self._executor_of(plan.schedule, self._order())
            undo.callback(self._executor.close)
            self._made = undo.pop_all()

    def _executor_of(self, schedule: Schedule, order: Sequence[Op] | None = None) -> Executor | SerialExecutor:
        shared = self._shared
        if not shared.settings.overlap:
            return SerialExecutor(schedule, self.pools, self.actions, self._streams, order)
        return Executor(
            schedule,
            self.pools,
            self.actions,
            self._streams,
            io_workers=max(1, shared.settings.io_threads // 2),
            binding=binding_for(shared.device),
            failed=shared.ranks.fail,
        )

    def _staging(self) -> Staging | None:
        """The host memory that messages of a pipeline pass through; None: there are none, or they are on the host."""
        if self.plan.program.dealt is None or self._shared.device.type == "cpu":
            return None
        return Staging(message_piece(self.plan.program), self._shared.device)

    def _order(self) -> Sequence[Op] | None:
        """The order in which this rank of a pipeline runs one op at a time, by which no two wait for each other: what
        is sent is received at once. None: any in which one rank could run its ops. All ranks come here."""
        if self._shared.settings.overlap or not self._ranks.are_pipeline:
            return None
        world = schedules_of(self._ranks, self.plan.schedule)
        return run_orders(world)[self._ranks.pipe.rank]

    def flush(self, context: StepContext) -> None:
        """Step the chunks that the step before has left, by ``context.left``.

        Raises:
            BaseException: what the first failing op raised; the step before cannot be completed any more.
        """
        self.actions.access.context = context
        schedule = self.bound.rest
        executor = self._executor_of(schedule, schedule.ops)
        try:
            executor.run()
        finally:
            executor.close()
            self.pools.reset()

    def run(
        self, context: StepContext, micro_batches: Sequence[Mapping[str, Any]], loss_weights: Sequence[float]
    ) -> list[float]:
        """One step or one evaluation; the loss of each micro-batch.

        Raises:
            BaseException: what the first failing op raised. Nothing is in flight any more.
        """
        with holding(True):  # what is begun is ended, whatever comes; only what is in between may be broken off
            return self._run(context, micro_batches, loss_weights)

    def _run(
        self, context: StepContext, micro_batches: Sequence[Mapping[str, Any]], loss_weights: Sequence[float]
    ) -> list[float]:
        tape, train = self._shared.tape, self.plan.settings.train
        for partials in self._partials.values():
            partials.fill(0.0)
        context.partials = self._partials if train else {}
        self.actions.access.context = context
        finished = False

        def end() -> None:
            if not finished:
                tape.abort()
                self.actions.release()
                self.pools.reset()
            self.actions.let_go()
            tape.elsewhere = None  # not before all lanes have come to rest

        with tape.undo.after(end):
            tape.facts = self._facts
            tape.elsewhere = self._elsewhere(micro_batches)
            tape.begin(
                context.step,
                micro_batches,
                loss_weights,
                stages=self.plan.program.stages,
                scale=context.loss_scale,
                train=train,
                first=self._ranks.number(0, len(micro_batches)),
            )
            with holding(False):
                began = time.perf_counter()
                self._before = self.actions.begin(), time.perf_counter() - began
                self._executor.run()
                losses = self._losses(context)
            tape.finish()
            self.runs += 1
            finished = True
        if train and context.verdict is None:
            self.actions.norm.judge()
        return losses

    def _elsewhere(self, micro_batches: Sequence[Mapping[str, Any]]) -> Elsewhere | None:
        """In a pipeline, what is between this rank's stages and those of others."""
        dealt = self.plan.program.dealt
        if dealt is None:
            return None
        shapes = [batch.shapes(mb) for mb in micro_batches]
        found = [next(h for known, h in self._handed.items() if batch.handed_alike(known, one)) for one in shapes]
        return Elsewhere(self._shared.tape, dealt, micro_batches, found)

    def _losses(self, context: StepContext) -> list[float]:
        """The losses of all micro-batches of this rank; those of a pipeline are its first rank's, and so is a loss that
        is no number, which all ranks learn of."""
        tape, ranks = self._shared.tape, self._ranks
        own = not ranks.pipe.rank
        losses = torch.stack(tape.losses()).tolist() if own else []
        if not ranks.are_pipeline:
            return losses
        failed = str(context.failure) if own and context.failure is not None else None
        found = ranks.gather_objects("losses", (losses, failed))
        first = next(((number, failure) for number, (_, failure) in enumerate(found) if failure is not None), None)
        if first is not None and failed is None:
            context.failure = NonFiniteError(f"rank {first[0]}: {first[1]}")
        return found[ranks.sharing.rank][0]

    def _close_pools(self) -> None:
        if not self._ranks.broken_off:
            self.pools.close()
            if self._messages is not None:
                self._messages.close()

    @property
    def scratch_written(self) -> int:
        """Bytes of saved activations and gradients that have gone to disk so far."""
        return 0 if self.scratch is None else self.scratch.written

    @property
    def marks(self) -> Mapping[str, Mark]:
        """Start, end and bytes of each op of the last run."""
        return self._executor.marks

    def count(self, moved: defaultdict[Lane, int], busy: defaultdict[Lane, float]) -> None:
        """Add the bytes that the last run has moved, and the seconds in which it had an op under way, by lane."""
        spans: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in self.plan.schedule.lanes}
        for mark in self._executor.marks.values():
            moved[mark.lane] += mark.moved
            spans[mark.lane].append((mark.start, mark.end))
        for lane, found in spans.items():
            moved[lane] += 0  # each is told of
            busy[lane] += covered(found)
        if self._before[0]:
            moved["read"] += self._before[0]
            busy["read"] += self._before[1]

    def trace(self, step: int, origin: float) -> list[TraceEvent]:
        """The last run, op by op, in seconds since ``origin``, its start by ``perf_counter``."""
        return [
            TraceEvent(
                step=step,
                op=name,
                lane=mark.lane,
                start=mark.start - origin,
                end=mark.end - origin,
                bytes=mark.moved,
            )
            for name, mark in self._executor.marks.items()
        ]

    def samples(self, origin: float) -> list[MemorySample]:
        """Bytes in use per tier over the last run."""
        return [MemorySample(time=t - origin, tier=tier, bytes=n) for t, tier, n in self.pools.samples]

    def close(self) -> None:
        """Give back threads, memory and scratch space; each happens whatever the others raise."""
        self._made.close()


def _remove(scratch: Store, paths: Sequence[Path]) -> None:
    scratch.close()
    delete_store(paths)
    for path in paths:
        with suppress(OSError):  # something else is in it: not ours to remove
            path.rmdir()


def _scratch(bound: Bound, shared: EngineResources) -> Store | None:
    """A store for what a step puts on disk and needs no longer than the step: waiting gradients, saved activations."""
    sizes, grids = bound.scratch()
    if not sizes:
        return None
    paths = shared.scratch_paths
    if store_exists(paths):
        raise StoreError(f"{paths[0]} is needed for what lives no longer than a step, and holds a run's state: move it")
    layout = Layout.build(((name, nbytes, 1) for name, nbytes in sizes.items()), grids)
    store = shared.commits.store
    return Store.create(
        paths,
        layout,
        model={"scratch": True},
        passing=True,
        weights=() if store is None else store.weights,
    )
