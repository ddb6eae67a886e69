"""The families of schedules, by name: the one table of what can be lowered, and with which options.

world = build(FamilyRequest(family="1f1b", layers=96, ranks=8, micro_batches=64, sizes=sizes))
world = build(FamilyRequest(family="vertical", program=program, micro_batches=8, delay=0.25))
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from penstock.errors import ConfigError
from penstock.schedule.collection import no_collection
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower import folded, orders
from penstock.schedule.lower.offload import Streaming, lower_program
from penstock.schedule.lower.orders import Order
from penstock.schedule.lower.puzzles import NONE, Habits
from penstock.schedule.lower.ranks import grid, pipeline, replicated
from penstock.schedule.lower.request import FamilyRequest, LayerOptions, StreamOptions
from penstock.schedule.lower.seat import FULLY, Sharding
from penstock.schedule.lower.stages import spread

LAYER_OPTIONS = (*(option.name for option in fields(LayerOptions)), "buffer_size")
STREAM_OPTIONS = (*(option.name for option in fields(StreamOptions)), "depths")
"""Fields of a request that only some families know: of those that compute whole layers, and of those that offload."""


@dataclass(frozen=True, kw_only=True)
class ScheduleFamily:
    """A family of schedules. ``options``: those of a request that it knows; ``one_rank``: it is for one rank only;
    ``streaming``: what it does where a request says nothing, of one that offloads, None of the others.
    """

    summary: str
    lower: Callable[[FamilyRequest], World]
    options: frozenset[str] = frozenset()
    one_rank: bool = False
    streaming: Streaming | None = None


@no_collection()
def build(request: FamilyRequest) -> World:
    """The schedules of all ranks, of one step in the steady state.

    Raises:
        ConfigError: no such family, an option that it does not have, or numbers that it cannot do.
    """
    family = FAMILIES.get(request.family)
    if family is None:
        raise ConfigError(f"there is no schedule {request.family!r}. Known: {', '.join(FAMILIES)}")
    _check_numbers(request)
    asked = [name for name in (*LAYER_OPTIONS, *STREAM_OPTIONS) if not _is_unsaid(getattr(request, name))]
    for option in (*asked, *(["lookahead"] if family.streaming and request.lookahead else [])):
        if option not in family.options:
            known = ", ".join(sorted(family.options)) or "none"
            raise ConfigError(f"{request.family} has no option {option}: leave it out. Its options: {known}")
    if family.one_rank and request.ranks != 1:
        raise ConfigError(f"{request.family} is for one rank, and {request.ranks} were asked for: leave ranks at 1")
    return family.lower(request)


def _is_unsaid(value: object) -> bool:
    return value is None or value is False  # 0 was asked for


_LEAST = {
    "layers": 1,
    "ranks": 1,
    "micro_batches": 1,
    "lookahead": 0,
    "virtual_stages": 1,
    "partition_activations": 2,
    "buffer_size": 1,
}


def _check_numbers(request: FamilyRequest) -> None:
    for name, smallest in _LEAST.items():
        value = getattr(request, name)
        if value is not None and value < smallest:
            raise ConfigError(f"{request.family}: {name}={value} must be at least {smallest}")
    for item in fields(request.sizes):
        if (size := getattr(request.sizes, item.name)) < 0:
            raise ConfigError(f"{request.family}: sizes.{item.name}={size} must be at least 0")


_WHOLE, _APART = Sharding(), Sharding(apart=True)
_FLUSH = Habits(flush="backward")


def _sharded(summary: str, sharding: Sharding, habits: Habits = NONE) -> ScheduleFamily:
    options = frozenset({"partition_activations", "buffer_size"})
    return ScheduleFamily(summary=summary, lower=lambda request: replicated(request, sharding, habits), options=options)


def _pipeline(
    summary: str, order: Order, sharding: Sharding = _WHOLE, habits: Habits = NONE, *, at_once: bool = False
) -> ScheduleFamily:
    """One stage to a rank."""

    def lower(request: FamilyRequest) -> World:
        return pipeline(request, spread(request, 1), order, sharding, habits, at_once=at_once)

    return ScheduleFamily(summary=summary, lower=lower)


def _looped(summary: str, order: Order, *, in_rounds: bool) -> ScheduleFamily:
    """Several stages to a rank, round and round; ``in_rounds``: as many micro-batches as ranks at a time."""

    def lower(request: FamilyRequest) -> World:
        if in_rounds and request.micro_batches % request.ranks:
            raise ConfigError(
                f"{request.family} goes {request.ranks} micro-batches (one for each rank) at a time, and "
                f"{request.micro_batches} is no multiple of that: ask for a multiple of {request.ranks}"
            )
        return pipeline(request, spread(request, request.virtual_stages or 2), order, _WHOLE)

    return ScheduleFamily(summary=summary, lower=lower, options=frozenset({"virtual_stages"}))


def _zero_bubble(request: FamilyRequest) -> World:
    virtual = request.virtual_stages or 1
    if virtual > 2:
        raise ConfigError(f"zero-bubble has 1 virtual stage (H1) or 2 (V) to a rank, not {virtual}")
    if virtual == 1:
        return pipeline(request, spread(request, 1), orders.zero_bubble_h1, _WHOLE)
    return pipeline(request, spread(request, 2, folded=True), folded.zero_bubble_v, _WHOLE)


def _dualpipe_v(request: FamilyRequest) -> World:
    if request.virtual_stages not in (None, 2):
        raise ConfigError(f"dualpipe-v has 2 virtual stages to a rank, not {request.virtual_stages}")
    if request.micro_batches < 2 * request.ranks:
        raise ConfigError(
            f"dualpipe-v with {request.ranks} ranks needs at least {2 * request.ranks} micro-batches (two for each "
            f"rank), and got {request.micro_batches}"
        )
    return pipeline(request, spread(request, 2, folded=True), folded.dualpipe_v, _WHOLE)


def _streamed(summary: str, streaming: Streaming, *options: str, one_rank: bool = False) -> ScheduleFamily:
    return ScheduleFamily(
        summary=summary,
        lower=lambda request: lower_program(request, streaming),
        options=frozenset({"chunks", "depths", *options}),
        one_rank=one_rank,
        streaming=streaming,
    )


_TIERS = ("weights", "state", "activations", "gradients")

FAMILIES: dict[str, ScheduleFamily] = {
    "single": ScheduleFamily(
        summary="one rank, all micro-batches at once; the step after the backward, or fused into it",
        lower=lambda request: replicated(request, _WHOLE),
        options=frozenset({"fused"}),
        one_rank=True,
    ),
    "grad-accumulation": ScheduleFamily(
        summary="one rank, one micro-batch after the other, gradients summed",
        lower=lambda request: replicated(request, _WHOLE, one_by_one=True),
        one_rank=True,
    ),
    "ddp": _sharded(
        "every rank holds the model; gradients are all-reduced", Sharding(reduce="all"), Habits(flush="step")
    ),
    "weight-sharded": _sharded(
        "weights and state are sharded, and weights gathered for each use; gradients are all-reduced",
        Sharding(weights=True, state=True, reduce="all"),
        Habits(flush="step"),
    ),
    "zero1": _sharded("ZeRO-1: the optimizer's state is sharded", Sharding(state=True, reduce="scatter-late")),
    "zero2": _sharded("ZeRO-2: state and gradients are sharded", Sharding(state=True, reduce="scatter-early")),
    "fsdp": _sharded("ZeRO-3: state, gradients and weights are sharded", FULLY, Habits(late="all")),
    "pipeline": _pipeline(
        "a stage to a rank, all micro-batches at once", orders.looped_bfs, _APART, _FLUSH, at_once=True
    ),
    "gpipe": _pipeline("a stage to a rank: all forwards, then all backwards", orders.looped_bfs, _APART, _FLUSH),
    "1f1b": _pipeline("one forward, one backward in turn: fewer micro-batches in flight", orders.interleaved),
    "interleaved-1f1b": _looped(
        "1F1B with several stages to a rank: a smaller bubble", orders.interleaved, in_rounds=True
    ),
    "looped-bfs": _looped(
        "several stages to a rank, breadth first: a stage does all micro-batches", orders.looped_bfs, in_rounds=False
    ),
    "looped-dfs": _looped(
        "several stages to a rank, depth first: the same order as interleaved-1f1b", orders.interleaved, in_rounds=True
    ),
    "zero-bubble": ScheduleFamily(
        summary="the backward is split to fill the bubble: H1 (1 virtual stage) or V (2, folded)",
        lower=_zero_bubble,
        options=frozenset({"virtual_stages"}),
    ),
    "dualpipe-v": ScheduleFamily(
        summary="folded; forwards and backwards of the two stages side by side",
        lower=_dualpipe_v,
        options=frozenset({"virtual_stages"}),
    ),
    "pipeline-fsdp": ScheduleFamily(
        summary="pipelines beside each other, with sharded weights, gradients and state",
        lower=lambda request: grid(request, FULLY, Habits(late="weights", flush="step")),
        options=frozenset({"gather_group"}),
    ),
    "horizontal": _streamed(
        "each micro-batch through all blocks before the next; gradients are summed in host memory",
        Streaming(order="horizontal"),
        *("wait", "stage", *_TIERS),
    ),
    "vertical": _streamed(
        "all micro-batches through a block before the next; a share of the steps (delay) in the next step's forward",
        Streaming(order="vertical"),
        *("wait", "delay", "stage", *_TIERS),
    ),
    "vertical-pipeline": _streamed(
        "a pipeline of ranks that stream: blocks dealt out in loops, breadth first, each rank vertical; only "
        "activations and their gradients cross",
        Streaming(order="vertical", dealt=True),
        *("wait", "delay", *_TIERS),
    ),
    "streamed-1f1b": _streamed(
        "a pipeline of ranks that stream, each its blocks in one piece, in the order of 1f1b; the first has the loss",
        Streaming(order="1f1b", dealt=True),
        *("wait", *_TIERS),
    ),
    "streamed-interleaved-1f1b": _streamed(
        "a pipeline of ranks that stream: blocks dealt out in loops, depth first, in the order of interleaved-1f1b",
        Streaming(order="interleaved-1f1b", dealt=True),
        *("wait", *_TIERS),
    ),
    "streamed-zero-bubble": _streamed(
        "streamed-1f1b with backwards in two parts: gradients of weights fill the bubble (H1)",
        Streaming(order="zero-bubble", dealt=True),
        *("wait", *_TIERS),
    ),
    "zero-offload": _streamed(
        "weights on the device, state in host memory; gradients go down as they are made, the CPU steps after the "
        "global norm (Ren et al., arXiv 2101.06840)",
        Streaming(order="horizontal", weights="device", state="host", activations="device", wait=True),
        one_rank=True,
    ),
    "zero-infinity": _streamed(
        "weights and state on disk, saved activations in host memory, micro-batch by micro-batch, steps after the "
        "global norm (Rajbhandari et al., arXiv 2104.07857)",
        Streaming(order="horizontal", wait=True, sharding=FULLY),
    ),
    "superoffload": _streamed(
        "zero-offload that does not wait for the norm (a step that should not have been is taken back), with the "
        "state of the blocks whose gradients come last on the device (Lian et al., arXiv 2509.21271)",
        Streaming(order="horizontal", weights="device", state="host", activations="device", device_share=0.125),
        "device_blocks",
        one_rank=True,
    ),
    "greedysnake": _streamed(
        "vertical with everything on disk, steps beside the backward, half of them in the next step's forward "
        "(Yue et al., arXiv 2512.17570)",
        Streaming(order="vertical", delay=0.5),
        "delay",
    ),
}
