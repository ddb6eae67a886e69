"""Worlds of ranks that compute whole layers: data-parallel ranks, the ranks of a pipeline, and pipelines beside each
other. Each says which seats there are; ``layers`` writes down what a rank in its seat does.
"""

from math import gcd

from penstock.errors import ConfigError
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.layers import Seat, Sharding, lower_rank
from penstock.schedule.lower.orders import Order, one_f_one_b
from penstock.schedule.lower.process_groups import ALONE, ProcessGroup
from penstock.schedule.lower.request import Request
from penstock.schedule.lower.stages import Stages


def replicated(request: Request, sharding: Sharding, *, one_by_one: bool = False) -> World:
    """Every rank computes its share of the micro-batches, at once or ``one_by_one``. All do the same, so they share one
    schedule. With partitioned activations, ranks come in groups that stand for model parallelism: a group computes the
    same micro-batches, each rank its slice of every layer (sizes and costs are those of the slice), and each keeps a
    part of what all of them need again.

    Raises:
        ConfigError: ranks or micro-batches that cannot be shared evenly.
    """
    together = request.partition_activations or 1
    if request.ranks % together:
        raise ConfigError(
            f"{request.family}: partition_activations={together} does not divide {request.ranks} ranks into groups: "
            "choose a divisor"
        )
    replicas = request.ranks // together
    if request.micro_batches % replicas:
        raise ConfigError(
            f"{request.family}: {request.micro_batches} micro-batches cannot be shared evenly by {replicas} ranks"
            f"{' (groups)' if together > 1 else ''}: ask for a multiple of {replicas}"
        )
    stages = Stages(layers=request.layers, ranks=1, per_rank=1, folded=False)

    def seat(group: str, model: ProcessGroup = ALONE) -> Seat:
        return Seat(
            rank=0,
            joined=tuple(range(request.layers)),
            steps=request.micro_batches if one_by_one else 1,
            items=1 if one_by_one else request.micro_batches // replicas,
            shards=ProcessGroup(name=group, size=replicas),
            model=model,
            upwards=False,
        )

    if request.partition_activations is None:
        shared = lower_rank(request, stages, seat("all"), one_f_one_b, sharding)
        groups = {"all": tuple(range(request.ranks))} if sharding.reduce != "none" else {}
        return World(name=request.family, ranks=(shared,) * request.ranks, groups=groups)
    data = {f"data{i}": tuple(range(i, request.ranks, together)) for i in range(together)}
    model = {f"model{i}": tuple(range(i * together, (i + 1) * together)) for i in range(replicas)}
    seats = [
        seat(f"data{r % together}", ProcessGroup(name=f"model{r // together}", size=together))
        for r in range(request.ranks)
    ]
    ranks = tuple(lower_rank(request, stages, each, one_f_one_b, sharding) for each in seats)
    return World(name=request.family, ranks=ranks, groups=data | model)


def pipeline(request: Request, stages: Stages, order: Order, sharding: Sharding, *, items: int = 1) -> World:
    """A world of ``stages.ranks`` ranks, each of which does its steps in the order given. ``items``: micro-batches that
    go through as one."""
    seats = [
        Seat(rank=rank, joined=tuple(sorted(stages.held(rank))), steps=request.micro_batches // items, items=items)
        for rank in range(stages.ranks)
    ]
    ranks = tuple(lower_rank(request, stages, seat, order, sharding) for seat in seats)
    return World(name=request.family, ranks=ranks, groups={})


def grid(request: Request, sharding: Sharding) -> World:
    """Pipelines beside each other, each with its share of the micro-batches, all of them at once: ``pipeline-fsdp``.

    Ranks are dealt out pipeline by pipeline: with S stages, rank r holds stage r mod S of pipeline r div S. There are
    as many pipelines as the micro-batches allow: the largest number that divides both ranks and micro-batches. Who
    takes part in the collectives of a layer is a choice:

    - ``stage``: the ranks that hold the layer, one of each pipeline; they share it among themselves;
    - ``world``: all ranks, each of which keeps a part of every layer and joins every gather, also of layers that it
      does not compute. That is the last of the LLM training puzzles, which has no process groups.

    Raises:
        ConfigError: a stage would have no layer.
    """
    pipelines = gcd(request.ranks, request.micro_batches)
    per_pipeline = request.ranks // pipelines
    layers = per_pipeline if request.stage_ops else request.layers
    if layers < per_pipeline:
        raise ConfigError(
            f"pipeline-fsdp with ranks={request.ranks} and micro_batches={request.micro_batches} has {per_pipeline} "
            f"stages to a pipeline, which need a layer each, and got layers={layers}: ask for fewer ranks, or for more "
            "micro-batches, as there are as many pipelines as divide both"
        )
    stages = Stages(layers=layers, ranks=per_pipeline, per_rank=1, folded=False)
    by_stage = request.gather_group == "stage"
    groups = {"all": tuple(range(request.ranks))}
    if by_stage:
        groups = {f"stage{s}": tuple(range(s, request.ranks, per_pipeline)) for s in range(per_pipeline)}
    ranks = []
    for rank in range(request.ranks):
        number, stage = divmod(rank, per_pipeline)
        group = f"stage{stage}" if by_stage else "all"
        seat = Seat(
            rank=stage,
            joined=tuple(stages.held(stage) if by_stage else range(layers)),
            steps=1,
            items=request.micro_batches // pipelines,
            shards=ProcessGroup(name=group, size=len(groups[group])),
            first_rank=number * per_pipeline,
            first_step=number,
        )
        ranks.append(lower_rank(request, stages, seat, one_f_one_b, sharding))
    return World(name=request.family, ranks=tuple(ranks), groups=groups)
