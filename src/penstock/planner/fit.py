"""Fits one step of a program into a budget: what stays on which tier, how large chunks are, how far lanes run ahead.

The order of preference is by bytes saved on the slowest link per byte of memory: saved activations stay on the device,
waiting gradients stay in host memory, and weights that are read for the backward until the optimizer takes them (a few
blocks' save one read of all); then weights move up from disk, then optimizer state, as long as there is room. Host
memory that is left then has what weights that cross between hosts once a step take.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from penstock.config import Tier, format_size
from penstock.errors import BudgetError, ConfigError
from penstock.planner.plan import Plan
from penstock.planner.request import Request
from penstock.planner.update_mode import steps_early
from penstock.schedule.place import Depths, Placement, Settings
from penstock.schedule.program import ALIGN, GroupSpec, Program

CHUNKS = tuple(2**power for power in range(21, 15, -1))
"""Elements of the chunks that are tried in that order, as larger ones cost less: 8 MiB down to 256 KiB of fp32."""
_OF_STEP, _OF_GROUP = 256, 8
"""Chunks of all groups together, and of the largest, that larger chunks are to leave. More of them only cost ops: on an
H100 a step in 1,635 chunks took 2.7 s, of which compute's own kernels are 2.0."""
DEVICE_DEPTHS = ((2, 2), (2, 1), (1, 1))
"""Depths of weights and gradients, from the best to the smallest."""
_FEW = 32
"""Groups of one size that do not fit on a tier, after which no others are tried that are as large: with fewer beside it
one may fit that did not before, but of hundreds each would be looked at."""
_HOST_DEPTHS = (Depths(), Depths(stage_in=3, stage_out=3, state=3), Depths(stage_in=2, stage_out=2, state=2))


class SizeError(BudgetError):
    """A tier has too little room for a step."""

    @property
    def least(self) -> int:
        """Bytes of it that are enough."""
        return int(self.args[1])

    def __str__(self) -> str:
        return str(self.args[0])


class DeviceSizeError(SizeError):
    """The device has too little room for a step, whatever the other tiers have."""


class HostSizeError(SizeError):
    """Host memory has too little room for a step that the device has room for."""


def nearest(one: SizeError, other: SizeError) -> SizeError:
    """Of two refusals the one that asks for least: of memory on the device only if both do."""
    return min(other, one, key=lambda error: (isinstance(error, DeviceSizeError), error.least))


def fit(request: Request, keep: Placement | None = None) -> Plan:
    """The best plan that fits, by the order of preference above; arguments and errors as ``fitted``. Gradients are
    rounded on the host where the side is left open and the device has no room for that."""
    try:
        settings = fitted(request, keep)
    except DeviceSizeError:
        if request.cast is not None or not request.casts_on_device:
            raise
        return fit(replace(request, cast="host"), keep)
    return request.plan(request.roomiest(_in_larger_chunks(request, settings)))


def fitted(request: Request, keep: Placement | None = None, *, best: bool = True) -> Settings:
    """The settings of ``fit``'s plan, without building its schedule.

    ``keep``: a placement of weights and state that is already in memory and is not to be changed. ``best``: False: a
    search knows placements that take less host memory, as more of them is on the device.

    Raises:
        BudgetError: nothing fits; says the smallest budget of each tier that works, or of host memory one that does.
        ConfigError: the budget pins what cannot be combined, or nothing can speculate or be delayed as asked.
    """
    request.check_update_mode()
    settings = _fit_device(request, base_placement(request) if keep is None else keep)
    if keep is None and request.ranks == 1:  # parts that ranks share live below the device
        settings = _up_to(request, settings, "device")
    settings = _fit_host(request, settings, "the smallest that works" if best else "enough")
    if keep is None:
        settings = _up_to(request, settings, "host")
    if request.early is None and not steps_early(request.program, settings):
        settings = replace(settings, speculate=False)
    if request.secondary is None and request.may_cross_once:
        option = replace(settings, secondary=True)
        settings = settings if request.exceeded(option) else option
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
        strands=request.own_strands if request.train else 1,
        keep=keep,
        stage=3 if request.stage is None or request.ranks == 1 or once else request.stage,
        secondary=bool(request.secondary) and request.may_cross_once,
    )


