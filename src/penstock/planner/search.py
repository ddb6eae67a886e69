"""The search for the best plan: linear programs propose, the simulator decides.

1. For every family, with and without speculation, and every delay one linear program tells which promise anything.
2. For each of these and every chunk size, the linear program gives the placement with the least estimated time for each
   tier of saved activations and gradients (``placement_lp``); those that may be the best are found again in whole
   groups (the same program, integer), and which groups these are is a matter of pattern (``rounding``).
3. The best few are built and simulated, then those that promise to be as fast as what that has shown, along with what
   ``fit`` would take.
4. From the simulated best, its neighbours are: the other pattern, other tiers for saved activations and gradients,
   chunks twice, half and a quarter as large, a little more and less delay, each depth one more and one less, weights
   kept for the optimizer or not, one group up or down. A neighbour whose estimate is well above the best's is not
   simulated. As long as one wins, its neighbours are next; it is over when the best takes as long as the least
   estimate, or as the optimum in parts of groups, to 1%, and as the work of its busiest lane, to 5%.

All seconds that are compared count a step that is run twice as often as is expected. What is simulated is counted in
ops, not seconds, so that the same question has the same answer on any machine.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

from penstock.config import Family, Tier
from penstock.errors import BudgetError, ConfigError
from penstock.planner.endurance import EnduranceError, worn_by
from penstock.planner.fit import fit, fitted, with_home, with_keep
from penstock.planner.phase_memory import beyond
from penstock.planner.placement_lp import Waits
from penstock.planner.plan import Plan
from penstock.planner.proposals import CHUNKS, EQUAL, FIRST, Promised, Proposal, Proposals
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.rounding import PATTERNS, Pattern
from penstock.planner.update_mode import DELAY_STEP
from penstock.schedule.collection import no_collection
from penstock.schedule.place import Placement, Settings
from penstock.schedule.program import ALIGN
from penstock.sim.result import Simulation
from penstock.sim.simulate import simulate

SIMULATIONS = 64

_DEEPEST = 8
BETTER = 0.998
"""A neighbour must take less than this share of the best time to be worth a change."""
HOPELESS = 1.02
"""Above so much of the best's simulated time and of its estimate, an estimate rules a plan out."""
GOOD_ENOUGH = 1.01
_BUSY = 1.05
"""A plan that takes up to this multiple of the work of its busiest lane is not improved for its order of ops alone."""
_SLOWER = (1.0, 1.3, 2.0, 4.0)
"""Factors on the fastest plan's time: for each in turn a plan is sought that writes no more than it may in so long."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best plan found, what it was proposed as, and its simulation.

    ``considered``: settings weighed; ``simulated``: how many of them were built and simulated.
    """

    question: Question
    proposal: Proposal
    plan: Plan
    simulation: Simulation
    considered: int = 0
    simulated: int = 0

    @property
    def request(self) -> Request:
        return self.proposal.request

    @property
    def seconds(self) -> float:
        """Simulated seconds of a step that is run once."""
        return self.simulation.time

    @cached_property
    def expected_seconds(self) -> float:
        """Seconds of a step on average: some are run twice if anything speculates."""
        return self.question.expected(self.seconds, self.plan)

    @property
    def repeats(self) -> float:
        """The share of steps that is expected to be run twice; 0 if nothing speculates."""
        return self.question.repeated(self.plan.settings)


def best(question: Question, keep: Placement | None = None) -> Plan:
    """The plan that ``search`` chooses, where there is something to search for: a request to train.

    ``keep``: a placement of weights and state that is already in memory and is not to be changed: the size of chunks
    and what else there is to choose are chosen.

    Raises:
        BudgetError: nothing fits; says the smallest budget of each tier that works.
        ConfigError: the budget has a directory on disk, and the machine's profile has no drive; or the request asks for
            speculation or a delay that cannot be.
    """
    request, machine = question.request, question.machine
    if request.bottom == "disk" and not machine.drives:
        raise ConfigError(f"the profile of {machine.name} has no drives, but budget.disk is given: run penstock doctor")
    if not request.train:
        return fit(request, keep)
    return search(question).plan if keep is None else _kept(question, keep)


@no_collection()
def _kept(question: Question, keep: Placement) -> Plan:
    """The best plan with a placement that stays: speculating or not, and with a delay only if that is faster."""
    candidates, refusal = _Search(question, math.inf), None
    proposals = candidates.proposals
    found: list[Proposal] = []
    for request in question.requests:
        for delay in question.delays_of(request):
            try:
                settings = fitted(replace(request, delay=delay), keep)
            except BudgetError as error:
                refusal = refusal or error
                continue
            found.append(proposals.proposal(settings, request, "last"))
    if not found:
        assert refusal is not None
        raise refusal
    least = min(p.estimate for p in found)
    chosen = next(p for p in found if p.estimate <= least * EQUAL)
    sizes = (replace(chosen.settings, chunk=size) for size in reversed(proposals.chunk_sizes(chosen.request)))
    fitting = [option for option in sizes if chosen.request.exceeded(option, question.disk_free) is None]
    options = [*(proposals.proposal(option, chosen.request, "last") for option in fitting), chosen]
    for proposal in sorted(options, key=lambda p: p.estimate):  # the largest first of those that are equal
        candidates.consider(proposal)
    if candidates.best is None:
        return chosen.request.plan(chosen.request.roomiest(chosen.settings))
    return candidates.best.plan


