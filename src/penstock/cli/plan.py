"""``penstock plan``: what a run will do on a machine, before anything is bought, loaded or waited for."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from penstock.cli.settings import load
from penstock.cli.task import free_here, shipped_shape, task_of
from penstock.config import Durability, Family, GradDtype, OptimizerName, Precision, TrainConfig, parse_size
from penstock.errors import ConfigError
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import check_device, machine_named, on_directories
from penstock.planner.arguments import check_drives
from penstock.planner.ask import PlanReport, measured, plan, rated, report
from penstock.planner.task import free_bytes, own_budget

PLAN_HELP = """\
penstock plan: the best way to run a model on a machine, and what to expect of it

  penstock plan CONFIG.yaml [--SETTING VALUE ...]    plan the run that penstock train would do with this file; so
                                                     --model NAME plans it for another model
  penstock plan --model NAME [--machine NAME]        plan a model that ships, a config.json or its folder

  --machine NAME|FILE    a machine that ships with penstock, or a profile; without it, this machine, as penstock doctor
                         has measured it
  --batch N              sequences in a step; cut into micro-batches as is best
  --disk-free SIZE       disk space that may be used, if not what the profile says
  --tbw N                terabytes that each drive is rated for, if not what the profile says
  --json                 print everything as JSON

With --model and no file, also:
  --micro-batches M --micro-batch-size B             how a step is cut, instead of --batch
  --sequence N           tokens in a sequence (2048)
  --precision P          fp32, bf16 or fp16 (bf16 on a GPU, fp32 on a CPU)
  --grad-dtype T         fp32, or bf16: gradients are rounded to it before norm and optimizer (fp32)
  --optimizer NAME       adamw, adam, sgd or lion (adamw)
  --clip-grad-norm X     clip gradients, so that the optimizer waits for their norm
  --schedule FAMILY      vertical or horizontal (the better one)
  --speculate true|false steps what is on disk before the norm of clipping or fp16 is known, or waits (the faster one)
  --delay X              share of the optimizer's steps that is taken in the next step's forward, 0 to 1 (the fastest)
  --durability D         step, interval or none: what a kill may cost (step, if that costs less than 10% of a step)
  --device SIZE, --host SIZE                         memory that may be used (most of what the machine has)
