"""The proposals of the linear programs for a question: settings that fit, each with an estimate of its seconds."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from penstock.config import format_size
from penstock.errors import BudgetError
from penstock.hardware.drives import together
from penstock.planner.fit import DEVICE_DEPTHS, SizeError, base_placement, fitted, nearest, settings_of, with_keep
from penstock.planner.phase_costs import PhaseCosts, Prices
from penstock.planner.placement_lp import PlacementLP, Shares
from penstock.planner.probes import Probes
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.rounding import PATTERNS, Pattern, Rounding
from penstock.planner.update_mode import DELAY_STEP
from penstock.schedule.place import Depths, Settings
from penstock.sim.costs import Costs

CHUNKS = tuple(2**power for power in range(16, 29))
EQUAL = 1.005
"""Estimates that differ by no more than this are as good as each other."""
FIRST = 4
"""so many of the linear programs' proposals with different tiers or patterns, and so many with different delays or
chunks, are simulated before the neighbours of the best"""

_FEW_CHUNKS = (2**24, 2**20, 2**18, 2**16)
"""Chunk sizes where one has to do: the first that fits."""
_HOST_DEPTHS = (4, 3, 2, 1)
_SHALLOWEST = Depths(weights=1, gradients=1, stage_in=1, stage_out=1, state=1, activations=1)
_TIERS_TRIED = 2
"""combinations of tiers for saved activations and gradients that are proposed for each size of chunks"""
PROMISING = 1.05
_OTHERS = 2
"""delays that promise something beside the best: one size of chunks says little of another"""
_BESIDES = 1.01
Promising = Sequence[tuple[Request, tuple[float, ...]]]
"""Requests, each with delays"""

_ONE_EACH = Costs(name="number of ops", seconds=lambda op: 1.0)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings that fit. ``estimate``: seconds of their loads by ``bounds.StepBound``, with the repeats expected.
    ``work``: seconds of all lanes together, each as if it worked alone."""

    request: Request
    settings: Settings
    pattern: Pattern
    estimate: float
    work: float


@dataclass(frozen=True, kw_only=True)
class Promised:
    """Shares that no whole groups have been found for yet: an integer program. ``seconds``: a lower bound of theirs,
    with the repeats that are expected if any group speculates: fewer, where all of them come to live in memory."""

    lp: PlacementLP
    shares: Shares
    seconds: float


