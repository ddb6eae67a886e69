"""The update mode of a plan beside those that it could have had instead, and the costs of each.

Where the schedule is small each alternative is searched for and simulated like the plan itself; else the linear program
places it anew for the plan's own chunks, and its estimate has to do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import BudgetError
from penstock.planner.phase_costs import PhaseCosts, by_lane
from penstock.planner.proposals import Proposals
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.search import Choice, search
from penstock.planner.update_mode import steps_early
from penstock.schedule.place import Settings
from penstock.sim.costs import Costs

UpdateMode = Literal["speculate", "wait, gradients in host memory", "wait, gradients on disk", "no norm needed"]

SMALL = 4_000
"""Ops of a plan up to which its alternatives are simulated."""
_OPS = 5_000
"""ops for each"""
_BYTES = Costs(name="bytes", seconds=lambda op: float(op.nbytes))


@dataclass(frozen=True, kw_only=True)
class ModeCosts:
    """An update mode, and what a plan with it costs.

    ``seconds``: of a step on average, and ``disk_bytes``: read and written by one on average: steps that are run twice
    count as often as is expected. ``held_bytes``: host memory for gradients that wait there, for the norm or for the
    next step's forward. ``delay``: the delay ratio. ``simulated``: by the simulator, not the linear program.
    """

    mode: UpdateMode
    delay: float
    seconds: float
    held_bytes: int
    disk_bytes: int
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """Costs by update mode. ``chosen``: of the plan itself. ``others``: the other modes that fit, fastest first, with
    delays chosen as for the plan. ``undelayed``: the same mode without a delay, where the plan has one and that fits.
    ``gain_of_delay``: the factor on tokens/s over that, both by the simulator or both by the linear program."""

    chosen: ModeCosts
    others: tuple[ModeCosts, ...]
    undelayed: ModeCosts | None
    gain_of_delay: float | None


def alternatives(choice: Choice) -> Alternatives:
    """The costs of the update mode that was chosen, and of the others."""
    request, settings = choice.request, choice.plan.settings
    own = update_mode_of(request, settings)
    moved = choice.plan.schedule.bytes_per_lane()
    back = choice.repeats * choice.plan.taken_back_bytes
    chosen = ModeCosts(
        mode=own,
        delay=settings.delay,
        seconds=choice.expected_seconds,
        held_bytes=_held_bytes(request, settings),
        disk_bytes=round((1 + choice.repeats) * (moved["read"] + moved["write"]) + back),
        simulated=True,
    )
    modes = [mode for mode in _modes(request) if mode != own]
    others = [found for mode in modes if (found := _cost(choice, mode, _pinned(request, mode))) is not None]
    undelayed = gain = None
    if settings.delay:
        undelayed = _cost(choice, own, replace(_pinned(request, own), delay=0.0))
    if undelayed is not None:
        gain = undelayed.seconds / (chosen.seconds if undelayed.simulated else choice.proposal.estimate)
    others.sort(key=lambda costs: costs.seconds)
    return Alternatives(chosen=chosen, others=tuple(others), undelayed=undelayed, gain_of_delay=gain)


def update_mode_of(request: Request, settings: Settings) -> UpdateMode:
    """The update mode of a request's settings."""
    if not request.wait:
        return "no norm needed"
    if steps_early(request.program, settings):
        return "speculate"
    return "wait, gradients on disk" if settings.place.gradients == "disk" else "wait, gradients in host memory"


def _modes(request: Request) -> Iterator[UpdateMode]:
    """The update modes that a request may have, where the numbers need the norm."""
    if request.may_speculate:
        yield "speculate"
    if request.wait and request.budget.gradients != "disk":
        yield "wait, gradients in host memory"
    if request.wait and request.budget.gradients != "host" and request.bottom == "disk":
        yield "wait, gradients on disk"


def _pinned(request: Request, mode: UpdateMode) -> Request:
    """The request that forces an update mode."""
    if mode in ("speculate", "no norm needed"):
        return replace(request, speculate=mode == "speculate")
    tier: Literal["host", "disk"] = "disk" if mode == "wait, gradients on disk" else "host"
    return replace(request, speculate=False, budget=replace(request.budget, gradients=tier))


def _cost(choice: Choice, mode: UpdateMode, request: Request) -> ModeCosts | None:
    """The costs of a mode; None if it does not fit, or turns out to be another mode (nothing is left to speculate)."""
    question = replace(choice.question, request=request, families=(request.family,))
    simulated = len(choice.plan.schedule.ops) <= SMALL
    found = _searched(question) if simulated else _estimated(question, choice.plan.settings)
    if found is None or update_mode_of(request, found[0]) != mode:
        return None
    settings, seconds, back = found
    lanes = by_lane(PhaseCosts(request, settings, _BYTES).of(settings.place))
    return ModeCosts(
        mode=mode,
        delay=settings.delay,
        seconds=seconds,
        held_bytes=_held_bytes(request, settings),
        disk_bytes=round((1 + question.repeated(settings)) * (lanes["read"] + lanes["write"]) + back),
        simulated=simulated,
    )


def _searched(question: Question) -> tuple[Settings, float, float] | None:
    """Settings, seconds of a step, and bytes that are read on average where a step is dropped."""
    try:
        choice = search(replace(question, simulated_ops=_OPS))
    except BudgetError:
        return None
    return choice.plan.settings, choice.expected_seconds, choice.repeats * choice.plan.taken_back_bytes


def _estimated(question: Question, like: Settings) -> tuple[Settings, float, float] | None:
    """As ``_searched``, of the linear program's best for the chunks of a plan. What is read where a step is dropped is
    not in its estimates."""
    proposals = Proposals(question)
    (request,) = question.requests
    delay = like.delay if request.delay is None else request.delay
    found = proposals.at(request, like.chunk, delay)
    if not found:
        return None
    best = min(found, key=lambda proposal: proposal.estimate)
    return best.settings, best.estimate, 0.0


def _held_bytes(request: Request, settings: Settings) -> int:
    found = request.provision(settings)
    uses = ((g, use) for g in found.streamed for use in range(len(request.route.uses[g])))
    return sum(found.held_count(g, use) for g, use in uses) * settings.chunk * found.widest_gradient
