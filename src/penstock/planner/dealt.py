"""Plans of a pipeline: each rank has a program, a budget and a plan of its own, and all of them take part in one world.

Where nothing is predicted, a rank's plan is the one that fits by the order of preference (``fit``). What all have to do
alike is decided for all of them: whether steps begin before the norm is known, and which share the next step's forward
takes. Where that is left open, and there is a machine to predict for, the world of each choice is simulated, and from
the fastest a search goes on in which linear programs propose for each rank (``joint``).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from penstock.config import Family
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.machine import Machine, Network
from penstock.planner.costs import costs_of_plan
from penstock.planner.endurance import EnduranceError, Worn, worn_by
from penstock.planner.fit import fit
from penstock.planner.joint import Joint, JointSearch, Pipelined
from penstock.planner.plan import Plan
from penstock.planner.proposals import Proposal
from penstock.planner.question import SIMULATED_OPS, Question
from penstock.planner.request import Request
from penstock.planner.update_mode import REPEATS, expected_seconds, seconds_back, steps_early
from penstock.schedule.check.late import late_chunks
from penstock.schedule.dealt import programs_of_ranks, stages_dealt
from penstock.schedule.lower.seat import pipeline_world
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import Placement, Settings, Side
from penstock.schedule.program import Program
from penstock.shape.model import ModelProfile, StageTimes
from penstock.sim.costs import Costs
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate

DELAYS = (0.0, 0.2, 0.4)
"""delay ratios that are weighed"""
_FEW_OPS = 10_000
"""Ops that may be simulated of what linear programs propose, however few the plans by preference took."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of one rank. ``keep``: where its weights and state are already, if that is not to be changed."""

    request: Request
    keep: Placement | None = None


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A step of all ranks. ``plans``: by rank; ``seconds``: of a step on average, as some are run twice; ``repeats``:
    runs of the step besides the first, on average; ``ops``: of all that was simulated to choose it."""

    plans: tuple[Plan, ...]
    simulation: Simulation
    seconds: float
    repeats: float
    ops: int = 0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The basis of a prediction. By a rank's number, ``machine``: as it sees it; ``times``: of all stages; and
    ``link``: over which messages go from it to another, None: the network. ``optimizer``, ``io_threads``,
    ``disk_free`` and ``repeats``: as of ``Question``."""

    machine: Callable[[int], Machine]
    times: Callable[[int], StageTimes]
    optimizer: str
    link: Callable[[int, int], Network] | None = None
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

    def step(self, plans: Sequence[Plan]) -> Foreseen:
        """The simulation of all ranks' steps."""
        costs = [self.costs(rank, plan) for rank, plan in enumerate(plans)]
        simulation = simulate(pipeline_world([plan.schedule for plan in plans]), costs)
        repeats = self.repeats * any(steps_early(plan.program, plan.settings) for plan in plans)
        back = max(seconds_back(plan, self.machine(rank)) for rank, plan in enumerate(plans))
        seconds = expected_seconds(simulation.time, repeats, back)
        return Foreseen(plans=tuple(plans), simulation=simulation, seconds=seconds, repeats=repeats)


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

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each rank."""
        program = self.requests[0].program
        assert program.dealt is not None
        calls = [program.dealt.of_stages[stage.index] for stage in program.stages if stage.kind == "call"]
        return tuple(calls.count(rank) for rank in range(len(self.requests)))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.beside * self.count * self.profile.tokens

    @property
    def disk_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank's store and scratch space take."""
        both = zip(self.requests, self.step.plans, strict=True)
        return tuple(request.space_bytes(plan.settings) for request, plan in both)


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


