"""Sizes and costs of the schedules that do not offload, for one model on one machine: a layer is a block of the model.

The blocks are taken to be equal, as the families have layers and nothing else; the loss stands for the epilogue. A
backward computes its layer's forward again, so between the two only the layer's input is kept.
"""

from penstock.errors import ConfigError, ScheduleError
from penstock.hardware.machine import Machine
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.layers import activation_pools
from penstock.schedule.lower.request import Sizes
from penstock.schedule.place import FP32, Format
from penstock.schedule.program import Stage
from penstock.shape.model import ModelProfile, StageTimes
from penstock.sim.costs import Costs

_LINKS = ("net", "send")


def layer_sizes(profile: ModelProfile, form: Format) -> Sizes:
    """Bytes of the model's first block: fp32 gradients, weights and state as in ``form``."""
    block = _block(profile)
    elements = sum(profile.program.groups[g].numel for g in block.forward_reads)
    return Sizes(
        activation=block.activation,
        activation_gradient=block.gradient,
        weights=elements * form.weight_bytes,
        gradient=elements * FP32,
        state=round(elements * form.per_element),
    )


def check_layers(world: World, sizes: Sizes) -> None:
    """Check that a world that nobody knows the making of can be one of ``sizes``: its pools, by their names, have
    buffers for whole layers of whole micro-batches.

    Raises:
        ScheduleError: names the pool.
    """
    known = activation_pools(sizes, 1) | {"weights": sizes.weights, "gradients": sizes.gradient}
    for schedule in {id(schedule): schedule for schedule in world.ranks}.values():
        for pool in schedule.pools:
            size = known.get(pool.name, pool.size)
            if pool.size and (not size or pool.size % size):
                wanted = f"would have multiples of {size}" if size else "has no such pool"
                raise ScheduleError(f"pool {pool.name} has buffers of {pool.size}, and this model {wanted}")


def layer_costs(
    machine: Machine, profile: ModelProfile, form: Format, times: StageTimes, optimizer: str, world: World
) -> Costs:
    """The costs of ``world``, built with ``layer_sizes``, where each rank is such a machine.

    ``optimizer``: key of the device's optimizer rates, ``"adamw.bf16"``. A rank steps the share of each layer's state
    that it holds, and a message or collective takes what it sends over the network's bandwidth, plus the latency.

    Raises:
        ConfigError: the machine has no network and the world needs one, or no rate for the optimizer. The costs raise
            ScheduleError for an op that no layer has.
    """
    block = _block(profile)
    first, second = times.in_two(block.index)
    seconds = {"F": times.forward[block.index], "B": first + second, "I": first, "W": second, "E": times.forward[-1]}
    network, overhead = machine.network, machine.overhead
    distinct = {id(schedule): schedule for schedule in world.ranks}.values()
    if network is None and any(op.lane in _LINKS for schedule in distinct for op in schedule.ops):
        raise ConfigError(
            f"the machine {machine.name} has no network between ranks: add a network (bandwidth, latency) to its "
            "profile, or use --costs unit or puzzle"
        )
    rate = machine.device.optimizer.get(optimizer) or machine.host.optimizer.get(optimizer)
    if rate is None:
        raise ConfigError(f"the machine {machine.name} has no rate for the optimizer {optimizer}: measure it anew")
    state = layer_sizes(profile, form).state
    elements = sum(profile.program.groups[g].trainable for g in block.forward_reads)
    step = elements * _share_stepped(world, state) / rate

    def cost(op: Op) -> float:
        kind = op.id.kind
        if kind in seconds:
            return overhead + seconds[kind] * op.items
        if kind == "OD":
            return overhead + step
        if op.lane == "recv":
            return 0.0
        if network is None or op.lane not in _LINKS:
            raise ScheduleError(f"op {op.id}: no layer of a model has an op {kind} where nothing is offloaded")
        return overhead + network.latency + op.nbytes / network.bandwidth

    return Costs(name=machine.name, seconds=cost)


def _share_stepped(world: World, state: int) -> float:
    """Share of a layer's state that one optimizer op steps: what a rank holds, over the layers that it steps. All of
    it, if the schedule does not say what a rank holds.
    """
    for schedule in world.ranks:
        steps = sum(op.id.kind == "OD" for op in schedule.ops)
        held = sum(nbytes for _, what, nbytes in schedule.fixed if what == "state")
        if steps and held:
            return held / (steps * state)
    return 1.0


def _block(profile: ModelProfile) -> Stage:
    return next(stage for stage in profile.program.stages if stage.kind == "call")
