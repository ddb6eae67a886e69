"""The search for the plans of a pipeline's ranks: linear programs propose for each rank, the simulation of all decides.

A rank's linear program is that of one process (``placement_lp``), read off the rank's own schedules; that compute waits
for other ranks is a fixed part of it (``Pipelined``). Ranks that are alike are one *kind*, and asked once.

What is simulated is one proposal for every kind: for each way that all ranks have to go alike (stepping before the norm
is known, the delay) the best of each, then the next best. From the fastest its neighbours are, all ranks a step at a
time, and then each kind by itself; what has helped is tried again first. It is over when nothing helps, when a step
takes what compute alone takes, or when as many ops were simulated as may be.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, zip_longest

from penstock.config import TIERS, Tier
from penstock.planner.fit import with_keep
from penstock.planner.placement_lp import Waits
from penstock.planner.proposals import EQUAL, PROMISING, Proposal, Proposals
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.search import BETTER, GOOD_ENOUGH, STEPS, ahead, different
from penstock.planner.update_mode import DELAY_STEP
from penstock.schedule.place import Settings
from penstock.shape.model import StageTimes

_MODES = 2
"""Ways that all ranks may go alike that whole groups are sought for."""
_HOPELESS = 1.3
"""Above so much of the best simulated time an estimate rules proposals out. It takes a rank's phases one after the
other, and those of different ranks overlap."""
Mode = tuple[bool, float]
"""The update mode of all ranks: True if steps begin before the norm is known; and the delay."""
Joint = tuple[Proposal, ...]
"""A proposal for each kind of rank."""
Change = Callable[[Proposal], Proposal]
"""A proposal with something else about it, to be placed anew."""


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """The compute of a pipeline's step: all ranks go at the pace of the one with the most to do, and it is filled and
    drained. ``waits``: by rank, the seconds in which its compute waits for others, by phase (``Phases``)."""

    seconds: float
    waits: tuple[Mapping[str, float], ...]

    @staticmethod
    def of(
        requests: Sequence[Request], times: Callable[[int], StageTimes], twin: Sequence[int] | None = None
    ) -> "Pipelined":
        """``times``: of all stages, by rank. ``twin``: for each rank one that takes as long. Nothing is computed again
        that need not be: what it takes at least."""
        like = range(len(requests)) if twin is None else twin
        of_kinds = {rank: _work(requests[rank], times(rank)) for rank in sorted(set(like))}
        works = [of_kinds[rank] for rank in like]
        fill = sum(once for _, _, once in works) - max(once for _, _, once in works)
        whole, there = max(f + b for f, b, _ in works) + fill, max(f for f, _, _ in works)
        if requests[0].route.takes_turns:
            waits = tuple({"backward": whole - f - b} for f, b, _ in works)
        else:
            waits = tuple({"forward": there - f, "backward": max(whole - there - b, 0.0)} for f, b, _ in works)
        return Pipelined(seconds=whole, waits=waits)


def _work(request: Request, times: StageTimes) -> tuple[float, float, float]:
    """Seconds of a rank's compute: forward; backward, with the epilogue; of a block, both, for one micro-batch."""
    program, count, keeps = request.program, request.micro_batches, request.most_graphs > 0
    last = len(program.stages) - 1
    stages = [stage for stage in program.stages[:last] if program.has(stage.index)]
    there = [times.forward[s.index] for s in stages]
    back = [times.kept(s.index) if keeps and s.graph is not None else times.backward[s.index] for s in stages]
    calls = (f + b for stage, f, b in zip(stages, there, back, strict=True) if stage.kind == "call")
    end = times.forward[last] if program.has(last) else 0.0
    return count * sum(there), count * (sum(back) + end), max(calls, default=0.0)


