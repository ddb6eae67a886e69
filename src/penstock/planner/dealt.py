"""Plans of a pipeline: each rank has a program, a budget and a plan of its own, and all of them take part in one world.

Where nothing is predicted, a rank's plan is the one that fits by the order of preference (``fit``). What all have to do
alike is decided for all of them: whether steps begin before the norm is known, and which share the next step's forward
takes. Where that is left open, and there is a machine to predict for, the world of each choice is simulated, and from
the fastest a search goes on in which linear programs propose for each rank (``joint``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product, starmap
from typing import Any

from penstock.config import Family
from penstock.errors import BudgetError, ConfigError
from penstock.planner.costs import costs_of_plan
from penstock.planner.endurance import EnduranceError, Worn, worn_by
from penstock.planner.fit import fit
from penstock.planner.joint import Joint, JointSearch, Pipelined
from penstock.planner.places import Asked, Places, Plans, Views
from penstock.planner.plan import Plan
from penstock.planner.proposals import Proposal
from penstock.planner.question import SIMULATED_OPS, Question
from penstock.planner.request import Request
from penstock.planner.update_mode import REPEATS, expected_seconds, seconds_back, steps_early
from penstock.schedule.check.late import late_chunks
from penstock.schedule.dealt import programs_of_ranks, stages_dealt
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Side
from penstock.schedule.program import Program
from penstock.shape.model import ModelProfile
from penstock.sim.costs import Costs
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate

DELAYS = (0.0, 0.2, 0.4)
"""delay ratios that are weighed"""
_FEW_OPS = 10_000
"""Ops that may be simulated of what linear programs propose, however few the plans by preference took."""


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A step of all ranks. ``plans``: by rank; ``seconds``: of a step on average, as some are run twice; ``repeats``:
    runs of the step besides the first, on average; ``ops``: of all that was simulated to choose it."""

    plans: Plans
    simulation: Simulation
    seconds: float
    repeats: float
    ops: int = 0


