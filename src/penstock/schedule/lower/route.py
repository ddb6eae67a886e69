"""The route of a step: which stages it visits in which order, and what each param group meets on the way.

A route depends on the program, the family of schedules and the number of micro-batches, but on nothing that a plan
decides: one route serves every placement that a planner tries.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule.ir.references import OpId, VisitId, stage_op
from penstock.schedule.lower.stay import Stay
from penstock.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One stay of a stage's weights on the device: its compute ops, in order, on the given micro-batches."""

    name: VisitId
    micro_batches: tuple[int, ...]

    @property
    def kind(self) -> str:
        """F, E or B"""
        return self.name.kind

    @property
    def stage(self) -> int:
        return self.name.stage

    def ops(self) -> list[OpId]:
        return [stage_op(self.kind, self.stage, m) for m in self.micro_batches]


class Route:
    """The visits of one step in order.

    | attribute | meaning |
    |---|---|
    | ``at_once`` | micro-batches that are under way at the same time: M vertical, 1 horizontal |
    | ``times`` | how often each (kind, stage) is visited |
    | ``last_visit`` | group -> index of the last visit that needs it |
    | ``readers`` | group -> indices of the visits that need its weights |
    | ``gradient_visits`` | trainable group -> indices of the visits that make gradients for it |
    | ``uses`` | trainable group -> stages that make gradients for it, in backward order |
    | ``whole`` | trainable groups whose gradient is complete on the device, after the one visit that makes it |
    | ``last_made`` | (group, stage) that makes a gradient for it -> index of the last visit that does |
    | ``summed`` | (group, stage) whose gradient is made in more than one visit, so that parts are summed on the host |
    """

    def __init__(self, program: Program, visits: Sequence[Visit], *, train: bool) -> None:
        self.program = program
        self.visits = tuple(visits)
        self.train = train
        self.at_once = len(self.visits[0].micro_batches)
        self.times = Counter((visit.kind, visit.stage) for visit in self.visits)
        self._reads: dict[tuple[str, int], tuple[int, ...]] = {}
        self._stays: dict[int, Stay] = {}
        self.last_visit: dict[int, int] = {}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.gradient_visits: dict[int, list[int]] = defaultdict(list)
        self.last_made: dict[tuple[int, int], int] = {}
        for i, visit in enumerate(self.visits):
            gradients = self.gradients(visit.kind, visit.stage)
            reads = self.reads(visit.kind, visit.stage)
            for g in (*reads, *gradients):
                self.last_visit[g] = i
            for g in reads:
                self.readers[g].append(i)
            for g in gradients:
                self.gradient_visits[g].append(i)
                self.last_made[g, visit.stage] = i
        makers = {g: [self.visits[i].stage for i in indices] for g, indices in self.gradient_visits.items()}
        self.uses = {g: tuple(dict.fromkeys(stages)) for g, stages in makers.items()}
        self.whole = frozenset(g for g, indices in self.gradient_visits.items() if len(indices) == 1)
        made = Counter((g, stage) for g, stages in makers.items() for stage in stages)
        self.summed = {key for key, visits in made.items() if visits > 1}

    def stay(self, depth: int) -> Stay:
        """What stays on the device between visits, with pools of weights ``depth`` buffers deep."""
        if depth not in self._stays:
            self._stays[depth] = Stay(
                self.program,
                [self.reads(visit.kind, visit.stage) for visit in self.visits],
                self.readers,
                at_once=self.at_once,
                depth=depth,
            )
        return self._stays[depth]

    def reads(self, kind: str, stage: int) -> tuple[int, ...]:
        """Groups whose weights a visit needs on the device: those of no elements have none."""
        if (kind, stage) not in self._reads:
            facts, groups = self.program.stages[stage], self.program.groups
            found = facts.backward_reads if kind == "B" else facts.forward_reads
            if kind == "E":
                found = tuple(sorted({*found, *(facts.backward_reads if self.train else ())}))
            self._reads[kind, stage] = tuple(g for g in found if groups[g].numel)
        return self._reads[kind, stage]

    def gradients(self, kind: str, stage: int) -> tuple[int, ...]:
        """Groups that a visit makes gradients for."""
        return self.program.stages[stage].gradients if self.train and kind in "BE" else ()
