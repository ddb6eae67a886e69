"""``penstock train``: from a settings file to a trained model, step by step, with everything it did written down."""

import logging
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.cli.display import Display, choose_display
from penstock.cli.interrupt import Interrupt
from penstock.cli.keeping import cost_of_a_kill, space
from penstock.cli.meter import Meter, Outline, metrics_of
from penstock.cli.model import build_model, parameter_count
from penstock.cli.out_of_memory import explain, is_out_of_memory
from penstock.cli.pace import Pace
from penstock.cli.run_folder import (
    MetricsFile,
    Start,
    claim,
    discard,
    has_steps,
    trace_path,
    write_prediction,
    write_settings,
)
from penstock.cli.schedule_file import read_world
from penstock.cli.summary import closing, opening, reset_peak_resident, resident_bytes
from penstock.config import LrScheduleConfig, OptimizerConfig, OptimizerName, Tier, TrainConfig
from penstock.data.batches import Batches
from penstock.data.tokens import TokenArray, TokenizedText, tokenize
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.optim.spec import SGD, Adam, AdamW, Lion, OptimizerSpec, Override
from penstock.plan.machine import Machine
from penstock.plan.meta import Kind
from penstock.plan.profiles import find_profile, save_profile
from penstock.report.prediction import Prediction
from penstock.run.device import resolve_device
from penstock.run.trace import TraceWriter
from penstock.schedule.op import Schedule
from penstock.sim.result import Simulation
from penstock.wrapping import wrap

log = logging.getLogger("penstock")

_OPTIMIZERS: Mapping[OptimizerName, type[OptimizerSpec]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "lion": Lion}


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A run from a start, or a resumption, to a stop. ``first``: steps that earlier stretches have done."""

    config: TrainConfig
    folder: Path
    display: Display
    engine: Engine
    train: Batches
    validation: Batches | None
    first: int
    meter: Meter
    pace: Pace

    @property
    def trace(self) -> Path | None:
        return None if self.config.trace_steps == 0 else trace_path(self.folder, self.first)


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
        _report_last(stretch)
        _check_unfinished(config, engine.step_count)
        write_settings(folder, config)
        code = _steps(stretch)
    display.say(closing(stretch.meter, own_bytes=own, folder=folder, trace=stretch.trace, stopped=code != 0))
    return code


def _report_last(stretch: Stretch) -> None:
    """Add the line of the step that the run goes on after, if a kill came between its commit and its line."""
    last = stretch.engine.last_step
    with MetricsFile(stretch.folder, done=stretch.first) as metrics:
        if last is not None and metrics.last < stretch.first == last.step:
            metrics.write(metrics_of(last, _evaluate(stretch, last.step)))


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


def optimizer_spec(config: OptimizerConfig) -> OptimizerSpec:
    """The optimizer that the settings describe; what they leave out keeps the spec's default."""
    overrides = tuple(Override(match=o.match, lr=o.lr, weight_decay=o.weight_decay) for o in config.overrides)
    return _OPTIMIZERS[config.name](**config.given(), overrides=overrides)


def lr_factor(config: LrScheduleConfig, steps: int) -> Callable[[int], float]:
    """The factor on the learning rate of each step, from 0: warm-up to 1, then a decay that ends at ``final``."""
    final = config.final or 0.0

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.kind == "constant":
            return 1.0
        progress = min((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
        down = progress if config.kind == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return 1.0 + (final - 1.0) * down

    return factor


def _steps(stretch: Stretch) -> int:
    """The training loop. Returns the exit code."""
    config, display, engine, first = stretch.config, stretch.display, stretch.engine, stretch.first
    factor = lr_factor(config.lr_schedule, config.steps)
    scheduler = LambdaLR(engine.optimizer, lambda index: factor(first + index))
    reset_peak_resident()
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsFile(stretch.folder, done=first))
        trace = stack.enter_context(TraceWriter(stretch.trace, steps=config.trace_steps)) if stretch.trace else None
        interrupt = stack.enter_context(Interrupt(display.notice, display.last_words))
        display.begin(stretch.meter)
        stack.callback(display.end)
        known: Simulation | None = None
        for index in range(first, config.steps):
            stats = engine.step(stretch.train.step(index))
            interrupt.leave_lost_terminal()
            scheduler.step()
            if trace is not None:
                trace.step(engine.trace, engine.counters)
            stretch.meter.planned(engine.plan.state_bytes, engine.plan.disk_bytes)
            if index == first:
                _say_cost(stretch)
            known = _foretell(stretch, known)
            if slow := stretch.pace.check(stats, known):
                log.warning(slow)
            held_out = None if interrupt.requested else _evaluate(stretch, index + 1)
            stretch.meter.add(stats, held_out)
            metrics.write(metrics_of(stats, held_out))
            display.update()
            if interrupt.requested:
                break
    return interrupt.exit_code


def _say_cost(stretch: Stretch) -> None:
    """What a kill would cost, where that was not known before the first plan."""
    budget = stretch.config.budget
    if cost_of_a_kill(budget, None) is None:
        stretch.display.say(f"As planned, {cost_of_a_kill(budget, stretch.engine.plan)}")


def _foretell(stretch: Stretch, known: Simulation | None) -> Simulation | None:
    """Write down what is predicted of this plan's steps, when it is not known yet; returns what is."""
    simulation = stretch.engine.prediction
    if simulation is None or simulation is known:
        return known
    prediction = Prediction.of(simulation, budget=stretch.meter.outline.given)
    write_prediction(stretch.folder, prediction)
    stretch.meter.forecast(prediction.time, prediction.bottleneck)
    return simulation


def _evaluate(stretch: Stretch, done: int) -> float | None:
    """The mean held-out loss, when this step is followed by an evaluation."""
    evaluate = stretch.config.evaluate
    if evaluate is None or stretch.validation is None:
        return None
    if done % evaluate.every and done != stretch.config.steps:
        return None
    losses = [stretch.engine.evaluate(stretch.validation.step(index)) for index in range(evaluate.batches)]
    return sum(losses) / len(losses)
