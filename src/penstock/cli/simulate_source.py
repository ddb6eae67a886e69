"""The source of what ``penstock simulate`` runs: a schedule by name, or one from a file, and its costs."""

import difflib
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill

from penstock.cli.schedule_file import MOST_OPS, read_world
from penstock.cli.simulate_arguments import Arguments
from penstock.cli.simulate_case import (
    LINKED_MACHINE,
    MACHINE,
    MODEL,
    Case,
    Training,
    abstract_case,
    counted,
    real_case,
    training_of,
)
from penstock.config import fields_of
from penstock.errors import ConfigError, ScheduleError
from penstock.hardware.machine import Machine
from penstock.hardware.profiles import machine_named
from penstock.planner.layer_costs import check_layers, layer_sizes
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import FAMILIES, LAYER_OPTIONS, STREAM_OPTIONS, build
from penstock.schedule.lower.request import FamilyRequest, LayerOptions, StreamOptions
from penstock.sim.costs import Costs
from penstock.sim.models import CostModel, puzzle, unit

_OFFLOAD_MICRO_BATCHES = 8
_PIPELINE = 4
_OFFLOAD_LANES: Set[Lane] = {"h2d", "d2h", "read", "write", "cpu"}

_REAL = ("model", "precision", "micro_batch_size", "sequence_length")
_OF_LAYERS = (*LAYER_OPTIONS, "lookahead")
_OF_STREAMS = tuple(name for name in STREAM_OPTIONS if name != "depths")

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
class Source:
    """A world by name or from a file. ``case``: it with its costs, which a machine may not have for it; ``checked``:
    the world has passed the checker."""

    world: World
    case: Callable[[], Case]
    checked: bool = False


def source_of(arguments: Arguments) -> Source:
    """Build, or read and check, what was asked for.

    Raises:
        ConfigError: there is no such schedule or model, an option does not fit, or a file is wrong.
    """
    name = arguments.name
    if name in FAMILIES:
        return _offload(arguments) if FAMILIES[name].streaming else _layers(arguments)
    if Path(name).exists() or "/" in name or "." in name:
        return _file(arguments)
    near = difflib.get_close_matches(name, FAMILIES, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"there is no schedule {name!r}, and no such file.{guess} Known: {', '.join(FAMILIES)}")


def described_families() -> str:
    """A line for each schedule that has a name."""
    return "\n".join(
        fill(f"{name:<18}  {family.summary}", 118, initial_indent="  ", subsequent_indent=" " * 22)
        for name, family in FAMILIES.items()
    )


# ---- schedules that do not offload


def _layers(arguments: Arguments) -> Source:
    name, family = arguments.name, FAMILIES[arguments.name]
    unknown = (option for option in LAYER_OPTIONS if option not in family.options)
    arguments.refuse(name, *unknown, *_OF_STREAMS)
    costs = arguments.costs or ("unit" if name in _UNIT_BY_DEFAULT else "puzzle")
    layers, ranks = _SHAPES.get(name, (8, 4))
    if costs in ("puzzle", "unit"):
        arguments.refuse(f"--costs {costs}", *_REAL)
        if costs == "unit":
            arguments.refuse("--costs unit, where gradients have no size", "buffer_size")
        model = puzzle() if costs == "puzzle" else unit()
        request = _request(arguments, layers, ranks, model)
        world, title = _built(request, costs), _shape_in_words(request)
        return Source(world=world, case=lambda: abstract_case(world, title, model))
    machine = machine_named(costs)
    training = _training_of(arguments, machine)
    blocks = sum(stage.kind == "call" for stage in training.profile.program.stages)
    sizes = layer_sizes(training.profile, training.form)
    request = _request(arguments, blocks, ranks, CostModel(costs=_FREE, sizes=sizes, stage_ops=False))
    world, title = _built(request, costs), _shape_in_words(request)
    return Source(world=world, case=partial(real_case, world, title, machine, training, layers=True))


def _built(request: FamilyRequest, costs: str) -> World:
    world = build(request)
    if request.lookahead and world == build(replace(request, lookahead=0)):
        raise ConfigError(
            f"--lookahead {request.lookahead} does nothing for {request.family} with --costs {costs}: no weights are "
            "gathered, and no pool is between network and compute. Leave it out"
        )
    return world


