"""``penstock plan``: what a run will do on a machine, before anything is bought, loaded or waited for."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, get_args

from penstock.cli.launch import MOST_RANKS
from penstock.cli.plan_hosts import check_hosts, compare
from penstock.cli.settings import load
from penstock.cli.split import check_of_pipeline, check_sums, dealt_batch
from penstock.cli.task import as_free_here, check_names, shape_of, shipped_shape, task_of
from penstock.cli.words import Words, help_of, read_words, split_words
from penstock.config import BatchConfig, Durability, TrainConfig, fields_of, format_size, parse_size
from penstock.config.quantities import parse_count
from penstock.config.sizes import MEMORY_LEAST, check_size
from penstock.config.step import check_deal
from penstock.documents.typed import hints_of
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.drives import with_room
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import check_device, machine_named, on_directories
from penstock.hardware.sharing import too_full
from penstock.planner.arguments import PlanInputs, PlanSettings, check_drives, check_streamed
from penstock.planner.ask import PlanReport, measured, plan, rated, report
from penstock.planner.dealt import Pipeline
from penstock.planner.task import own_budget
from penstock.schedule.collection import no_collection


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanInputs, Words):
    """penstock plan: the best way to run a model on a machine, and what to expect of it

      penstock plan CONFIG.yaml [--SETTING VALUE ...]    plan the run that penstock train would do with this file; so
                                                         --model NAME plans it for another model
      penstock plan --model NAME [--machine NAME]        plan a model that ships, a config.json or its folder

    | option | meaning |
    |---|---|
    | ``machine`` NAME|FILE | a machine that ships with penstock, or a profile; without it, this machine, as penstock
    doctor has measured it |
    | ``hosts`` COUNTxRANKSxNAME | say which layout of the ranks of several hosts is the fastest: 2x8xh100-80g is two
    machines of 8 ranks each, 2x8 two like this one (or ``machine``), and + joins several kinds |
    | ``network`` RATE | a host's link to the other hosts, as 100Gbit/s, if not what the profile says |
    | ``latency`` TIME | of a message over it (10us) |
    | ``longest`` | also look for the longest sequences that fit, which may take a minute more |
    | ``json`` | print everything as JSON |
    """

    command: ClassVar[str] = "penstock plan"
    takes: ClassVar[str] = "a settings file, or --model NAME"
    common: ClassVar[bool] = True

    machine: str | None = None
    hosts: str | None = None
    network: str | None = None
    latency: str | None = None
    longest: bool = False
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class FileArguments(PlanOptions):
    """With a settings file, also:

    | option | meaning |
    |---|---|
    | ``ranks`` N | plan for N processes on the machine that share the model's state; those of a file with ``pipeline``
    are as many as that says |
    | ``epoch_tokens`` N | tokens in the training data (100M, 1.5B), for a file that gives epochs: how long these take,
    and what share of the drives' life |
    """

    operands: ClassVar[tuple[str, ...]] = ("config",)

    config: Path
    ranks: int = 1
    epoch_tokens: str | int | float | None = None
    settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self.check_inputs()
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"ranks={self.ranks}: must be from 1 to {MOST_RANKS}, the processes on one machine")
        if self.epoch_tokens is not None:
            parse_count("epoch_tokens", self.epoch_tokens)
        check_hosts(self)
        keys = {key.replace("-", "_") for key, _ in self.settings}
        if self.batch is not None and (cut := {"micro_batches", "micro_batch_size"} & keys):
            raise ConfigError(
                f"--batch is cut into micro-batches by the planner: give it without --{min(cut).replace('_', '-')}"
            )

    def to_plan(self) -> TrainConfig:
        """The settings of the run: the file's and the flags', with the batch that is asked for in the place of theirs.

        Raises:
            ConfigError: as ``load``.
        """
        config = load(self.config, self.settings)
        if self.batch is None:
            return config
        return replace(config, batch=BatchConfig(sequences=self.batch), micro_batch_size=None)


@dataclass(frozen=True, kw_only=True)
class ModelArguments(PlanOptions, PlanSettings):
    """With --model and no file, also:

    | option | meaning |
    |---|---|
    | ``model`` NAME | a model that ships, a config.json or its folder |
    | ``device``, ``host`` | memory that may be used (most of what the machine has) |
    | ``durability`` | what a kill may cost (step, if that costs less than 10% of a step) |
    """

    of_a_run: ClassVar[bool] = True

    model: str
    device: str | int | float | None = None
    host: str | int | float | None = None
    durability: Durability | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hosts(self)
        for key in ("device", "host"):
            if (size := getattr(self, key)) is not None:
                check_size(key, size, MEMORY_LEAST)


Arguments = FileArguments | ModelArguments


def help_text() -> str:
    """The usage, with and without a file."""
    forms = (help_of(form, but=PlanOptions) for form in (FileArguments, ModelArguments))
    return "\n".join((help_of(PlanOptions), *forms))


def read_arguments(words: Sequence[str]) -> Arguments:
    """Raises ConfigError: as ``read_words``; or there is no model."""
    plain, flags = split_words(FileArguments, words)
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags}
    if plain:
        if "tokens" in given:  # which of a file would be taken for those of a batch
            raise ConfigError("--tokens is for a model without a settings file, whose steps or epochs say it")
        return read_words(FileArguments, words)
    known = {*hints_of(FileArguments), *hints_of(ModelArguments), *hints_of(TrainConfig)}
    # Without a file an option that is none of either form is a misspelt one, perhaps --model.
    if "model" not in given and all(key.partition(".")[0] in known for key in given):
        return read_words(FileArguments, words)
    check_streamed(given.get("schedule"))
    return read_words(ModelArguments, words)


@no_collection()
def run(arguments: Arguments) -> int:
    """Plan, and print. Returns the exit code.

    Raises:
        ConfigError, BudgetError, ModelError: see ``penstock.plan``.
    """
    if arguments.hosts is not None:
        return compare(arguments)
    if isinstance(arguments, FileArguments):
        config = arguments.to_plan()
        if config.pipeline > 1:
            _of_pipeline(arguments, config)
            return 0
        found = _of_config(arguments, config)
    else:
        found = _of_model(arguments)
    longest = found.longest if arguments.longest else None
    if arguments.json:
        more = {"longest": None if longest is None else asdict(longest)} if arguments.longest else {}
        print(json.dumps(found.json | more, indent=2))
    else:
        from penstock.cli.plan_text import describe, describe_longest

        print(describe(found, wide=(sys.stdout.encoding or "").lower().startswith("utf")), end="")
        if arguments.longest:
            print(f"\n{describe_longest(longest)}")
    return 0


def _of_model(arguments: ModelArguments) -> PlanReport:
    machine = measured(()) if arguments.machine is None else machine_named(arguments.machine)
    budget = own_budget(machine, device=arguments.device, host=arguments.host)
    return plan(
        arguments.model,
        machine=machine,
        budget=replace(budget, durability=arguments.durability),
        **fields_of(arguments, PlanSettings),
    )


def _of_pipeline(arguments: FileArguments, config: TrainConfig) -> None:
    """Print what to expect of a pipeline's step.

    Raises:
        ConfigError, BudgetError: as ``penstock.plan``; or an option says nothing of a pipeline.
    """
    from penstock.cli.pipeline import expected, fastest
    from penstock.cli.pipeline_text import as_json, describe

    whole = config.pipeline * config.cp
    ranks = whole if arguments.ranks == 1 else arguments.ranks
    if ranks % whole:
        said = f"pipeline: {config.pipeline}" + (f" and cp: {config.cp}" if config.cp > 1 else "")
        raise ConfigError(f"--ranks {ranks}, and the file says {said}: give a multiple of {whole}, or leave one out")
    check_of_pipeline(config, ranks)
    check_sums(config, ranks)
    for name, given in (("longest", arguments.longest), ("tbw", arguments.tbw is not None)):
        if given:
            raise ConfigError(f"--{name} is not there yet for a pipeline ({config.pipeline} ranks): leave it out")
    check_drives(arguments.disk_free, None, config.budget)
    machine = _machine(arguments, config)
    check_names(config, machine.device.kind)
    size, each = dealt_batch(config, config.sharing(ranks))
    if size is None:
        found = fastest(config, machine, ranks)[0]
    else:
        found = expected(config, shape_of(config, machine.device.kind), machine, size, each, ranks)
    check = partial(_check_room, machine)
    found = found.improved(check)
    check(found)
    steps = config.steps
    if arguments.epoch_tokens is not None or steps is None:
        steps = _steps(config, arguments.epoch_tokens, found.tokens)
    if arguments.json:
        print(json.dumps(as_json(found, config, machine, steps), indent=2))
    else:
        print(*describe(found, config, machine, steps), sep="\n")


def _check_room(machine: Machine, found: Pipeline) -> None:
    """Raises BudgetError: a drive has no room for all that a pipeline's ranks would have on it."""
    needs = [nbytes for nbytes in found.disk_bytes for _ in range(found.beside)]
    if any(needs) and (full := too_full(machine.drives, needs)) is not None:
        need, free = map(format_size, full)
        raise BudgetError(f"budget.disk: on one drive the stores take {need}, and {free} are free there")


