"""Follows the machine: looks at each step that is done, and finds a better plan when its lanes are not as predicted.

``planner.following`` has the arithmetic: which numbers tell it, and what a change must promise. All ranks are told the
numbers of all, and so come to the same in the same step; rank 0 searches.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.config import Tier, format_size
from penstock.config.sizes import three_digits
from penstock.errors import BudgetError
from penstock.planner.endurance import Worn, worn_by
from penstock.planner.following import (
    AGAIN,
    ANOTHER,
    HORIZON,
    KEYS,
    LEAST_GAIN,
    PATIENCE,
    WINDOW,
    Deviations,
    Seen,
    moving_seconds,
    of_all_ranks,
    stage_key,
)
from penstock.planner.plan import Plan
from penstock.planner.question import Question
from penstock.planner.search import estimate, search
from penstock.runtime.streams import Mark
from penstock.schedule.moving import fills_no_tier_more
from penstock.schedule.place import FP32, Placement, Settings
from penstock.sim.costs import Pair
from penstock.sim.result import Simulation

Step = tuple[dict[str, float], dict[str, float]]
"""Factors and shares of a step (``planner.following.Seen``)."""


class Lens:
    """A plan's ops as arrays, beside which a step that ran them is looked at."""

    def __init__(self, plan: Plan, prediction: Simulation) -> None:
        ops, stages = plan.schedule.ops, plan.program.stages
        self._names = [op.id for op in ops]
        lanes = [op.lane for op in ops]
        self._computes = np.array([lane == "compute" for lane in lanes])
        self._nbytes = np.array([op.nbytes for op in ops], dtype=np.float64)
        self._alone = np.array(prediction.alone[0])
        keys = [stage_key(op.id.kind, stages[op.id.stage]) if op.lane == "compute" else None for op in ops]
        found = {key: np.array([key in both for both in zip(keys, lanes, strict=True)]) for key in KEYS}
        self._of_key = {key: of for key, of in found.items() if of.any()}

    def look(self, marks: Mapping[str, Mark]) -> Seen:
        """The findings of a step beside the plan's prediction. ``marks``: by op, when it ran and the bytes it moved."""
        found = [marks[name] for name in self._names]
        starts, ends = np.array([mark.start for mark in found]), np.array([mark.end for mark in found])
        moved = np.array([mark.moved for mark in found], dtype=np.float64)
        # Shorter micro-batches than were planned for move less; a delayed chunk that nobody has left moves nothing.
        share = np.divide(
            moved, self._nbytes, out=np.ones_like(moved), where=(self._nbytes > 0) & (moved < self._nbytes)
        )
        expected = self._alone * np.where(self._computes, 1.0, share)
        return Seen(
            together=_together(self._of_key, starts, ends),
            expected={key: float(expected[of].sum()) for key, of in self._of_key.items()},
        )


