"""The search for the best plan: linear programs propose, the simulator decides.

1. For every family, delay and chunk size, the linear program gives the placement with the least estimated time for each
   tier of checkpoints and gradients (``placement_lp``); the best of them are found again in whole groups (the same
   program, integer), and which groups these are is a matter of pattern (``rounding``).
2. The best few are built and simulated, along with what ``fit`` would take.
3. From the simulated best, its neighbours are: the other pattern, other tiers for checkpoints and gradients, chunks
   twice and half as large, each depth one more and one less, other delays, one group up or down. A neighbour whose
   estimate is well above the best simulated time is not simulated. As long as one wins, its neighbours are next; it is
   over when the best takes as long as the least estimate, to 1%.

What is simulated is counted in ops, not seconds, so that the same question has the same answer on any machine.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from penstock.config import Tier, format_size
from penstock.errors import BudgetError, ConfigError
from penstock.plan.fit import Family, Plan, Request, base_placement, fit, fitted, settings_of
from penstock.plan.lane_loads import Loads, Walk, bound
from penstock.plan.machine import Machine
from penstock.plan.model import StageTimes
from penstock.plan.outside import beyond
from penstock.plan.placement_lp import PlacementLP, Shares, Waits
from penstock.plan.question import Question
from penstock.plan.rounding import PATTERNS, Limits, Pattern, Rounding
from penstock.schedule.place import Depths, Placement, Settings
from penstock.schedule.program import ALIGN
from penstock.schedule.world import World
from penstock.sim.costs import Costs
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate

SIMULATIONS = 16

_CHUNKS = tuple(2**power for power in range(16, 29))
_FEW_CHUNKS = (2**24, 2**20, 2**18, 2**16)
"""where one size has to do: the first that fits"""
_DEVICE_DEPTHS = ((2, 2), (2, 1), (1, 1))
"""of weights and gradients, from the best to the smallest"""
_HOST_DEPTHS = (4, 3, 2, 1)
_SHALLOWEST = Depths(weights=1, gradients=1, stage_in=1, stage_out=1, state=1, checkpoints=1)
_TIERS_TRIED = 2
"""combinations of tiers for checkpoints and gradients that are proposed for each size of chunks"""
_FIRST = 4
"""proposals of the linear programs that are simulated before the neighbours of the best"""
_DEEPEST = 8
_BETTER = 0.998
"""A neighbour must take less than this share of the best time to be worth a change."""
_HOPELESS = 1.02
"""Above so much of the best simulated time an estimate, which takes phases one after the other, rules a plan out."""
_EQUAL, _GOOD_ENOUGH, _PROMISING = 1.005, 1.01, 1.05
_ONE_EACH = Costs(name="number of ops", seconds=lambda op: 1.0)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings that fit, and the sum of the phases' busiest lanes (seconds)."""

    request: Request
    settings: Settings
    pattern: Pattern
    estimate: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best plan found, and its simulation.

    ``settled``: it takes as long as the least estimate, to 1%. ``considered``: settings weighed; ``simulated``: how
    many of them were built and simulated.
    """

    question: Question
    request: Request
    plan: Plan
    simulation: Simulation
    estimate: float
    settled: bool
    considered: int
    simulated: int

    @property
    def seconds(self) -> float:
        return self.simulation.time


def best(
    request: Request,
    machine: Machine,
    times: StageTimes,
    optimizer: str,
    keep: Placement | None = None,
    *,
    io_threads: int = 4,
) -> Plan:
    """The plan that ``search`` chooses for a request as it is, cheap enough for the start of a run.

    ``keep``: a placement of weights and state that is already in memory and is not to be changed. ``io_threads``: as
    ``penstock.wrap``.

    Raises:
        BudgetError: nothing fits; says the smallest budget of each tier that works.
        ConfigError: the budget has a directory on disk, and the machine's profile has no drive.
    """
    if request.bottom == "disk" and not machine.drives:
        raise ConfigError(f"the profile of {machine.name} has no drives, but budget.disk is given: run penstock doctor")
    if keep is not None or not request.train:
        return fit(request, keep)
    question = Question(
        request=request,
        machine=machine,
        times=times,
        optimizer=optimizer,
        families=(request.family,),
        io_threads=io_threads,
    )
    return search(question).plan


def search(question: Question) -> Choice:
    """The best plan for a question.

    Raises:
        BudgetError: nothing fits; says the smallest budget of each tier that works.
    """
    return _Search(question).run()


def estimate(question: Question, family: Family) -> float | None:
    """Seconds of the linear program's optimum for a family, for one size of chunks; None if nothing fits."""
    seconds = _Search(question).least(replace(question.request, family=family))
    return None if math.isinf(seconds) else seconds