class Proposals:
    """The linear programs of one question, each made and solved once."""

    def __init__(self, question: Question) -> None:
        self.q = question
        self.considered = 0
        self._programs: dict[tuple[object, ...], PlacementLP] = {}
        self._probes: dict[tuple[object, ...], Probes] = {}
        self._prices: dict[tuple[object, ...], Prices] = {}
        self._counters: dict[tuple[object, ...], PhaseCosts] = {}

    # ---- what is worth proposing

    def promising(self) -> Promising:
        """Requests that fit and are not clearly worse than another one, each with the delays that are worth a try.

        By the relaxed optimum of one size of chunks.
        """
        screened = [(request, self._screened(request, self.q.delays_of(request))) for request in self.q.requests]
        bar = min((found[0][0] for _, found in screened if found), default=math.inf) * PROMISING
        worth = [(request, found) for request, found in screened if found and found[0][0] <= bar]
        return [(request, _best_delays([*found, *self._between(request, found)])) for request, found in worth]

    def least_relaxed(self, request: Request, delays: Iterable[float]) -> float:
        """Expected seconds of the best relaxed optimum for these delays."""
        found = (lp.relaxed for delay in delays if (lp := self._first_fitting(request, delay)) is not None)
        return min((shares.seconds for shares in found if shares is not None), default=math.inf) * self._runs(request)

    def _screened(self, request: Request, delays: Iterable[float]) -> list[tuple[float, float]]:
        """(expected seconds of the relaxed optimum, delay), least first, of the delays from small to large that fit,
        for as long as more delay is no worse and there is more to gain than what compute takes."""
        found: list[tuple[float, float]] = []
        for delay in delays:
            lp = self._first_fitting(request, delay)
            if lp is None or lp.relaxed is None:
                continue
            expected, compute = lp.relaxed.seconds * self._runs(request), lp.compute_seconds(lp.relaxed)
            best = min(found, default=(math.inf, 0.0))[0]
            found.append((expected, delay))
            if expected > best * EQUAL or lp.relaxed.seconds <= compute * EQUAL:
                break
        return sorted(found)

    def _between(self, request: Request, screened: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """(expected seconds, delay) of the delays beside the best of those screened, where that is one of several."""
        if len(screened) < 2:
            return []
        known, best = {delay for _, delay in screened}, screened[0][1]
        near = (round(best + step, 6) for step in (-DELAY_STEP, DELAY_STEP))
        return [one for d in near if 0 <= d <= max(known) and d not in known for one in self._screened(request, (d,))]

    def least(self, request: Request) -> float:
        """Expected seconds of the best shares, for the first chunk size that fits and the better of a few delays;
        infinite if none does."""
        delays = self.q.delays_of(request)
        few = delays if len(delays) < 3 else (delays[0], delays[len(delays) // 2])
        for delay in _best_delays(self._screened(request, few)):
            lp = self._first_fitting(request, delay)
            if lp is not None and lp.least_whole is not None:
                return lp.least_whole.seconds * self._runs(request)
        return math.inf

    def _first_fitting(self, request: Request, delay: float) -> PlacementLP | None:
        """The better program of two chunk sizes: the largest of a few with which anything fits, and the largest that
        leaves room for host pools of the usual depth, which a delay may not find beside larger chunks."""
        smallest = None if self.q.unstartable else self.smallest(request)
        if smallest is None or not smallest.fits:
            return None
        base, found = base_placement(request), list[PlacementLP]()
        for chunk in (*(c for c in _FEW_CHUNKS if c > smallest.s.chunk), smallest.s.chunk):
            settings = self._deepest(replace(settings_of(request, base, chunk, Depths()), delay=delay), request)
            usual = settings is not None and settings.depths.state == _HOST_DEPTHS[0]
            if settings is not None and (usual or not found):
                found.append(self._with_kept_weights(settings, request))
            if usual:
                break
        solved = [(lp.relaxed.seconds, i) for i, lp in enumerate(found) if lp.relaxed is not None]
        return found[min(solved)[1]] if solved else None

    def _runs(self, request: Request) -> float:
        """The runs of a step, on average, if anything speculates that may."""
        return 1 + self.q.repeats * request.speculates

    def promised(self, promising: Promising) -> list[Promised]:
        """The promises of the linear programs for every chunk size, the one of the least seconds first."""
        found = (
            promised
            for request, delays in promising
            for delay, chunk in product(delays, self.chunk_sizes(request))
            for promised in self._promised(request, chunk, delay)[:_TIERS_TRIED]
        )
        return sorted(found, key=lambda promised: promised.seconds)

    def at(self, request: Request, chunk: int, delay: float) -> list[Proposal]:
        """The proposals of the linear program for one delay and chunk size; where no whole groups fit with the tiers of
        saved activations and gradients that promise most, those with the first others with which any do."""
        promised = self._promised(request, chunk, delay)
        found = [p for one in promised[:_TIERS_TRIED] for p in self.kept(one)]
        return found or next((others for one in promised[_TIERS_TRIED:] if (others := self.kept(one))), [])

    def _promised(self, request: Request, chunk: int, delay: float) -> list[Promised]:
        """A promise for each combination of tiers for saved activations and gradients, the one of the least seconds
        first."""
        option = replace(settings_of(request, base_placement(request), chunk, Depths()), delay=delay)
        settings = self._deepest(option, request)
        if settings is None:
            return []
        lp, runs = self._better(settings, request), self._runs(request)
        return [Promised(lp=lp, shares=s, seconds=s.seconds * runs) for s in lp.solve_whole()]

    def kept(self, promised: Promised) -> list[Proposal]:
        """The proposals that a promise comes to in whole groups, in any pattern that fits."""
        return list(self.rounded(promised.lp, promised.shares, PATTERNS))

    def small(self, request: Request, delays: Iterable[float]) -> list[Proposal]:
        """Proposals for the first delay, and the largest chunks, with which anything fits, where nothing does that
        promises most, or of which several can be simulated."""
        least, smallest = self.least_chunk(request), self.smallest(request)
        any_fits = least is not None and smallest is not None and smallest.fits
        sizes = [chunk for chunk in CHUNKS[::-1] if chunk >= least] if any_fits else []
        tried = (self.at(request, chunk, delay) for delay in delays for chunk in sizes)
        return next((found for found in tried if found), [])

    def hopeless(self) -> str | None:
        """The reason that nothing fits whatever the sizes of tiers are, and what to do; None: their sizes decide."""
        if self.q.unstartable is None and all(self.least_chunk(request) is None for request in self.q.requests):
            return self.too_many_ops()
        return self.q.unstartable

    def fits(self) -> bool:
        """True if the search would find anything, without a simulation."""
        if self.q.unstartable is not None:
            return False
        for request in self.q.requests:
            least = self.least_chunk(request)
            if least is not None and self.at(request, least, request.delay or 0.0):
                return True
        try:
            return bool(self.greedy(self.q.requests, needed=True))
        except BudgetError:
            return False

    def smallest(self, request: Request) -> PlacementLP | None:
        """The linear program that asks for the least memory of those that may be used: the smallest chunks, and no more
        buffers than a step needs. None: even the largest chunks make too many ops.
        """
        chunk = self.least_chunk(request)
        if chunk is None:
            return None
        return self.program(settings_of(request, base_placement(request), chunk, _SHALLOWEST), request)

    def greedy(self, requests: Iterable[Request], *, needed: bool) -> list[Proposal]:
        """The proposals that ``fit`` makes, so that no choice is worse.

        Raises:
            BudgetError: it takes nothing, and something is ``needed``: nothing else has been found.
        """
        found: list[Proposal] = []
        refusal: BudgetError | None = None
        for request in requests:
            try:
                settings = fitted(request, best=False)
            except SizeError as error:
                if refusal is None or isinstance(refusal, SizeError):
                    refusal = nearest(error, refusal or error)
                continue
            if request.exceeded(settings, self.q.disk_free) is not None:
                refusal = BudgetError(_too_little_disk(request, settings, self.q.disk_free))
            elif self.q.most_ops is not None and self.size(request, settings) > self.q.most_ops:
                refusal = BudgetError(self.too_many_ops())
            else:
                found.append(self.proposal(settings, request, "last"))
        if refusal is not None and not found and needed:
            raise refusal
        return found

    # ---- programs

    def _deepest(self, settings: Settings, request: Request) -> Settings | None:
        """The settings with the most buffers, up to the usual ones, with which anything fits."""
        if not self.program(replace(settings, depths=_SHALLOWEST), request).fits:
            return None
        for weights, gradients in DEVICE_DEPTHS:
            for n in _HOST_DEPTHS:
                depths = Depths(weights=weights, gradients=gradients, stage_in=n, stage_out=n, state=n, activations=n)
                option = replace(settings, depths=depths)
                lp = self.program(option, request)
                if lp.fits:
                    return option
                if lp.device_is_full:
                    break
        return None

    def _with_kept_weights(self, settings: Settings, request: Request) -> PlacementLP:
        """The program of some settings with weights kept until they are stepped, where that fits."""
        lp = self.program(with_keep(request, settings), request)
        return lp if lp.fits and lp.relaxed is not None else self.program(settings, request)

    def _better(self, settings: Settings, request: Request) -> PlacementLP:
        """The program with weights kept, or without where that promises fewer seconds and compute alone takes less."""
        lp = self._with_kept_weights(settings, request)
        if lp.relaxed is None or lp.relaxed.seconds <= lp.compute_seconds(lp.relaxed) * EQUAL:
            return lp
        without = self.program(settings, request)
        return without if without.relaxed is not None and without.relaxed.seconds < lp.relaxed.seconds else lp

    def rounded(self, lp: PlacementLP, shares: Shares, patterns: Iterable[Pattern]) -> Iterator[Proposal]:
        """Whole groups for the tiers of saved activations and gradients that shares have, near the optimum."""
        whole = lp.solve(shares.activation_tier, shares.gradient_tier, integer=True)
        rounding = Rounding(lp, whole or shares)
        for pattern in patterns:
            placed = rounding.settings(pattern)
            if placed is not None:
                yield self.proposal(with_keep(lp.request, placed, keep=placed.keep), lp.request, pattern)

    def again(
        self, settings: Settings, request: Request, patterns: Iterable[Pattern], below: float = math.inf
    ) -> Iterator[Proposal]:
        """Proposals with the chunks, depths, delay and tiers of saved activations and gradients of some settings, whose
        groups are placed anew; none if they promise to take ``below`` seconds or more."""
        lp, place = self.program(settings, request), settings.place
        if place.activations not in lp.activation_tiers:
            return
        waits = place.gradients if place.gradients in lp.gradient_tiers else lp.gradient_tiers[0]
        shares = lp.solve(place.activations, waits)
        if shares is not None and shares.seconds < below:
            yield from self.rounded(lp, shares, patterns)

    def program(self, settings: Settings, request: Request) -> PlacementLP:
        """The linear program of a request with the chunks, depths and delay of some settings. How many graphs are kept
        is its own to say."""
        graphs = request.most_graphs if request.recompute is False else 0
        settings = replace(settings, depths=replace(settings.depths, graphs=graphs))
        key = *_variant(request), settings.chunk, settings.depths, settings.delay, settings.keep
        if key not in self._programs:
            costs = self.q.costs_of(request)
            self._programs[key] = PlacementLP(
                request,
                settings,
                costs,
                disk_free=self.q.disk_free,
                most_writing=self._most_writing(request),
                prices=self._priced(request, costs, keep=settings.keep),
            )
        return self._programs[key]

    def _most_writing(self, request: Request) -> float | None:
        """Seconds that a step may write, if it is run once. What its ops cost besides their bytes is left a little."""
        if self.q.most_written is None:
            return None
        return _BESIDES * self.q.most_written / self._runs(request) / together(self.q.machine.drives).write

    def _priced(self, request: Request, costs: Costs, *, keep: bool) -> Prices:
        key = *_variant(request), keep
        if key not in self._probes:
            wait = request.wait and request.train
            self._probes[key] = Probes(request, wait=wait, speculate=request.speculates, keep=keep)
        counts = costs is _ONE_EACH
        if (*key, counts) not in self._prices:
            self._prices[*key, counts] = Prices(self._probes[key], costs, {} if counts else self.q.waiting)
        return self._prices[*key, counts]

    def proposal(self, settings: Settings, request: Request, pattern: Pattern) -> Proposal:
        """A proposal of settings that fit."""
        self.considered += 1
        lp = self.program(settings, request)
        graphs = request.with_graphs(settings).depths.graphs - lp.s.depths.graphs
        load = lp.loads.of(settings.place, graphs)
        expected = lp.bound.seconds(load) * (1 + self.q.repeated(settings))
        return Proposal(request=request, settings=settings, pattern=pattern, estimate=expected, work=float(load.sum()))

    # ---- sizes of schedules

    def chunk_sizes(self, request: Request) -> Sequence[int]:
        """Chunk sizes whose schedules can be simulated a few times, from small to large; or the largest, if it may."""
        base = settings_of(request, base_placement(request), CHUNKS[-1], Depths())
        sizes = sorted({min(chunk, base.chunk) for chunk in CHUNKS})
        few = [s for s in sizes if self.size(request, replace(base, chunk=s)) <= self.q.simulated_ops // FIRST]
        return few or [size for size in sizes[-1:] if self._allowed(request, size)]

    def least_chunk(self, request: Request) -> int | None:
        """The smallest chunks whose schedule is allowed; None if even that of the largest is not."""
        first: int = bisect_left(CHUNKS, True, key=lambda chunk: self._allowed(request, chunk))
        return CHUNKS[first] if first < len(CHUNKS) else None

    def _allowed(self, request: Request, chunk: int) -> bool:
        """True if a schedule with such chunks, and everything as low as it goes, has few enough ops."""
        most = self.q.most_ops
        if most is None:
            return True
        if 2 * request.micro_batches * len(request.program.stages) > most:  # forwards and backwards alone
            return False
        return self.size(request, settings_of(request, base_placement(request), chunk, Depths())) <= most

    def too_many_ops(self) -> str:
        """The reason that nothing is planned, and what to do."""
        return (
            f"{self.q.request.micro_batches} micro-batches make a schedule of more than {self.q.most_ops:,} ops, the "
            "most that is planned: use fewer and larger micro-batches"
        )

    def size(self, request: Request, settings: Settings) -> int:
        """Number of ops of a schedule."""
        deep = settings.depths.weights > 1
        key = *_variant(request), settings.chunk, settings.delay, settings.keep, deep
        if key not in self._counters:
            prices = self._priced(request, _ONE_EACH, keep=settings.keep)
            self._counters[key] = PhaseCosts(request, settings, _ONE_EACH, prices)
        return round(float(self._counters[key].of(settings.place).sum()))


def _variant(request: Request) -> tuple[object, ...]:
    """All that the requests of one search differ in."""
    return request.family, request.speculates, request.casts_on_device, request.stage, request.secondary


def _best_delays(screened: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    """The best of the delays in (seconds, delay): the middle of those that are as good as the best, which leaves lanes
    the most room; the next ones that promise something; and none at all beside them."""
    by_seconds = sorted(screened)
    if not by_seconds:
        return ()
    least = by_seconds[0][0]
    good = sorted(delay for seconds, delay in by_seconds if seconds <= least * EQUAL)
    middle = good[len(good) // 2]
    others = [delay for seconds, delay in by_seconds if delay not in (0, middle) and seconds <= least * PROMISING]
    return tuple(dict.fromkeys((middle, *others[:_OTHERS], *(delay for _, delay in by_seconds if not delay))))


def _too_little_disk(request: Request, settings: Settings, free: int | None) -> str:
    needed = request.space_bytes(settings)
    assert free is not None
    return (
        f"{format_size(needed)} ({needed} bytes) of disk are needed for weights, state and scratch space, and "
        f"{format_size(free)} are free. Free {format_size(needed - free)} more, or add a drive"
    )