def _in_larger_chunks(request: Request, settings: Settings) -> Settings:
    """The settings with the largest chunks that leave enough of them to overlap, and that there is room for."""
    sizes = [max(g.trainable, g.frozen) for g in request.program.groups]
    largest = min(sum(sizes) // _OF_STEP, max(sizes) // _OF_GROUP).bit_length() - 1
    for power in range(largest, settings.chunk.bit_length() - 1, -1):
        option = replace(settings, chunk=2**power)
        if request.exceeded(option) is None:
            return option
    return settings


def _fit_device(request: Request, base: Placement) -> Settings:
    """Choose what decides device memory: whether saved activations leave, the depth of weights and gradients, and where
    nothing fits otherwise how large chunks may be, of which some are there, too."""
    away: tuple[Tier, ...] = ("device", "host") if request.budget.activations is None else (base.activations,)
    needs = []
    tiers = away if request.train else ("device",)
    chunks = CHUNKS if request.is_of_several or request.casts_on_device else CHUNKS[:1]  # else none are on the device
    for chunk, tier, (weights, gradients) in product(chunks, tiers, DEVICE_DEPTHS):
        depths = Depths(weights=weights, gradients=gradients)
        settings = settings_of(request, replace(base, activations=tier), chunk, depths)
        needs.append(request.peak_bytes(settings, "device"))
        if needs[-1] <= request.budget.device_bytes:
            return settings
    working = max(stage.peak(split=request.splits) for stage in request.program.stages)
    raise DeviceSizeError(
        f"budget.device={_said(request.budget.device)} is too small for this model: the smallest that works is "
        f"{format_size(min(needs))} ({min(needs)} bytes), of which {format_size(working)} are temporaries of the "
        "largest stage. Raise budget.device, or use smaller or fewer micro-batches"
        + (f", or another stage of ZeRO than {settings.stage}, as all weights stay there" * (settings.stage in (1, 2)))
        + (f", or another schedule than {request.order}, which holds there what waits of backwards" * request.splits)
        + (", or leave recompute out, to keep as many graphs of blocks as fit" * (request.recompute is False)),
        min(needs),
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
                min(chunk, settings.chunk),
                replace(depths, weights=device.weights, gradients=device.gradients),
                keep=keep,
            )


def _fit_host(request: Request, settings: Settings, least: str) -> Settings:
    """Choose what decides host memory: chunk size, buffers in flight, weights that are kept for the optimizer, and what
    goes to disk. ``least``: the least memory that one of these takes, in words."""
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
    raise HostSizeError(
        f"budget.host={said} is too small for this model: {least} is {format_size(min(needs))} "
        f"({min(needs)} bytes){each}. Raise budget.host{shared}{advice}",
        min(needs),
    )


def _up_to(request: Request, settings: Settings, tier: Literal["device", "host"]) -> Settings:
    """Give what is left of a tier's memory to weights, then to state; the last blocks', as their backward comes first,
    before the others'."""
    groups, below = _last_first(request.program), _BELOW[tier]
    if request.budget.weights is None:
        weights = settings.place.weights
        settings = _raise(request, settings, tier, [g.index for g in groups if weights[g.index] in below], state=False)
    if request.budget.state is None:
        place = settings.place
        lower = [g.index for g in groups if g.trainable and place.state[g.index] in below]
        if tier == "device":
            tied = tied_groups(request.program)
            lower = [g for g in lower if g not in tied and place.weights[g] == "device"]
        settings = _raise(request, settings, tier, lower, state=True)
    return settings


_BELOW: Mapping[Tier, tuple[Tier, ...]] = {"device": ("host", "disk"), "host": ("disk",)}


def _raise(request: Request, settings: Settings, tier: Tier, groups: Sequence[int], *, state: bool) -> Settings:
    """Move the weights of groups up to a tier, or their ``state``, in the given order, each if the step still fits: as
    many together as do, which are found by halving, and after a few that do not fit no others that are as large."""
    limit = request.budget.device_bytes if tier == "device" else request.budget.host_bytes
    sizes = {g: request.program.groups[g].numel for g in groups}
    refused = Counter[int]()

    def with_first(count: int) -> Settings:
        weights, states = list(settings.place.weights), list(settings.place.state)
        for g in left[:count]:
            (states if state else weights)[g] = tier
        return replace(settings, place=replace(settings.place, weights=tuple(weights), state=tuple(states)))

    def is_too_much(count: int) -> bool:
        return request.peak_bytes(with_first(count), tier) > limit

    left = list(groups)
    while left:
        fitting = 0 if is_too_much(1) else bisect_left(range(1, len(left) + 1), True, lo=1, key=is_too_much)
        settings = with_first(fitting)
        refused.update(sizes[g] for g in left[fitting : fitting + 1])
        largest = min((size for size, times in refused.items() if times == _FEW), default=math.inf)
        left = [g for g in left[fitting + 1 :] if sizes[g] < largest]
    return settings


def with_home(place: Placement, g: int, weights: Tier, state: Tier) -> Placement:
    """A placement with the weights and the state of a group on these tiers."""
    return replace(
        place,
        weights=(*place.weights[:g], weights, *place.weights[g + 1 :]),
        state=(*place.state[:g], state, *place.state[g + 1 :]),
    )


def _last_first(program: Program) -> list[GroupSpec]:
    """The groups that a rank has something of, the last one first: of a long pipeline most are others'."""
    return [g for g in reversed(program.groups) if g.numel]