_FREE = Costs(name="none", seconds=lambda op: 0.0)


def _request(arguments: Arguments, layers: int, ranks: int, model: CostModel) -> FamilyRequest:
    ranks = arguments.ranks or ranks
    request = FamilyRequest(
        family=arguments.name,
        layers=arguments.layers or layers,
        ranks=ranks,
        micro_batches=arguments.micro_batches or _micro_batches(arguments.name, ranks, filled=not model.costs.serial),
        sizes=model.sizes,
        stage_ops=model.stage_ops,
        **fields_of(arguments, LayerOptions),
        buffer_size=arguments.buffer_bytes,
        lookahead=arguments.lookahead or 0,
    )
    _check_size(_about(request))
    return request


def _about(request: FamilyRequest) -> int:
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
    """Number of micro-batches where none is asked for: as many as in the puzzles, or enough to fill a pipeline."""
    if name == "pipeline-fsdp":
        return max(1, ranks // 4)
    if name == "dualpipe-v" or (filled and name in _UNIT_BY_DEFAULT):
        return 2 * ranks
    return ranks if ranks > 1 else 4


def _shape_in_words(request: FamilyRequest) -> str:
    stages = f", {request.virtual_stages} virtual stages each" if request.virtual_stages else ""
    layers = "" if request.stage_ops and request.family in _UNIT_BY_DEFAULT else f"{counted(request.layers, 'layer')}, "
    micro_batches = counted(request.micro_batches, "micro-batch")
    return f"{request.family}: {layers}{counted(request.ranks, 'rank')}{stages}, {micro_batches}"


# ---- schedules that offload


def _offload(arguments: Arguments) -> Source:
    name = arguments.name
    family = FAMILIES[name]
    assert family.streaming is not None
    ranks = arguments.ranks or (min(_PIPELINE, arguments.layers or _PIPELINE) if family.streaming.dealt else 1)
    if ranks > 1 and family.one_rank:
        raise ConfigError(f"--ranks {ranks}: {name} is a schedule of one rank. Leave --ranks out")
    arguments.refuse(name, *_OF_LAYERS, *(option for option in _OF_STREAMS if option not in family.options))
    costs = arguments.costs or _machine_of(ranks)
    if costs == "puzzle":
        raise ConfigError(
            f"--costs puzzle: the puzzles have neither host memory nor disk, which {name} needs: {_OTHERS}"
        )
    machine = None if costs == "unit" else machine_named(costs)
    sharing = 1 if family.streaming.dealt else ranks
    micro_batches, rest = divmod(arguments.micro_batches or _OFFLOAD_MICRO_BATCHES * ranks, sharing)
    if rest:
        raise ConfigError(
            f"--micro-batches {arguments.micro_batches} cannot be shared evenly by {ranks} ranks: write a multiple"
        )
    visits = 1 if family.streaming.order == "vertical" else micro_batches
    of_stage, of_group = 6 * ranks * micro_batches, 8 * ranks * (arguments.chunks or 16) * visits
    training = _training_of(arguments, machine, of_stage + of_group)
    program = training.profile.program
    stages = len(program.stages)
    _check_size(stages * of_stage + len(program.groups) * of_group)
    world = build(
        FamilyRequest(
            family=name,
            program=program,
            ranks=ranks,
            micro_batches=micro_batches * sharing,
            form=training.form,
            **fields_of(arguments, StreamOptions),
        )
    )
    share = f"{counted(ranks, 'rank')}, " if ranks > 1 else ""
    title = f"{name}: {counted(stages - 2, 'layer')}, {share}{counted(micro_batches * sharing, 'micro-batch')}"

    def case() -> Case:
        if machine is None:
            return abstract_case(world, title, replace(unit(), stage_ops=False), "bytes")
        return real_case(world, title, machine, training, layers=False)

    return Source(world=world, case=case)


_OTHERS = "use --costs unit or a machine's profile"


def _machine_of(ranks: int) -> str:
    """The machine where no costs are asked for: several ranks need one whose profile says what they send each other."""
    return MACHINE if ranks == 1 else LINKED_MACHINE


# ---- schedules from a file


def _file(arguments: Arguments) -> Source:
    """A schedule that a user has written, or that --text has printed."""
    path = Path(arguments.name)
    arguments.refuse("a schedule from a file", "ranks", "micro_batches", *_OF_LAYERS, *_OF_STREAMS)
    world = read_world(path)
    lanes = {op.lane for schedule in world.ranks for op in schedule.ops}
    offloads = bool(lanes & _OFFLOAD_LANES) or all(schedule.chunk for schedule in world.ranks)
    costs = arguments.costs or (_machine_of(len(world.ranks)) if offloads else "unit" if "send" in lanes else "puzzle")
    ops = sum(len(schedule.ops) for schedule in world.ranks)
    title = f"{world.name} from {path}: {counted(len(world.ranks), 'rank')}, {counted(ops, 'op')}"
    if costs in ("puzzle", "unit"):
        arguments.refuse(f"a schedule from a file with --costs {costs}", "layers", *_REAL)
        if costs == "puzzle" and lanes & _OFFLOAD_LANES:
            lane = next(iter(sorted(lanes & _OFFLOAD_LANES)))
            raise ConfigError(f"--costs puzzle: the puzzles have no lane {lane}, which {path} uses: {_OTHERS}")
        model = puzzle() if costs == "puzzle" else unit()
        model = replace(model, stage_ops=model.stage_ops and not offloads)
        return Source(world=world, case=lambda: abstract_case(world, title, model, "the file's unit"), checked=True)
    machine = machine_named(costs)
    if not offloads:
        training = _training_of_layers(path, world, arguments, machine, costs)
    else:
        training = _training_of(arguments, machine)
        _check_model(path, world, training, arguments)
    case = partial(real_case, world, title, machine, training, layers=not offloads)
    return Source(world=world, case=case, checked=True)


def _training_of_layers(path: Path, world: World, arguments: Arguments, machine: Machine, costs: str) -> Training:
    """A model whose blocks are the layers of a file. The file must have been made for that, not for other costs."""
    arguments.refuse(f"{path}, whose ops say which layers there are", "layers")
    idents = [op.id for schedule in world.ranks for op in schedule.lanes["compute"]]
    found = {ident.stage for ident in idents if ident.kind in ("F", "B", "I", "W")}
    if not found or len(found) <= max(found):
        missing = min(set(range(len(found) + 1)) - found)
        raise ConfigError(f"{path}: no op computes layer {missing}, and a model on a machine has all from 0 up")
    training = training_of(replace(arguments, layers=len(found)), machine)
    try:
        check_layers(world, layer_sizes(training.profile, training.form))
    except ScheduleError as error:
        raise ConfigError(
            f"{path}: {error}: {training.description}. A schedule for a machine has layers, not stages, and sizes in "
            f"bytes: print it with --costs {costs} --text, and simulate it with the same options for the model"
        ) from None
    return training


def _check_model(path: Path, world: World, training: Training, arguments: Arguments) -> None:
    """The schedule's stages and groups are those of the model whose times it gets."""
    stages, groups = len(training.profile.program.stages), len(training.profile.program.groups)
    for schedule in world.ranks:
        for op in schedule.ops:
            ident = op.id
            if ident.stage >= stages or ident.group >= groups or (ident.kind == "E" and ident.stage != stages - 1):
                model = f"{arguments.model or MODEL} with {counted(stages - 2, 'layer')}"
                raise ConfigError(
                    f"{path}: op {op.id} is not of {model}: say with --model and --layers which model it is for"
                )


def _training_of(arguments: Arguments, machine: Machine | None, of_layer: int = 6) -> Training:
    """``training_of``, where a schedule has room for as many layers as are asked for, each of at least ``of_layer``
    ops."""
    _check_size(of_layer * (arguments.layers or 0))
    return training_of(arguments, machine)


def _check_size(ops: int) -> None:
    if ops > MOST_OPS:
        raise ConfigError(
            f"that is a schedule of about {ops:,} ops, and {MOST_OPS:,} fit in memory: ask for fewer layers, ranks, "
            "micro-batches or chunks"
        )
