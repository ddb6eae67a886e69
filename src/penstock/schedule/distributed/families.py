"""The families of schedules that do not offload, by name.

world = build(Request(family="1f1b", layers=96, ranks=8, micro_batches=64, sizes=sizes))
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from penstock.errors import ConfigError
from penstock.schedule.distributed import folded, orders
from penstock.schedule.distributed.grid import build_grid
from penstock.schedule.distributed.pipeline import Flush, Order, build_pipeline
from penstock.schedule.distributed.replicated import Sharding, build_replicated
from penstock.schedule.distributed.request import Request
from penstock.schedule.distributed.stages import spread
from penstock.schedule.ir.worlds import World

OPTIONS = ("virtual_stages", "gather_group", "fused", "partition_activations", "buffer_size")
"""Fields of a request that only some families know."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """``options``: those of ``OPTIONS`` that it knows; ``one_rank``: it is for one rank only."""

    summary: str
    build: Callable[[Request], World]
    options: frozenset[str] = frozenset()
    one_rank: bool = False


def build(request: Request) -> World:
    """The schedules of all ranks.

    Raises:
        ConfigError: no such family, an option that it does not have, or numbers that it cannot do.
    """
    family = FAMILIES.get(request.family)
    if family is None:
        raise ConfigError(f"there is no schedule {request.family!r}. Known: {', '.join(FAMILIES)}")
    _check_numbers(request)
    for option in OPTIONS:
        if getattr(request, option) not in (None, False) and option not in family.options:
            known = ", ".join(sorted(family.options)) or "none"
            raise ConfigError(f"{request.family} has no option {option}: leave it out. Its options: {known}")
    if family.one_rank and request.ranks != 1:
        raise ConfigError(f"{request.family} is for one rank, and {request.ranks} were asked for: leave ranks at 1")
    return family.build(request)


def _check_numbers(request: Request) -> None:
    least = {"layers": 1, "ranks": 1, "micro_batches": 1, "lookahead": 0}
    least |= {"virtual_stages": 1, "partition_activations": 2, "buffer_size": 1}
    for name, smallest in least.items():
        value = getattr(request, name)
        if value is not None and value < smallest:
            raise ConfigError(f"{request.family}: {name}={value} must be at least {smallest}")
    for item in fields(request.sizes):
        if (size := getattr(request.sizes, item.name)) < 0:
            raise ConfigError(f"{request.family}: sizes.{item.name}={size} must be at least 0")


def _sharded(summary: str, sharding: Sharding) -> Family:
    options = frozenset({"partition_activations", "buffer_size"})
    return Family(summary=summary, build=lambda request: build_replicated(request, sharding), options=options)


def _pipeline(summary: str, order: Order, *, held: bool = False) -> Family:
    """One stage to a rank."""
    return Family(
        summary=summary, build=lambda request: build_pipeline(request, spread(request, 1), order, Flush(held=held))
    )


def _looped(summary: str, order: Order, *, in_rounds: bool) -> Family:
    """Several stages to a rank, round and round; ``in_rounds``: as many micro-batches as ranks at a time."""

    def build_looped(request: Request) -> World:
        if in_rounds and request.micro_batches % request.ranks:
            raise ConfigError(
                f"{request.family} goes {request.ranks} micro-batches (one for each rank) at a time, and "
                f"{request.micro_batches} is no multiple of that: ask for a multiple of {request.ranks}"
            )
        return build_pipeline(request, spread(request, request.virtual_stages or 2), order, Flush())

    return Family(summary=summary, build=build_looped, options=frozenset({"virtual_stages"}))


def _all_at_once(request: Request) -> World:
    return build_pipeline(request, spread(request, 1), orders.gpipe, Flush(held=True, items=request.micro_batches))


def _zero_bubble(request: Request) -> World:
    virtual = request.virtual_stages or 1
    if virtual > 2:
        raise ConfigError(f"zero-bubble has 1 virtual stage (H1) or 2 (V) to a rank, not {virtual}")
    if virtual == 1:
        return build_pipeline(request, spread(request, 1), orders.zero_bubble_h1, Flush())
    return build_pipeline(request, spread(request, 2, folded=True), folded.zero_bubble_v, Flush())


def _dualpipe_v(request: Request) -> World:
    if request.virtual_stages not in (None, 2):
        raise ConfigError(f"dualpipe-v has 2 virtual stages to a rank, not {request.virtual_stages}")
    if request.micro_batches < 2 * request.ranks:
        raise ConfigError(
            f"dualpipe-v with {request.ranks} ranks needs at least {2 * request.ranks} micro-batches (two for each "
            f"rank), and got {request.micro_batches}"
        )
    return build_pipeline(request, spread(request, 2, folded=True), folded.dualpipe_v, Flush())


FAMILIES: dict[str, Family] = {
    "single": Family(
        summary="one rank, all micro-batches at once; the step after the backward, or fused into it",
        build=lambda request: build_replicated(request, Sharding()),
        options=frozenset({"fused"}),
        one_rank=True,
    ),
    "grad-accumulation": Family(
        summary="one rank, one micro-batch after the other, gradients summed",
        build=lambda request: build_replicated(request, Sharding(step_of_one=True)),
        one_rank=True,
    ),
    "ddp": _sharded("every rank holds the model; gradients are all-reduced", Sharding(reduce="all", keeps_ends=True)),
    "weight-sharded": _sharded(
        "weights and state are sharded, and weights gathered for each use; gradients are all-reduced",
        Sharding(weights=True, state=True, reduce="all", keeps_ends=True),
    ),
    "zero1": _sharded("ZeRO-1: the optimizer's state is sharded", Sharding(state=True, reduce="scatter-late")),
    "zero2": _sharded("ZeRO-2: state and gradients are sharded", Sharding(state=True, reduce="scatter-early")),
    "fsdp": _sharded(
        "ZeRO-3: state, gradients and weights are sharded", Sharding(weights=True, state=True, reduce="scatter-early")
    ),
    "pipeline": Family(summary="a stage to a rank, all micro-batches at once", build=_all_at_once),
    "gpipe": _pipeline("a stage to a rank: all forwards, then all backwards", orders.gpipe, held=True),
    "1f1b": _pipeline("one forward, one backward in turn: fewer micro-batches in flight", orders.one_f_one_b),
    "interleaved-1f1b": _looped(
        "1F1B with several stages to a rank: a smaller bubble", orders.interleaved, in_rounds=True
    ),
    "looped-bfs": _looped(
        "several stages to a rank, breadth first: a stage does all micro-batches", orders.looped_bfs, in_rounds=False
    ),
    "looped-dfs": _looped(
        "several stages to a rank, depth first: the same order as interleaved-1f1b", orders.interleaved, in_rounds=True
    ),
    "zero-bubble": Family(
        summary="the backward is split to fill the bubble: H1 (1 virtual stage) or V (2, folded)",
        build=_zero_bubble,
        options=frozenset({"virtual_stages"}),
    ),
    "dualpipe-v": Family(
        summary="folded; forwards and backwards of the two stages side by side",
        build=_dualpipe_v,
        options=frozenset({"virtual_stages"}),
    ),
    "pipeline-fsdp": Family(
        summary="pipelines beside each other, with sharded weights, gradients and state",
        build=build_grid,
        options=frozenset({"gather_group"}),
    ),
}
