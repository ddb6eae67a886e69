"""From micro-batches to a runner: probe the model once, fit a plan, keep it for every step that it has room for."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import Budget, Tier
from penstock.errors import BudgetError
from penstock.plan.fit import Family, Plan, Request, fit, with_schedule
from penstock.run import batch
from penstock.run.memory import DeviceSlab, HostSlab
from penstock.run.runner import Machinery, Runner
from penstock.schedule.check import check
from penstock.schedule.op import Schedule
from penstock.schedule.place import Placement
from penstock.schedule.program import Program, Stage
from penstock.tape.passage import StageFacts

_BOUNCE = 8 << 20


class Planning:
    """Holds the plans made so far (one for training, one for evaluation) and the one runner that has memory."""

    def __init__(self, machinery: Machinery, budget: Budget, schedule: Family | Schedule, *, wait: bool) -> None:
        """``wait``: whether the optimizer waits for the global gradient norm."""
        self.runner: Runner | None = None
        self._shared = machinery
        self._budget = budget
        self._schedule = schedule
        self._wait = wait
        self._plans: dict[bool, tuple[tuple[batch.Shapes, ...], Plan, tuple[StageFacts, ...]]] = {}
        self._placed: Placement | None = None

    def runner_for(self, micro_batches: Sequence[Mapping[str, Any]], *, train: bool) -> Runner:
        """The runner for these micro-batches; plans anew when they are more, larger or others than planned for.

        Raises:
            BudgetError: they do not fit.
            ModelError: the model cannot be run block by block on them.
        """
        shapes = tuple(batch.shapes(mb) for mb in micro_batches)
        if train in self._plans:
            planned, plan, facts = self._plans[train]
            if len(planned) == len(shapes) and all(batch.covers(p, s) for p, s in zip(planned, shapes, strict=True)):
                return self._use(plan, facts)
        self.close()
        stages = self._probe(max(micro_batches, key=batch.nbytes), train=train)
        facts = self._shared.tape.facts
        plan = self._fit(stages, micro_batches, train=train)
        check(plan.schedule)
        if train:
            self._placed = plan.settings.place
        self._shared.residence.settle(plan.settings.place)
        largest = max(shapes, key=lambda shape: sum(math.prod(dims) for _, dims, _ in shape))
        self._plans[train] = ((largest,) * len(shapes), plan, facts)
        return self._use(plan, facts)

    def close(self) -> None:
        """Give the runner's memory back; the plans stay."""
        if self.runner is not None:
            self.runner.close()
            self.runner = None

    def _use(self, plan: Plan, facts: tuple[StageFacts, ...]) -> Runner:
        if self.runner is None or self.runner.plan is not plan:
            self.close()
            self.runner = Runner(plan, facts, self._shared)
        return self.runner

    def _fit(self, stages: Sequence[Stage], micro_batches: Sequence[Mapping[str, Any]], *, train: bool) -> Plan:
        own = self._schedule if isinstance(self._schedule, Schedule) else None
        name = own.name if own is not None else self._schedule
        request = Request(
            program=Program(groups=tuple(g.spec for g in self._shared.groups), stages=tuple(stages)),
            budget=self._budget,
            form=self._shared.residence.form,
            micro_batches=len(micro_batches),
            wait=self._wait,
            train=train,
            family="horizontal" if name == "horizontal" else "vertical",
            inputs=sum(batch.nbytes(mb) for mb in micro_batches),
        )
        plan = self._best(request)
        return with_schedule(request, plan, own) if own is not None and train else plan

    def _best(self, request: Request) -> Plan:
        """The plan for a request; what is resident stays where it is if it can."""
        keep = self._placed
        if keep is None and not request.train:  # nothing has been placed: evaluate from where the state is at home
            home: Tier = "host" if self._shared.residence.store is None else "disk"
            count = len(request.program.groups)
            keep = Placement(weights=(home,) * count, state=(home,) * count, gradients="host", checkpoints="device")
        try:
            return fit(request, keep)
        except BudgetError:
            if keep is None:
                raise
            return fit(request)

    def _probe(self, micro_batch: Mapping[str, Any], *, train: bool) -> tuple[Stage, ...]:
        """Let the tape learn the model's stages, with weights brought to the device as they are touched."""
        shared, residence = self._shared, self._shared.residence
        slabs: dict[int, DeviceSlab] = {}
        bounce = HostSlab(_BOUNCE, pin=shared.device.type == "cuda")

        def load(g: int) -> None:
            name = f"weights.{g}"
            if residence.tier_of(name) == "device":
                shared.groups[g].attach(residence.array(name))
                return
            part = residence.parts[name]
            slabs[g] = DeviceSlab(part.nbytes, shared.device)
            flat = slabs[g].bytes[: part.nbytes].view(part.dtype)
            for first, piece in residence.pieces(name, bounce):
                residence.read(name, first, piece)
                flat[first : first + piece.numel()].copy_(piece)
            shared.groups[g].attach(flat)

        def unload(g: int) -> None:
            shared.groups[g].detach(residence.dtype, shared.device)
            slab = slabs.pop(g, None)
            if slab is not None:
                slab.close()

        try:
            inputs = batch.to_device(micro_batch, shared.device, residence.dtype)
            return shared.tape.probe(inputs, load, unload, train=train)
        finally:
            for g in list(slabs):
                unload(g)
            bounce.close()