@no_collection()
def search(question: Question, *, beat: float = math.inf) -> Choice:
    """The best plan for a question.

    ``beat``: expected seconds of a plan for another question that this one's would have to be faster than: what is 1%
    behind it after the first simulations is not improved any further.

    Raises:
        BudgetError: nothing fits; says the smallest budget of each tier that works.
        ConfigError: the request asks for speculation or a delay that cannot be.
    """
    found = _Search(question, beat).run()
    allowed = question.allowance
    if allowed is None or question.written_per_day(found.plan, found.seconds) <= allowed:
        return found
    return _enduring(question, found, allowed)


def _enduring(question: Question, worn: Choice, allowed: float) -> Choice:
    """The best plan that keeps to the drives' endurance, where the best of all does not: of those that write no more
    than may be written in the time that it takes, or else in a longer one, which they then have to take.

    Raises:
        EnduranceError: none does.
    """
    for slower in _SLOWER:
        try:
            found = _Search(question.limited(slower * worn.expected_seconds), math.inf).run()
        except BudgetError:
            continue
        try:  # it takes longer, so that it may write more than what was allowed for
            again = _Search(question.limited(found.expected_seconds), math.inf).run()
        except BudgetError:
            return found
        return min(found, again, key=lambda choice: choice.expected_seconds)
    by = worn_by(question.request.budget, worn.plan, question.machine, 1 + worn.repeats, worn.expected_seconds)
    assert by is not None
    raise EnduranceError.of(by)


@no_collection()
def estimate(question: Question, family: Family) -> float | None:
    """Expected seconds of the linear program's optimum for a family, for one size of chunks; None if nothing fits.
    Whether it keeps to the drives' endurance is not asked."""
    seconds = _least(replace(question, families=(family,)))
    return None if math.isinf(seconds) else seconds


def estimate_lasting(question: Question, family: Family) -> float | None:
    """Expected seconds of the linear program's optimum for a family that keeps to the drives' endurance; None: nothing
    does. The program takes phases one after another and no time between ops, so that what it finds too fast for the
    drives may be slow enough for them."""
    question = replace(question, families=(family,))
    seconds = _least(question)
    if math.isinf(seconds) or question.allowance is None:
        return None if math.isinf(seconds) else seconds
    limited = ((slower * seconds, _least(question.limited(slower * seconds))) for slower in _SLOWER)
    return next((found for wanted, found in limited if wanted <= found * EQUAL < math.inf), None)


def _least(question: Question) -> float:
    proposals = Proposals(question)
    return min(proposals.least(request) for request in proposals.q.requests)