def _of_config(arguments: FileArguments, config: TrainConfig) -> PlanReport:
    if isinstance(config.schedule, Path):
        raise ConfigError(
            f"schedule={str(config.schedule)!r} is a schedule of your own, which penstock simulate shows in time; "
            "penstock plan chooses one: give --schedule vertical or horizontal"
        )
    check_drives(arguments.disk_free, arguments.tbw, config.budget)
    machine = _machine(arguments, config)
    if (tbw := config.drive_tbw if arguments.tbw is None else arguments.tbw) is not None:
        machine = rated(machine, tbw)
    ranks = arguments.ranks
    config.check_ranks(ranks)
    check_sums(config, ranks)
    check_deal(config.deal, dealt=False)
    check_names(config, machine.device.kind)
    task = task_of(config, machine, ranks=ranks)
    size, each = dealt_batch(config, config.sharing(ranks))
    found = report(task, batch=each) if size is None else report(task, split=(size, each))
    steps, notes = _steps(config, arguments.epoch_tokens, found.forecast.tokens), list(found.notes)
    if steps is None:
        notes.append("the time of the epochs depends on the data: give --epoch-tokens N, the tokens in one")
    if config.plan is None:
        notes.append(
            "the file says plan: null, so that the run places state by a fixed order; this is the plan for plan: auto"
        )
    if (shipped := shipped_shape(config.model)) is not None:
        notes.append(
            f"the shape of {config.model.source} is the published one, which ships as {shipped}: no hub was asked"
        )
    return replace(found, steps=steps, notes=tuple(notes))


