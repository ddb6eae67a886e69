"""The ops of a step on each lane, read off lowered schedules of a small program: one for each home, not for each plan.

A *probe* is a schedule of a request's ``Sample`` with one chunk for each part of a group, all groups at one home, all
or none of their steps delayed. What its ops of a group or a stage do is counted as *facts*. All else is multiplied:

- a part in n chunks moves the same bytes in n ops;
- of a delay, the probe without and the one with all delayed have their shares;
- all groups and stages that one of the sample stands for have the same facts;
- micro-batches: a group's facts are the same for any number of them vertically, and horizontally each further one adds
  what the third does. A stage's are those of two micro-batches whose inputs of the last block may stay, by the half,
  and what the third adds, whose may not. Where ranks of a pipeline do forwards and backwards in turn, all of them are
  lowered.

So probes know neither the sizes of chunks nor those of micro-batches: there are few, and they are kept.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from penstock.config import Family, Tier
from penstock.planner.classes import GroupClass, Home, group_classes
from penstock.planner.fit import settings_of, tied_groups
from penstock.planner.phases import Phases
from penstock.planner.request import Request
from penstock.planner.sample import Sample, without_activations, without_weights
from penstock.schedule.ir.ops import Op
from penstock.schedule.lower.seat import Seat
from penstock.schedule.lower.update import partials_of
from penstock.schedule.lower.visits import lower_step, route_of
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Depths, Placement, Settings
from penstock.schedule.program import GroupSpec, Program

Part = Literal["trainable", "frozen", "whole"]
"""The part of a group that an op is of: a chunk of one of its parts, or all of it."""

Fact = tuple[int, str, Part, int]
"""Row (``Phases``), kind and part of ops, and bytes of each."""

Facts = Mapping[Fact, float]
"""The number of ops of each kind."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The facts of one lowered schedule: of each group and stage, and of the ops that there is one of."""

    groups: Mapping[int, Facts]
    stages: Mapping[int, Facts]
    alone: Facts