class JointSearch:
    """One search, and the best that it has found so far."""

    def __init__(
        self, questions: Sequence[Question], *, best: float, least: float, simulate: Callable[[Joint], float | None]
    ) -> None:
        """``questions``: one of each kind of rank. ``best``, ``least``: expected seconds of a step by the plans that
        there are, and of its compute alone. ``simulate``: expected seconds, infinite if that may not be; None: nothing
        more may be simulated."""
        self._of_kinds = [Proposals(question) for question in questions]
        self._simulate = simulate
        self._seen: set[tuple[Settings, ...]] = set()
        self._joint: Joint | None = None
        self._best, self._enough = best, least * GOOD_ENOUGH
        self._over = best <= self._enough

    def run(self, now: Sequence[Settings]) -> None:
        """Simulate what may be faster than what there is. ``now``: the settings of each kind of rank."""
        if self._over:
            return
        everyone = range(len(now))
        for joint in self._first():
            self._try(joint)
            self._try(self._after(joint, everyone, _off_the_device))
        if self._joint is None:
            self._joint = self._as_proposed(now)
        steps = list[tuple[Collection[int], Change]]()
        for kinds in (everyone, *([(kind,) for kind in everyone] if len(now) > 1 else [])):
            steps += [(kinds, change) for change in _changes(self._joint)]
        while not self._over:
            helped = next((step for step in steps if self._helps(*step)), None)
            if helped is None:
                return
            steps.remove(helped)
            steps.insert(0, helped)

    def _try(self, joint: Joint) -> bool:
        """Simulate proposals unless that is known or hopeless; whether they are the best now."""
        key, estimate = tuple(one.settings for one in joint), max(one.estimate for one in joint)
        if self._over or key in self._seen or estimate >= self._best * _HOPELESS:
            return False
        self._seen.add(key)
        seconds = self._simulate(joint)
        self._over = seconds is None
        if seconds is None or seconds >= self._best * BETTER:
            return False
        self._best, self._joint = seconds, joint
        self._over = seconds <= self._enough
        return True

    def _first(self) -> list[Joint]:
        """The best proposals of the linear programs, the most promising ones first."""
        found: list[list[Joint]] = []
        for mode in self._modes():
            of_kinds = [_best(proposals, mode) for proposals in self._of_kinds]
            if all(of_kinds):
                rows = range(max(map(len, of_kinds)))
                found.append([tuple(own[min(row, len(own) - 1)] for own in of_kinds) for row in rows])
        return [joint for row in zip_longest(*found) for joint in row if joint is not None]

    def _modes(self) -> list[Mode]:
        """The few ways that all ranks may go alike that promise the most, by the rank that takes longest."""
        slowest: dict[Mode, list[float]] = defaultdict(list)
        for proposals in self._of_kinds:
            for request in proposals.q.requests:
                for delay in proposals.q.delays_of(request):
                    slowest[request.speculates, delay].append(proposals.least_relaxed(request, (delay,)))
        seconds = sorted((max(each), mode) for mode, each in slowest.items())
        return [mode for found, mode in seconds[:_MODES] if found <= seconds[0][0] * PROMISING]

    def _as_proposed(self, settings: Sequence[Settings]) -> Joint:
        """The settings that the kinds of ranks have, as if they had been proposed."""
        found: list[Proposal] = []
        for proposals, one in zip(self._of_kinds, settings, strict=True):
            early = [request for request in proposals.q.requests if request.speculates == one.speculate]
            request = (early or proposals.q.requests)[0]
            graphs = request.most_graphs if request.recompute is False else 0
            plain = replace(one, speculate=request.speculates, depths=replace(one.depths, graphs=graphs))
            found.append(proposals.proposal(plain, request, "last"))
        return tuple(found)

    def _helps(self, kinds: Collection[int], change: Change) -> bool:
        assert self._joint is not None
        return not self._over and self._try(self._after(self._joint, kinds, change))

    def _after(self, joint: Joint, kinds: Collection[int], change: Change) -> Joint:
        """Proposals with those of some kinds changed, and placed anew, where that can be."""
        found = list(joint)
        for kind in kinds:
            before, proposals = found[kind], self._of_kinds[kind]
            one = change(before)
            if change is not _off_the_device:
                one = next(proposals.again(one.settings, one.request, (one.pattern,)), before)
                one = _off_the_device(one) if _off_the_device(before) == before else one
            if one.request.exceeded(one.settings, proposals.q.disk_free) is None:
                found[kind] = proposals.proposal(one.settings, one.request, one.pattern)
        return tuple(found)


def _best(proposals: Proposals, mode: Mode) -> list[Proposal]:
    """The proposals for one kind of rank that are worth a simulation, the best first."""
    early, delay = mode
    promised = proposals.promised([(r, (delay,)) for r in proposals.q.requests if r.speculates == early])
    near = sum(one.seconds <= promised[0].seconds * EQUAL for one in promised)
    found = [proposal for one in promised[: near + 1] for proposal in proposals.kept(one)]
    least = min((one.estimate for one in found), default=0.0)
    found.sort(key=lambda p: (p.estimate > least * EQUAL, *ahead(p.settings), p.work))
    return different(found, 2)


def _changes(joint: Joint) -> list[Change]:
    """Changes of proposals that are worth a try."""
    found: list[Change] = [_off_the_device, *(partial(_stepped, step) for step in STEPS)]
    if joint[0].request.delay is None and joint[0].request.order == "vertical":
        found += [partial(_delayed, steps * DELAY_STEP) for steps in (2, -2, 1, -1)]
    waits: tuple[Waits, ...] = ("host", "disk")
    found += [partial(_on_tiers, tier, waiting) for tier, waiting in product(TIERS, waits)]
    return [*found, _in_the_other_pattern, _keeping]


def _off_the_device(one: Proposal) -> Proposal:
    """With weights in host memory that would be on the device, and whose steps are made in host memory: then new ones
    need not come up before anything else does, which a rank's sum of phases does not show."""
    place, budget = one.settings.place, one.request.budget
    if budget.weights is not None:
        return one
    homes = zip(place.weights, place.state, strict=True)
    weights: tuple[Tier, ...] = tuple("host" if w == "device" != s else w for w, s in homes)
    return replace(one, settings=replace(one.settings, place=replace(place, weights=weights)))


def _stepped(step: Callable[[Settings], Settings], one: Proposal) -> Proposal:
    return replace(one, settings=step(one.settings))


def _delayed(more: float, one: Proposal) -> Proposal:
    delay = min(max(round(one.settings.delay + more, 6), 0.0), 1.0)
    return replace(one, settings=replace(one.settings, delay=delay))


def _on_tiers(activations: Tier, gradients: Waits, one: Proposal) -> Proposal:
    place = replace(one.settings.place, activations=activations, gradients=gradients)
    return replace(one, settings=replace(one.settings, place=place))


def _in_the_other_pattern(one: Proposal) -> Proposal:
    return replace(one, pattern="last" if one.pattern == "spread" else "spread")


def _keeping(one: Proposal) -> Proposal:
    """With weights kept until they are stepped, or without."""
    return replace(one, settings=with_keep(one.request, one.settings, keep=not one.settings.keep))