def _together(
    of_key: Mapping[str, NDArray[np.bool_]], starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> dict[int, float]:
    """Seconds by which keys were busy at once (``Seen.together``); ``of_key``: which ops are of each."""
    moments = np.unique(np.concatenate((starts, ends)))
    if len(moments) < 2:
        return {}
    masks = np.zeros(len(moments) - 1, dtype=np.int64)
    begun, over = np.searchsorted(moments, starts), np.searchsorted(moments, ends)
    for key, of in of_key.items():
        change = np.bincount(begun[of], minlength=len(moments)) - np.bincount(over[of], minlength=len(moments))
        masks |= (np.cumsum(change)[:-1] > 0).astype(np.int64) << KEYS.index(key)
    kinds, index = np.unique(masks, return_inverse=True)
    seconds = np.bincount(index, weights=np.diff(moments))
    return dict(zip(kinds.tolist(), seconds.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Searched:
    """Result of rank 0's search. ``settings``: of a better plan; None: there is none. ``seconds``: that it took.
    ``now``, ``then``: seconds of a step on average, by the plan in use and by the better one. ``worn``: the wear by the
    plan in use, if it is more than ``budget.endurance`` allows: then a plan that keeps to it is better, and may be
    slower. ``out_of_reach``: there is a better one, to which arrays cannot move while all have their memory."""

    settings: Settings | None
    seconds: float
    now: float
    then: float
    worn: Worn | None = None
    out_of_reach: bool = False


class Following:
    """Deviations of the steps so far from their prediction, and the decision when to search for a plan again."""

    def __init__(self) -> None:
        self.search_seconds = 0.0
        """seconds of the last search for a plan; known to rank 0"""
        self._deviations = Deviations()
        self._lens: tuple[Simulation, Lens] | None = None
        self._last: Step | None = None
        self.due = False
        """True: the machine is another one than at the last search"""
        self.wears = False
        """True: a search for a plan that wears the drives less than the one in use was in vain"""
        self._patience, self._rested = PATIENCE
        """steps after a search before the next one, if nothing else has changed; and steps since the last one"""
        self._between, self._unchanged = 0, PATIENCE[1]
        """steps after a search before the next one, whatever has changed; and steps by the plan in use"""
        self._known: float | None = None  # seconds that a step was to take after the last search
        self._since = dict[str, float]()  # logarithms of the factors of what was off since then

    def look(
        self, plan: Plan, prediction: Simulation, contention: Mapping[Pair, float], marks: Mapping[str, Mark]
    ) -> None:
        """A step is done; ``marks``: what its ops did."""
        if self._lens is None or self._lens[0] is not prediction:
            self._lens = prediction, Lens(plan, prediction)
        seen = self._lens[1].look(marks)
        self._last = seen.factors(contention), seen.shares()

    def take(self) -> Step | None:
        """Take the factors and shares of the last step away; None: they have been taken, or there are none."""
        last, self._last = self._last, None
        return last

    def learn(self, steps: Sequence[Step | None]) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """Take in a step of all ranks: the factors of what is not as predicted, and all factors; None: all is."""
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            return None
        self._rested += 1
        self._unchanged += 1
        self._deviations.add(of_all_ranks([f for f, _ in known]), of_all_ranks([s for _, s in known]))
        off = self._deviations.off()
        return (off, self._deviations.middle()) if off else None

    def corrected(self, off: Mapping[str, float]) -> None:
        """Predictions take what was ``off`` into account from here on: deviations count anew, and a search is due."""
        self.due = True
        self._since |= {key: self._since.get(key, 0.0) + math.log(factor) for key, factor in off.items()}
        self._deviations.clear()

    def is_due(self, now: float) -> bool:
        """True if a search is worth its time, with a plan in use whose steps take ``now`` seconds by all that is known:
        not at once after a search in vain, unless steps, or the rate of a lane, are other ones than then; and ever
        more rarely while plans take turns, each of which promises more than the other."""
        other = self._known is None or abs(now / self._known - 1) > AGAIN
        other |= max(map(abs, self._since.values()), default=0.0) > ANOTHER
        return self.due and self._rested >= (self._between if other else max(self._between, self._patience))

    def searched(self, found: Searched) -> bool:
        """A search is over. True if it is the first to find no plan that wears the drives less than the one in use,
        which does so too fast."""
        least, most = PATIENCE
        if found.settings is None:
            self._patience, self._known = min(2 * self._patience, most), found.now
        else:
            soon = self._unchanged < 2 * max(self._between, least)
            self._between = min(2 * max(self._between, WINDOW), most) if soon else 0
            self._patience, self._unchanged, self._known = least, 0, found.then
        self.due, self._rested = False, 0
        self._since.clear()
        self.search_seconds = found.seconds
        known, self.wears = self.wears, found.settings is None and found.worn is not None
        return self.wears and not known

    def changed(self) -> None:
        """Another plan is in use, whose steps have noise of their own, or none is any more."""
        self._deviations = Deviations()
        self._last = None


def better(
    question: Question, plan: Plan, simulation: Simulation, search_seconds: float, *, in_vain: bool = False
) -> Searched:
    """Search for a plan that is worth a change.

    ``plan``, in use, whose ``simulation`` is by the question's rates. ``search_seconds``: what a search takes. One that
    takes longer than what the least gain would bring is made only where the linear program promises more, or where the
    plan in use wears its drives too fast, and no search for one that does not was ``in_vain``.
    """
    began, now = time.perf_counter(), question.expected(simulation.time, plan)
    worn = worn_by(question.request.budget, plan, question.machine, 1 + question.repeated(plan.settings), now)
    nothing = Searched(settings=None, seconds=search_seconds, now=now, then=now, worn=worn)
    if (worn is None or in_vain) and search_seconds > HORIZON * LEAST_GAIN * now:
        found = [seconds for f in question.families if (seconds := estimate(question, f)) is not None]
        if HORIZON * (now - min(found, default=now)) < search_seconds:
            return nothing
    try:
        choice = search(question)
    except BudgetError:  # of plans that are made anew, none: the one in use has what it needs
        return replace(nothing, seconds=time.perf_counter() - began)
    took, then = time.perf_counter() - began, choice.expected_seconds
    old, new = plan.settings.place, choice.plan.settings.place
    # The first step by another plan warms up, and what is delayed is done beforehand.
    cost = took + now + moving_seconds(plan.program, plan.settings.form, old, new, question.machine)
    worth = now - then >= LEAST_GAIN * now and HORIZON * (now - then) > cost
    if not (worth or worn) or not _order_of_moves(plan, new):
        return replace(nothing, seconds=took, out_of_reach=worth or worn is not None)
    return Searched(settings=choice.plan.settings, seconds=took, now=now, then=then, worn=worn)


def _order_of_moves(plan: Plan, new: Placement) -> bool:
    """True if arrays can move to another placement with no tier fuller on the way than before or after. Copies of
    weights are given back before, and made last."""
    form, old = plan.settings.form, plan.settings.place
    sizes, now, then = list[int](), list[Tier](), list[Tier]()
    for group in plan.program.groups:
        g = group.index
        sizes += [group.numel * form.weight_bytes, form.state_bytes(group)]
        now += [old.home(group), old.state[g]]
        then += [new.home(group), new.state[g]]
    return fills_no_tier_more(sizes, now, then)


def differences(old: Settings, new: Settings) -> str:
    """The differences between one plan's settings and another's, in words."""
    a, b = old.place, new.place
    others = (
        (a.activations != b.activations, f"saved activations go to {b.activations}"),
        (a.gradients != b.gradients, f"gradients wait on {b.gradients}"),
        (old.delay != new.delay, f"delay {old.delay:g} -> {new.delay:g}"),
        (
            old.speculate != new.speculate,
            "steps " + ("before the norm is known" if new.speculate else "wait for the norm"),
        ),
        (old.cast != new.cast, f"gradients are rounded on the {new.cast}"),
        (old.stage != new.stage, f"ZeRO stage {old.stage} -> {new.stage}"),
        (
            old.secondary != new.secondary,
            f"weights cross between hosts {'once a step' if new.secondary else 'for each use'}",
        ),
        (old.keep != new.keep, f"weights {'stay' if new.keep else 'do not stay'} in host memory until their step"),
        (
            old.depths.graphs != new.depths.graphs,
            f"buffers for {old.depths.graphs} -> {new.depths.graphs} graphs of blocks' calls",
        ),
        (old.chunk != new.chunk, f"chunks of {format_size(old.chunk * FP32)} -> {format_size(new.chunk * FP32)}"),
    )
    parts = [*_moves("weights", a.weights, b.weights), *_moves("state", a.state, b.state)]
    return ", ".join([*parts, *(text for differs, text in others if differs)]) or "other numbers of buffers"


def _moves(what: str, old: Sequence[Tier], new: Sequence[Tier]) -> list[str]:
    counts = Counter(then for now, then in zip(old, new, strict=True) if now != then)
    return [f"{what} of {count} group{'s' * (count > 1)} to {tier}" for tier, count in counts.items()]


def change_in_words(why: str, old: Settings, found: Searched) -> str:
    """A sentence on a change of plan: ``why``, what changes, and the seconds of a step before and after."""
    assert found.settings is not None
    now, then = three_digits(found.now), three_digits(found.then)
    if found.worn is not None:
        why = f"{why}, so that the plan wore its drives too fast ({found.worn})"
    return f"{why}: {differences(old, found.settings)}, {now} s -> {then} s a step predicted"


def wear_in_words(why: str, found: Searched) -> str:
    """A sentence on a plan that goes on although it wears its drives too fast; ``why``: what has changed."""
    assert found.worn is not None
    other = (
        "the plan that keeps to it cannot be had while the run goes on: end it, and start it again"
        if found.out_of_reach
        else f"no other plan keeps to it. What would help: {', or '.join(found.worn.what_helps)}"
    )
    return f"{why}: the plan wears its drives too fast now: {found.worn}; {other}"
