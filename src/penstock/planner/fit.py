"""Fits one step of a program into a budget: what stays on which tier, how large chunks are, how far lanes run ahead.

The order of preference is by bytes saved on the slowest link per byte of memory: saved activations stay on the device,
waiting gradients stay in host memory, and weights that are read for the backward until the optimizer takes them (a few
blocks' save one read of all); then weights move up from disk, then optimizer state, as long as there is room.
Peak memory is not estimated: it is what the schedule's own pools add up to.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Literal

from penstock.config import Budget, Family, StreamConfig, Tier, format_size
from penstock.config.step import SPLIT
from penstock.errors import BudgetError, ConfigError
from penstock.planner.phase_memory import arrays
from penstock.planner.update_mode import check_update_mode, no_speculation, steps_early
from penstock.schedule.ir.ops import Schedule, graphs_kept, peak_bytes
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.dealt import message_bytes
from penstock.schedule.lower.graphs import all_graphs
from penstock.schedule.lower.provision import STAGED, Provision, fixed_bytes, in_depth, narrow_groups
from penstock.schedule.lower.route import Route
from penstock.schedule.lower.seat import Seat, streaming_seat
from penstock.schedule.lower.visits import horizontal, in_turn, route_of, vertical
from penstock.schedule.meaning import narrow_groups_of
from penstock.schedule.place import BF16, FP32, Depths, Format, Placement, Settings, Side, checksum_bytes, page_up
from penstock.schedule.program import ALIGN, Program

CHUNKS = tuple(2**power for power in range(21, 15, -1))
"""Elements of the chunks that are tried in that order, as larger ones cost less: 8 MiB down to 256 KiB of fp32."""
_OF_STEP, _OF_GROUP = 256, 8
"""Chunks of all groups together, and of the largest, that larger chunks are to leave. More of them only cost ops: on an
H100 a step in 1,635 chunks took 2.7 s, of which compute's own kernels are 2.0."""
DEVICE_TEMPORARIES = 32 << 20
"""Bytes that an optimizer step on an accelerator needs besides its arguments (``optim.fallback`` has the same)."""
DEVICE_DEPTHS = ((2, 2), (2, 1), (1, 1))
"""Depths of weights and gradients, from the best to the smallest."""
_HOST_DEPTHS = (Depths(), Depths(stage_in=3, stage_out=3, state=3), Depths(stage_in=2, stage_out=2, state=2))