class _Search:
    """One search, and what it has simulated so far."""

    def __init__(self, question: Question, beat: float) -> None:
        self.q = question
        self.beat = beat
        self.proposals = Proposals(question)
        self.ops = 0
        self.seen: set[tuple[Family, Settings]] = set()
        self.best: Choice | None = None
        self.delays: tuple[float, ...] = ()
        self.misplaced: str | None = None

    def run(self) -> Choice:
        if (why := self.proposals.hopeless()) is not None:
            raise BudgetError(why)
        promising = self.proposals.promising()
        self.delays = tuple(dict.fromkeys(delay for _, delays in promising for delay in delays))
        relaxed = (self.proposals.least_relaxed(request, delays) for request, delays in promising)
        possible = min(relaxed, default=math.inf)
        waiting = deque(self.proposals.promised(promising))
        found = self._kept(waiting)
        if not found:
            found = [p for request, delays in promising for p in self.proposals.small(request, delays)]
        if not found:  # in whole groups may fit what promises less
            found = [p for request in self.q.requests for p in self.proposals.small(request, [request.delay or 0.0])]
        possible = self._first(found, possible)
        if not self._settled(possible) and not self._beaten():  # what may be best by the time that was simulated
            possible = self._first(self._kept(waiting, self.worth), possible)
        if not self._settled(possible):
            worth = self.q.requests if self.best is None else [request for request, _ in promising]
            for proposal in self.proposals.greedy(worth, needed=self.best is None):
                self.consider(proposal)
        if self.best is not None and not self._beaten():
            while not self._settled(possible) and self._improve():
                pass
        if self.best is None:
            raise BudgetError(self.misplaced or "nothing fits")
        return replace(self.best, considered=self.proposals.considered, simulated=len(self.seen))

    @property
    def least(self) -> float:
        """Expected seconds of the best; infinite: there is none."""
        return math.inf if self.best is None else self.best.expected_seconds

    @property
    def worth(self) -> float:
        """An estimate below this may be of a plan that is faster than the best; infinite: there is none. The best's own
        may be above what it takes, as estimates take phases one after the other."""
        return math.inf if self.best is None else HOPELESS * max(self.least, self.best.proposal.estimate)

    def _kept(self, waiting: deque[Promised], below: float | None = None) -> list[Proposal]:
        """Whole groups for what promises, least first, to take fewer seconds than ``below``; None: than is worth a try
        beside the best of these by its estimate. Each takes an integer program."""
        found: list[Proposal] = []
        while waiting:
            bar = HOPELESS * min((p.estimate for p in found), default=math.inf) if below is None else below
            if waiting[0].seconds >= bar:
                break
            found += self.proposals.kept(waiting.popleft())
        return found

    def _first(self, proposals: list[Proposal], possible: float) -> float:
        """Simulate the first of some proposals; the least that is possible, now that there are these.

        Of estimates that are as good as equal first those without a delay, which costs something at the start and at
        each evaluation. Then those with pools of the usual depth, where reads, steps and writes need not take turns.
        Then the largest chunks, which let the lanes run further ahead and leave, with their few ops, more simulations
        to come. Then what works and moves least.
        """
        best = min((p.estimate for p in proposals), default=math.inf)
        possible = min(best, possible)
        proposals.sort(key=lambda p: (p.estimate > best * EQUAL, p.settings.delay > 0, *ahead(p.settings), p.work))
        for proposal in different(proposals, FIRST):
            if not self._settled(possible) or self._delays_beside(proposal):
                self.consider(proposal)
        return possible

    def _delays_beside(self, proposal: Proposal) -> bool:
        """True if the best delays and this one does not: a delay is worth what it costs where it is the faster one."""
        return self.best is not None and self.best.proposal.settings.delay > 0 and proposal.settings.delay == 0

    def _beaten(self) -> bool:
        """True if the plan for another question, which was found before, is better."""
        return self.best is not None and self.least > self.beat * GOOD_ENOUGH

    def _settled(self, possible: float) -> bool:
        """True if no estimate promises more than the best, which takes hardly longer than the work of its busiest lane.
        Estimates alone settle nothing: they are up to a fifth above or below what is simulated."""
        if self.best is None or self.least > possible * GOOD_ENOUGH:
            return False
        return self.best.seconds <= self.best.simulation.lower_bound * _BUSY

    # ---- simulation

    def consider(self, proposal: Proposal) -> bool:
        """Simulate a proposal unless that is known or hopeless; whether it is the best now."""
        request, key = proposal.request, (proposal.request.family, proposal.settings)
        if key in self.seen or proposal.estimate >= self.worth:
            return False
        if self._spent(self.proposals.size(request, proposal.settings)):
            return False
        settings = request.roomiest(proposal.settings)
        if self._beyond(request, settings) is not None:
            settings = proposal.settings
        if (why := self._beyond(request, settings)) is not None:
            self.misplaced = why
            return False
        plan = request.plan(settings)
        simulation = simulate(request.world(plan.schedule), self.q.costs_of(request))
        self.ops += len(plan.schedule.ops)
        self.seen.add(key)
        found = Choice(question=self.q, proposal=proposal, plan=plan, simulation=simulation)
        if self._wears(plan, simulation.time) or found.expected_seconds >= self.least * BETTER:
            return False
        self.best = found
        return True

    def _wears(self, plan: Plan, seconds: float) -> bool:
        """True if a plan that has to keep to the drives' endurance does not."""
        allowed = self.q.allowance
        if self.q.most_written is None or allowed is None:
            return False
        return self.q.written_per_day(plan, seconds) > allowed

    def _beyond(self, request: Request, settings: Settings) -> str | None:
        """The phase for which the machine has no room with these settings; None: it has room for all."""
        if self.q.room is None:
            return None
        device, host = request.peaks(settings)
        return beyond(self.q.peaks(settings.place, {"device": device, "host": host}), self.q.room)

    def _spent(self, ops: int) -> bool:
        """True if another simulation of so many ops would be too many; the first never is."""
        return bool(self.seen) and (self.ops + ops > self.q.simulated_ops or len(self.seen) >= SIMULATIONS)

    def _improve(self) -> bool:
        """Simulate the neighbours of the best until one is better."""
        assert self.best is not None
        of, size = self.best.proposal, len(self.best.plan.schedule.ops)
        # A neighbour has as many ops, or half of them with chunks twice as large.
        return any(self.consider(neighbour) for neighbour in self._affordable(of, size // 2))

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
                yield from self._again(settings, request, (pattern,), place.activations, place.gradients)
        lp = self.proposals.program(settings, request)
        for tier, waits in product(lp.activation_tiers, lp.gradient_tiers):
            if (tier, waits) != (place.activations, place.gradients):
                yield from self._again(settings, request, (proposal.pattern,), tier, waits)
        for changed in _changes(request, settings, self._delays_near(settings.delay, request)):
            yield from self._again(changed, request, (proposal.pattern,), place.activations, place.gradients)
        yield from self._moved(proposal)

    def _delays_near(self, delay: float, request: Request) -> list[float]:
        """A little and a good deal more and less delay, and the others that promise something."""
        if len(self.q.delays_of(request)) < 2:
            return []
        near = [round(delay + steps * DELAY_STEP, 6) for steps in (1, -1, 4, -4)]
        return [d for d in dict.fromkeys((*self.delays, *near)) if 0 <= d <= 1 and d != delay]

    def _again(
        self, settings: Settings, request: Request, patterns: Iterable[Pattern], activations: Tier, gradients: Waits
    ) -> Iterator[Proposal]:
        """Proposals with these tiers of saved activations and gradients, placed anew for changed settings."""
        place = replace(settings.place, activations=activations, gradients=gradients)
        return self.proposals.again(replace(settings, place=place), request, patterns, below=self.worth)

    def _moved(self, proposal: Proposal) -> Iterator[Proposal]:
        """One group of a class up or down, of the largest class first."""
        settings, request, place = proposal.settings, proposal.request, proposal.settings.place
        kinds = sorted(self.proposals.program(settings, request).classes, key=lambda kind: -len(kind.members))
        for members, home in [(kind.members, home) for kind in kinds for home in kind.homes]:
            others = [g for g in members if (place.weights[g], place.state[g]) != home]
            for g in dict.fromkeys((*others[-1:], *others[:1])):
                option = replace(settings, place=with_home(place, g, *home))
                if request.exceeded(option, self.q.disk_free) is None:
                    yield self.proposals.proposal(option, request, proposal.pattern)


def ahead(settings: Settings) -> tuple[int, int]:
    """A key that sorts settings by how far lanes run ahead of each other, the furthest first: by the number of buffers,
    then by their size."""
    return -settings.depths.state, -settings.chunk


def different(proposals: Sequence[Proposal], count: int) -> list[Proposal]:
    """The proposals to simulate, of those given, the best first: one for each way to come to the numbers, ``count``
    with other tiers or patterns, and ``count`` with other delays or chunks, since estimates hardly tell these apart.
    Two patterns are one where all groups of a class live alike."""
    ways: dict[object, Proposal] = {}
    tiers: dict[object, Proposal] = {}
    paces: dict[object, Proposal] = {}
    for p in proposals:
        settings, place = p.settings, p.settings.place
        way = p.request.family, settings.speculate, settings.cast, settings.stage, settings.secondary
        ways.setdefault((way, settings.delay > 0), p)
        tiers.setdefault((way, place.activations, place.gradients, p.pattern), p)
        paces.setdefault((way, settings.delay, settings.chunk), p)
    chosen = (*ways.values(), *list(tiers.values())[:count], *list(paces.values())[:count])
    return list({(p.request.family, p.settings): p for p in chosen}.values())


def _in_chunks(factor: float, settings: Settings) -> Settings:
    chunk = int(settings.chunk * factor) // ALIGN * ALIGN
    return replace(settings, chunk=chunk) if CHUNKS[0] <= chunk <= CHUNKS[-1] else settings


def _deeper(name: str, more: int, settings: Settings) -> Settings:
    depth = getattr(settings.depths, name) + more
    return replace(settings, depths=replace(settings.depths, **{name: depth})) if 1 <= depth <= _DEEPEST else settings


_DEPTHS = ("weights", "state", "gradients", "stage_out", "stage_in", "activations")
STEPS: tuple[Callable[[Settings], Settings], ...] = (
    *(partial(_in_chunks, factor) for factor in (2.0, 0.5, 0.25)),
    *(partial(_deeper, name, more) for name, more in product(_DEPTHS, (1, -1))),
)
"""From settings to those one step away, in chunks and depths, the likeliest to help first; to the same where there is
no such step."""


def _changes(request: Request, settings: Settings, delays: Iterable[float]) -> Iterator[Settings]:
    """Settings one step away, placement aside, or with one of some delays."""
    for step in STEPS:
        if (other := step(settings)) != settings:
            yield other
    for delay in delays:  # after what costs nothing outside of steps
        yield replace(settings, delay=delay)
    if (other := with_keep(request, settings, keep=not settings.keep)) != settings:
        yield other
