"""What ``penstock simulate`` was asked for, as a world and its costs: a schedule by name, or one from a file."""

import difflib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from penstock.cli.schedule_file import read_world
from penstock.cli.simulate_arguments import SimulateArguments
from penstock.config import Tier
from penstock.errors import ConfigError
from penstock.plan.costs import machine_costs
from penstock.plan.layer_costs import layer_costs, layer_sizes
from penstock.plan.machine import Machine
from penstock.plan.model import ModelProfile, stage_times
from penstock.plan.profiles import machine_named
from penstock.plan.shipped import named
from penstock.schedule import offload
from penstock.schedule.distributed import families
from penstock.schedule.distributed.request import Request
from penstock.schedule.op import Lane
from penstock.schedule.place import Format
from penstock.schedule.world import World
from penstock.sim.costs import Costs
from penstock.sim.models import CostModel, puzzle, unit

Amounts = Literal["bytes", "elements", "micro-batches"]

_MACHINE, _MODEL = "a100-40g", "gpt-65b"
_SEQUENCE = 2048
_FORMAT = Format(weight_bytes=2, moments=2)
_PRECISION, _OPTIMIZER = "bf16", "adamw.bf16"
_OFFLOAD_MICRO_BATCHES = 8
_OFFLOAD_LANES: Set[Lane] = {"h2d", "d2h", "read", "write", "cpu"}
_DRIVE_LANES: Set[Lane] = {"read", "write"}
_MOST_OPS = 4_000_000
"""About as many as fit in 4 GB with all that is known of them."""

_REAL = ("model", "micro_batch_size", "sequence_length")
_DISTRIBUTED = (*families.OPTIONS, "lookahead")
_OFFLOAD = ("chunks", "delay", "wait", "weights", "state", "checkpoints", "gradients", "device_blocks")

_UNIT_BY_DEFAULT = {
    *("pipeline", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "looped-dfs", "zero-bubble", "dualpipe-v")
}
_SHAPES = {  # layers and ranks as in the puzzles; 8 and 4 for the others
    "single": (2, 1),
    "grad-accumulation": (2, 1),
    "ddp": (2, 4),
    **dict.fromkeys(("weight-sharded", "zero1", "zero2", "fsdp"), (6, 4)),
    "pipeline-fsdp": (4, 16),
}


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


def case_of(arguments: SimulateArguments) -> Case:
    """Build, or read and check, what was asked for.

    Raises:
        ConfigError: there is no such schedule or model, an option does not fit, or a file is wrong.
    """
    name = arguments.name
    if name in offload.FAMILIES:
        return _offload(arguments)
    if name in families.FAMILIES:
        return _distributed(arguments)
    if Path(name).exists() or "/" in name or "." in name:
        return _file(arguments)
    known = [*families.FAMILIES, *offload.FAMILIES]
    near = difflib.get_close_matches(name, known, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"there is no schedule {name!r}, and no such file.{guess} Known: {', '.join(known)}")


def described_families() -> str:
    """A line for each schedule that has a name."""
    lines = [(name, family.summary) for name, family in families.FAMILIES.items()]
    lines += [(name, family.description) for name, family in offload.FAMILIES.items()]
    return "\n".join(f"  {name:<19} {summary}" for name, summary in lines)


# ---- schedules that do not offload


def _distributed(arguments: SimulateArguments) -> Case:
    name, family = arguments.name, families.FAMILIES[arguments.name]
    unknown = (option for option in families.OPTIONS if option not in family.options)
    arguments.refuse(name, *unknown, *_OFFLOAD)
    costs = arguments.costs or ("unit" if name in _UNIT_BY_DEFAULT else "puzzle")
    layers, ranks = _SHAPES.get(name, (8, 4))
    if costs in ("puzzle", "unit"):
        arguments.refuse(f"--costs {costs}", *_REAL)
        model = puzzle() if costs == "puzzle" else unit()
        request = _request(arguments, layers, ranks, model)
        return _abstract(arguments, families.build(request), _shape_in_words(request), model)
    machine, profile = machine_named(costs), _profile(arguments)
    blocks = sum(stage.kind == "call" for stage in profile.program.stages)
    sizes = layer_sizes(profile, _FORMAT)
    request = _request(arguments, blocks, ranks, CostModel(costs=_FREE, sizes=sizes, stage_ops=False))
    return _layers_on_machine(arguments, families.build(request), _shape_in_words(request), machine, profile)