def _steps(config: TrainConfig, epoch_tokens: str | float | None, tokens: int) -> int | None:
    """Steps of the whole run, each of so many tokens; None: that depends on how much data there are, which nobody has
    said."""
    if config.epochs is None:
        if epoch_tokens is not None:
            raise ConfigError(f"epoch_tokens has no effect where the file gives steps ({config.steps}): leave it out")
        return config.steps
    if epoch_tokens is None:
        return None
    return max(round(config.epochs * parse_count("epoch_tokens", epoch_tokens) / tokens), 1)  # as the run counts them


def _machine(arguments: FileArguments, config: TrainConfig) -> Machine:
    """The machine that is named, or this one with the device that the settings name, with the budget's directories and
    the bytes that may be used there."""
    device, paths, asked = config.device, config.budget.disk_paths, arguments.machine
    if asked is None:
        kind = next((kind for kind in get_args(DeviceKind) if device is not None and device.startswith(kind)), None)
        machine = measured(paths, kind=kind)
    else:
        machine = on_directories(machine_named(asked), paths)
        if device is not None:
            check_device(machine, device)
    if arguments.disk_free is not None:
        return replace(machine, drives=with_room(machine.drives, parse_size(arguments.disk_free)))
    return as_free_here(machine, paths) if asked is None else machine
