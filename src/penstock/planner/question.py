"""The question that the search for a plan is asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from penstock.config import Family, Tier, ZeroStage
from penstock.hardware.machine import Machine
from penstock.planner.costs import machine_costs
from penstock.planner.endurance import DAY, allowance, written_per_day
from penstock.planner.fit import base_placement
from penstock.planner.phase_memory import Peaks, Phase, beyond, peaks_outside_steps
from penstock.planner.plan import Plan
from penstock.planner.request import Request
from penstock.planner.update_mode import DELAYS, REPEATS, expected_seconds, seconds_back, steps_early
from penstock.schedule.place import Placement, Settings, Side
from penstock.shape.model import StageTimes
from penstock.sim.costs import Costs

FAMILIES: tuple[Family, ...] = ("vertical", "horizontal")
"""Families that are searched where none is asked for."""
SIMULATED_OPS = 50_000
"""The most ops that all simulations of one search may have together; the first is done whatever it takes."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question to a search: a request, the machine's costs, and how far the search may go.

    The request's ``speculate`` and ``delay`` are forced, or None to be chosen: ``delays`` are those to begin with, and
    ``repeats`` is the share of steps that is expected to be run again if anything speculates. ``disk_free``: bytes that
    may be used on disk; None: enough. ``most_ops``: ops of the largest schedule that may be chosen; None: any.
    ``room``: bytes of device and host memory for what comes before and after steps (``phase_memory``); None: enough.
    ``most_written``: bytes that a step may write on average, with its repeats; None: any. A plan then has to keep to
    the drives' endurance, too. ``waiting``: of a rank of a pipeline, seconds of a step in which compute waits for
    others, by phase (``Phases``).
    """

    request: Request
    machine: Machine
    times: StageTimes
    optimizer: str
    families: tuple[Family, ...] = FAMILIES
    delays: tuple[float, ...] = DELAYS
    repeats: float = REPEATS
    disk_free: int | None = None
    io_threads: int = 4
    most_ops: int | None = None
    room: Mapping[Tier, int] | None = None
    simulated_ops: int = SIMULATED_OPS
    most_written: float | None = None
    waiting: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """The request in each family, waiting for the norm and speculating, with weights that several ranks gather for
        each use or once a step, or across hosts once, and with gradients that are rounded on either side of the link,
        as far as these may be chosen.

        Raises:
            ConfigError: what is forced cannot be.
        """
        families = self.possible_families
        free = self.request.early is None and self.request.may_speculate
        modes = (False, True) if free else (self.request.speculates,)
        forced = replace(self.request, family=families[0])
        forced.check_update_mode()
        asked = (
            replace(forced, family=family, speculate=early, stage=stage, secondary=secondary)
            for family, early, (stage, secondary) in product(families, modes, self._ways_to_gather)
        )
        return tuple(replace(request, cast=side) for request in asked for side in _sides(request))

    @property
    def _ways_to_gather(self) -> Sequence[tuple[ZeroStage | None, bool]]:
        """Stages of ZeRO, each with a secondary partition on each host or without."""
        request = self.request
        free = request.stage is None and request.ranks > 1
        each_use: ZeroStage | None = 3 if free else request.stage
        chosen = request.may_cross_once and request.secondary is None
        found = [(each_use, kept) for kept in ((False, True) if chosen else (bool(request.secondary),))]
        return [*found, (2, False)] if free else found

    @property
    def possible_families(self) -> tuple[Family, ...]:
        """The families that can have the delay that is forced; all, if none can."""
        return tuple(f for f in self.families if f == "vertical" or not self.request.delay) or self.families

    def delays_of(self, request: Request) -> tuple[float, ...]:
        """The delay ratios to begin with: the one that is forced, or those that the family can have."""
        if request.delay is not None:
            return (request.delay,)
        return self.delays if request.may_delay else (0.0,)

    def repeated(self, settings: Settings) -> float:
        """The share of steps with these settings that is expected to be run twice; 0 if nothing speculates."""
        return self.repeats * steps_early(self.request.program, settings)

    def expected(self, seconds: float, plan: Plan) -> float:
        """Seconds of a step on average, where a run of its plan takes ``seconds``."""
        return expected_seconds(seconds, self.repeated(plan.settings), seconds_back(plan, self.machine))

    @cached_property
    def allowance(self) -> float | None:
        """Bytes a day that the drives may be written (``budget.endurance``); None: any, or nothing is trained."""
        return allowance(self.request.budget, self.machine) if self.request.train else None

    def limited(self, seconds: float) -> "Question":
        """The question for plans that write no more than may be written in so many seconds."""
        assert self.allowance is not None
        return replace(self, most_written=self.allowance / DAY * seconds)

    def written_per_day(self, plan: Plan, seconds: float) -> float:
        """Bytes a day that a plan writes whose steps take so long, if they are run once."""
        expected = self.expected(seconds, plan)
        runs = 1 + self.repeated(plan.settings)
        return written_per_day(self.request.budget, plan, self.machine, runs, expected)

    @cached_property
    def unstartable(self) -> str | None:
        """The reason that no step would ever begin, wherever things are placed: loading or probing takes too much
        memory. None: one would."""
        peaks = self.peaks(base_placement(self.request), {"device": 0, "host": 0})
        if why := beyond({"load": peaks["load"]}, self.room or {}):
            whole = "the largest part of the model that moves together is made in fp32, whatever the budget"
            return f"{why}: {whole if self.request.bottom == 'disk' else 'give budget.disk, or lower budget.host'}"
        why = beyond({"probe": peaks["probe"]}, self.room or {})
        return why and f"{why}: use smaller micro-batches or shorter sequences"

    def peaks(self, place: Placement, step: Mapping[Tier, int]) -> Mapping[Phase, Peaks]:
        """The peak memory of phases outside of steps; ``step``: bytes of device and host that steps take."""
        request = self.request
        return peaks_outside_steps(
            request.program,
            request.form,
            place,
            step=step,
            disk=request.bottom == "disk",
            host_bytes=request.budget.host_bytes,
            slots=request.budget.slots,
            cut=request.parts(request.ranks),
        )

    def costs_of(self, request: Request) -> Costs:
        """The costs of the ops of a request's schedules, which depend on where gradients are rounded."""
        if request.narrow not in self._costs:
            self._costs[request.narrow] = machine_costs(
                self.machine,
                request.program,
                request.form,
                self.times,
                self.optimizer,
                io_threads=self.io_threads,
                grad_dtype=request.grad_dtype,
                narrow=request.narrow,
            )
        return self._costs[request.narrow]

    @property
    def costs(self) -> Costs:
        """``costs_of`` what is asked."""
        return self.costs_of(self.request)

    @cached_property
    def _costs(self) -> dict[frozenset[int], Costs]:
        return {}


def _sides(request: Request) -> tuple[Side, ...]:
    """The sides on which a request's gradients may be rounded: both where that is worth a choice."""
    if request.cast is None and request.may_cast_on_device:
        return ("device", "host")
    return ("device" if request.casts_on_device else "host",)
