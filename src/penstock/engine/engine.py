"""The engine: ``penstock.wrap`` a model, then ``step``. Everything else is a room below this one."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from penstock.config import Budget, GradDtype, Precision
from penstock.engine import batch, start
from penstock.engine.attempt import Outcome, take_step
from penstock.engine.due import Due
from penstock.engine.durability import Standing
from penstock.engine.interrupt import whole_steps
from penstock.engine.planning import Planning
from penstock.engine.runner import Machinery, Runner, hyper_runs
from penstock.engine.start import WeightSource
from penstock.engine.trace import MemorySample, TraceEvent
from penstock.engine.turns import in_turn, is_foreign
from penstock.errors import ConfigError, NonFiniteError
from penstock.hardware.machine import Machine
from penstock.optim.facade import StreamedOptimizer, rate_name
from penstock.optim.precision import DTYPES, LossScale, format_of
from penstock.optim.spec import OptimizerSpec
from penstock.planner.fit import Plan
from penstock.planner.means import REPEATS
from penstock.runtime.context import StepContext
from penstock.runtime.streams import streams_for
from penstock.schedule.ir.ops import Schedule
from penstock.sim.result import Simulation
from penstock.state import numa, snapshots
from penstock.state.buffers import Buffers
from penstock.state.commits import Home
from penstock.state.record import check_param_groups, check_progress
from penstock.state.stats import StepStats
from penstock.state.values import Values
from penstock.store.owner import Owner
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import group_parameters, groups_of
from penstock.tape.guard import guard
from penstock.tape.passage import LossFn
from penstock.tape.tape import Tape

log = logging.getLogger("penstock")


class Engine:
    """Trains a model whose state lives on device, host and disk. Made by ``wrap``; a context manager.

    Calls of all engines of a process take turns; two calls of one at once are refused, and calls in a forked child.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSpec,
        budget: Budget,
        precision: Precision,
        schedule: Literal["vertical", "horizontal"] | Schedule,
        clip_grad_norm: float | None,
        device: torch.device,
        blocks: Sequence[nn.Module] | None,
        loss_fn: LossFn,
        seed: int,
        io_threads: int,
        overlap: bool,
        machine: Machine | None,
        speculate: bool | None,
        delay: float | None,
        grad_dtype: GradDtype,
        compile: str | None,  # noqa: A002  as in wrap
        weights: WeightSource | None,
        owner: Owner | None,
    ) -> None:
        self._process = os.getpid()
        self.model = model
        self.budget = budget
        self.device = device
        self.step_count = 0
        """Steps taken, skipped ones included."""
        self.last_step: StepStats | None = None
        """What the last step reported; of the one that a store goes on after, its numbers without lanes and memory."""
        self.trace: list[TraceEvent] = []
        """Every op of the last step, as it ran; of a step that was run twice, of the run that counts."""
        self.counters: list[MemorySample] = []
        """Bytes in use per tier over the last step."""
        self.position: Mapping[str, Any] | None = None
        """Where the last step left the data, as ``step`` was told; of a store, as it was committed."""
        self._began = time.perf_counter()
        self._updates = 0
        self._missed: dict[str, int] = {}
        self._waits = clip_grad_norm is not None or DTYPES[precision] == torch.float16
        self._clip = clip_grad_norm
        self._seed = seed
        self._dtype = DTYPES[precision]
        self._scale = LossScale.of(precision)
        self._closed = False
        found = find_blocks(model, blocks)
        from_meta = start.built_on_meta(model)
        self._groups = group_parameters(model, found)
        self.optimizer = StreamedOptimizer(
            optimizer, [(s.name, s.parameter) for g in self._groups for s in g.slices if s.trainable]
        )
        self._trained = [s.name for g in self._groups for s in g.slices if s.trainable]
        self._buffers = Buffers(model)
        self._description = start.describe_model(self._groups, self._buffers, precision, optimizer)
        self._home = Home(
            budget,
            [g.spec for g in self._groups],
            format_of(precision, optimizer.moments),
            self._dtype,
            device,
            self._buffers,
            model=self._description,
            io_threads=io_threads,
            owner=owner,
        )
        self._arrays = self._home.arrays
        self._standing = Standing(self._home, self._buffers, self._progress, waits=self._waits, due=Due.of(budget))
        try:
            guard(model, blocks=[block.module for block in found])  # now: whatever fails from here on, it has no values
            self._settle_in(weights, from_meta=from_meta)
            self._tape = Tape(model, found, self._groups, loss_fn, seed=seed, device=device, compile=compile)
            machinery = Machinery(
                tape=self._tape,
                groups=self._groups,
                arrays=self._arrays,
                runs={g.spec.index: hyper_runs(g, self.optimizer) for g in self._groups if g.spec.trainable},
                device=device,
                streams=streams_for(device),
                scratch_paths=tuple(path / "scratch" for path in budget.disk_paths),
                io_threads=io_threads,
                threads=numa.thread_count(device),
                overlap=overlap,
                machine=machine,
                optimizer=rate_name(optimizer, precision),
            )
            self._planning = Planning(
                machinery,
                budget,
                schedule,
                wait=self._waits,
                speculate=speculate,
                delay=delay,
                grad_dtype=grad_dtype,
                repeats=0.0 if clip_grad_norm is None else REPEATS,  # a step that overflows in fp16 is not run again
                before_change=self._rest,
            )
            self._standing.note(between_steps=True)
            self._written = self._home.written
        except BaseException:
            if hasattr(self, "_tape"):
                self._tape.close()
            self._home.close(None)
            raise

    def _settle_in(self, weights: WeightSource | None, *, from_meta: bool) -> None:
        """Bring the model's parameters and buffers to where they live from now on."""
        if from_meta:
            resumed = self._home.resumed is not None
            start.make_buffers(self.model, self.device, self._seed, weights, resumed=resumed)
        start.buffers_to(self.model, self.device)
        if self._home.resumed is None:
            start.fill(self.model, self._groups, self._arrays, from_meta=from_meta, seed=self._seed, weights=weights)
            return
        where = f"the last commit in {self.budget.disk_paths[0]}"
        check_progress(self._home.resumed, where, trained=len(self._trained), seed=self._seed)
        for group in self._groups:
            group.detach(self._dtype, self.device)
        self._buffers.read(self._home.read_buffer)
        self._adopt(self._home.resumed)
        log.warning("continuing the store in %s from step %d", self.budget.disk_paths[0], self.step_count)

    # ---- training

    @in_turn
    def step(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        *,
        loss_weights: Sequence[float] | None = None,
        position: Mapping[str, Any] | None = None,
    ) -> StepStats:
        """One optimizer step over the micro-batches: gradients are summed, weighted by their number of labels.

        Micro-batches are mappings of tensors, what ``loss_fn`` (or the model) takes. Their number and sizes may change
        from step to step; a plan is made whenever they are more, larger or of other shapes than planned for.
        ``loss_weights``: what each micro-batch's loss counts in the sum, instead of its share of the labels: 1 each
        where ``loss_fn`` divides by what the whole step has.

        ``position``: where the data are behind these micro-batches, in numbers, text, lists and mappings. It is part of
        this step's commit and of snapshots: whoever goes on from there finds it in ``engine.position``.

        Raises:
            ConfigError: ``position`` is nothing that JSON holds, or more than 64 KiB of it.
            ModelError: the list is empty, or a micro-batch takes another way through the model than the first; the
                weights are not one finite number for each.
            BudgetError: a step of this size does not fit; says what would.
            NonFiniteError: a loss is infinite or NaN (nothing was updated).
            StoreError: the disk failed.
            KeyboardInterrupt: Ctrl-C arrived; the step is complete.

        After an error nothing has changed, and the engine can be used, if all state is on disk in two slots (and, with
        a delay ratio, the step before was complete), or if it came before the first update. Otherwise the state is half
        updated: the engine says so whenever it is used, until a snapshot is loaded. What the last commit of the store
        names stands in any case.
        """
        self._check_usable()
        behind = batch.as_json(position)
        with whole_steps():
            return self._step(micro_batches, loss_weights, behind)

    @in_turn
    def prepare(self, micro_batches: Sequence[Mapping[str, Any]]) -> Plan:
        """Make the plan for steps of such micro-batches now, and take the memory that it needs; changes nothing else.

        The next ``step`` would do it, too. So ``plan`` and ``prediction`` are there before it, and whether it fits.

        Raises:
            ModelError, BudgetError, StoreError: as ``step``. After a BudgetError others may be tried.
        """
        self._check_usable()
        batch.check(micro_batches)
        with whole_steps():
            return self._planning.runner_for(micro_batches, train=True).plan

    def _step(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        loss_weights: Sequence[float] | None,
        position: Mapping[str, Any] | None,
    ) -> StepStats:
        began = time.perf_counter()
        batch.check(micro_batches)
        given = batch.given_weights(micro_batches, loss_weights)
        runner = self._planning.runner_for(micro_batches, train=True)
        weights = given or self._planning.labels.weights(micro_batches)
        on_device = batch.all_to_device(micro_batches, self.device, self._dtype)
        buffers = (standing := self._standing).before_step()
        context = StepContext(
            step=self.step_count + 1,
            count=self._updates + 1,
            hypers=self.optimizer.hypers(),
            clip=self._clip,
            loss_scale=self._scale.value,
            missed=dict(self._missed),
            previous=None if standing.pending is None else standing.pending.context,
            complete=standing.pending is None,
            commit=standing.complete,
        )
        scratch = runner.scratch_written
        undo = standing.undo(context, buffers, early=runner.speculates or not self._waits)
        try:
            outcome = take_step(runner, context, on_device, weights, undo)
            numbers = outcome.numbers(micro_batches, weights, clip=self._clip, seconds=time.perf_counter() - began)
            stats = self._stats(runner, outcome, numbers)
            if not numbers.skipped:
                self._arrays.complete_step(runner.late)
        except BaseException as error:
            standing.broken_off(context, buffers, error)
            raise
        self._end_step(outcome, runner, buffers, numbers, position)
        standing.after_step(outcome.context, runner)
        written = self._home.written + runner.scratch_written - scratch
        self.last_step = replace(
            stats,
            flops=self._planning.flops_of(micro_batches),
            labels=None if given else self._planning.labels.known,
            bytes_written=written - self._written,
            seconds=time.perf_counter() - began,
        )
        self._written = self._home.written
        return self.last_step

    def _end_step(
        self,
        outcome: Outcome,
        runner: Runner,
        buffers: Mapping[str, torch.Tensor],
        numbers: StepStats,
        position: Mapping[str, Any] | None,
    ) -> None:
        """Make a step that has run count, or refuse it: all of it, or the state says that it is in between."""
        context = outcome.context
        context.skip = numbers.skipped
        if context.skip:
            where = f"step {context.step}: {outcome.non_finite or 'a gradient'} was infinite or NaN"
            self._buffers.put_back(buffers)
            if not self._waits:
                self._refuse_step(where)
            log.warning("%s; nothing was updated", where)
        try:
            if not context.skip:
                self._arrays.turn_step(runner.late, groups_of(context.touched, self._groups))
            self.step_count, self.last_step, self.position = self.step_count + 1, numbers, position
            self._planning.observe(over=not context.skip and context.clip_factor() < 1.0)
            if not context.skip:
                self._updates += 1
                self._missed = context.missed_after(self._groups)
            self._scale.update(overflow=context.skip)
            self.optimizer.record_step()
        except BaseException as error:
            self._standing.give_up(f"step {context.step} was broken off by {type(error).__name__} while it was counted")
            raise

    def _refuse_step(self, where: str) -> NoReturn:
        """A gradient that nothing waited for was infinite or NaN."""
        if not self._home.discardable:
            self._standing.give_up(f"{where}, and the state was updated with it")
            raise NonFiniteError(
                f"{self._standing.broken}. Load a snapshot; with clip_grad_norm set such a step is skipped"
            )
        self._standing.note(between_steps=True)
        raise NonFiniteError(f"{where}. Nothing was updated; with clip_grad_norm set such a step is skipped")

    @in_turn
    def evaluate(
        self, micro_batches: Sequence[Mapping[str, Any]], *, loss_weights: Sequence[float] | None = None
    ) -> float:
        """Mean loss of the micro-batches in evaluation mode, forward only; changes nothing.

        ``loss_weights``: as in ``step``.

        Raises: as ``step``.
        """
        self._check_usable()
        batch.check(micro_batches)
        given = batch.given_weights(micro_batches, loss_weights)
        modes = {module: module.training for module in self.model.modules()}
        buffers = self._buffers.copies()
        self.model.eval()
        try:
            runner = self._planning.runner_for(micro_batches, train=False)
            weights = given or self._planning.labels.weights(micro_batches)
            context = StepContext(
                step=self.step_count, count=1, hypers=self.optimizer.hypers(), clip=None, loss_scale=1.0
            )
            losses = runner.run(context, batch.all_to_device(micro_batches, self.device, self._dtype), weights)
            if context.failure is not None:
                raise context.failure
        finally:
            for module, training in modes.items():
                module.training = training
            self._buffers.put_back(buffers)
        return math.fsum(w * loss for w, loss in zip(weights, losses, strict=True))

    @property
    def plan(self) -> Plan:
        """The plan of the last step or evaluation.

        Raises:
            ConfigError: there was none yet; a plan needs to see a micro-batch.
        """
        if self._planning.runner is None:
            raise ConfigError("there is no plan before the first step: it depends on the micro-batches' shapes")
        return self._planning.runner.plan

    @property
    def prediction(self) -> Simulation | None:
        """What the plan of the last step or evaluation was predicted to do, op by op; None without a machine profile.

        It is for micro-batches that are all as large as the largest: checkpoints of shorter ones are smaller.

        Raises:
            ConfigError: there was none yet.
        """
        return self._planning.prediction_of(self.plan)

    def _stats(self, runner: Runner, outcome: Outcome, numbers: StepStats) -> StepStats:
        """All that a step reports, but for the time that its commit takes."""
        self.trace = runner.trace(numbers.step, self._began)
        self.counters = runner.samples(self._began)
        totals = runner.totals() if outcome.dropped is None else runner.totals() + outcome.dropped
        return replace(
            numbers,
            bytes_moved=dict(totals.moved),
            lane_seconds=dict(totals.busy),
            peak_bytes=dict(runner.pools.peak),
        )

    # ---- state

    def master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor on the CPU) of every parameter, frozen ones in the compute dtype's values.

        One parameter is in memory at a time: what was yielded is overwritten only if you keep no reference.
        """
        values = self.values()
        yield from ((name, values.parameter(name)) for name in values.parameters)

    @in_turn
    def values(self) -> Values:
        """Every parameter and persistent buffer, to be read piece by piece while no step runs."""
        self._check_usable()
        self._rest()
        return Values(self._arrays, self._description, self._buffers.tensors())

    @in_turn
    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a snapshot: parameters, optimizer state, step, random state, settings of the optimizer; exact.

        Raises:
            StoreError: the path exists (and ``overwrite`` is not set), or the disk is full or fails.
        """
        self._check_usable()
        self._rest()
        meta = {"model": self._description, **self._progress()}
        snapshots.save(Path(path), self._arrays, self._buffers, meta, overwrite=overwrite)

    @in_turn
    def load(self, path: str | Path) -> None:
        """Take over a snapshot. Training goes on exactly as it would have where it was saved.

        Raises:
            StoreError: the snapshot is missing, damaged, or made for another model, precision or optimizer; or the disk
                failed on the way. Only in the last case has anything changed: load again then.
            ConfigError: it was saved by a run with another seed.
        """
        self._check_open()
        self._rest()
        with snapshots.opened(Path(path), self._description) as snapshot:
            check_progress(snapshot.meta, str(path), trained=len(self._trained), seed=self._seed)
            check_param_groups(snapshot.meta["param_groups"], self.optimizer.param_groups, str(path))
            self._standing.note(between_steps=False)
            self._standing.give_up(f"loading {path} was broken off")  # until everything below is done
            snapshots.restore(snapshot, self._arrays, self._buffers)
            self._adopt(snapshot.meta)
            for mine, saved in zip(self.optimizer.param_groups, snapshot.meta["param_groups"], strict=True):
                mine.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
            self._standing.replaced(self._planning.runner)

    def close(self) -> None:
        """Bring what is in memory to the store and give everything back. The model's parameters stay placeholders.

        In a forked child nothing happens: all of it is the parent's.
        """
        if not self._closed and not is_foreign(self):
            self._close()

    @in_turn
    def _close(self) -> None:
        self._closed = True
        with contextlib.ExitStack() as all_of_it:  # last in, first out; each happens whatever the others raise
            all_of_it.callback(self._standing.close)
            for group in self._groups:
                all_of_it.callback(group.detach, self._dtype, self.device)
            all_of_it.callback(self._tape.close)
            all_of_it.callback(self._planning.close)
            all_of_it.callback(self._rest)

    def _rest(self) -> None:
        """Nothing is pending from here on: delayed chunks are stepped, and what is being written is written."""
        self._standing.rest(self._planning.runner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _progress(self) -> dict[str, Any]:
        """All that a run is besides its arrays. Random state is a function of seed and step."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {
            "step": self.step_count,
            "updates": self._updates,
            "missed": {str(i): self._missed[name] for i, name in enumerate(self._trained) if name in self._missed},
            "seed": self._seed,
            "loss_scale": asdict(self._scale),
            "param_groups": groups,
            "last": None if self.last_step is None else self.last_step.numbers(),
            "position": self.position,
        }

    def _adopt(self, progress: Mapping[str, Any]) -> None:
        self.step_count = int(progress["step"])
        self._updates = int(progress["updates"])
        self._missed = {self._trained[int(i)]: count for i, count in progress["missed"].items()}
        self._scale = LossScale(**progress["loss_scale"])
        last = progress.get("last")  # absent from what earlier versions wrote
        self.last_step = None if last is None else StepStats(**last)
        self.position = progress.get("position")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed: build the model anew, and wrap that")

    def _check_usable(self) -> None:
        self._check_open()
        self._standing.check_usable()