class Probes:
    """The probes of one request, lowered when they are asked for. ``phases``: of the request itself."""

    def __init__(self, request: Request, *, wait: bool, speculate: bool, keep: bool) -> None:
        """``wait``, ``speculate``, ``keep``: as in ``Settings``."""
        self.request = request
        self.wait = wait
        self.speculate = speculate
        self.keep = keep
        self.phases = Phases(request.route, wait=wait, speculate=speculate)
        self.sample = Sample.of(request.program)
        self.tied = tied_groups(request.program)
        self._one_by_one = request.one_by_one and request.micro_batches > 1
        self._in_turn = request.route.takes_turns
        self._found: dict[tuple[object, ...], Probe] = {}

    @cached_property
    def classes(self) -> tuple[GroupClass, ...]:
        """All groups, those that are alike together."""
        return group_classes(self.request, self.phases, self.tied)

    @cached_property
    def reals(self) -> Mapping[int, tuple[int, ...]]:
        """Group of the sample -> those that it stands for."""
        found: dict[int, list[int]] = defaultdict(list)
        for g, small in enumerate(self.sample.groups):
            found[small].append(g)
        return {small: tuple(groups) for small, groups in found.items()}

    def of_group(self, small: int, home: Home, gradients: Tier, *, late: bool, deep: bool) -> Facts:
        """The ops of a group of the sample. ``gradients``: where they wait, if they do; ``late``: with every step
        delayed; ``deep``: with more than one buffer for weights."""
        counts = (2, 3) if self._one_by_one else (self.request.micro_batches if self._in_turn else 1,)
        found = [self._of_groups(home, gradients, late, deep, m).groups.get(small, {}) for m in counts]
        further = self.request.micro_batches - 2
        return found[0] if len(found) == 1 else _sum((1 - further, found[0]), (further, found[1]))

    def of_stage(self, small: int, activations: Tier, inputs: int) -> Facts:
        """The ops of a stage of the sample for all micro-batches. ``inputs``: as in ``Depths``."""
        count = self.request.micro_batches
        if self._in_turn:
            return self._of_stages(activations, count).stages.get(small, {})
        two, three = (self._of_stages(activations, m).stages.get(small, {}) for m in (2, 3))
        if self._one_by_one:  # the first and the last, and those in between
            return _sum((1 - (count - 2), two), (count - 2, three))
        stay = min(inputs, count)
        return _sum((stay / 2 - (count - stay), two), (count - stay, three))

    def alone(self, home: Home, gradients: Tier, *, late: bool) -> Facts:
        """The ops that there is one of, where all groups live at one home."""
        count = 2 if self._one_by_one else self.request.micro_batches if self._in_turn else 1
        found = self._of_groups(home, gradients, late, True, count).alone
        return {
            (row, kind, part, self._partials if kind == "AN" and self.request.program.dealt is None else n): number
            for (row, kind, part, n), number in found.items()
        }

    @cached_property
    def _partials(self) -> int:
        """Bytes of the partial sums of all groups' squares, of which the sample has fewer."""
        ranks = Mesh(data=self.request.ranks).everyone()
        return ranks.sent(partials_of(ranks, self.request.route))

    def _of_groups(self, home: Home, gradients: Tier, late: bool, deep: bool, count: int) -> Probe:
        key = (home, gradients, late, deep, count)
        if key not in self._found:
            homes = [self._home(group, home) for group in self._bare.groups]
            place = Placement(
                weights=tuple(weights for weights, _ in homes),
                state=tuple(state for _, state in homes),
                gradients="disk" if gradients == "disk" else "host",
                activations="device",
            )
            settings = replace(self._settings, place=place, delay=float(late), depths=Depths(weights=1 + deep))
            self._found[key] = self._probe(self._bare, replace(settings, micro_batches=count))
        return self._found[key]

    def _of_stages(self, activations: Tier, count: int) -> Probe:
        key = (activations, count)
        if key not in self._found:
            place = replace(_in_host_memory(self._empty), activations=activations)
            settings = replace(self._settings, micro_batches=count, place=place)
            self._found[key] = self._probe(self._empty, settings)
        return self._found[key]

    def _probe(self, program: Program, settings: Settings) -> Probe:
        family = self.request.order if self._one_by_one or self._in_turn else "vertical"
        return _probe(program, settings, self.request.seat(settings), family)

    @cached_property
    def _bare(self) -> Program:
        return without_activations(self.sample.program)

    @cached_property
    def _empty(self) -> Program:
        return without_weights(self.sample.program)

    @cached_property
    def _settings(self) -> Settings:
        place = _in_host_memory(self.request.program)
        largest = max(max(g.trainable, g.frozen) for g in self.request.program.groups)
        settings = settings_of(self.request, place, largest, Depths(), keep=self.keep)
        # strands on the device are a few additions more, which the simulator counts; on the host there are as many
        # and all blocks are computed again (``PhaseCosts.of_graphs`` has what graphs save)
        depths = replace(settings.depths, graphs=0)
        return replace(settings, wait=self.wait, speculate=self.speculate, delay=0.0, strands=1, depths=depths)

    @cached_property
    def _tied(self) -> set[int]:
        return {self.sample.groups[g] for g in self.tied}

    def _home(self, group: GroupSpec, home: Home) -> Home:
        """The home, or host memory for a group that cannot live there."""
        alone = Placement(weights=(home[0],), state=(home[1],), gradients="host", activations="device")
        impossible = alone.fault(replace(group, index=0)) is not None
        return ("host", "host") if impossible or (group.index in self._tied and home[1] == "device") else home


def _in_host_memory(program: Program) -> Placement:
    tiers: list[Tier] = ["host"] * len(program.groups)
    return Placement(weights=tuple(tiers), state=tuple(tiers), gradients="host", activations="device")


@lru_cache(maxsize=4096)
def _probe(program: Program, settings: Settings, seat: Seat, family: Family) -> Probe:
    """The facts of a program's schedule, whose groups have one chunk for each of their parts."""
    route = route_of(program, settings.micro_batches, family, train=settings.train)
    schedule = lower_step(family, program, settings, seat=seat)
    groups: dict[int, Counter[Fact]] = defaultdict(Counter)
    stages: dict[int, Counter[Fact]] = defaultdict(Counter)
    alone: Counter[Fact] = Counter()
    for op, row in Phases(route, wait=settings.wait, speculate=settings.speculate).rows(schedule):
        g, k = op.id.group, op.id.stage
        facts = groups[g] if g >= 0 else stages[k] if k >= 0 else alone
        facts[row, op.id.kind, "whole" if g < 0 else _part(op, program.groups[g]), op.nbytes] += 1
    return Probe(groups=dict(groups), stages=dict(stages), alone=alone)


def _part(op: Op, group: GroupSpec) -> Part:
    if op.id.chunk < 0:
        return "whole"
    return "trainable" if group.trainable and op.id.chunk == 0 else "frozen"


def _sum(*weighted: tuple[float, Facts]) -> Facts:
    found: dict[Fact, float] = defaultdict(float)
    for weight, facts in weighted:
        for fact, count in facts.items():
            found[fact] += weight * count
    return {fact: count for fact, count in found.items() if abs(count) > 1e-9}
