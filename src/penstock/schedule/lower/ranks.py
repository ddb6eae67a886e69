"""Worlds of ranks that compute whole layers: data-parallel ranks, the ranks of a pipeline, and pipelines beside each
other. Each is a mesh; ``layers`` writes down what a rank in its seat does.
"""

from math import gcd

from penstock.errors import ConfigError
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.layers import Seat, Sharding, lower_rank
from penstock.schedule.lower.mesh import Mesh
from penstock.schedule.lower.orders import Order, one_f_one_b
from penstock.schedule.lower.request import Request
from penstock.schedule.lower.stages import Stages


def replicated(request: Request, sharding: Sharding, *, one_by_one: bool = False) -> World:
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
    return _world(request, mesh, stages, one_f_one_b, sharding, steps=steps, upwards=False, all_join=together == 1)


def pipeline(request: Request, stages: Stages, order: Order, sharding: Sharding, *, at_once: bool = False) -> World:
    """A world of ``stages.ranks`` ranks, each of which does its steps in the order given, for one micro-batch after the
    other or for all ``at_once``."""
    steps = 1 if at_once else request.micro_batches
    return _world(request, Mesh(stages=stages.ranks), stages, order, sharding, steps=steps)


def grid(request: Request, sharding: Sharding) -> World:
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
    return _world(request, mesh, stages, one_f_one_b, sharding, steps=1, all_join=all_join)


def _world(
    request: Request,
    mesh: Mesh,
    stages: Stages,
    order: Order,
    sharding: Sharding,
    *,
    steps: int,
    upwards: bool = True,
    all_join: bool = False,
) -> World:
    """Every rank in its seat; ranks that do the same share one schedule. ``all_join``: every rank has a part of every
    layer."""

    def seat(rank: int) -> Seat:
        replica, stage, _ = mesh.stands(rank)
        return Seat(
            rank=stage,
            joined=tuple(range(stages.layers) if all_join else sorted(stages.held(stage))),
            steps=steps,
            items=request.micro_batches // mesh.data // steps,
            shards=mesh.everyone() if all_join else mesh.replicas(rank),
            first_rank=replica * mesh.stages if mesh.stages > 1 else 0,
            model=mesh.together(rank),
            upwards=upwards,
        )

    seats = [seat(rank) for rank in range(mesh.size)]
    made: dict[Seat, Schedule] = {}
    for each in seats:
        if each not in made:
            made[each] = lower_rank(request, stages, each, order, sharding)
    groups = [each.shards for each in seats] if sharding.reduce != "none" else []
    groups += [each.model for each in seats if mesh.model > 1]
    return World(
        name=request.family,
        ranks=tuple(made[each] for each in seats),
        groups={group.name: group.members for group in groups},
    )
