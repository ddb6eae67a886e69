"""``penstock train``: from a settings file to a trained model, step by step, with everything it did written down."""

import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

from penstock.cli.display import Display, choose_display
from penstock.cli.keeping import cost_of_a_kill, space
from penstock.cli.loop import Stretch, report_last, run_steps
from penstock.cli.meter import Meter, Outline
from penstock.cli.model import build_model, parameter_count
from penstock.cli.out_of_memory import explain, is_out_of_memory
from penstock.cli.pace import Pace
from penstock.cli.recipe import optimizer_spec
from penstock.cli.run_folder import (
    Start,
    claim,
    discard,
    has_steps,
    write_settings,
)
from penstock.cli.schedule_file import read_world
from penstock.cli.summary import closing, opening, resident_bytes
from penstock.config import Tier, TrainConfig
from penstock.data.batches import Batches
from penstock.data.tokens import TokenArray, TokenizedText, tokenize
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.optim.spec import OptimizerSpec
from penstock.plan.machine import Machine
from penstock.plan.meta import Kind
from penstock.plan.profiles import find_profile, save_profile
from penstock.run.device import resolve_device
from penstock.schedule.op import Schedule
from penstock.wrapping import wrap


def train(config: TrainConfig, start: Start) -> int:
    """Carry out a run and return the exit code: 0, or 128 plus the signal that ended it early.

    Raises:
        ConfigError, BudgetError, ModelError, StoreError, NonFiniteError: as they come.
        MemoryError: no memory was left, of the device's or the process's memory.
    """
    display = choose_display(sys.stdout)
    schedule = _schedule(config.schedule)
    optimizer = optimizer_spec(config.optimizer)
    model = build_model(config.model, config.data)
    folder = claim(config, start)
    try:
        make_engine = partial(_engine, model, optimizer, config, schedule, _machine(config, display))
        return _train(config, display, folder, make_engine, parameter_count(model))
    except BaseException as error:
        begun = start == "resume" or has_steps(folder)
        memory = explain(error, config, begun=begun) if is_out_of_memory(error) else None
        if not begun:  # so that the next try does not need --overwrite
            discard(config)
        if memory is not None:
            raise MemoryError(memory) from error
        raise


def _train(
    config: TrainConfig, display: Display, folder: Path, make_engine: Callable[[], Engine], parameters: int
) -> int:
    """The run in a folder that is its own."""
    share = None if config.evaluate is None else config.evaluate.share
    with display.working(f"Training a tokenizer of {config.data.vocabulary:,} tokens and encoding the text"):
        text = tokenize(config.data, folder, held_out=share)
    batches, validation = _batches(config, text)
    display.say(opening(config, text, parameters))
    own = resident_bytes()
    with ExitStack() as stack:
        with display.working(f"Preparing {parameters / 1e6:.1f}M parameters and their optimizer state"):
            engine = stack.enter_context(make_engine())
        cost = cost_of_a_kill(config.budget, None)
        display.say(space(config.budget) + ("" if cost is None else f"; {cost}"))
        given: dict[Tier, int] = {"device": config.budget.device_bytes, "host": config.budget.host_bytes}
        stretch = Stretch(
            config=config,
            folder=folder,
            display=display,
            engine=engine,
            train=batches,
            validation=validation,
            first=engine.step_count,
            meter=Meter(
                outline=Outline(steps=config.steps, parameters=parameters, given=given, first=engine.step_count)
            ),
            pace=Pace(),
        )
        report_last(stretch)
        _check_unfinished(config, engine.step_count)
        write_settings(folder, config)
        code = run_steps(stretch)
    display.say(closing(stretch.meter, own_bytes=own, folder=folder, trace=stretch.trace, stopped=code != 0))
    return code


def _check_unfinished(config: TrainConfig, done: int) -> None:
    """Raises:
    ConfigError: there is no step left to do.
    """
    if done >= config.steps:
        raise ConfigError(
            f"run={config.run!r} is complete: {done} steps are done and steps is {config.steps}. To go on, raise it: "
            f"penstock resume {shlex.quote(config.run)} --steps {2 * done}"
        )


def _schedule(asked: Literal["vertical", "horizontal"] | Path) -> Literal["vertical", "horizontal"] | Schedule:
    """A family by its name, or the schedule that a file holds, checked.

    Raises:
        ConfigError: there is no such file, or it holds no schedule of one rank that keeps the rules.
    """
    if not isinstance(asked, Path):
        return asked
    if not asked.exists():
        raise ConfigError(f"schedule={str(asked)!r}: must be vertical, horizontal or a file, and there is no such file")
    world = read_world(asked)
    if len(world.ranks) > 1:
        raise ConfigError(f"schedule={str(asked)!r} is for {len(world.ranks)} ranks: training runs one")
    return world.ranks[0]


def _machine(config: TrainConfig, display: Display) -> Machine | None:
    """The profile to plan for: the one that is stored, else a quick one that is made and stored now."""
    if config.plan is None:
        return None
    paths, device = config.budget.disk_paths, resolve_device(config.device)
    kind: Kind = "cpu" if device.type == "cpu" else "cuda"
    found = find_profile(paths, kind=kind)
    if found is None:
        from penstock.doctor import examine

        other = " for this kind of device" if find_profile(paths) is not None else ""
        display.say(
            f"This machine has no profile{other} yet: measuring it, once (penstock doctor does it more thoroughly)"
        )
        existing = dict.fromkeys(next(p for p in (path, *path.parents) if p.is_dir()) for path in paths)
        save_profile(examine.examine(list(existing), examine.QUICK, device, display.working))
        found = find_profile(paths, kind=kind)
    return found


def _engine(
    model: nn.Module,
    optimizer: OptimizerSpec,
    config: TrainConfig,
    schedule: Literal["vertical", "horizontal"] | Schedule,
    profile: Machine | None,
) -> Engine:
    return wrap(
        model,
        optimizer=optimizer,
        budget=config.budget,
        precision=config.precision,
        schedule=schedule,
        plan=profile,
        clip_grad_norm=config.clip_grad_norm,
        device=config.device,
        seed=config.seed,
        speculate=config.speculate,
        grad_dtype=config.grad_dtype,
        delay=config.delay,
    )


def _batches(config: TrainConfig, text: TokenizedText) -> tuple[Batches, Batches | None]:
    """Training sequences in random order, held-out ones in the order of the text."""

    def batches(tokens: TokenArray, name: str, seed: int | None) -> Batches:
        return Batches(
            tokens=tokens,
            name=name,
            sequence_length=config.data.sequence_length,
            micro_batches=config.micro_batches,
            micro_batch_size=config.micro_batch_size,
            seed=seed,
        )

    held_out = None if text.validation is None else batches(text.validation, "validation", None)
    return batches(text.train, "training", config.seed), held_out