_BUILDS: Mapping[Family, Callable[..., Schedule]] = {
    "vertical": vertical,
    "horizontal": horizontal,
    "1f1b": partial(in_turn, name="1f1b"),
    "interleaved-1f1b": partial(in_turn, name="interleaved-1f1b"),
    "zero-bubble": partial(in_turn, name="zero-bubble", split=True),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule with what it was built from, and the memory it may use per tier (bytes)."""

    program: Program
    settings: Settings
    schedule: Schedule
    state_bytes: int
    """weights, fp32 gradients and optimizer state of the whole model"""
    disk_bytes: int

    @cached_property
    def narrow(self) -> frozenset[int]:
        """Groups whose gradients cross to the host, and wait, in bf16."""
        return narrow_groups_of(self.schedule)

    @cached_property
    def graphs_kept(self) -> int:
        """The number of calls of blocks in a step whose graph is kept for their backward."""
        return graphs_kept(self.schedule)

    @property
    def calls(self) -> int:
        """The number of calls of blocks in a step, of this rank's."""
        own = sum(stage.kind == "call" and self.program.has(stage.index) for stage in self.program.stages)
        return own * self.settings.micro_batches

    @property
    def device_bytes(self) -> int:
        return self.schedule.peak_bytes("device")

    @property
    def host_bytes(self) -> int:
        return self.schedule.peak_bytes("host")

    def describe(self) -> str:
        """A few lines for people: what lives where, and the peak of each tier."""
        place = self.settings.place

        def shares(tiers: tuple[Tier, ...]) -> str:
            sizes: dict[Tier, int] = dict.fromkeys(tiers, 0)
            for group, tier in zip(self.program.groups, tiers, strict=True):
                sizes[tier] += group.numel
            total = sum(sizes.values())
            return ", ".join(f"{100 * n / total:.0f}% {tier}" for tier, n in sizes.items() if n)

        waiting = [self.settings.waits(g.index) for g in self.program.groups if g.trainable]
        wait = f"wait on {place.gradients}" if any(waiting) else "are stepped as they come"
        return "\n".join(
            (
                f"state {format_size(self.state_bytes)}",
                f"weights {shares(place.weights)}; optimizer {shares(place.state)}",
                f"saved activations on {place.activations}; gradients {wait}",
                f"{self.schedule.name}, {self.settings.micro_batches} micro-batches, {len(self.schedule.ops)} ops",
                f"chunks of {format_size(self.settings.chunk * FP32)} of fp32",
                f"peak device {format_size(self.device_bytes)}, host {format_size(self.host_bytes)}",
            )
        )


@dataclass(frozen=True, kw_only=True)
class Request(StreamConfig):
    """The request to fit a step of a program into a budget.

    What is None is left to the planner, and where there is nothing to choose by (``fit``) what can speculates, nothing
    is delayed, and the ``cast`` is done on the device: fewer bytes cross and wait. ``wait``: as in ``Settings``.
    ``inputs``: bytes of all micro-batches on the device, which is an accelerator if ``accelerated``. ``ranks``: that
    share every group, for each of so many ``copies`` of the state, and are on so many ``hosts``, as many on each;
    ``program``, ``budget`` and ``micro_batches`` are those of one of them.
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

    def build(self, settings: Settings) -> Schedule:
        return _BUILDS[self.order](self.program, settings, self.fixed(settings.place), seat=self.seat(settings))

    def seat(self, settings: Settings) -> Seat:
        """The seat of each rank."""
        dealt = self.program.dealt
        pipe, place = (1, 0) if dealt is None else (dealt.ranks, dealt.rank)
        return streaming_seat(self.ranks, settings.stage, self.copies, self.hosts, pipe=pipe, place=place)

    @property
    def is_of_several(self) -> bool:
        """True if it is one of several ranks', whose budget has its share of host memory."""
        return self.ranks * self.copies > 1 or self.program.dealt is not None

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
            of_stage = {s.index: len(provision.leaving(s.index, everyone)) for s in stages}
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
        return self._store_bytes + self.scratch_bytes(settings)

    @cached_property
    def _store_bytes(self) -> int:
        groups, form = self.program.groups, self.form
        stored = sum(page_up(array.nbytes) for array in arrays(self.program, form))
        return self.budget.slots * stored + 2 * checksum_bytes(groups, form, self.budget.slots)

    def disk_bytes(self, place: Placement) -> int:
        """Bytes of weights and state whose home is on disk."""
        return sum(
            (g.numel * self.form.weight_bytes * (place.home(g) == "disk"))
            + self.form.state_bytes(g) * (place.state[g.index] == "disk")
            for g in self.program.groups
        )

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
        leaving = len(self.provision(settings).leaving(last, range(self.route.at_once))) if away else 0
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
        trained = sum(g.trainable for g in self.program.groups)
        total = sum(g.numel for g in self.program.groups)
        state = sum(self.form.state_bytes(g) for g in self.program.groups)
        return Plan(
            program=self.program,
            settings=settings,
            schedule=self.build(settings) if schedule is None else schedule,
            state_bytes=total * self.form.weight_bytes + trained * FP32 + state,
            disk_bytes=self.disk_bytes(settings.place),
        )

    def fixed(self, place: Placement, at_once: int | None = None) -> tuple[tuple[Tier, str, int], ...]:
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
    """Bytes of the pools of device and host. The advice on other machines and budgets asks for the same ones again; and
    a search for depths that fit asks for many that differ in what is staged alone."""
    depths = settings.depths
    unstaged = replace(depths, **dict.fromkeys(STAGED.values(), 1))
    sized = _provision(route, replace(settings, depths=unstaged), seat).pools.values()
    pools = [in_depth(pool, depths) for pool in sized]
    return peak_bytes(pools, (), "device"), peak_bytes(pools, (), "host")


@lru_cache(maxsize=256)
def _provision(route: Route, settings: Settings, seat: Seat) -> Provision:
    """The pools of a step with these settings, and what it takes of them."""
    return Provision(route, settings, seat)


def fit(request: Request, keep: Placement | None = None) -> Plan:
    """The best plan that fits, by the order of preference above; arguments and errors as ``fitted``."""
    return request.plan(request.roomiest(_in_larger_chunks(request, fitted(request, keep))))


def fitted(request: Request, keep: Placement | None = None) -> Settings:
    """The settings of ``fit``'s plan, without building its schedule.

    ``keep``: a placement of weights and state that is already in memory and is not to be changed.

    Raises:
        BudgetError: nothing fits; says the smallest budget of each tier that works.
        ConfigError: the budget pins what cannot be combined, or nothing can speculate or be delayed as asked.
    """
    request.check_update_mode()
    settings = _fit_device(request, base_placement(request) if keep is None else keep)
    if keep is None and request.ranks == 1:  # parts that ranks share live below the device
        settings = _to_device(request, settings)
    settings = _fit_host(request, settings)
    if keep is None:
        settings = _to_host(request, settings)
    if request.early is None and not steps_early(request.program, settings):
        settings = replace(settings, speculate=False)
    return with_keep(request, settings, keep=settings.keep)


def with_keep(request: Request, settings: Settings, *, keep: bool = True) -> Settings:
    """The settings with weights kept until they are stepped, or without where none would be: one schedule, one way to
    say it. ``keep``: whether they are to be, if that is not said by the settings."""
    kept = replace(settings, keep=keep)
    return kept if keep and request.provision(kept).kept else replace(settings, keep=False)


def tied_groups(program: Program) -> set[int]:
    """Groups that more than one stage produces gradients for."""
    counts = Counter(g for stage in program.stages for g in stage.gradients)
    return {g for g, count in counts.items() if count > 1}


def off_device(place: Placement, program: Program) -> Placement:
    """A placement, with the state of tied groups in host memory instead of on the device: a step of another program may
    have put it there, in which they were not tied."""
    moved = {g for g in tied_groups(program) if place.state[g] == "device"}
    return replace(place, state=tuple("host" if g in moved else tier for g, tier in enumerate(place.state)))


def base_placement(request: Request) -> Placement:
    """Everything as low as it may go; pins of the budget are kept.

    A tied group cannot step on the device (its gradient comes in parts, at different times): a pin to the device
    leaves it in host memory.
    """
    budget, groups = request.budget, request.program.groups
    if request.ranks > 1 and "device" in (budget.weights, budget.state):
        raise ConfigError(
            f"budget.weights={budget.weights!r} with budget.state={budget.state!r} and {request.ranks} ranks: their "
            "parts live in host memory or on disk. Leave them to the plan, or give 'host' or 'disk'"
        )
    weights: Tier = budget.weights or ("device" if budget.state == "device" else request.bottom)
    state: Tier = budget.state or request.bottom
    if state == "device" and weights != "device":
        raise ConfigError(
            f"budget.weights={weights!r} with budget.state={state!r} cannot work: state on the device "
            "needs weights on the device"
        )
    tied = tied_groups(request.program) if state == "device" else set()
    return Placement(
        weights=(weights,) * len(groups),
        state=tuple("host" if g.index in tied else state for g in groups),
        gradients=budget.gradients or "host",
        activations=budget.activations or "device",
    )


def settings_of(request: Request, place: Placement, chunk: int, depths: Depths, *, keep: bool = False) -> Settings:
    largest = max(max(g.trainable, g.frozen) for g in request.program.groups)
    if request.recompute is False:
        depths = replace(depths, graphs=request.most_graphs)
    once = not request.train and bool(request.stage)  # there is no second use for which weights could stay
    return Settings(
        micro_batches=request.micro_batches,
        chunk=min(chunk, max(largest, ALIGN)),
        form=request.form,
        place=place,
        depths=depths,
        wait=request.wait and request.train,
        speculate=request.speculates,
        train=request.train,
        delay=(request.delay or 0.0) if request.train else 0.0,
        grad_dtype=request.grad_dtype,
        cast="device" if request.casts_on_device else "host",
        strands=(request.strands or 1) if request.train else 1,
        keep=keep,
        stage=3 if request.stage is None or request.ranks == 1 or once else request.stage,
    )


def _in_larger_chunks(request: Request, settings: Settings) -> Settings:
    """The settings with the largest chunks that leave enough of them to overlap, and that there is room for."""
    sizes = [max(g.trainable, g.frozen) for g in request.program.groups]
    largest = min(sum(sizes) // _OF_STEP, max(sizes) // _OF_GROUP).bit_length() - 1
    for power in range(largest, settings.chunk.bit_length() - 1, -1):
        option = replace(settings, chunk=2**power)
        if (
            request.peak_bytes(option, "device") <= request.budget.device_bytes
            and request.peak_bytes(option, "host") <= request.budget.host_bytes
        ):
            return option
    return settings


def _fit_device(request: Request, base: Placement) -> Settings:
    """Choose what decides device memory: whether saved activations leave, and the depth of weights and gradients."""
    away: tuple[Tier, ...] = ("device", "host") if request.budget.activations is None else (base.activations,)
    needs = []
    for tier, (weights, gradients) in product(away if request.train else ("device",), DEVICE_DEPTHS):
        depths = Depths(weights=weights, gradients=gradients)
        settings = settings_of(request, replace(base, activations=tier), CHUNKS[0], depths)
        needs.append(request.peak_bytes(settings, "device"))
        if needs[-1] <= request.budget.device_bytes:
            return settings
    working = max(stage.peak(split=request.splits) for stage in request.program.stages)
    raise BudgetError(
        f"budget.device={_said(request.budget.device)} is too small for this model: the smallest that works is "
        f"{format_size(min(needs))} ({min(needs)} bytes), of which {format_size(working)} are temporaries of the "
        "largest stage. Raise budget.device, or use smaller or fewer micro-batches"
        + (f", or another stage of ZeRO than {settings.stage}, as all weights stay there" * (settings.stage in (1, 2)))
        + (f", or another schedule than {request.order}, which holds there what waits of backwards" * request.splits)
        + (", or leave recompute out, to keep as many graphs of blocks as fit" * (request.recompute is False))
    )


def _said(size: str | float) -> str:
    """A size as it was written; what was written as a number of bytes, and what a plan has taken, in words."""
    return size if isinstance(size, str) else format_size(int(size))


def _host_options(request: Request, settings: Settings) -> Iterator[Settings]:
    place, budget = settings.place, request.budget
    activations: list[Tier] = [place.activations]
    if place.activations == "host" and budget.activations is None and request.bottom == "disk":
        activations.append("disk")
    gradients: list[Literal["host", "disk"]] = [place.gradients]
    waiting = settings.delay > 0 or any(settings.waits(g.index) for g in request.program.groups if g.trainable)
    if place.gradients == "host" and budget.gradients is None and request.bottom == "disk" and waiting:
        gradients.append("disk")
    kept = (True, False) if request.train and "disk" in place.weights else (False,)
    for spill, away, keep in product(gradients, activations, kept):
        for chunk, depths in product(CHUNKS, _HOST_DEPTHS):
            device = settings.depths
            yield settings_of(
                request,
                replace(place, gradients=spill, activations=away),
                chunk,
                replace(depths, weights=device.weights, gradients=device.gradients),
                keep=keep,
            )


def _fit_host(request: Request, settings: Settings) -> Settings:
    """Choose what decides host memory: chunk size, buffers in flight, weights that are kept for the optimizer, and what
    goes to disk."""
    needs = []
    for option in _host_options(request, settings):
        needs.append(request.peak_bytes(option, "host"))
        if needs[-1] <= request.budget.host_bytes:
            return option
    advice = "" if request.bottom == "disk" else ", or give budget.disk a directory"
    said, each, shared = _said(request.budget.host), "", ""
    if request.is_of_several:
        said = f"{format_size(request.budget.host_bytes)} for each rank"
        each, shared = " for each", ", which the ranks of a host share"
    raise BudgetError(
        f"budget.host={said} is too small for this model: the smallest that works is {format_size(min(needs))} "
        f"({min(needs)} bytes){each}. Raise budget.host{shared}{advice}"
    )


def _raise(request: Request, settings: Settings, tier: Tier, moves: Iterable[tuple[int, bool, bool]]) -> Settings:
    """Move groups up to a tier, in the given order, each if the step still fits.

    ``moves``: (group, whether its weights move, whether its state moves).
    """
    limit = request.budget.device_bytes if tier == "device" else request.budget.host_bytes
    for g, weights, state in moves:
        place = settings.place
        higher = replace(
            place,
            weights=(*place.weights[:g], tier, *place.weights[g + 1 :]) if weights else place.weights,
            state=(*place.state[:g], tier, *place.state[g + 1 :]) if state else place.state,
        )
        option = replace(settings, place=higher)
        if request.peak_bytes(option, tier) <= limit:
            settings = option
    return settings


def _to_device(request: Request, settings: Settings) -> Settings:
    """Give what is left of device memory to weights, then to state; last blocks first (their backward comes first)."""
    place, groups = settings.place, request.program.groups[::-1]
    if request.budget.weights is None:
        moves = [(g.index, True, False) for g in groups if place.weights[g.index] != "device"]
        settings = _raise(request, settings, "device", moves)
    if request.budget.state is None:
        place, tied = settings.place, tied_groups(request.program)
        stays = (g for g in groups if g.trainable and g.index not in tied and place.state[g.index] != "device")
        moves = [(g.index, False, True) for g in stays if place.weights[g.index] == "device"]
        settings = _raise(request, settings, "device", moves)
    return settings


def _to_host(request: Request, settings: Settings) -> Settings:
    """Give what is left of host memory to weights, then to state."""
    place, groups = settings.place, request.program.groups[::-1]
    if request.budget.weights is None:
        moves = [(g.index, True, False) for g in groups if place.weights[g.index] == "disk"]
        settings = _raise(request, settings, "host", moves)
    if request.budget.state is None:
        moves = [(g.index, False, True) for g in groups if g.trainable and place.state[g.index] == "disk"]
        settings = _raise(request, settings, "host", moves)
    return settings