@dataclass(frozen=True, kw_only=True)
class Pace(Views):
    """The basis of a prediction. ``optimizer``, ``io_threads``, ``disk_free`` and ``repeats``: as of ``Question``."""

    optimizer: str
    io_threads: int = 4
    disk_free: int | None = None
    repeats: float = REPEATS

    def costs(self, rank: int, plan: Plan) -> Costs:
        """The costs of the ops of a rank's plan."""
        link = None if self.link is None else partial(self.link, rank)
        machine, times = self.machine(rank), self.times(rank)
        return costs_of_plan(plan, machine, times, self.optimizer, io_threads=self.io_threads, link_to=link)

    def question(self, rank: int, request: Request, waits: Mapping[str, float], ranks: int) -> Question:
        """The question for the plan of one of so many ranks, whose compute ``waits`` for others, by phase."""
        cast: Side = "device" if request.casts_on_device else "host"
        return Question(
            # what pipelines leave no choice of
            request=replace(request, stage=3 if request.ranks > 1 else request.stage, cast=cast),
            machine=self.machine(rank),
            times=self.times(rank),
            optimizer=self.optimizer,
            families=(request.family,),
            delays=DELAYS,
            repeats=self.repeats,
            disk_free=self.disk_free,
            io_threads=self.io_threads,
            simulated_ops=SIMULATED_OPS // ranks,
            waiting=waits,
        )

    def step(self, plans: Plans) -> Foreseen:
        """The simulation of all ranks' steps."""
        firsts = {rank: plans[rank] for rank in plans.firsts}
        costs = {rank: self.costs(rank, plan) for rank, plan in firsts.items()}
        simulation = simulate(plans.world, [costs[rank] for rank in plans.twin])
        repeats = self.repeats * any(steps_early(plan.program, plan.settings) for plan in firsts.values())
        back = max(seconds_back(plan, self.machine(rank)) for rank, plan in firsts.items())
        seconds = expected_seconds(simulation.time, repeats, back)
        return Foreseen(plans=plans, simulation=simulation, seconds=seconds, repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A step of a pipeline in micro-batches of ``size`` sequences, each with such a ``profile``; or of several beside
    each other, of which ``requests`` and plans are those of one."""

    size: int
    profile: ModelProfile
    requests: tuple[Request, ...]
    pace: Pace
    step: Foreseen

    @staticmethod
    def by_preference(size: int, profile: ModelProfile, requests: Sequence[Request], pace: Pace) -> "Pipeline":
        """With the ``preferred`` plans; raises as that."""
        step = preferred([Asked(request=request) for request in requests], pace)
        return Pipeline(size=size, profile=profile, requests=tuple(requests), pace=pace, step=step)

    def improved(self, check: Callable[["Pipeline"], None]) -> "Pipeline":
        """With the plans that are searched for from these on. ``check`` raises BudgetError where ranks lack room."""
        asked = [Asked(request=request) for request in self.requests]
        return replace(self, step=improved(asked, self.pace, self.step, lambda step: check(replace(self, step=step))))

    @property
    def count(self) -> int:
        """Micro-batches of each pipeline."""
        return self.requests[0].micro_batches

    @property
    def beside(self) -> int:
        """The number of pipelines."""
        return self.requests[0].ranks

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each rank."""
        program = self.requests[0].program
        assert program.dealt is not None
        calls = Counter(program.dealt.of_stages[stage.index] for stage in program.stages if stage.kind == "call")
        return tuple(calls[rank] for rank in range(len(self.requests)))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.beside * self.count * self.profile.tokens

    @cached_property
    def disk_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank's store and scratch space take."""
        plans = self.step.plans
        space = {rank: self.requests[rank].space_bytes(plans[rank].settings) for rank in plans.firsts}
        return tuple(space[rank] for rank in plans.twin)


def programs_of(
    program: Program, ranks: int, counts: Sequence[int] | None = None, family: Family = "vertical", beside: int = 1
) -> list[Program]:
    """The program of each rank of a pipeline, to which a model's blocks are dealt out, as the ``family`` has them.
    ``counts``: blocks of each rank; None: by what they compute. ``beside``: pipelines whose ranks of one place share
    what that has.

    Raises:
        ConfigError: there are too few blocks, or two ranks would need the same parameters.
    """
    of_stages = stages_dealt(program, ranks, counts, family)
    program = Mesh(data=beside).everyone().part(program)
    return programs_of_ranks(program, of_stages, ranks)


def plans_of(asked: Sequence[Asked]) -> Plans:
    """The plans of all ranks of a pipeline, by rank, where nothing is predicted.

    Raises:
        BudgetError: a rank's does not fit; says whose.
        ConfigError: they cannot do alike what all have to.
    """
    first = asked[0].request
    return next(_possible(Places(asked), [_choice(first.speculate, first.delay)]))


def fastest_of(asked: Sequence[Asked], pace: Pace) -> Foreseen:
    """The plans of all ranks of a pipeline that are expected to be the fastest of those that keep to the endurance of
    all drives.

    Raises:
        EnduranceError: none do; says of which rank the drives would bear the least.
        BudgetError, ConfigError: as ``plans_of``.
    """
    return improved(asked, pace, preferred(asked, pace))


def preferred(asked: Sequence[Asked], pace: Pace) -> Foreseen:
    """The fastest of the plans by the order of preference; raises as ``fastest_of``."""
    best: Foreseen | None = None
    least: tuple[int, Worn] | None = None
    ops, places = 0, Places(asked, pace)
    for plans in _possible(places, _choices(asked[0].request)):
        size = plans.ops
        ops += size
        found = pace.step(plans)
        if (worn := _worn(places, found, pace)) is not None:
            least = min(least or worn, worn, key=lambda one: one[1].too_fast)
        elif best is None or found.seconds < best.seconds:
            best = found
        if best is not None and ops + size > SIMULATED_OPS:
            break
    if best is None:
        assert least is not None
        rank, by = least
        raise EnduranceError(f"rank {rank} of the pipeline: {EnduranceError.of(by)}", worn=by)
    return replace(best, ops=ops)


def improved(
    asked: Sequence[Asked], pace: Pace, best: Foreseen, check: Callable[[Foreseen], None] = lambda _: None
) -> Foreseen:
    """The plans of all ranks that are found from the ``preferred`` ones on, by linear programs and about half as many
    ops of simulations (``joint``). What is in memory already stays there, and evaluations have no choice. ``check``
    raises BudgetError for plans that lack room where ranks share it."""
    if not asked[0].request.train or any(one.keep is not None for one in asked):
        return best
    places = Places(asked, pace)
    kinds = places.kinds
    left = max(best.ops // 2, _FEW_OPS)

    def simulated(joint: Joint) -> float | None:
        nonlocal best, left
        if left <= 0:
            return None
        plans = _as_proposed(places, dict(zip(kinds, joint, strict=True)))
        left -= plans.ops
        if _differ(places, plans) is not None or _worn(places, found := pace.step(plans), pace) is not None:
            return math.inf
        if found.seconds < best.seconds:
            try:
                check(found)
            except BudgetError:
                return math.inf
            best = replace(found, ops=best.ops)
        return found.seconds

    compute = Pipelined.of([one.request for one in asked], pace.times, places.twin)
    questions = [pace.question(kind, asked[kind].request, compute.waits[kind], len(asked)) for kind in kinds]
    search = JointSearch(questions, best=best.seconds, least=compute.seconds, simulate=simulated)
    search.run([best.plans.settings(kind) for kind in kinds])
    return best


def _as_proposed(places: Places, proposed: Mapping[int, Proposal]) -> Plans:
    """The plans of all ranks by what is proposed for the first rank of each kind."""
    settings = {kind: one.request.roomiest(one.settings) for kind, one in proposed.items()}
    return places.plans({kind: one.request for kind, one in proposed.items()}, settings)


def _worn(places: Places, step: Foreseen, pace: Pace) -> tuple[int, Worn] | None:
    """The rank whose drives wear too fast, of several the one where they do so most; None: all keep to what they
    may."""
    found: list[tuple[int, Worn]] = []
    for rank in step.plans.firsts:
        request, plan, machine = places.asked[rank].request, step.plans[rank], pace.machine(rank)
        worn = worn_by(request.budget, plan, machine, 1 + step.repeats, step.seconds) if request.train else None
        found += [] if worn is None else [(rank, worn)]
    return max(found, key=lambda one: one[1].too_fast, default=None)


Choice = Mapping[str, Any]
"""The update mode and delay of all ranks, as the fields of their requests."""


def _choice(early: bool | None, share: float | None) -> Choice:
    return {"speculate": early, "delay": share}


def _choices(first: Request) -> Iterable[Choice]:
    """The update modes and delays that all ranks may have, as far as these are left open."""
    early: list[bool | None] = [first.speculate]
    shares: list[float | None] = [first.delay]
    if first.train:
        if first.early is None and first.may_speculate:
            early = [None, False]
        if first.delay is None and first.may_delay:
            shares = list(DELAYS)
    return starmap(_choice, product(early, shares))


def _possible(places: Places, choices: Iterable[Choice]) -> Iterator[Plans]:
    """The plans of all ranks with each choice that can be; raises as ``plans_of`` if none can."""
    refused: BudgetError | ConfigError | None = None
    some = False
    for choice in choices:
        try:
            plans = _alike(places, choice)
        except (BudgetError, ConfigError) as error:
            refused = refused or error
            continue
        some = True
        yield plans
    if not some:
        assert refused is not None
        raise refused


def _alike(places: Places, choice: Choice) -> Plans:
    """The plans of all ranks, which go the same ways where all take part: a step that is run again, one that the next
    one completes, a commit.

    Raises:
        BudgetError, ConfigError: they cannot.
    """
    plans = _each(places, choice)
    if not places.asked[0].request.train:
        return plans
    early = {plans[rank].schedule.speculative for rank in plans.firsts}
    if len(early) > 1 and not choice["speculate"]:
        plans = _each(places, {**choice, "speculate": False})
    if (why := _differ(places, plans)) is not None:
        raise ConfigError(why)
    return plans


def _differ(places: Places, all_plans: Plans) -> str | None:
    """The reason that the plans of all ranks do not go the same ways, and what to do; None: they do."""
    plans = {rank: all_plans[rank] for rank in all_plans.firsts}
    early = [rank for rank, plan in plans.items() if plan.schedule.speculative]
    if early and (others := sorted(plans.keys() - early)):
        return (
            f"speculate=True, and rank {others[0]} of the pipeline has nothing on disk that can step early: "
            "leave speculate out"
        )
    if len({bool(late_chunks(plan.schedule)) for plan in plans.values()}) > 1:
        return (
            f"delay={plans[0].settings.delay:g}, and of the ranks of this pipeline some have nothing that can be "
            "delayed: give delay=0"
        )
    first = places.asked[0].request
    promises = first.budget.durability is None or not first.wait
    below = [rank for rank, plan in plans.items() if _is_all_on_disk(plan)]
    if 0 < len(below) < len(plans) and promises:
        return (
            f"all state of rank {below[0]} of the pipeline would live on disk or not change, and of others "
            "some in memory, and no step could be committed or taken back by all of them: give budget.state='disk' or "
            "budget.state='host', or train other parameters"
        )
    return None


def _each(places: Places, choice: Choice) -> Plans:
    """The plan of each rank, fitted once for ranks whose stages are alike: what else they ask for, all of them do."""
    asked: dict[int, Asked] = {}
    for kind in places.kinds:
        one = places.asked[kind]
        asked[kind] = replace(one, request=replace(one.request, **choice))
    made = {kind: _of_rank(kind, one) for kind, one in asked.items()}
    settings = {kind: plan.settings for kind, plan in made.items()}
    return places.plans({kind: one.request for kind, one in asked.items()}, settings, made)


def _of_rank(rank: int, asked: Asked) -> Plan:
    try:
        try:
            return fit(asked.request, asked.keep)
        except BudgetError:
            if asked.keep is None:
                raise
            return fit(asked.request)
    except (BudgetError, ConfigError) as error:
        raise type(error)(f"rank {rank} of the pipeline: {error}") from error


def _is_all_on_disk(plan: Plan) -> bool:
    place = plan.settings.place
    return all(place.state[g.index] == place.home(g) == "disk" for g in plan.program.groups if g.trainable)
