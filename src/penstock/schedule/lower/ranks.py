"""Worlds of ranks that compute whole layers: data-parallel ranks, the ranks of a pipeline, and pipelines beside each
other. Each is a mesh of ranks, of which each visits the layers of its stages in its order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import gcd

from penstock.errors import ConfigError
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.references import VisitId, stage_op, visit
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Emitter
from penstock.schedule.lower.layers import LayerProvision, layer_program, layer_settings
from penstock.schedule.lower.orders import Order, interleaved
from penstock.schedule.lower.puzzles import NONE, Habits, HoldingEmitter
from penstock.schedule.lower.rank import lower_rank
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.lower.route import Message, Route, Visit
from penstock.schedule.lower.seat import Seat, Sharding
from penstock.schedule.lower.stages import Stages
from penstock.schedule.mesh import Mesh, ProcessGroup


def replicated(request: FamilyRequest, sharding: Sharding, habits: Habits = NONE, *, one_by_one: bool = False) -> World:
    """Every rank computes its share of the micro-batches, at once or ``one_by_one``. With partitioned activations,
    ranks come in groups that stand for model parallelism: a group computes the same micro-batches, each rank its slice
    of every layer (sizes and costs are those of the slice), and each keeps a part of what all of them need again.

    Raises:
        ConfigError: ranks or micro-batches that cannot be shared evenly.
    """
    together = request.partition_activations or 1
    if request.ranks % together:
        raise ConfigError(
            f"{request.family}: partition_activations={together} does not divide {request.ranks} ranks into groups: "
            "choose a divisor"
        )
    mesh = Mesh(data=request.ranks // together, model=together)
    if request.micro_batches % mesh.data:
        raise ConfigError(
            f"{request.family}: {request.micro_batches} micro-batches cannot be shared evenly by {mesh.data} ranks"
            f"{' (groups)' if together > 1 else ''}: ask for a multiple of {mesh.data}"
        )
    stages = Stages(layers=request.layers, ranks=1, per_rank=1, folded=False)
    steps = request.micro_batches if one_by_one else 1
    return _world(request, mesh, stages, interleaved, sharding, habits, steps=steps, up=False, all_join=together == 1)


def pipeline(
    request: FamilyRequest,
    stages: Stages,
    order: Order,
    sharding: Sharding,
    habits: Habits = NONE,
    *,
    at_once: bool = False,
) -> World:
    """A world of ``stages.ranks`` ranks, each of which does its steps in the order given, for one micro-batch after the
    other or for all ``at_once``."""
    steps = 1 if at_once else request.micro_batches
    return _world(request, Mesh(stages=stages.ranks), stages, order, sharding, habits, steps=steps)


def grid(request: FamilyRequest, sharding: Sharding, habits: Habits) -> World:
    """Pipelines beside each other, each with its share of the micro-batches, all of them at once: ``pipeline-fsdp``.

    There are as many pipelines as the micro-batches allow: the largest number that divides both ranks and
    micro-batches. Who takes part in the collectives of a layer is a choice:

    - ``stage``: the ranks that hold the layer, one of each pipeline; they share it among themselves;
    - ``world``: all ranks, each of which keeps a part of every layer and joins every gather, also of layers that it
      does not compute. That is the last of the LLM training puzzles, which has no process groups.

    Raises:
        ConfigError: a stage would have no layer.
    """
    pipelines = gcd(request.ranks, request.micro_batches)
    mesh = Mesh(data=pipelines, stages=request.ranks // pipelines)
    layers = mesh.stages if request.stage_ops else request.layers
    if layers < mesh.stages:
        raise ConfigError(
            f"pipeline-fsdp with ranks={request.ranks} and micro_batches={request.micro_batches} has {mesh.stages} "
            f"stages to a pipeline, which need a layer each, and got layers={layers}: ask for fewer ranks, or for more "
            "micro-batches, as there are as many pipelines as divide both"
        )
    stages = Stages(layers=layers, ranks=mesh.stages, per_rank=1, folded=False)
    all_join = request.gather_group != "stage"
    return _world(request, mesh, stages, interleaved, sharding, habits, steps=1, all_join=all_join)


def _world(
    request: FamilyRequest,
    mesh: Mesh,
    stages: Stages,
    order: Order,
    sharding: Sharding,
    habits: Habits,
    *,
    steps: int,
    up: bool = True,
    all_join: bool = False,
) -> World:
    """Every rank in its seat; ranks that do the same share one schedule. Each goes through its stages ``steps`` times,
    with as many micro-batches at once as that leaves. ``all_join``: every rank has a part of every layer."""
    program = layer_program(request.sizes, stages.layers)
    settings = layer_settings(stages.layers, request.micro_batches)
    sharding = replace(sharding, piece=request.buffer_size)

    @cache
    def lowered(first: int, place: int, seat: Seat) -> Schedule:
        joined = range(stages.layers) if all_join else stages.held(place)
        walk = list(_walk(stages, order(stages, place, steps), place, first, joined, once=steps == 1))
        provision = LayerProvision(Route(program, walk, train=True), settings, seat, request.sizes)
        pools, ahead = provision.pools.values(), request.lookahead
        emitter = Emitter(pools, lookahead=ahead) if habits == NONE else HoldingEmitter(pools, ahead, habits, walk)
        return lower_rank(Builder(provision, emitter), request.family, provision.fixed(len(joined)))

    ranks: list[Schedule] = []
    groups: list[ProcessGroup] = []
    for rank in range(mesh.size):
        replica, place, _ = mesh.stands(rank)
        seat = Seat(
            shards=mesh.everyone() if all_join else mesh.replicas(rank),
            sharding=sharding,
            model=mesh.together(rank),
            items=request.micro_batches // mesh.data // steps,
            inputs=request.sizes.activation,
            lookahead=request.lookahead,
            steps="within" if request.fused else "up" if up else "down",
        )
        ranks.append(lowered(replica * mesh.stages if mesh.stages > 1 else 0, place, seat))
        groups += [seat.shards] if sharding.reduce != "none" else []
        groups += [seat.model] if mesh.model > 1 else []
    return World(name=request.family, ranks=tuple(ranks), groups={group.name: group.members for group in groups})


def _walk(
    stages: Stages, order: Iterable[VisitId], place: int, first: int, joined: Sequence[int], *, once: bool
) -> Iterator[Visit | Message]:
    """The walk of a pipeline's rank, layer by layer. Around a stage's own layers its neighbours' results are received
    and its own sent, where the neighbour is on another rank, and the gathers of layers of other ranks are ``joined``;
    the last stage's backward begins with the loss. A stage without layers receives and sends on.

    ``first``: the rank of the pipeline's first place. ``once``: a layer is visited once forward and once backward.
    """
    others = [] if len(joined) == len(stages.held(place)) else joined

    def peer(stage: int) -> int:
        at = stages.rank_of(stage) if 0 <= stage < stages.count else place
        return -1 if at == place else first + at

    def of(kind: str, layers: Iterable[int], m: int) -> Iterator[Visit]:
        for layer in layers:
            yield Visit(visit(kind, layer, -1 if once else m), (m,))

    def join(kind: str, layers: Iterable[int]) -> Iterator[Visit]:
        for layer in layers:
            yield Visit(visit(kind, layer), ())

    beside = {stage: (peer(stage - 1), peer(stage + 1)) for stage in stages.of(place)}
    for stay in order:
        stage, m, kind = stay.stage, stay.micro_batch, stay.kind
        own = range(stages.firsts[stage], stages.firsts[stage + 1])
        before, behind = beside[stage]
        if kind == "F":
            yield from join("F", [n for n in others if n < own.start])
            if before >= 0:
                yield Message(stage_op("RA", own.start - 1, m), before)
            yield from of("F", own, m)
            if behind >= 0:
                yield Message(stage_op("SA", own.stop - 1, m), behind)
            yield from join("F", [n for n in others if n >= own.stop])
        elif kind == "W":
            yield from of("W", reversed(own), m)
        else:
            yield from join("B", [n for n in reversed(others) if n >= own.stop])
            if behind >= 0:
                yield Message(stage_op("RD", own.stop - 1, m), behind)
            elif stage == stages.count - 1:
                yield from of("E", (stages.layers,), m)
            yield from of(kind, reversed(own), m)
            if before >= 0:
                yield Message(stage_op("SD", own.start - 1, m), before)
            yield from join("B", [n for n in reversed(others) if n < own.start])