def plans_of(asked: Sequence[Asked]) -> tuple[Plan, ...]:
    """The plans of all ranks of a pipeline, by rank, where nothing is predicted.

    Raises:
        BudgetError: a rank's does not fit; says whose.
        ConfigError: they cannot do alike what all have to.
    """
    first = asked[0].request
    return next(_possible(asked, [(first.speculate, first.delay)]))


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
    ops = 0
    for plans in _possible(asked, _choices(asked[0].request)):
        size = sum(len(plan.schedule.ops) for plan in plans)
        ops += size
        found = pace.step(plans)
        if (worn := _worn(asked, found, pace)) is not None:
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
    like = _likes(asked, pace)
    kinds = sorted(set(like))
    left = max(best.ops // 2, _FEW_OPS)

    def simulated(joint: Joint) -> float | None:
        nonlocal best, left
        if left <= 0:
            return None
        plans = _as_proposed(asked, like, dict(zip(kinds, joint, strict=True)))
        left -= sum(len(plan.schedule.ops) for plan in plans)
        if _differ(asked, plans) is not None or _worn(asked, found := pace.step(plans), pace) is not None:
            return math.inf
        if found.seconds < best.seconds:
            try:
                check(found)
            except BudgetError:
                return math.inf
            best = replace(found, ops=best.ops)
        return found.seconds

    compute = Pipelined.of([one.request for one in asked], pace.times)
    questions = [pace.question(kind, asked[kind].request, compute.waits[kind], len(asked)) for kind in kinds]
    search = JointSearch(questions, best=best.seconds, least=compute.seconds, simulate=simulated)
    search.run([best.plans[kind].settings for kind in kinds])
    return best


def _as_proposed(asked: Sequence[Asked], like: Sequence[int], proposed: Mapping[int, Proposal]) -> tuple[Plan, ...]:
    """The plans of all ranks by what is proposed for the first rank of each kind."""
    settings = {kind: one.request.roomiest(one.settings) for kind, one in proposed.items()}
    plans = []
    for kind, one in zip(like, asked, strict=True):
        request = replace(proposed[kind].request, program=one.request.program, budget=one.request.budget)
        plans.append(request.plan(_moved(settings[kind], asked[kind].request.program, one.request.program)))
    return tuple(plans)


def _worn(asked: Sequence[Asked], step: Foreseen, pace: Pace) -> tuple[int, Worn] | None:
    """The rank whose drives wear too fast, of several the one where they do so most; None: all keep to what they
    may."""
    found: list[tuple[int, Worn]] = []
    for rank, (one, plan) in enumerate(zip(asked, step.plans, strict=True)):
        budget, machine = one.request.budget, pace.machine(rank)
        worn = worn_by(budget, plan, machine, 1 + step.repeats, step.seconds) if one.request.train else None
        found += [] if worn is None else [(rank, worn)]
    return max(found, key=lambda one: one[1].too_fast, default=None)


def _choices(first: Request) -> Iterable[tuple[bool | None, float | None]]:
    """(speculate, delay) that all ranks may have, as far as these are left open."""
    speculates: list[bool | None] = [first.speculate]
    delays: list[float | None] = [first.delay]
    if first.train:
        if first.early is None and first.may_speculate:
            speculates = [None, False]
        if first.delay is None and first.may_delay:
            delays = list(DELAYS)
    return product(speculates, delays)


def _possible(
    asked: Sequence[Asked], choices: Iterable[tuple[bool | None, float | None]]
) -> Iterator[tuple[Plan, ...]]:
    """The plans of all ranks with each choice of (speculate, delay) that can be; raises as ``plans_of`` if none can."""
    refused: BudgetError | ConfigError | None = None
    some = False
    for speculate, delay in choices:
        try:
            plans = _alike([replace(a, request=replace(a.request, speculate=speculate, delay=delay)) for a in asked])
        except (BudgetError, ConfigError) as error:
            refused = refused or error
            continue
        some = True
        yield plans
    if not some:
        assert refused is not None
        raise refused


def _alike(asked: Sequence[Asked]) -> tuple[Plan, ...]:
    """The plans of all ranks, which go the same ways where all take part: a step that is run again, one that the next
    one completes, a commit.

    Raises:
        BudgetError, ConfigError: they cannot.
    """
    plans = _each(asked)
    if not asked[0].request.train:
        return tuple(plans)
    early = {plan.schedule.speculative for plan in plans}
    if len(early) > 1 and not asked[0].request.speculate:
        plans = _each([replace(one, request=replace(one.request, speculate=False)) for one in asked])
    if (why := _differ(asked, plans)) is not None:
        raise ConfigError(why)
    return tuple(plans)


def _differ(asked: Sequence[Asked], plans: Sequence[Plan]) -> str | None:
    """The reason that the plans of all ranks do not go the same ways, and what to do; None: they do."""
    early = [plan.schedule.speculative for plan in plans]
    if any(early) and not all(early):
        return (
            f"speculate=True, and rank {early.index(False)} of the pipeline has nothing on disk that can step early: "
            "leave speculate out"
        )
    if len({bool(late_chunks(plan.schedule)) for plan in plans}) > 1:
        return (
            f"delay={plans[0].settings.delay:g}, and of the ranks of this pipeline some have nothing that can be "
            "delayed: give delay=0"
        )
    promises = asked[0].request.budget.durability is None or not asked[0].request.wait
    below = [_is_all_on_disk(plan) for plan in plans]
    if len(set(below)) > 1 and promises:
        return (
            f"all state of rank {below.index(True)} of the pipeline would live on disk or not change, and of others "
            "some in memory, and no step could be committed or taken back by all of them: give budget.state='disk' or "
            "budget.state='host', or train other parameters"
        )
    return None


def _each(asked: Sequence[Asked]) -> list[Plan]:
    """The plan of each rank, made once for ranks whose stages are alike: what else they ask for, all of them do."""
    plans: list[Plan] = []
    for rank, (one, like) in enumerate(zip(asked, _likes(asked), strict=True)):
        if like == rank:
            plans.append(_of_rank(rank, one))
        else:
            settings = _moved(plans[like].settings, asked[like].request.program, one.request.program)
            plans.append(one.request.plan(settings))
    return plans


def _likes(asked: Sequence[Asked], pace: Pace | None = None) -> list[int]:
    """For each rank the first one whose stages, and machine if there is a ``pace``, are like its own."""
    first: dict[object, int] = {}
    machines: list[Machine] = []
    found = []
    for rank, one in enumerate(asked):
        request, key = one.request, object()
        if one.keep is None and request.program.dealt is not None:
            machine = 0
            if pace is not None:
                seen = pace.machine(rank)
                machines += [] if seen in machines else [seen]
                machine = machines.index(seen)
            asks = bool(request.budget.disk_paths), request.micro_batches, request.inputs, machine
            # in turn, ranks with stages that are alike have other numbers of micro-batches under way
            key = _likeness(request.program), asks, request.program.dealt.rank if request.route.takes_turns else None
        found.append(first.setdefault(key, rank))
    return found


def _likeness(program: Program) -> object:
    """A key of what decides about the plan of a rank: its stages in their order, and what crosses around them."""
    dealt = program.dealt
    assert dealt is not None
    return tuple(
        (
            replace(stage, index=0, name="", forward_reads=(), backward_reads=(), gradients=()),
            tuple(replace(program.groups[g], index=0, name="") for g in stage.groups),
            k > 0 and dealt.crosses(k - 1),
            dealt.crosses(k),
            dealt.besides[k],
            k in (0, len(program.stages) - 2, len(program.stages) - 1),
        )
        for k, stage in enumerate(program.stages)
        if dealt.has(k)
    )


def _moved(settings: Settings, like: Program, program: Program) -> Settings:
    """The settings of another rank's plan for a rank whose stages are like its own."""
    weights, state = list(settings.place.weights), list(settings.place.state)
    theirs = [g.index for g in like.groups if g.numel]
    own = [g.index for g in program.groups if g.numel]
    for before, now in zip(theirs, own, strict=True):
        weights[now], state[now] = settings.place.weights[before], settings.place.state[before]
    return replace(settings, place=replace(settings.place, weights=tuple(weights), state=tuple(state)))


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