_FREE = Costs(name="none", seconds=lambda op: 0.0)


def _request(arguments: SimulateArguments, layers: int, ranks: int, model: CostModel) -> Request:
    ranks = arguments.ranks or ranks
    request = Request(
        family=arguments.name,
        layers=arguments.layers or layers,
        ranks=ranks,
        micro_batches=arguments.micro_batches or _micro_batches(arguments.name, ranks, filled=not model.costs.serial),
        sizes=model.sizes,
        stage_ops=model.stage_ops,
        virtual_stages=arguments.virtual_stages,
        gather_group=arguments.gather_group,
        fused=arguments.fused,
        partition_activations=arguments.partition_activations,
        buffer_size=arguments.buffer_size,
        lookahead=arguments.lookahead or 0,
    )
    _check_size(_about(request))
    return request


def _about(request: Request) -> int:
    """Roughly how many ops that is, and more for what takes as long to build."""
    layers, ranks, micro_batches = request.layers, request.ranks, request.micro_batches
    if request.family not in _UNIT_BY_DEFAULT:
        pieces = -(-request.sizes.gradient // request.buffer_size) if request.buffer_size else 1
        steps = micro_batches if request.family == "grad-accumulation" else 1
        return (6 * steps + 2 * pieces) * layers * ranks
    steps = 1 if request.family == "pipeline" else micro_batches
    stages = ranks * (request.virtual_stages or 2)
    folded = ranks * ranks // 4 if request.family in ("zero-bubble", "dualpipe-v") else 0
    return (6 * stages + (0 if request.stage_ops else 3 * layers)) * steps + folded


def _micro_batches(name: str, ranks: int, *, filled: bool) -> int:
    """Where none are asked for: as in the puzzles, or enough to fill a pipeline."""
    if name == "pipeline-fsdp":
        return max(1, ranks // 4)
    if name == "dualpipe-v" or (filled and name in _UNIT_BY_DEFAULT):
        return 2 * ranks
    return ranks if ranks > 1 else 4


def _shape_in_words(request: Request) -> str:
    stages = f", {request.virtual_stages} virtual stages each" if request.virtual_stages else ""
    layers = (
        "" if request.stage_ops and request.family in _UNIT_BY_DEFAULT else f"{_counted(request.layers, 'layer')}, "
    )
    micro_batches = _counted(request.micro_batches, "micro-batch")
    return f"{request.family}: {layers}{_counted(request.ranks, 'rank')}{stages}, {micro_batches}"


# ---- schedules that offload


def _offload(arguments: SimulateArguments) -> Case:
    name = arguments.name
    if arguments.ranks not in (None, 1):
        raise ConfigError(f"--ranks {arguments.ranks}: {name} is a schedule of one rank. Leave --ranks out")
    family = offload.FAMILIES[name]
    arguments.refuse(name, *_DISTRIBUTED, *(option for option in _OFFLOAD if option not in family.options))
    costs = arguments.costs or _MACHINE
    if costs == "puzzle":
        raise ConfigError(
            f"--costs puzzle: the puzzles have neither host memory nor disk, which {name} needs: {_OTHERS}"
        )
    profile = _profile(arguments)
    micro_batches = arguments.micro_batches or _OFFLOAD_MICRO_BATCHES
    stages, chunks = len(profile.program.stages), len(profile.program.groups) * (arguments.chunks or 16)
    _check_size(6 * stages * micro_batches + 8 * chunks * (micro_batches if family.order == "horizontal" else 1))
    world = offload.build(
        offload.Request(
            family=name,
            program=profile.program,
            micro_batches=micro_batches,
            form=_FORMAT,
            chunks=arguments.chunks,
            delay=arguments.delay,
            wait=arguments.wait or None,
            weights=arguments.weights,
            state=arguments.state,
            checkpoints=arguments.checkpoints,
            gradients=arguments.gradients,
            device_blocks=arguments.device_blocks,
        )
    )
    words = f"{name}: {_counted(stages - 2, 'layer')}, {_counted(micro_batches, 'micro-batch')}"
    if costs == "unit":
        return replace(_abstract(arguments, world, words, unit()), amounts="bytes", stage_ops=False)
    return _on_machine(arguments, world, words, machine_named(costs), profile)


_OTHERS = "use --costs unit or a machine's profile"


# ---- schedules from a file


def _file(arguments: SimulateArguments) -> Case:
    """A schedule that a user has written, or that --text has printed."""
    path = Path(arguments.name)
    arguments.refuse("a schedule from a file", "ranks", "micro_batches", *_DISTRIBUTED, *_OFFLOAD)
    world = read_world(path)
    lanes = {op.lane for schedule in world.ranks for op in schedule.ops}
    costs = arguments.costs or (_MACHINE if lanes & _OFFLOAD_LANES else "unit" if "send" in lanes else "puzzle")
    ops = sum(len(schedule.ops) for schedule in world.ranks)
    words = f"{world.name} from {path}: {_counted(len(world.ranks), 'rank')}, {_counted(ops, 'op')}"
    if costs in ("puzzle", "unit"):
        arguments.refuse(f"a schedule from a file with --costs {costs}", "layers", *_REAL)
        if costs == "puzzle" and lanes & _OFFLOAD_LANES:
            lane = next(iter(sorted(lanes & _OFFLOAD_LANES)))
            raise ConfigError(f"--costs puzzle: the puzzles have no lane {lane}, which {path} uses: {_OTHERS}")
        case = _abstract(arguments, world, words, puzzle() if costs == "puzzle" else unit())
        return replace(case, stage_ops=costs == "unit", checked=True)
    machine, profile = machine_named(costs), _profile(arguments)
    if not lanes & _OFFLOAD_LANES:
        return replace(_layers_on_machine(arguments, world, words, machine, profile), checked=True)
    _check_model(path, world, profile, arguments)
    return replace(_on_machine(arguments, world, words, machine, profile), checked=True)


def _check_model(path: Path, world: World, profile: ModelProfile, arguments: SimulateArguments) -> None:
    """The schedule's stages and groups are those of the model whose times it gets."""
    stages, groups = len(profile.program.stages), len(profile.program.groups)
    for schedule in world.ranks:
        for op in schedule.ops:
            word = op.word
            if word.stage >= stages or word.group >= groups or (word.kind == "E" and word.stage != stages - 1):
                raise ConfigError(
                    f"{path}: op {op.id} is not of {arguments.model or _MODEL} with {stages - 2} layers: name the model "
                    "that the schedule is for, with --model and --layers"
                )


# ---- costs


def _abstract(arguments: SimulateArguments, world: World, words: str, model: CostModel) -> Case:
    unit_costs = not model.costs.serial
    said = (
        "costs unit: forward 1, backward 2 (1 + 1 where it is split), nothing else; memory in micro-batches in flight"
        if unit_costs
        else "costs puzzle: a layer 1 for each batch, optimizer 0.5, collective 0.3, send and receive 0.2, one thing "
        "at a time; memory in elements"
    )
    return Case(
        name=world.name,
        title=words,
        world=world,
        costs=model.costs,
        costs_in_words=said,
        unit="",
        amounts="micro-batches" if unit_costs else "elements",
        stage_ops=model.stage_ops,
    )


def _on_machine(
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
    costs = machine_costs(machine, profile.program, _FORMAT, times, _OPTIMIZER)
    return _real(arguments, world, words, machine, profile, costs)


def _layers_on_machine(
    arguments: SimulateArguments, world: World, words: str, machine: Machine, profile: ModelProfile
) -> Case:
    """A schedule of layers, each of which is one of the model's blocks."""
    times = stage_times(profile, machine, _PRECISION)
    costs = layer_costs(machine, profile, _FORMAT, times, _OPTIMIZER, world)
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


def _profile(arguments: SimulateArguments) -> ModelProfile:
    shape = named(arguments.model or _MODEL)
    if arguments.layers is not None:
        shape = shape.with_layers(arguments.layers)
    size, length = arguments.micro_batch_size or 1, arguments.sequence_length or _SEQUENCE
    return shape.profile(size, length, _FORMAT)


def _model_in_words(arguments: SimulateArguments, profile: ModelProfile) -> str:
    model = arguments.model or _MODEL
    layers = f" cut to {_counted(arguments.layers, 'layer')}" if arguments.layers else ""
    return (
        f"{model}{layers} ({profile.parameters / 1e9:,.3g}B parameters), micro-batches of "
        f"{arguments.micro_batch_size or 1} x {arguments.sequence_length or _SEQUENCE} tokens"
    )


def _check_size(ops: int) -> None:
    if ops > _MOST_OPS:
        raise ConfigError(
            f"that is a schedule of about {ops:,} ops, and {_MOST_OPS:,} fit in memory: ask for fewer layers, ranks, "
            "micro-batches or chunks"
        )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
