"""A case for ``penstock simulate``: a world, its costs, and how to speak of both."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.cli.simulate_arguments import Arguments
from penstock.config import Precision, Tier, format_size
from penstock.config.sizes import three_digits
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.planner.costs import machine_costs
from penstock.planner.layer_costs import layer_costs
from penstock.report.sentence import format_time
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.worlds import World
from penstock.schedule.place import Format
from penstock.shape.huggingface import model_shape
from penstock.shape.model import ModelProfile, StageTimes, stage_times
from penstock.sim.costs import Costs
from penstock.sim.models import CostModel

MACHINE = "a100-40g"
LINKED_MACHINE = "a100-80g"
MODEL = "gpt-65b"
_SEQUENCE = 2048
_DRIVE_LANES: Set[Lane] = {"read", "write"}

Amounts = Literal["bytes", "elements", "micro-batches", "the file's unit"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A world to simulate. ``unit`` of times: ``"s"``, or empty where the costs have none. ``stage_ops``: an op is a
    pipeline's stage, not one of its layers. ``memory``: bytes of a machine's tiers.
    """

    title: str
    world: World
    costs: Costs
    costs_in_words: str
    unit: Literal["s", ""]
    amounts: Amounts
    memory: Mapping[Tier, int] = field(default_factory=dict)
    stage_ops: bool = False

    def time(self, seconds: float) -> str:
        """A time in words."""
        return format_time(seconds, self.unit)

    def amount(self, number: int) -> str:
        """An amount of memory, or what was moved, in words."""
        return format_size(number) if self.amounts == "bytes" else f"{number:,}"


_SAID = {
    "unit": "forward 1, backward 2 (1 + 1 where it is split), nothing else",
    "puzzle": "a layer 1 for each batch, optimizer 0.5, collective 0.3, send and receive 0.2, one thing at a time",
}


def abstract_case(world: World, title: str, model: CostModel, amounts: Amounts | None = None) -> Case:
    """A world under costs that stand for no machine. ``amounts``: of memory, if not what the costs measure it in."""
    costs = model.costs
    amounts = amounts or ("elements" if costs.name == "puzzle" else "micro-batches")
    return Case(
        title=title,
        world=world,
        costs=costs,
        costs_in_words=f"costs {costs.name}: {_SAID[costs.name]}; memory in {amounts}",
        unit="",
        amounts=amounts,
        stage_ops=model.stage_ops,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model to train in micro-batches of one shape, with AdamW in one precision. ``description``: of it all."""

    profile: ModelProfile
    precision: Precision
    description: str

    @property
    def form(self) -> Format:
        return Format.of(self.precision, 2)

    @property
    def optimizer(self) -> str:
        """Key of a machine's optimizer rates."""
        return f"adamw.{self.precision}"

    def times(self, machine: Machine) -> StageTimes:
        return stage_times(self.profile, machine, self.precision)


def training_of(arguments: Arguments, machine: Machine | None) -> Training:
    """The model that was asked for, in micro-batches as asked for, for a machine's kind of device.

    Raises:
        ConfigError: there is no such model, or it has not the layers or positions.
    """
    name, precision = arguments.model or MODEL, arguments.precision or "bf16"
    shape = model_shape(name, kind="cuda" if machine is None else machine.device.kind)
    shape = replace(shape, splits=arguments.name == "streamed-zero-bubble")
    if arguments.layers is not None:
        shape = shape.with_layers(arguments.layers)
        name += f" with {counted(arguments.layers, 'layer')}"
    size, length = arguments.micro_batch_size or 1, arguments.sequence_length or _SEQUENCE
    profile = shape.profile(size, length, Format.of(precision, 2))
    parameters = f"{three_digits(profile.parameters / 1e9)}B parameters"
    description = f"{name} ({parameters}), micro-batches of {size} x {length} tokens; {precision}, AdamW"
    return Training(profile=profile, precision=precision, description=description)


def real_case(world: World, title: str, machine: Machine, training: Training, *, layers: bool) -> Case:
    """A schedule of the model's own program, or of ``layers``, each of which is one of the model's blocks.

    Raises:
        ConfigError: the machine lacks what the schedule uses.
    """
    if layers:
        costs = layer_costs(
            machine, training.profile, training.form, training.times(machine), training.optimizer, world
        )
    else:
        _check_machine(world, machine, training)
        program, times = training.profile.program, training.times(machine)
        costs = machine_costs(machine, program, training.form, times, training.optimizer)
    return Case(
        title=title,
        world=world,
        costs=costs,
        costs_in_words=f"costs of {machine.name}, for {training.description}",
        unit="s",
        amounts="bytes",
        memory={"device": machine.device.memory, "host": machine.host.memory},
    )


def _check_machine(world: World, machine: Machine, training: Training) -> None:
    lanes = {op.lane for schedule in world.ranks for op in schedule.ops}
    if lanes & _DRIVE_LANES and not machine.drives:
        raise ConfigError(f"{world.name} uses the disk, and the machine {machine.name} has no drive: choose another")
    if lanes & {"net", "send"} and machine.network is None:
        raise ConfigError(
            f"{world.name} has several ranks, and the machine {machine.name} has no network between them: "
            "add a network (bandwidth, latency) to its profile, or use --costs unit"
        )
    if "nic" in lanes and machine.across is None:
        raise ConfigError(
            f"{world.name} has collectives between hosts, and ranks are simulated as those of one machine, "
            f"{machine.name}: use --costs unit. penstock plan --hosts predicts steps of several hosts"
        )
    if training.optimizer not in machine.host.optimizer:
        raise ConfigError(
            f"the machine {machine.name} has no rate host.optimizer.{training.optimizer}: measure it anew"
        )


def counted(number: int, what: str) -> str:
    """``1 rank``, ``2 micro-batches``."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
