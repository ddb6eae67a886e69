"""The route of a step: which stages it visits in which order, and what each param group meets on the way.

A route depends on the program, the family of schedules and the number of micro-batches, but on nothing that a plan
decides: one route serves every placement that a planner tries.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from penstock.schedule.ir.references import OpId, VisitId, stage_op
from penstock.schedule.lower.stay import Stay
from penstock.schedule.program import Program


class Visit:
    """One stay of a stage's weights on the device: its compute ops, in order, on the given micro-batches. Without any,
    other ranks compute the stage, and this one has a part of its weights and gradients: it joins their collectives.

    ``kind``: F, E, B, or where that is split I and W.
    """

    __slots__ = ("kind", "micro_batches", "name", "stage")  # a world has hundreds of thousands

    def __init__(self, name: VisitId, micro_batches: tuple[int, ...]) -> None:
        self.name: Final = name
        self.micro_batches: Final = micro_batches
        self.kind: Final = name.kind
        self.stage: Final = name.stage

    def ops(self) -> list[OpId]:
        return [stage_op(self.kind, self.stage, m) for m in self.micro_batches]


class Message(NamedTuple):
    """A message between two stages of which ``peer``, another rank, has one: the op that receives or sends the output
    of a stage, or the gradient with respect to it."""

    ident: OpId
    peer: int


class Route:
    """The walk of one step, its visits and between them messages, in order; and the visits in order.

    | attribute | meaning |
    |---|---|
    | ``at_once`` | micro-batches that are under way at the same time: M vertical, 1 horizontal, and where they go in
    turn (``in_turn``) as many as the walk has between their first step and their last |
    | ``together`` | micro-batches of a visit |
    | ``times`` | how often each (kind, stage) is visited |
    | ``last_visit`` | group -> index of the last visit that needs it |
    | ``readers`` | group -> indices of the visits that need its weights |
    | ``gradient_visits`` | trainable group -> indices of the visits that make gradients for it |
    | ``uses`` | trainable group -> stages that make gradients for it, in backward order |
    | ``whole`` | trainable groups whose gradient is complete on the device, after the one visit that makes it |
    | ``last_made`` | (group, stage) that makes a gradient for it -> index of the last visit that does |
    | ``summed`` | (group, stage) whose gradient is made in more than one visit, so that parts are summed on the host |
    """

    def __init__(
        self, program: Program, walk: Sequence[Visit | Message], *, train: bool, at_once: int | None = None
    ) -> None:
        """``at_once``: of a walk on which forwards and backwards take turns; None: all of a visit, of any other."""
        self.program = program
        self.walk = walk
        self.visits = tuple([step for step in walk if isinstance(step, Visit)])
        self.train = train
        self.together = len(self.visits[0].micro_batches) if self.visits else 0
        self.takes_turns = at_once is not None
        self.at_once = self.together if at_once is None else at_once
        self._reads: dict[tuple[str, int], tuple[int, ...]] = {}
        self._stays: dict[tuple[int, bool], Stay] = {}
        self.last_visit: dict[int, int] = {}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.gradient_visits: dict[int, list[int]] = defaultdict(list)
        self.last_made: dict[tuple[int, int], int] = {}
        for i, visit in enumerate(self.visits):
            kind, stage = visit.kind, visit.stage
            for g in self.reads(kind, stage):
                self.last_visit[g] = i
                self.readers[g].append(i)
            for g in self.gradients(kind, stage):
                self.last_visit[g] = i
                self.gradient_visits[g].append(i)
                self.last_made[g, stage] = i
        makers = {g: [self.visits[i].stage for i in indices] for g, indices in self.gradient_visits.items()}
        self.uses = {g: tuple(dict.fromkeys(stages)) for g, stages in makers.items()}
        self.whole = frozenset(g for g, indices in self.gradient_visits.items() if len(indices) == 1)
        made = Counter((g, stage) for g, stages in makers.items() for stage in stages)
        self.summed = {key for key, visits in made.items() if visits > 1}

    def readers_between(self, first: int, last: int) -> int:
        """The number of visits between two others that read weights."""
        return max(self._reading[last] - self._reading[first + 1], 0)

    @cached_property
    def _reading(self) -> list[int]:
        """For each visit, the number of visits before it that read weights."""
        return list(accumulate((bool(self.reads(v.kind, v.stage)) for v in self.visits), initial=0))

    @cached_property
    def times(self) -> Counter[tuple[str, int]]:
        return Counter((visit.kind, visit.stage) for visit in self.visits)

    def stay(self, depth: int, *, throughout: bool = False) -> Stay:
        """The weights that stay on the device between visits, with pools of weights ``depth`` buffers deep;
        ``throughout``: all weights until their last visit."""
        key = (depth, throughout)
        if key not in self._stays:
            self._stays[key] = Stay(
                self.program,
                [self.reads(visit.kind, visit.stage) for visit in self.visits],
                self.readers,
                at_once=self.at_once,
                depth=depth,
                throughout=throughout,
            )
        return self._stays[key]

    def reads(self, kind: str, stage: int) -> tuple[int, ...]:
        """Groups whose weights a visit needs on the device: those of no elements have none."""
        if (kind, stage) not in self._reads:
            facts, groups = self.program.stages[stage], self.program.groups
            found: Iterable[int] = ()
            match kind:
                case "F":
                    found = facts.forward_reads
                case "B" | "I":
                    found = facts.backward_reads
                case "E":
                    found = sorted({*facts.forward_reads, *(facts.backward_reads if self.train else ())})
            self._reads[kind, stage] = tuple(g for g in found if groups[g].numel)
        return self._reads[kind, stage]

    def trained(self, kind: str, stage: int) -> list[int]:
        """Groups that a visit reads or makes gradients for and that are trained, in ascending order."""
        met = {*self.reads(kind, stage), *self.gradients(kind, stage)}
        return sorted(met & self.gradient_visits.keys())

    def gradients(self, kind: str, stage: int) -> tuple[int, ...]:
        """Groups that a visit makes gradients for."""
        return self.program.stages[stage].gradients if self.train and kind in "BEW" else ()
