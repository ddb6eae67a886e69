"""The request to fit a step of a program into a budget: what is fixed, what is left to the planner, and what follows.

Peak memory is not estimated: it is what the schedule's own pools add up to.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from penstock.config import Budget, Family, StreamConfig, Tier
from penstock.config.step import IN_TURN, SPLIT
from penstock.planner.phase_memory import arrays
from penstock.planner.plan import Plan
from penstock.planner.update_mode import check_update_mode, no_speculation
from penstock.schedule.dealt import message_bytes
from penstock.schedule.ir.ops import Schedule, peak_bytes
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.fixed import Fixed, fixed_bytes
from penstock.schedule.lower.graphs import all_graphs
from penstock.schedule.lower.provision import Provision, narrow_groups
from penstock.schedule.lower.route import Route
from penstock.schedule.lower.seat import Seat, streaming_seat
from penstock.schedule.lower.visits import lower_step, route_of
from penstock.schedule.place import BF16, FP32, Format, Placement, Settings, Side, checksum_bytes, page_up
from penstock.schedule.program import Program

DEVICE_TEMPORARIES = 32 << 20
"""Bytes that an optimizer step on an accelerator needs besides its arguments (``optim.fallback`` has the same)."""


@dataclass(frozen=True, kw_only=True)
class Request(StreamConfig):
    """The request to fit a step of a program into a budget.

    What is None is left to the planner, and where there is nothing to choose by (``fit``) what can speculates, nothing
    is delayed, and the ``cast`` is done on the device: fewer bytes cross and wait. ``wait``: as in ``Settings``.
    ``inputs``: bytes of all micro-batches on the device, which is an accelerator if ``accelerated``. ``ranks``: that
    share every group, for each of so many ``copies`` of the state, and are on so many ``hosts``, as many on each;
    ``program``, ``budget`` and ``micro_batches`` are those of one of them, ``strands`` those of all. ``secondary``: as
    in ``Settings``, if it can be (``may_cross_once``); None: where there is room left for it.
    """

    program: Program
    budget: Budget
    form: Format
    micro_batches: int
    wait: bool
    cast: Side | None = None
    train: bool = True
    family: Family = "vertical"
    inputs: int = 0
    accelerated: bool = False
    ranks: int = 1
    copies: int = 1
    hosts: int = 1
    secondary: bool | None = None

    def build(self, settings: Settings) -> Schedule:
        return lower_step(self.order, self.program, settings, self.fixed(settings.place), seat=self.seat(settings))

    def seat(self, settings: Settings) -> Seat:
        """The seat of each rank."""
        dealt = self.program.dealt
        pipe, place = (1, 0) if dealt is None else (dealt.ranks, dealt.rank)
        seat, secondary = (self.ranks, settings.stage, self.copies, self.hosts), settings.secondary
        return streaming_seat(*seat, secondary=secondary, pipe=pipe, place=place)

    @property
    def is_of_several(self) -> bool:
        """True if it is one of several ranks', whose budget has its share of host memory."""
        return self.ranks * self.copies > 1 or self.program.dealt is not None

    @property
    def own_strands(self) -> int:
        """The number of strands that each rank sums."""
        return max(1, (self.strands or 1) // (self.ranks * self.copies))

    def provision(self, settings: Settings) -> Provision:
        """The pools of a step with these settings, and what it takes of them."""
        return _provision(self.route, settings, self.seat(settings))

    def peak_bytes(self, settings: Settings, tier: Tier) -> int:
        """``build(settings).peak_bytes(tier)``, without building: options are weighed by the hundred."""
        return self.peaks(settings)[tier == "host"]

    def peaks(self, settings: Settings) -> tuple[int, int]:
        """``peak_bytes`` of device and host together."""
        fixed, (device, host) = self.fixed(settings.place), _pooled(self.route, settings, self.seat(settings))
        return device + peak_bytes((), fixed, "device"), host + peak_bytes((), fixed, "host")

    def exceeded(self, settings: Settings, disk_free: int | None = None) -> Tier | None:
        """The first tier that a step needs more of than there is. ``disk_free``: bytes of disk; None: enough."""
        device, host = self.peaks(settings)
        if device > self.budget.device_bytes:
            return "device"
        if host > self.budget.host_bytes:
            return "host"
        return "disk" if disk_free is not None and self.space_bytes(settings) > disk_free else None

    def world(self, schedule: Schedule) -> World:
        """The world to simulate for a schedule that all ranks have."""
        return streaming_seat(self.ranks, copies=self.copies, hosts=self.hosts).in_step(schedule)

    @cached_property
    def route(self) -> Route:
        return _route(self.program, self.micro_batches, self.order, train=self.train)

    @property
    def early(self) -> bool | None:
        """True if steps are to begin before the norm is known; None: that is not said."""
        return self.steps_early(self.budget)

    @cached_property
    def speculates(self) -> bool:
        """True if groups with all state on disk step before the norm is known."""
        return self.early is not False and self.may_speculate

    @cached_property
    def may_speculate(self) -> bool:
        """True if anything could, if it is not forbidden."""
        return self.train and no_speculation(self.budget, wait=self.wait) is None

    @property
    def may_cross_once(self) -> bool:
        """True if what a step's weights cross between hosts could be kept within each until their last use."""
        over_hosts = self.hosts > 1 and self.copies == 1 and self.program.dealt is None
        return self.train and over_hosts and self.stage in (None, 3)

    @property
    def may_delay(self) -> bool:
        """True if a step may leave a part of itself to the next one. With one slot a step that is pending leaves the
        store in pieces between steps, where it is whole otherwise."""
        return self.order == "vertical" and not (self.bottom == "disk" and self.budget.slots == 1)

    @cached_property
    def casts_on_device(self) -> bool:
        """True if gradients that are complete on the device are rounded there."""
        return self.cast != "host" and self.may_cast_on_device

    @property
    def may_cast_on_device(self) -> bool:
        """True if any gradient could be, if the choice is free."""
        return self.grad_dtype == "bf16" and bool(self.route.whole)

    @cached_property
    def narrow(self) -> frozenset[int]:
        """Groups whose gradients are, wherever they live."""
        return self.route.whole if self.casts_on_device else frozenset()

    def check_update_mode(self) -> None:
        """As ``update_mode.check_update_mode``; an evaluation steps nothing and has no update mode."""
        if self.train:
            check_update_mode(self, self.budget, wait=self.wait, delays=self.order == "vertical")

    @cached_property
    def most_graphs(self) -> int:
        """The buffers for graphs of calls that a step can use: none if saved activations are to leave the device, as
        the input of a call with a graph stays."""
        leave = self.recompute is None and self.budget.activations in ("host", "disk")
        return 0 if self.recompute or leave else all_graphs(self.route)

    @property
    def order(self) -> Family:
        """The order of the step's visits: evaluations have one."""
        return self.family if self.train else "vertical"

    @property
    def splits(self) -> bool:
        """True if backwards are run in two parts, where they can be."""
        return self.order in SPLIT

    @property
    def takes_turns(self) -> bool:
        """True if forwards and backwards of different micro-batches take turns."""
        return self.order in IN_TURN

    @property
    def one_by_one(self) -> bool:
        return self.order == "horizontal"

    @cached_property
    def bottom(self) -> Literal["host", "disk"]:
        """The lowest tier there is."""
        return "disk" if self.budget.disk_paths else "host"

    def scratch_bytes(self, settings: Settings) -> int:
        """Bytes on disk that a step needs besides the state: saved activations and gradients that wait there."""
        place, stages = settings.place, self.program.stages
        gradients = activations = 0
        if place.gradients == "disk":
            # with a delay alone, a share of each: but the extents are as large as the gradients
            stepped = (
                g
                for g in self.program.groups
                if place.state[g.index] != "device" and (settings.waits(g.index) or settings.delay)
            )
            narrow = narrow_groups(self.route, settings)
            gradients = sum(g.trainable * (BF16 if g.index in narrow else FP32) for g in stepped)
        if self.train and place.activations == "disk":
            provision, everyone = self.provision(settings), range(self.route.at_once)
            of_stage = {s.index: len(provision.activations.leaving(s.index, everyone)) for s in stages}
            if self.route.takes_turns or self.one_by_one:  # each micro-batch has an extent of its own
                of_stage = {k: self.micro_batches * bool(leaving) for k, leaving in of_stage.items()}
            activations = sum(page_up(s.activation) * of_stage[s.index] for s in stages)
        return gradients + activations

    def space_bytes(self, settings: Settings) -> int:
        """Bytes of disk that a run takes: the store has room for all weights and state, wherever they are at home, in
        every slot, and for two tables of checksums.
        """
        if self.bottom != "disk":
            return 0
        return self.store_bytes + self.scratch_bytes(settings)

    @cached_property
    def store_bytes(self) -> int:
        """Bytes of a store, if there is a disk."""
        groups, form = self.program.groups, self.form
        stored = sum(page_up(array.nbytes) for array in arrays(self.program, form))
        return self.budget.slots * stored + 2 * checksum_bytes(groups, form, self.budget.slots)

    def roomiest(self, settings: Settings) -> Settings:
        """The settings with as many graphs of calls on the device, from their forwards to their backwards, as the
        budget has room for: their blocks need not be computed again. Then as many inputs of the last block: they need
        not leave, and come back at once.
        """
        return self._with_inputs(self.with_graphs(settings))

    def with_graphs(self, settings: Settings) -> Settings:
        """The settings with as many graphs of calls on the device as the budget has room for."""
        if not settings.train or self.most_graphs <= settings.depths.graphs:
            return settings

        def having(count: int) -> Settings:
            return replace(settings, depths=replace(settings.depths, graphs=count))

        def is_too_much(count: int) -> bool:
            return self.peak_bytes(having(count), "device") > self.budget.device_bytes

        if not is_too_much(self.most_graphs):
            return having(self.most_graphs)
        counts = range(settings.depths.graphs + 1, self.most_graphs)
        return having(settings.depths.graphs + bisect_left(counts, True, key=is_too_much))

    def _with_inputs(self, settings: Settings) -> Settings:
        last, depths = len(self.program.stages) - 3, settings.depths
        away = settings.train and settings.place.activations != "device" and self.program.has(last + 1)
        leaving = len(self.provision(settings).activations.leaving(last, range(self.route.at_once))) if away else 0
        if not leaving:
            return settings

        def with_more(more: int) -> Settings:
            return replace(settings, depths=replace(depths, inputs=depths.inputs + more))

        now = self.peak_bytes(settings, "device")
        # of a pipeline's rank, which is sent them, each may take a buffer more than what it is
        each = max(stage.activation for stage in self.program.stages[:-1])
        each = max(each, self.peak_bytes(with_more(1), "device") - now)
        return with_more(max(min((self.budget.device_bytes - now) // each, leaving), 0))

    def plan(self, settings: Settings, schedule: Schedule | None = None) -> Plan:
        """The plan with these settings; whether it fits is the caller's to know. ``schedule``: the user's own, which
        the settings describe; None: the one that is built from them."""
        built = self.build(settings) if schedule is None else schedule
        return Plan(program=self.program, settings=settings, schedule=built)

    def fixed(self, place: Placement, at_once: int | None = None) -> Fixed:
        """(tier, what, bytes) that the whole step holds besides its pools. ``at_once``: micro-batches under way at the
        same time; None: those of the route."""
        return fixed_bytes(
            self.program,
            self.form,
            place,
            self.route.at_once if at_once is None else at_once,
            inputs=self.inputs,
            step_temporaries=DEVICE_TEMPORARIES if self.accelerated else 0,
            messages=message_bytes(self.program) if self.accelerated else 0,
            train=self.train,
            split=self.splits,
        )


@lru_cache(maxsize=32)
def _route(program: Program, micro_batches: int, order: Family, *, train: bool) -> Route:
    """One for all requests that have it, and with it one key for what its settings take."""
    return route_of(program, micro_batches, order, train=train)


@lru_cache(maxsize=4096)
def _pooled(route: Route, settings: Settings, seat: Seat) -> tuple[int, int]:
    """Bytes of the pools of device and host: the advice on other machines and budgets asks for the same ones again."""
    pools = _provision(route, settings, seat).pools.values()
    return peak_bytes(pools, (), "device"), peak_bytes(pools, (), "host")


@lru_cache(maxsize=256)
def _provision(route: Route, settings: Settings, seat: Seat) -> Provision:
    """The pools of a step with these settings, and what it takes of them."""
    return Provision(route, settings, seat)
