"""The engine: ``penstock.wrap`` a model, then ``step``. Everything else is a room below this one."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from penstock.engine import batch, dropped
from penstock.engine.attempt import Attempt
from penstock.engine.due import Due
from penstock.engine.durability import Durability
from penstock.engine.fate import Event, State
from penstock.engine.inside import Inside
from penstock.engine.interrupt import holding, whole_steps
from penstock.engine.planning import Planning
from penstock.engine.resources import EngineResources
from penstock.engine.snapshots import Snapshots
from penstock.engine.spans import check_same
from penstock.engine.trace import MemorySample, TraceEvent
from penstock.engine.turns import in_turn, is_foreign, outside_of_inference_mode
from penstock.errors import ConfigError, NonFiniteError
from penstock.planner.plan import Plan
from penstock.ranks.group import ALONE
from penstock.runtime.context import StepContext, Update
from penstock.sim.result import Simulation
from penstock.state.shared import CalledArrays, LedArrays
from penstock.state.stats import StepStats
from penstock.state.values import Values
from penstock.tape.modes import TrainingFlags

_OF_ALL = (KeyboardInterrupt, SystemExit, NonFiniteError)
"""Errors that end all ranks alike, as far as anybody knows: a signal that each gets, numbers that all found bad."""
_FIXED = ("model", "budget", "device", "optimizer")
"""Attributes that say what an engine was made of: to assign another one would change what is read there alone."""


class Engine:
    """Trains a model whose state lives on device, host and disk. Made by ``wrap``; a context manager. One that is
    dropped without ``close`` ends as by a kill: what is not committed is lost.

    Calls of all engines of a process take turns; two calls of one at once are refused, and calls in a forked child.
    """

    def __init__(self, resources: EngineResources) -> None:
        """``resources``: what the engine lives on, and closes; where this fails, they are closed as well."""
        try:
            self._process, self._is_closed = os.getpid(), False
            self._resources = resources
            self.model = resources.tape.model
            self.budget = resources.settings.budget
            self.device = resources.device
            self.optimizer = resources.optimizer
            self.trace: Sequence[TraceEvent] = ()
            """Every op of the last step, as it ran; of a step that was run twice, of the run that counts."""
            self.counters: Sequence[MemorySample] = ()
            """Bytes in use per tier over the last step."""
            self._began = time.perf_counter()
            self._ranks, self._progress, commits = resources.ranks, resources.progress, resources.commits
            self._durability = Durability(commits, self._progress, Due.of(self.budget))
            self._snapshots = Snapshots(resources, self._durability)
            self._planning = Planning(resources, before_change=self._durability.rest_of_all)
            commits.commit(self._progress.record())
            self._written = commits.written
            self._forget = dropped.watch(self, self._planning, self._durability, resources)
        except BaseException:
            resources.tape.close()
            resources.commits.close()
            raise

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
            ConfigError: ``position`` is nothing that JSON holds, or more than 64 KiB of it; or what stands in
                ``optimizer.param_groups`` is, or is out of its range.
            ModelError: the list is empty, or a micro-batch takes another way through the model than the first; the
                weights are not one finite number for each.
            BudgetError: a step of this size does not fit; says what would.
            NonFiniteError: a loss is infinite or NaN (nothing was updated).
            StoreError: the disk failed.
            KeyboardInterrupt: Ctrl-C arrived; the step is complete, or a second one has broken it off (``step_count``).

        After an error nothing has changed, and the engine can be used, if all state is on disk in two slots (and, with
        a delay ratio, the step before was complete), or if it came before the first update. Otherwise the state is half
        updated: the engine says so whenever it is used, until a snapshot is loaded. What the last commit of the store
        names stands in any case. The one error after a step that counts is a StoreError that says so: its commit
        failed, of whatever. Do not repeat that step (``step_count`` has it): the next one commits it first, or, where
        the state has one slot, with itself. If that commit fails again, the next step was not taken, and says so. With
        several ranks a write in the background that fails ends all of them, after a step that counts, too.
        """
        with outside_of_inference_mode(), whole_steps(), self._ranks.together("step"):
            self._check_usable()
            return self._step(micro_batches, loss_weights, batch.as_json(position))

    @in_turn
    def prepare(self, micro_batches: Sequence[Mapping[str, Any]]) -> Plan:
        """Make the plan for steps of such micro-batches now, and take the memory that it needs; changes nothing else.

        The next ``step`` would do it, too. So ``plan`` and ``prediction`` are there before it, and whether it fits.

        Raises:
            ModelError, BudgetError, StoreError: as ``step``. After a BudgetError others may be tried.
        """
        with outside_of_inference_mode(), whole_steps(), self._ranks.together("prepare"):
            self._check_usable()
            batch.check(micro_batches, train=True)
            return self._planning.runner_for(self._cut(micro_batches), train=True).plan

    def _step(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        loss_weights: Sequence[float] | None,
        position: Mapping[str, Any] | None,
    ) -> StepStats:
        began = time.perf_counter()
        batch.check(micro_batches, train=True)
        self._progress.settings()  # now: a commit that fails for what is in them would be the step's that had counted
        given = self._given("step", micro_batches, loss_weights)
        micro_batches = self._cut(micro_batches)
        runner = self._planning.runner_for(micro_batches, train=True)
        flops = self._planning.probing.flops_of(micro_batches)  # now: a loss may write into a micro-batch
        weights = given or self._planning.labels.weights(micro_batches, self._ranks.sharing)
        self._durability.check_written()
        scratch = runner.scratch_written
        attempt = Attempt(
            runner=runner,
            context=self._context(),
            micro_batches=micro_batches,
            loss_weights=weights,
            durability=self._durability,
            resources=self._resources,
            before=self._resources.tape.before(train=True),
            flops=flops,
            began=began,
            origin=self._began,
            count=partial(self._count, position=position),
        )
        before = self.step_count
        try:
            self._durability.follow(Event.BEGIN, attempt.actions, f"step {before + 1}")
            self._durability.after_step(self.step_count, runner)
        finally:
            if self.step_count > before:  # it counts, whatever failed then
                assert attempt.stats is not None
                self.trace, self.counters = attempt.trace, attempt.samples
                if not attempt.skipped:
                    self._planning.look(runner)
                written = self._resources.commits.written + runner.scratch_written - scratch
                self._progress.last = replace(
                    attempt.stats,
                    labels=None if given else self._planning.labels.known,
                    bytes_written=written - self._written,
                    seconds=time.perf_counter() - began,
                    plan_change=self._planning.changed,
                )
                self._written = self._resources.commits.written
        assert self._progress.last is not None
        return self._progress.last

    def _given(
        self, call: str, micro_batches: Sequence[Mapping[str, Any]], loss_weights: Sequence[float] | None
    ) -> list[float] | None:
        """``batch.given_weights``, where all ranks make the same ``call`` in the same step, with the same settings
        of the optimizer, and either all give weights or none does; of a pipeline, all the same micro-batches."""
        given = batch.given_weights(micro_batches, loss_weights, self._ranks.sharing)
        if self._ranks.size > 1:
            settings = {"call": call, "step": self.step_count, "use of loss_weights": given is not None}
            hypers = [asdict(hyper) for hyper in self.optimizer.hypers()]
            of_groups = {f"{key} of param group {i}": repr(own[key]) for i, own in enumerate(hypers) for key in own}
            self._ranks.agree_on_each(settings | of_groups)
        if self._ranks.are_pipeline:
            shared = {"micro-batches, which ranks of a pipeline share": batch.digest(micro_batches, given)}
            self._ranks.pipe.agree_on_each(shared)
        if self._ranks.cp > 1:
            digests = self._ranks.gather_objects("micro-batches", batch.digest(micro_batches, given))
            check_same(digests, self._ranks)
        return given

    def _cut(self, micro_batches: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """This rank's micro-batches: all of them, or of ranks that share each sequence its spans."""
        spans = self._resources.spans
        return micro_batches if spans is None else spans.cut(micro_batches)

    def _context(self) -> StepContext:
        """The inputs of the next step's first run besides its micro-batches."""
        progress, pending = self._progress, self._durability.pending
        return StepContext(
            step=progress.step + 1,
            update=Update(
                count=progress.updates + 1,
                hypers=self.optimizer.hypers(),
                missed=progress.missed,
                grad_scale=1.0 / progress.scale.value,
            ),
            clip=self._resources.settings.clip_grad_norm,
            loss_scale=progress.scale.value,
            left=None if pending is None else pending.update,
            completed=None if pending is None else self._durability.complete,
        )

    def _count(self, attempt: Attempt, position: Mapping[str, Any] | None) -> None:
        """The run is one step further."""
        assert attempt.stats is not None
        self._planning.observe(over=not attempt.skipped and attempt.context.clip_factor() < 1.0)
        self._progress.count(attempt.stats, attempt.missed(), position)

    @in_turn
    def evaluate(
        self, micro_batches: Sequence[Mapping[str, Any]], *, loss_weights: Sequence[float] | None = None
    ) -> float:
        """Mean loss of the micro-batches in evaluation mode, forward only; changes nothing.

        ``loss_weights``: as in ``step``.

        Raises: as ``step``.
        """
        with outside_of_inference_mode(), self._ranks.together("evaluate"):
            self._check_usable()
            flags = TrainingFlags(self.model.modules())
            with self._resources.tape.undo.after(partial(flags.switch, frozenset())):
                return self._evaluate(micro_batches, loss_weights)

    def _evaluate(self, micro_batches: Sequence[Mapping[str, Any]], loss_weights: Sequence[float] | None) -> float:
        batch.check(micro_batches, train=False)
        given = self._given("evaluate", micro_batches, loss_weights)
        micro_batches = self._cut(micro_batches)
        self.model.eval()
        runner = self._planning.runner_for(micro_batches, train=False)
        weights = given or self._planning.labels.weights(micro_batches, self._ranks.sharing)
        context = StepContext(step=self.step_count, update=Update(count=1, hypers=()))
        inputs = batch.all_to_device(micro_batches, self.device, self._resources.dtype)
        tape = self._resources.tape
        with tape.undo.after(tape.before(train=False).put_back):  # from now: a probe tells which buffers change
            losses = runner.run(context, inputs, weights)
        failures = self._ranks.gather_objects("losses that are no numbers", context.failure and str(context.failure))
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise context.failure or NonFiniteError(f"rank {rank}: {failure}")
        return batch.mean_loss(self._ranks.sharing.gather_objects("losses", batch.weighted(weights, losses)))

    @property
    def plan(self) -> Plan:
        """The plan of the last step or evaluation.

        Raises:
            ConfigError: there was none yet, as a plan needs to see a micro-batch; it could not be made; or the engine
                is closed.
        """
        self._durability.check_open()
        if self._planning.runner is None:
            raise ConfigError("there is no plan before the first step, nor after one for which none could be made")
        return self._planning.runner.plan

    @property
    def prediction(self) -> Simulation | None:
        """The prediction for the plan of the last step, op by op; None without a machine profile, or of an evaluation.

        It is for micro-batches that are all as large as the largest: saved activations of shorter ones are smaller. Of
        several ranks it is of one, the slowest by all that is known; the others do the same at the same time. Of a
        pipeline it is of all ranks, by rank.

        Raises:
            ConfigError: as ``plan``.
        """
        return self._planning.prediction_of(self.plan)

    @property
    def expected_runs(self) -> float:
        """Runs of ``plan``'s schedule that a step takes on average. More than 1 where steps do not wait for the norm
        of their gradients, and are run again if that is over the limit: by the share of such steps among the last
        50, or 5% before the first.

        Raises:
            ConfigError: as ``plan``.
        """
        return self._planning.expected(self.plan)[0]

    @property
    def expected_seconds(self) -> float | None:
        """Seconds that a step is predicted to take on average, with all that is done again; None: nothing is predicted.

        Raises:
            ConfigError: as ``plan``.
        """
        return self._planning.expected(self.plan)[1]

    @property
    def step_count(self) -> int:
        """Steps taken, skipped ones included."""
        return self._progress.step

    @property
    def last_step(self) -> StepStats | None:
        """Statistics of the last step. Those that a store was continued with have no figures of lanes and memory."""
        return self._progress.last

    @property
    def position(self) -> Mapping[str, Any] | None:
        """The position in the data after the last step, as ``step`` was told; of a store, as it was committed.

        One that is set between steps is part of every snapshot and commit from then on, also of the last step's where a
        delay has left that to the next one; not of one that is made, or being written.

        Raises:
            ConfigError: as ``step``.
        """
        return deepcopy(self._progress.position)  # the caller may write to it

    @position.setter
    def position(self, value: Mapping[str, Any] | None) -> None:
        self._durability.check_open()
        self._progress.position = batch.as_json(value)

    # ---- state

    def master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 tensor on the CPU) of every parameter, frozen ones in the compute dtype's values.

        One parameter is in memory at a time: what was yielded is overwritten only if you keep no reference.
        """
        values = self.values()
        yield from ((name, values.parameter(name)) for name in values.parameters)

    @in_turn
    def values(self) -> Values:
        """Every parameter and persistent buffer, to be read piece by piece between steps, as they are then: each read
        is a call of its own. Several ranks read the same pieces in the same order, as each lends the others what it
        has. Buffers are this rank's.

        Raises:
            ConfigError: another rank makes another call, or reads something else.
        """
        with self._ranks.together("values"):
            self._check_usable()
            self._ranks.agree_on_each({"call": "values"})
            return self._resources.values(CalledArrays(self._resources.whole_arrays, self._read))

    @in_turn
    def _read(self, read: Callable[[], None]) -> None:
        """Have something read with nothing pending. Who has all of it waits for nobody, and may read alone."""
        self._ranks.check()
        with (ALONE if self._resources.share.is_whole else self._ranks).together("values"):
            self._check_usable()
            self._rest()
            read()

    @in_turn
    def on_first(self, what: str, work: Callable[[Values], None]) -> None:
        """Have the first rank alone do ``work`` with ``values``, of which the others lend it what they have. All come
        here, and go on when it is done.

        Raises: what ``work`` does. Of a StoreError or a ConfigError all ranks do, and can go on; after another error
        the others have a RankError.
        """
        with self._ranks.together("on_first"):
            self._check_usable()
            self._rest()
            arrays = LedArrays(self._resources.whole_arrays, self._ranks)

            def lead() -> None:
                try:
                    with holding(False):
                        work(self._resources.values(arrays))
                finally:
                    arrays.done()

            self._ranks.jointly(what, arrays.follow if self._ranks.rank else lead)

    @in_turn
    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a snapshot: parameters, optimizer state, step, random state, settings of the optimizer; exact.

        Of several ranks each writes its part, and all of them make one snapshot, at one path.

        Raises:
            StoreError: the path exists (and ``overwrite`` is not set), or the disk is full or fails; of several ranks
                on all of them, and they can go on.
        """
        with self._ranks.together("save"):
            self._check_usable()
            self._snapshots.agree("save", path, overwrite=overwrite)
            self._rest()
            self._snapshots.save(Path(path), overwrite=overwrite)

    @in_turn
    def load(self, path: str | Path) -> None:
        """Take over a snapshot. Training goes on exactly as it would have where it was saved, be it by another number
        of ranks.

        Raises:
            StoreError: the snapshot is missing, damaged, or made for another model, precision, optimizer or number of
                strands; or the disk failed on the way. Only in the last case has anything changed: load again then,
                with one rank; several have to be started again.
            ConfigError: it was saved by a run with another seed.
        """
        with self._ranks.together("load"):
            self._durability.check_open()
            self._resources.tape.undo.all()
            self._snapshots.agree("load", path)
            self._rest()
            self._snapshots.load(Path(path), self._planning.runner)

    def close(self) -> None:
        """Bring what is in memory to the store and give everything back. The model's parameters stay placeholders.

        In a forked child nothing happens: all of it is the parent's.
        """
        if not self._is_closed and not is_foreign(self):
            self._close()

    @in_turn
    def _close(self) -> None:
        with contextlib.ExitStack() as all_of_it:  # last in, first out; each happens whatever the others raise
            all_of_it.callback(self._ranks.close)
            all_of_it.callback(self._durability.close)
            all_of_it.callback(self._resources.close)
            all_of_it.callback(self._planning.close)
            all_of_it.callback(self._end)
        self._is_closed = True
        self._forget()

    def _end(self) -> None:
        """All ranks end after the same step, and have nothing pending; or what is committed stands."""
        if self._ranks.failure is None and self._durability.state is not State.CLOSED:
            with self._ranks.together("close"):
                self._resources.tape.undo.all()
                self._ranks.agree("end of the run, after step", self.step_count)
                self._durability.rest(self._planning.runner, closes=True)

    def _rest(self) -> None:
        """Nothing is pending from here on: delayed chunks are stepped, and what is being written is written."""
        self._durability.rest_of_all(self._planning.runner)

    @property
    def inside(self) -> Inside:
        """The engine's parts, for tests and benchmarks; they may be other ones in any version."""
        return Inside(resources=self._resources, durability=self._durability, planning=self._planning, rest=self._rest)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in vars(self):
            raise ConfigError(f"engine.{name} is what the engine was made with: wrap the model anew for another one")
        super().__setattr__(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and not isinstance(error, _OF_ALL) and not self._ranks.is_of_all(error):
            self._ranks.fail(error)
        self.close()

    def _around_call(self) -> contextlib.AbstractContextManager[None]:
        return self._resources.streams.around_caller()

    def _check_usable(self) -> None:
        self._durability.check_usable()
        self._resources.tape.undo.all()