def fits(question: Question) -> bool:
    """Whether the search would find anything, without a simulation."""
    return _Search(question).fits()


def hopeless(question: Question) -> str | None:
    """Why nothing fits whatever the sizes of tiers are, and what to do; None: their sizes decide."""
    search = _Search(question)
    requests = [replace(question.request, family=family) for family in question.families]
    if question.unstartable is None and all(search.smallest(request) is None for request in requests):
        return search.too_many_ops()
    return question.unstartable


def smallest_program(request: Request, question: Question) -> PlacementLP | None:
    """The linear program that asks for the least memory of those that the search may use: the smallest chunks, and no
    more buffers than a step needs. None: even the largest chunks make too many ops.
    """
    return _Search(question).smallest(request)


class _Search:
    """What one search has weighed and simulated so far."""

    def __init__(self, question: Question) -> None:
        self.q = question
        self.limits = Limits.of(question.request, question.disk_free)
        self.considered = 0
        self.ops = 0
        self.programs: dict[tuple[object, ...], PlacementLP] = {}
        self.walks: dict[Family, Walk] = {}
        self.counters: dict[tuple[object, ...], Loads] = {}
        self.seen: dict[tuple[Family, Settings], float] = {}
        self.best: tuple[float, Proposal, Plan, Simulation] | None = None
        self.misplaced: str | None = None

    def run(self) -> Choice:
        if self.q.unstartable is not None:
            raise BudgetError(self.q.unstartable)
        requests = [replace(self.q.request, family=family) for family in self.q.families]
        if all(self._least_chunk(request) is None for request in requests):
            raise BudgetError(self.too_many_ops())
        promising = self._promising(requests)
        proposals = [p for request in promising for p in self.proposals(request)]
        proposals = proposals or [p for request in promising for p in self._small(request)]
        possible = min((p.estimate for p in proposals), default=math.inf)
        # Of estimates that are as good as equal first the fewest ops: large chunks let the lanes run further ahead, and
        # leave more simulations to come.
        proposals.sort(key=lambda p: (p.estimate > possible * _EQUAL, self._size(p.request, p.settings), p.estimate))
        for proposal in _different(proposals, _FIRST):
            if not self._settled(possible):
                self._try(proposal)
        if not self._settled(possible):
            for proposal in self.greedy(requests):
                self._try(proposal)
        while self.best is not None and not self._settled(possible) and self._improve():
            pass
        if self.best is None:
            raise BudgetError(self.misplaced or "nothing fits")
        _, proposal, plan, simulation = self.best
        return Choice(
            question=self.q,
            request=proposal.request,
            plan=plan,
            simulation=simulation,
            estimate=proposal.estimate,
            settled=self._settled(possible),
            considered=self.considered,
            simulated=len(self.seen),
        )

    def _settled(self, possible: float) -> bool:
        """Whether the best takes as long as the least estimate says that it must."""
        return self.best is not None and self.best[0] <= possible * _GOOD_ENOUGH

    def _promising(self, requests: list[Request]) -> list[Request]:
        """Those that fit and are not clearly worse than another one, by one linear program each."""
        seconds = [self.least(request) for request in requests]
        bar = min(seconds) * _PROMISING
        return [r for r, s in zip(requests, seconds, strict=True) if math.isfinite(s) and s <= bar]

    # ---- proposals

    def proposals(self, request: Request) -> list[Proposal]:
        """What the linear programs propose for every delay and chunk size."""
        delays = self.q.delays if request.family == "vertical" else (0.0,)
        return [p for d, chunk in product(delays, self._chunk_sizes(request)) for p in self._at(request, chunk, d)]

    def _at(self, request: Request, chunk: int, delay: float = 0.0) -> list[Proposal]:
        """What the linear program proposes for one delay and chunk size."""
        option = replace(settings_of(request, base_placement(request), chunk, Depths()), delay=delay)
        settings = self._deepest(option, request)
        if settings is None:
            return []
        lp = self._program(settings, request)
        return [p for shares in lp.solve_whole()[:_TIERS_TRIED] for p in self._rounded(lp, shares, PATTERNS)]

    def _small(self, request: Request) -> list[Proposal]:
        """Proposals for the largest chunks that fit, where those of which several can be simulated do not."""
        least = self._least_chunk(request)
        sizes = [] if least is None else [chunk for chunk in _CHUNKS[::-1] if chunk >= least]
        return next((found for chunk in sizes if (found := self._at(request, chunk))), [])

    def fits(self) -> bool:
        if self.q.unstartable is not None:
            return False
        requests = [replace(self.q.request, family=family) for family in self.q.families]
        for request in requests:
            least = self._least_chunk(request)
            if least is not None and self._at(request, least):
                return True
        try:
            return bool(self.greedy(requests))
        except BudgetError:
            return False

    def smallest(self, request: Request) -> PlacementLP | None:
        """As ``smallest_program``."""
        chunk = self._least_chunk(request)
        if chunk is None:
            return None
        return self._program(settings_of(request, base_placement(request), chunk, _SHALLOWEST), request)

    def least(self, request: Request) -> float:
        """Seconds of the best shares, for the first chunk size that fits and the best delay; infinite if none does."""
        delays = self.q.delays if request.family == "vertical" else (0.0,)
        return min(self._least(request, delay) for delay in delays)

    def _least(self, request: Request, delay: float) -> float:
        smallest = None if self.q.unstartable else self.smallest(request)
        if smallest is None or smallest.relaxed is None:
            return math.inf
        base = base_placement(request)
        for chunk in (*(c for c in _FEW_CHUNKS if c > smallest.s.chunk), smallest.s.chunk):
            option = replace(settings_of(request, base, chunk, Depths()), delay=delay)
            settings = self._deepest(option, request)
            solved = [] if settings is None else self._program(settings, request).solve_whole()
            if solved:
                return solved[0].seconds
        return math.inf

    def _deepest(self, settings: Settings, request: Request) -> Settings | None:
        """The settings with the most buffers, up to the usual ones, with which anything fits."""
        for weights, gradients in _DEVICE_DEPTHS:
            for n in _HOST_DEPTHS:
                depths = Depths(weights=weights, gradients=gradients, stage_in=n, stage_out=n, state=n, checkpoints=n)
                option = replace(settings, depths=depths)
                lp = self._program(option, request)
                if lp.device_is_full:
                    break
                if lp.relaxed is not None:
                    return option
        return None

    def _rounded(self, lp: PlacementLP, shares: Shares, patterns: Iterable[Pattern]) -> Iterator[Proposal]:
        """Whole groups for the tiers that shares have for checkpoints and gradients, as near to the optimum as fits."""
        whole = lp.solve(shares.checkpoint_tier, shares.gradient_tier, integer=True)
        rounding = Rounding(lp, whole or shares, self.limits)
        for pattern in patterns:
            placed = rounding.settings(pattern)
            if placed is not None:
                yield self._proposal(placed, lp.request, pattern)

    def _program(self, settings: Settings, request: Request) -> PlacementLP:
        key = (request.family, settings.chunk, settings.depths, settings.delay)
        if key not in self.programs:
            walk = self._walk(request)
            self.programs[key] = PlacementLP(request, settings, self.q.costs, disk_free=self.q.disk_free, walk=walk)
        return self.programs[key]

    def _walk(self, request: Request) -> Walk:
        if request.family not in self.walks:
            self.walks[request.family] = Walk(
                request, wait=request.wait and request.train, speculate=request.speculates
            )
        return self.walks[request.family]

    def _proposal(self, settings: Settings, request: Request, pattern: Pattern) -> Proposal:
        self.considered += 1
        lp = self._program(settings, request)
        load = lp.loads.of(settings.place)
        return Proposal(request=request, settings=settings, pattern=pattern, estimate=bound(load, lp.limits))

    def greedy(self, requests: Sequence[Request]) -> list[Proposal]:
        """What ``fit`` takes, so that no choice is worse.

        Raises:
            BudgetError: it takes nothing, and nothing else has been found.
        """
        found, refusal = [], None
        for request in requests:
            try:
                settings = fitted(request)
            except BudgetError as error:
                refusal = error
                continue
            if self.limits.exceeded(request, settings) is None:
                if self.q.most_ops is None or self._size(request, settings) <= self.q.most_ops:
                    found.append(self._proposal(settings, request, "last"))
                else:
                    refusal = BudgetError(self.too_many_ops())
            else:
                refusal = BudgetError(_too_little_disk(request, settings, self.limits))
        if refusal is not None and not found and self.best is None:
            raise refusal
        return found

    # ---- sizes of schedules

    def _chunk_sizes(self, request: Request) -> Sequence[int]:
        """Chunk sizes whose schedules can be simulated a few times, from small to large; or the largest, if it may."""
        base = settings_of(request, base_placement(request), _CHUNKS[-1], Depths())
        sizes = sorted({min(chunk, base.chunk) for chunk in _CHUNKS})
        few = [s for s in sizes if self._size(request, replace(base, chunk=s)) <= self.q.simulated_ops // _FIRST]
        return few or [size for size in sizes[-1:] if self._allowed(request, size)]

    def _least_chunk(self, request: Request) -> int | None:
        """The smallest chunks whose schedule is allowed; None if even that of the largest is not."""
        first: int = bisect_left(_CHUNKS, True, key=lambda chunk: self._allowed(request, chunk))
        return _CHUNKS[first] if first < len(_CHUNKS) else None

    def _allowed(self, request: Request, chunk: int) -> bool:
        """Whether a schedule with such chunks, and everything as low as it goes, has few enough ops."""
        most = self.q.most_ops
        if most is None:
            return True
        if 2 * request.micro_batches * len(request.program.stages) > most:  # forwards and backwards alone
            return False
        return self._size(request, settings_of(request, base_placement(request), chunk, Depths())) <= most

    def too_many_ops(self) -> str:
        return (
            f"{self.q.request.micro_batches} micro-batches make a schedule of more than {self.q.most_ops:,} ops, the "
            "most that is planned: use fewer and larger micro-batches"
        )

    def _size(self, request: Request, settings: Settings) -> int:
        """Number of ops of a schedule."""
        key = (request.family, settings.chunk, settings.delay)
        if key not in self.counters:
            self.counters[key] = Loads(request, settings, _ONE_EACH, self._walk(request))
        return round(float(self.counters[key].of(settings.place).sum()))

    # ---- simulation

    def _try(self, proposal: Proposal) -> bool:
        """Simulate a proposal unless that is known or hopeless; whether it is the best now."""
        key = (proposal.request.family, proposal.settings)
        hopeless = self.best is not None and proposal.estimate >= self.best[0] * _HOPELESS
        if key in self.seen or hopeless or self._spent(self._size(proposal.request, proposal.settings)):
            return False
        if self.q.room is not None:
            device, host = proposal.request.peaks(proposal.settings)
            why = beyond(self.q.peaks(proposal.settings.place, {"device": device, "host": host}), self.q.room)
            if why is not None:
                self.misplaced = why
                return False
        plan = proposal.request.plan(proposal.settings)
        simulation = simulate(World.of(plan.schedule), self.q.costs)
        self.ops += len(plan.schedule.ops)
        self.seen[key] = simulation.time
        if self.best is not None and simulation.time >= self.best[0] * _BETTER:
            return False
        self.best = (simulation.time, proposal, plan, simulation)
        return True

    def _spent(self, ops: int) -> bool:
        """Whether another simulation of so many ops would be too many; the first never is."""
        return self.best is not None and (self.ops + ops > self.q.simulated_ops or len(self.seen) >= SIMULATIONS)

    def _improve(self) -> bool:
        """Simulate the neighbours of the best until one is better."""
        assert self.best is not None
        of, size = self.best[1], len(self.best[2].schedule.ops)
        # A neighbour has as many ops, or half of them with chunks twice as large.
        return any(self._try(neighbour) for neighbour in self._affordable(of, size // 2))

    def _affordable(self, of: Proposal, ops: int) -> Iterator[Proposal]:
        """Neighbours as long as there is something left to simulate them with: each costs an integer program."""
        neighbours = self._neighbours(of)
        while not self._spent(ops) and (neighbour := next(neighbours, None)) is not None:
            yield neighbour

    def _neighbours(self, proposal: Proposal) -> Iterator[Proposal]:
        settings, request = proposal.settings, proposal.request
        place = settings.place
        for pattern in PATTERNS:
            if pattern != proposal.pattern:
                yield from self._again(settings, request, (pattern,), place.checkpoints, place.gradients)
        lp = self._program(settings, request)
        for tier, waits in product(lp.checkpoint_tiers, lp.gradient_tiers):
            if (tier, waits) != (place.checkpoints, place.gradients):
                yield from self._again(settings, request, (proposal.pattern,), tier, waits)
        for changed in _changes(settings, self.q.delays if request.family == "vertical" else (0.0,)):
            yield from self._again(changed, request, (proposal.pattern,), place.checkpoints, place.gradients)
        yield from self._moved(proposal)

    def _again(
        self, settings: Settings, request: Request, patterns: Iterable[Pattern], checkpoints: Tier, gradients: Waits
    ) -> Iterator[Proposal]:
        """The same tiers of checkpoints and gradients, placed anew for changed settings."""
        lp = self._program(settings, request)
        waits = gradients if gradients in lp.gradient_tiers else lp.gradient_tiers[0]
        shares = lp.solve(checkpoints, waits)
        if shares is not None:
            yield from self._rounded(lp, shares, patterns)

    def _moved(self, proposal: Proposal) -> Iterator[Proposal]:
        """One group of the largest class up or down."""
        settings, request, place = proposal.settings, proposal.request, proposal.settings.place
        lp = self._program(settings, request)
        kind = max(lp.classes, key=lambda kind: len(kind.members))
        for home in kind.homes:
            others = [g for g in kind.members if (place.weights[g], place.state[g]) != home]
            for g in dict.fromkeys((*others[-1:], *others[:1])):
                option = replace(settings, place=_with_home(place, g, *home))
                if self.limits.exceeded(request, option) is None:
                    yield self._proposal(option, request, proposal.pattern)


def _too_little_disk(request: Request, settings: Settings, limits: Limits) -> str:
    needed = request.space_bytes(settings)
    assert limits.disk is not None
    return (
        f"{format_size(needed)} ({needed} bytes) of disk are needed for weights, state and scratch space, and "
        f"{format_size(limits.disk)} are free. Free {format_size(needed - limits.disk)} more, or add a drive"
    )


def _with_home(place: Placement, g: int, weights: Tier, state: Tier) -> Placement:
    return replace(
        place,
        weights=(*place.weights[:g], weights, *place.weights[g + 1 :]),
        state=(*place.state[:g], state, *place.state[g + 1 :]),
    )


def _different(proposals: Sequence[Proposal], count: int) -> list[Proposal]:
    """The best proposals, each with another combination of family, tiers, pattern or chunk; best first."""
    chosen: list[Proposal] = []
    kinds: set[tuple[object, ...]] = set()
    for p in proposals:
        kind = (p.request.family, p.settings.place.checkpoints, p.settings.place.gradients, p.pattern)
        if kind not in kinds:
            kinds.add(kind)
            chosen.append(p)
    return chosen[:count]


def _changes(settings: Settings, delays: Iterable[float]) -> Iterator[Settings]:
    """Settings one step away, placement aside."""
    for chunk in (settings.chunk * 2, settings.chunk // 2 // ALIGN * ALIGN):
        if _CHUNKS[0] <= chunk <= _CHUNKS[-1]:
            yield replace(settings, chunk=chunk)
    for name in ("weights", "state", "gradients", "stage_out", "stage_in", "checkpoints"):  # likeliest to help first
        depth = getattr(settings.depths, name)
        for other in (depth + 1, depth - 1):
            if 1 <= other <= _DEEPEST:
                yield replace(settings, depths=replace(settings.depths, **{name: other}))
    for delay in delays:
        if delay != settings.delay:
            yield replace(settings, delay=delay)
