"""A case for ``penstock simulate``: a world, its costs, and how to speak of both."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from penstock.cli.simulate_arguments import SimulateArguments
from penstock.config import Tier
from penstock.errors import ConfigError
from penstock.plan.costs import machine_costs
from penstock.plan.huggingface import model_shape
from penstock.plan.layer_costs import layer_costs
from penstock.plan.machine import Machine
from penstock.plan.model import ModelProfile, stage_times
from penstock.schedule.op import Lane
from penstock.schedule.place import Format
from penstock.schedule.world import World
from penstock.sim.costs import Costs
from penstock.sim.models import CostModel

MACHINE = "a100-40g"
FORMAT = Format(weight_bytes=2, moments=2)
MODEL = "gpt-65b"
_SEQUENCE = 2048
_PRECISION, _OPTIMIZER = "bf16", "adamw.bf16"
_DRIVE_LANES: Set[Lane] = {"read", "write"}

Amounts = Literal["bytes", "elements", "micro-batches", "the file's unit"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A world to simulate. ``unit`` of times: ``"s"``, or empty where the costs have none. ``stage_ops``: an op is a
    pipeline's stage, not one of its layers. ``memory``: bytes of a machine's tiers. ``checked``: the world has
    passed the checker.
    """

    name: str
    title: str
    world: World
    costs: Costs
    costs_in_words: str
    unit: Literal["s", ""]
    amounts: Amounts
    memory: Mapping[Tier, int] = field(default_factory=dict)
    stage_ops: bool = False
    checked: bool = False


_SAID = {
    "unit": "forward 1, backward 2 (1 + 1 where it is split), nothing else",
    "puzzle": "a layer 1 for each batch, optimizer 0.5, collective 0.3, send and receive 0.2, one thing at a time",
}


def abstract_case(world: World, words: str, model: CostModel, amounts: Amounts | None = None) -> Case:
    """A world under costs that stand for no machine. ``amounts``: of memory, if not what the costs measure it in."""
    costs = model.costs
    amounts = amounts or ("elements" if costs.name == "puzzle" else "micro-batches")
    return Case(
        name=world.name,
        title=words,
        world=world,
        costs=costs,
        costs_in_words=f"costs {costs.name}: {_SAID[costs.name]}; memory in {amounts}",
        unit="",
        amounts=amounts,
        stage_ops=model.stage_ops,
    )


def machine_case(
    arguments: SimulateArguments, world: World, words: str, machine: Machine, profile: ModelProfile
) -> Case:
    """A schedule of the model's own program."""
    lanes = {op.lane for schedule in world.ranks for op in schedule.ops}
    if lanes & _DRIVE_LANES and not machine.drives:
        raise ConfigError(f"{world.name} uses the disk, and the machine {machine.name} has no drive: choose another")
    if lanes & {"net", "send"} and machine.network is None:
        raise ConfigError(f"{world.name} has several ranks, and the machine {machine.name} has no network between them")
    if _OPTIMIZER not in machine.host.optimizer:
        raise ConfigError(f"the machine {machine.name} has no rate host.optimizer.{_OPTIMIZER}: measure it anew")
    times = stage_times(profile, machine, _PRECISION)
    costs = machine_costs(machine, profile.program, FORMAT, times, _OPTIMIZER)
    return _real(arguments, world, words, machine, profile, costs)


def layers_case(
    arguments: SimulateArguments, world: World, words: str, machine: Machine, profile: ModelProfile
) -> Case:
    """A schedule of layers, each of which is one of the model's blocks."""
    times = stage_times(profile, machine, _PRECISION)
    costs = layer_costs(machine, profile, FORMAT, times, _OPTIMIZER, world)
    return _real(arguments, world, words, machine, profile, costs)


def _real(
    arguments: SimulateArguments, world: World, words: str, machine: Machine, profile: ModelProfile, costs: Costs
) -> Case:
    model = _model_in_words(arguments, profile)
    return Case(
        name=world.name,
        title=words,
        world=world,
        costs=costs,
        costs_in_words=f"costs of {machine.name}, for {model}; {_PRECISION}, AdamW",
        unit="s",
        amounts="bytes",
        memory={"device": machine.device.memory, "host": machine.host.memory},
    )


def profile_of(arguments: SimulateArguments, machine: Machine | None) -> ModelProfile:
    """The model that was asked for, in micro-batches as asked for, for a machine's kind of device.

    Raises:
        ConfigError: there is no such model, or it has not the layers or positions.
    """
    shape = model_shape(arguments.model or MODEL, kind="cuda" if machine is None else machine.device.kind)
    if arguments.layers is not None:
        shape = shape.with_layers(arguments.layers)
    size, length = arguments.micro_batch_size or 1, arguments.sequence_length or _SEQUENCE
    return shape.profile(size, length, FORMAT)


def _model_in_words(arguments: SimulateArguments, profile: ModelProfile) -> str:
    model = arguments.model or MODEL
    layers = f" cut to {counted(arguments.layers, 'layer')}" if arguments.layers else ""
    return (
        f"{model}{layers} ({profile.parameters / 1e9:,.3g}B parameters), micro-batches of "
        f"{arguments.micro_batch_size or 1} x {arguments.sequence_length or _SEQUENCE} tokens"
    )


def counted(number: int, what: str) -> str:
    """``1 rank``, ``2 micro-batches``."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
