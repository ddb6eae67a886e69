"""From micro-batches to a runner: have the model probed, fit a plan, keep it for every step that it has room for."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from penstock.config import Family, Tier, fields_of
from penstock.engine import batch
from penstock.engine.dealt import dealt_program, plan_among, predicted_of_all, repeat_of_all, schedules_of, times_of_all
from penstock.engine.device import warn_of_other_bits
from penstock.engine.following import Following, Searched, Step, better, change_in_words, wear_in_words
from penstock.engine.interrupt import holding
from penstock.engine.mixing import check_on_first
from penstock.engine.probed import Probed, check_probed, join, join_facts, slowest_of
from penstock.engine.probing import Probing
from penstock.engine.repeats import Repeats
from penstock.engine.resources import EngineResources
from penstock.engine.runner import Runner
from penstock.errors import BudgetError, ConfigError, ModelError, StoreError, is_out_of_memory
from penstock.hardware.drives import together
from penstock.hardware.machine import Network
from penstock.hardware.sharing import link_of_messages, of_each_rank, of_pipeline
from penstock.planner.costs import contention, costs_of_plan
from penstock.planner.dealt import Pace
from penstock.planner.fit import fit, off_device
from penstock.planner.following import corrected, corrected_times, what_is_off
from penstock.planner.own_schedule import own_plan
from penstock.planner.plan import Plan
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.search import best
from penstock.planner.update_mode import expected_repeats, expected_seconds
from penstock.runtime.bound import Bound
from penstock.schedule.check.worlds import check_world
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.place import Placement, Settings
from penstock.schedule.program import Program, Stage
from penstock.shape.model import StageTimes
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate
from penstock.tape.facts import StageFacts
from penstock.tape.handed import HandedOn
from penstock.tape.parameters import refuse_given_values

log = logging.getLogger("penstock")


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A plan, what the tape has to know to run it, and the largest shapes of micro-batch that it was made for."""

    plan: Plan
    facts: tuple[StageFacts, ...]
    shapes: tuple[batch.Shapes, ...]
    request: Request
    handed: Mapping[batch.Shapes, HandedOn]
    """by shape on the device, what calls of blocks are handed"""
    times: StageTimes | None = None
    """measured times of stages, from which steps are predicted; None: nothing is predicted"""
    prediction: Simulation | None = None
    repeat: float | None = None
    """seconds in which a step is taken back that is then run again; None: none is"""

    def covers(self, wanted: Sequence[batch.Shapes]) -> bool:
        """True if these micro-batches need no more than the plan has."""
        # Of a pipeline other ranks have to know of each shape what calls are handed.
        covers = batch.covers if self.plan.program.dealt is None else batch.handed_alike
        return len(wanted) == self.plan.settings.micro_batches and all(
            any(covers(planned, shape) for planned in self.shapes) for shape in wanted
        )


_OFTEN = 0.5