"""

_BOTH = ("machine", "batch", "disk-free", "tbw")
_WITH_MODEL = (
    *_BOTH,
    "micro-batches",
    "micro-batch-size",
    "sequence",
    "precision",
    "grad-dtype",
    "optimizer",
    "clip-grad-norm",
    "schedule",
    "speculate",
    "delay",
    "durability",
    "device",
    "host",
)


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """``penstock plan``. ``options``: flag -> text; ``settings``: dotted setting and value, with ``config`` only."""

    config: Path | None = None
    model: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[tuple[str, str], ...] = ()
    as_json: bool = False


def parse_plan(words: Sequence[str]) -> PlanArguments:
    """Take apart the words after ``penstock plan``.

    Raises:
        ConfigError: no model or two, a flag without a value, an unknown flag.
    """
    files: list[str] = []
    given: list[tuple[str, str]] = []
    as_json = False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if word == "--json":
            as_json = True
        elif not word.startswith("--"):
            files.append(word)
        elif equals:
            given.append((key, value))
        elif not rest or rest[0].startswith("--"):
            raise ConfigError(f"{word} needs a value: {word} VALUE. Try: penstock plan --help")
        else:
            given.append((key, rest.pop(0)))
    models = [value for key, value in given if key == "model"]
    if len(files) > 1 or not (files or models):
        found = " and ".join(files) or "neither"
        raise ConfigError(
            f"penstock plan takes a settings file, or --model NAME, and was given {found}. Try: penstock plan --help"
        )
    own = _BOTH if files else _WITH_MODEL
    options = {key: value for key, value in given if key in own}
    settings = tuple((key, value) for key, value in given if key not in own and (files or key != "model"))
    if not files and settings:
        raise ConfigError(f"--{settings[0][0]} is not an option of penstock plan --model. Try: penstock plan --help")
    _check_flags([key.replace("-", "_") for key, _ in given])
    return PlanArguments(
        config=Path(files[0]) if files else None,
        model=models[0] if models and not files else None,
        options=options,
        settings=settings,
        as_json=as_json,
    )


def _check_flags(keys: Sequence[str]) -> None:
    """Refuse flags of which one would have no effect. ``keys``: with underscores."""
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"--{twice[0].replace('_', '-')} is given twice: keep one")
    if "batch" in keys and (cut := {"micro_batches", "micro_batch_size"} & set(keys)):
        raise ConfigError(
            f"--batch is cut into micro-batches by the planner: give it without --{min(cut).replace('_', '-')}"
        )


def run_plan(arguments: PlanArguments) -> int:
    """Plan, and print. Returns the exit code.

    Raises:
        ConfigError, BudgetError, ModelError: see ``penstock.plan``.
    """
    found = _of_model(arguments) if arguments.config is None else _of_config(arguments.config, arguments)
    if arguments.as_json:
        print(json.dumps(found.json, indent=2))
    else:
        from penstock.cli.plan_text import describe

        print(describe(found, wide=(sys.stdout.encoding or "").lower().startswith("utf")), end="")
    return 0


def _of_model(arguments: PlanArguments) -> PlanReport:
    options = arguments.options
    machine = machine_named(options["machine"]) if "machine" in options else measured(())
    assert arguments.model is not None
    more: dict[str, Any] = {
        "micro_batches": _whole(options, "micro-batches"),
        "micro_batch_size": _whole(options, "micro-batch-size"),
        "sequence_length": _whole(options, "sequence") or 2048,
        "precision": _one_of(options, "precision", get_args(Precision)),
        "grad_dtype": _one_of(options, "grad-dtype", get_args(GradDtype)) or "fp32",
        "optimizer": _one_of(options, "optimizer", get_args(OptimizerName)) or "adamw",
        "clip_grad_norm": _number(options, "clip-grad-norm"),
        "schedule": _one_of(options, "schedule", get_args(Family)),
    }
    return plan(
        arguments.model,
        machine=machine,
        budget=replace(
            own_budget(machine, device=_size(options, "device"), host=_size(options, "host")),
            durability=_durability(options),
        ),
        batch=_whole(options, "batch"),
        disk_free=_size(options, "disk-free"),
        tbw=_number(options, "tbw"),
        speculate=_truth(options, "speculate"),
        delay=_share(options, "delay"),
        **more,
    )


def _of_config(path: Path, arguments: PlanArguments) -> PlanReport:
    options, config = arguments.options, load(path, arguments.settings)
    if isinstance(config.schedule, Path):
        raise ConfigError(
            f"schedule={str(config.schedule)!r} is a schedule of your own, which penstock simulate shows in time; "
            "penstock plan chooses one: give --schedule vertical or horizontal"
        )
    paths = config.budget.disk_paths
    machine = _machine(config, options.get("machine"))
    free, tbw = _size(options, "disk-free"), _number(options, "tbw")
    check_drives(free, tbw, config.budget)
    if free is None:
        free = free_bytes(machine) if "machine" in options else free_here(paths)
    if tbw is None:
        tbw = config.drive_tbw
    if tbw is not None:
        machine = rated(machine, tbw)
    task = task_of(config, machine, disk_free=free)
    batch = _whole(options, "batch")
    if batch is None and config.micro_batch_size is not None:
        found = report(task, split=config.split)
    else:
        found = report(task, batch=batch or config.sequences_per_step)
    if config.plan is None:
        note = (
            "the file says plan: null, so that the run places state by a fixed order; this is the plan for plan: auto"
        )
        found = replace(found, notes=(*found.notes, note))
    if (shipped := shipped_shape(config.model)) is not None:
        note = f"the shape of {config.model.source} is the published one, which ships as {shipped}: no hub was asked"
        found = replace(found, notes=(*found.notes, note))
    return found


def _machine(config: TrainConfig, asked: str | None) -> Machine:
    """The machine that is named, or this one with the device that the settings name, with the budget's directories."""
    device, paths = config.device, config.budget.disk_paths
    if asked is None:
        kind = next((kind for kind in get_args(DeviceKind) if device is not None and device.startswith(kind)), None)
        return measured(paths, kind=kind)
    machine = on_directories(machine_named(asked), paths)
    if device is not None:
        check_device(machine, device)
    return machine


# ---- options


def _whole(options: Mapping[str, str], name: str) -> int | None:
    if name not in options:
        return None
    text = options[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name} {text}: must be a whole number of at least 1")
    return int(text)


def _number(options: Mapping[str, str], name: str) -> float | None:
    if name not in options:
        return None
    try:
        value = float(options[name])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{name} {options[name]}: must be a number of more than 0")
    return value


def _share(options: Mapping[str, str], name: str) -> float | None:
    if name not in options:
        return None
    try:
        value = float(options[name])
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"--{name} {options[name]}: must be a number from 0 to 1")
    return value


def _durability(options: Mapping[str, str]) -> Durability | None:
    text = _one_of(options, "durability", get_args(Durability))
    return next((known for known in get_args(Durability) if known == text), None)


def _truth(options: Mapping[str, str], name: str) -> bool | None:
    text = _one_of(options, name, ("true", "false"))
    return None if text is None else text == "true"


def _size(options: Mapping[str, str], name: str) -> int | None:
    if name not in options:
        return None
    try:
        return parse_size(options[name])
    except ConfigError as error:
        raise ConfigError(f"--{name} {error}") from None


def _one_of(options: Mapping[str, str], name: str, known: Sequence[str]) -> str | None:
    if name in options and options[name] not in known:
        raise ConfigError(f"--{name} {options[name]}: must be one of {', '.join(known)}")
    return options.get(name)