class Planning:
    """Holds the plans made so far (one for training, one for evaluation) and the one runner that has memory."""

    def __init__(self, resources: EngineResources, *, before_change: Callable[[Runner], None]) -> None:
        """``before_change``: called before a runner gives its memory back, with it: what it has left to do is to be
        done now."""
        self._before_change = before_change
        self.runner: Runner | None = None
        self.probing = Probing(resources, make_room=self.close)
        self.labels = self.probing.labels
        self._shared = resources
        self._asked = settings = resources.settings
        self._schedule = settings.schedule
        ranks, whole = resources.ranks, resources.machine
        threads = max(ranks.gather_objects("threads", resources.threads))
        self._machine = whole
        """the machine as each rank sees it, corrected by what steps have shown; None: nothing is predicted"""
        self._link: Network | None = None
        """the link of messages, where pipelines are beside each other"""
        if whole is not None and ranks.are_pipeline:
            self._machine = of_pipeline(whole, ranks.size, threads, ranks.hosts, ranks.each, ranks.cp)
            self._link = link_of_messages(whole, ranks.size, ranks.hosts, ranks.each)
        elif whole is not None:
            self._machine = of_each_rank(whole, ranks.size, threads, ranks.hosts, ranks.copies, ranks.cp)
        follows = settings.follows_machine and self._machine is not None and not ranks.are_pipeline
        self._following = Following() if follows else None
        self.changed: str | None = None
        """the reason for a change of plan since the step before; None: it has not changed"""
        self.repeats = Repeats(expected_repeats(settings))
        self._plans: dict[bool, Ready] = {}
        self._last: dict[bool, Ready] = {}
        """the plans from before the last change of the model"""
        self._why = ""  # the machine is another one than predicted, in words
        self._before: Ready | None = None
        """the plan that was in use before a change that has not come into use yet; None: there is none"""
        self.placed: Placement | None = None
        """the placement of arrays; None: nothing has been placed"""
        if resources.spans is not None:
            check_on_first(resources, resources.spans)

    def runner_for(self, micro_batches: Sequence[Mapping[str, Any]], *, train: bool) -> Runner:
        """The runner for these micro-batches; plans anew when they are more, larger or others than planned for.

        Raises:
            BudgetError: they do not fit.
            ModelError: the model cannot be run block by block on them.
        """
        refuse_given_values(self._shared.groups, self._shared.dtype)
        shapes, ranks = [batch.shapes(mb) for mb in micro_batches], self._shared.ranks
        self.changed = None if train else self.changed
        seen = self._following.take() if train and self._following is not None else None
        another, ready = self.probing.is_of_another(train=train), self._plans.get(train)
        gathered = ranks.gather_objects("plan", (another, ready is not None and ready.covers(shapes), seen))
        if any(another for another, _, _ in gathered):
            ready = self._as_before(shapes, train=train)
            if ready is not None:
                self.probing.look_at_labels(micro_batches)
                return self._use(ready)
        if ready is not None and all(covered for _, covered, _ in gathered):
            self.probing.look_at_labels(micro_batches)
            if train and self._following is not None:
                ready = self._follow(self._following, ready, [step for _, _, step in gathered])
            return self._use(ready) if self._before is None or not train else self._use_changed(ready, self._before)
        self._before = None
        ranks.agree("number of micro-batches", len(micro_batches))
        self.close()
        probed = self.probing.find(dict(zip(shapes, micro_batches, strict=True)), self._machine, train=train)
        self.probing.look_at_labels(micro_batches)
        nbytes = max(batch.nbytes(mb, self._shared.arrays.dtype) for mb in micro_batches)
        # In a pipeline, whose ranks have to know of each shape what calls are handed, also of those that were probed
        # before, so that steps whose shapes alternate have one plan.
        every = dict(self.probing.found[train]) if ranks.are_pipeline else probed
        others = any(ranks.gather_objects("shapes that were seen before", len(every) > len(probed)))
        try:
            with holding(False):
                self._plans[train] = self._ready(every, len(micro_batches), nbytes, train=train)
        except (BudgetError, ConfigError, ModelError):
            if not others:
                raise
            with holding(False):
                self._plans[train] = self._ready(probed, len(micro_batches), nbytes, train=train)
        return self._use(self._plans[train])

    def _as_before(self, shapes: Sequence[batch.Shapes], *, train: bool) -> Ready | None:
        """The plan from before the last change of the model, if that is taken back and the plan has room for these
        micro-batches; None: there is to be another one. All ranks come here."""
        now, last = self._plans.pop(train, None), self._last.pop(train, None)
        if now is not None:
            self._last[train] = now
        is_again = self.probing.set_aside(train=train)
        covered = is_again and last is not None and last.covers(shapes)
        if not all(self._shared.ranks.gather_objects("plan from before", covered)) or last is None:
            return None
        self._before, self._plans[train] = None, last
        if train:
            self._is_placed(last.plan.settings.place)
            if self._following is not None:
                self._following.changed()
        return last

    def _ready(self, probed: Mapping[batch.Shapes, Probed], count: int, nbytes: int, *, train: bool) -> Ready:
        """The plan for ``count`` micro-batches of such shapes, of at most ``nbytes`` each."""
        ranks, every = self._shared.ranks, list(probed.values())
        stages = self._join_ranks(every)  # first: it looks whether all have the same stages
        known = (p.facts for found in self.probing.found.values() for p in found.values())
        facts = join_facts([p.facts for p in every], known)
        check_probed(every, stages, self._asked, count, train=train)
        calls = {p.moved: p.handed for p in every}
        largest = max(nbytes, *(p.nbytes for p in every))
        request = self._request(self._program(stages, facts, calls), count, largest, train=train)
        times = self._times([p.times for p in every], request.program)
        plan = self._fit(request, times)
        if ranks.sharing.size > 1:
            ranks.sharing.agree("schedule", hashlib.sha256(str(plan.schedule).encode()).hexdigest()[:16])
        if train:
            self._is_placed(plan.settings.place)
        made = Ready(plan=plan, facts=facts, shapes=tuple(probed), request=request, handed=calls)
        return self._predicted(made, times)

    def _predicted(self, ready: Ready, times: StageTimes | None) -> Ready:
        """``ready``, with the prediction of its plan by these times. All ranks come here."""
        prediction = None if times is None else self._predict(ready.request, ready.plan, times)
        repeat = repeat_of_all(self._shared.ranks, ready.plan, self._machine)
        return replace(ready, times=times, prediction=prediction, repeat=repeat)

    def look(self, runner: Runner) -> None:
        """A step is done that counts: see what its lanes did. The first of a runner warms up, and shows nothing."""
        ready = self._plans.get(True)
        if self._following is None or ready is None or ready.plan is not runner.plan or runner.runs < 2:
            return
        assert self._machine is not None
        assert ready.prediction is not None
        drives = self._machine.drives
        slowed = contention(self._machine, together(drives) if drives else None)
        self._following.look(ready.plan, ready.prediction, slowed, runner.marks)

    def _follow(self, following: Following, ready: Ready, steps: Sequence[Step | None]) -> Ready:
        """The plan for the next step: that of the last one, predicted by what the last steps have shown, or a better
        one. All ranks come here with what all have seen."""
        machine, times = self._machine, ready.times
        assert machine is not None
        assert times is not None
        learned = following.learn(steps)
        if learned is not None:
            off, factors = learned
            self._why = what_is_off(off, machine)
            self._machine = corrected(machine, factors)
            self._last.clear()  # they were predicted on the machine before
            times = corrected_times(times, factors, ready.plan.program.stages)
            ready = self._predicted(ready, times)
            self._plans[True] = ready
            following.corrected(off)
        if not following.due:
            return ready
        prediction = ready.prediction
        assert prediction is not None
        question = self._question(ready.request, times)
        if not following.is_due(question.expected(prediction.time, ready.plan)):
            return ready
        with holding(False):
            found: Searched = self._shared.ranks.once(
                "better plan",
                lambda: better(question, ready.plan, prediction, following.search_seconds, in_vain=following.wears),
            )
        if following.searched(found) and self._shared.ranks.rank == 0:
            log.warning(wear_in_words(self._why, found))
        if found.settings is None:
            log.debug("%s; the plan stays, %.3g s a step predicted", self._why, found.now)
            return ready
        self.changed = change_in_words(self._why, ready.plan.settings, found)
        self.change(found.settings)
        following.changed()
        return self._plans[True]

    def _question(self, request: Request, times: StageTimes) -> Question:
        """The question for the plan of a request in its family, which is free to move everything."""
        assert self._machine is not None
        shared = self._shared
        return Question(
            request=request,
            machine=self._machine,
            times=times,
            optimizer=shared.rate,
            families=(request.family,),
            io_threads=self._asked.io_threads,
            repeats=self.repeats.planned,
            disk_free=shared.disk_free(request),
        )

    @property
    def request(self) -> Request:
        """The request that the plan of steps was made for. There has to be such a plan."""
        return self._plans[True].request

    def change(self, settings: Settings) -> None:
        """Train with other settings of the same request from the next step on, which are within its budget. Changes no
        bit. All ranks come here with the same, between two steps, and there is a plan.
        """
        ready = self._plans[True]
        plan = ready.request.plan(settings)
        self._check(plan, ready.request)
        changed = self._predicted(replace(ready, plan=plan), ready.times)
        self._before = self._before or ready
        self._plans[True] = changed

    def _use_changed(self, ready: Ready, before: Ready) -> Runner:
        """Bring a changed plan into use, which nobody has asked for: if any rank cannot, all go on with the one before.

        Raises:
            StoreError: what is pending could not be done, or the one before has no memory or disk any more, either.
        """
        self._before = None
        self.close()
        failure: Exception | None = None
        try:
            self._is_placed(ready.plan.settings.place)
            self._use(ready)
        except (StoreError, BudgetError, MemoryError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            failure = error
        failures = self._shared.ranks.gather_objects("changed plan", failure and str(failure))
        said = next((said for said in failures if said is not None), None)
        if said is not None:
            log.warning("the plan is not changed, as the other one cannot be had: %s", said)
            self.close()
            self._following = None  # what cannot be had once is not tried again
            self.changed = None
            self._plans[True] = before
            self._is_placed(before.plan.settings.place)
            self._use(before)
        assert self.runner is not None
        return self.runner

    def _is_placed(self, place: Placement) -> None:
        """Arrays are about to be where steps are to find them."""
        if place != self.placed:
            self.placed = place
            for plans in (self._plans, self._last):
                plans.pop(False, None)  # it was made for arrays in other places

    def observe(self, *, over: bool) -> None:
        """Count a step, whose norm was ``over`` the limit or not. If that is more or less often the case than the plan
        was made for, and the update mode is left open, the next step is planned anew."""
        self.probing.has_stepped()
        left_open = self._asked.needs_norm and self._asked.steps_early(self._asked.budget) is None
        if self.repeats.add(over=over) and left_open:
            self.repeats.planned = self.repeats.share
            self._last.clear()
            if (ready := self._plans.get(True)) is not None:
                self._plans[True] = replace(ready, shapes=())  # for none; its prediction is that of the last step

    def prediction_of(self, plan: Plan) -> Simulation | None:
        """The prediction for a plan that is in use; None: there is none."""
        ready = self._of(plan)
        return None if ready is None else ready.prediction

    def _of(self, plan: Plan) -> Ready | None:
        return next((ready for ready in self._plans.values() if ready.plan is plan), None)

    def expected(self, plan: Plan) -> tuple[float, float | None]:
        """Runs and seconds of a step on average, by a plan that is in use; None: nothing is predicted."""
        ready, repeats, back = self._of(plan), 0.0, 0.0
        if ready is not None and ready.repeat is not None:
            repeats, back = self.repeats.share, ready.repeat
        predicted = self.prediction_of(plan)
        return 1 + repeats, None if predicted is None else expected_seconds(predicted.time, repeats, back)

    def _predict(self, request: Request, plan: Plan, times: StageTimes) -> Simulation:
        shared = self._shared
        assert self._machine is not None
        if shared.ranks.are_pipeline:
            return predicted_of_all(shared.ranks, plan, self._pace(times))
        costs = costs_of_plan(plan, self._machine, times, shared.rate, io_threads=self._asked.io_threads)
        return simulate(request.world(plan.schedule), costs)

    def close(self) -> None:
        """Give the runner's memory back; the plans stay."""
        if self.runner is not None:
            self._before_change(self.runner)
            self.abandon()

    def abandon(self) -> None:
        """As ``close``; what the runner has left to do is not done."""
        if self.runner is not None:
            runner, self.runner = self.runner, None  # first: what is half closed is not used again
            runner.close()

    def _use(self, ready: Ready) -> Runner:
        if self.runner is None or self.runner.plan is not ready.plan:
            if isinstance(self._schedule, Schedule):
                Bound(schedule=ready.plan.schedule, program=ready.plan.program).check_rest()
            self.close()
            self._shared.arrays.settle(ready.plan.settings.place)
            if self._shared.device.type != "cpu":
                # What the probe and the move have freed makes room for the plan's slabs.
                torch.accelerator.empty_cache()
            if self._shared.device.type != "cpu" and "device" in ready.plan.settings.place.state:
                warn_of_other_bits(self._shared.device, self._shared.rate)
            self.runner = Runner(ready.plan, ready.facts, self._shared, ready.handed)
        return self.runner

    def _join_ranks(self, probed: Sequence[Probed]) -> tuple[Stage, ...]:
        """Stages that have room for every rank's micro-batches. What their tape has to know is each rank's own."""
        own = [(p.stages, tuple(fact.offload for fact in p.facts)) for p in probed]
        every = [both for by_rank in self._shared.ranks.gather_objects("stages", own) for both in by_rank]
        return join([stages for stages, _ in every], [movable for _, movable in every])

    def _program(
        self, stages: Sequence[Stage], facts: Sequence[StageFacts], calls: Mapping[batch.Shapes, HandedOn]
    ) -> Program:
        """The program that this rank has its part of."""
        shared = self._shared
        if not shared.ranks.are_pipeline:
            groups = tuple(shared.share.part(g.spec) for g in shared.groups)
            return Program(groups=groups, stages=tuple(stages))
        whole = Program(groups=tuple(g.spec for g in shared.groups), stages=tuple(stages))
        return dealt_program(whole, facts, list(calls.values()), shared.dealt, shared.share, shared.ranks)

    def _request(self, program: Program, count: int, nbytes: int, *, train: bool) -> Request:
        # A schedule of one's own has its order in it, whatever it is called: what is built beside it are evaluations.
        family: Family = "vertical" if isinstance(self._schedule, Schedule) else self._schedule
        ranks, asked = self._shared.ranks.sharing, self._asked
        inputs = ranks.gather_objects("inputs", count * nbytes)
        speculate, own = asked.steps_early(asked.budget), train and isinstance(self._schedule, Schedule)
        if speculate is None and not own and self._machine is None and self.repeats.planned > _OFTEN:
            speculate = False  # there is no profile to tell what a step and what waiting costs
        return Request(
            program=program,
            budget=asked.budget,
            form=self._shared.arrays.form,
            micro_batches=count,
            wait=asked.needs_norm,
            **fields_of(asked) | {"speculate": speculate, "strands": self._shared.strands},
            train=train,
            family=family,
            inputs=max(inputs),
            ranks=ranks.each,
            copies=ranks.copies,
            hosts=ranks.hosts,
            accelerated=self._shared.device.type != "cpu",
        )

    def _times(self, own: Sequence[StageTimes | None], program: Program) -> StageTimes | None:
        """Times of the stages on the slowest rank, or in a pipeline of each stage on its own rank: they were measured
        while all ranks computed."""
        ranks = self._shared.ranks
        if program.dealt is not None:
            return times_of_all(ranks, slowest_of(own), program.dealt)
        return slowest_of(ranks.gather_objects("stage times", slowest_of(own)))

    def _fit(self, request: Request, times: StageTimes | None) -> Plan:
        if isinstance(self._schedule, Schedule) and request.train:
            own = partial(own_plan, request, self._schedule, self.placed)
            return self._shared.ranks.sharing.jointly("a schedule of one's own", own)
        began = time.perf_counter()
        if self._shared.ranks.are_pipeline:
            pace = None if times is None or self._machine is None else self._pace(times)
            plan = plan_among(self._shared.ranks, request, self._kept(request), pace)
        elif request.ranks == 1:
            plan = self._best(request, times)
        else:
            settings = self._shared.ranks.decided("settings of the plan", lambda: self._best(request, times).settings)
            plan = request.plan(settings)
        if self._following is not None and request.train:
            self._following.search_seconds = time.perf_counter() - began
            self._following.changed()
        self._check(plan, request)
        return plan

    def _pace(self, times: StageTimes) -> Pace:
        """The basis of a prediction of a pipeline."""
        shared, machine, link = self._shared, self._machine, self._link
        assert machine is not None
        return Pace(
            machine=lambda _: machine,
            times=lambda _: times,
            optimizer=shared.rate,
            link=None if link is None else lambda *_: link,
            io_threads=self._asked.io_threads,
            repeats=self.repeats.planned,
        )

    def _check(self, plan: Plan, request: Request) -> None:
        ranks = self._shared.ranks
        if ranks.are_pipeline:
            check_world(schedules_of(ranks, plan.schedule))
            prove(plan.schedule, Needs.of(plan.program, plan.settings, request.ranks))
            return
        seat = request.seat(plan.settings)
        check_world(seat.of_few().world(plan.schedule))
        prove(plan.schedule, Needs.of(plan.program, plan.settings, request.ranks, request.copies, seat.hosts.size))

    def _kept(self, request: Request) -> Placement | None:
        """The placement of weights and state that a plan for a request had better keep; None: nothing is placed yet."""
        keep = self.placed
        on_disk = self._shared.arrays.store is not None
        if keep is None and not request.train and on_disk:  # evaluate from where the state is at home
            disk: Tier = "disk"
            home = (disk,) * len(request.program.groups)
            keep = Placement(weights=home, state=home, gradients="host", activations="device")
        return None if keep is None else off_device(keep, request.program)

    def _best(self, request: Request, times: StageTimes | None) -> Plan:
        """The plan for a request; what is resident stays where it is if it can."""
        keep = self._kept(request)
        try:
            return self._plan(request, times, keep)
        except BudgetError:
            if keep is None:
                raise
            return self._plan(request, times, None)

    def _plan(self, request: Request, times: StageTimes | None, keep: Placement | None) -> Plan:
        if self._machine is None or times is None:
            return fit(request, keep)
        return best(self._question(request, times), keep)
