"""``penstock train``: from a settings file to a trained model, step by step, with everything it did written down."""

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.engine import Engine, wrap
from torch.optim.lr_scheduler import LambdaLR

from penstock.cli import settings
from penstock.cli.display import Display, choose_display
from penstock.cli.interrupt import Interrupt
from penstock.cli.meter import Meter, Outline, metrics_of
from penstock.cli.model import build_model, parameter_count
from penstock.cli.run_folder import MetricsFile, claim
from penstock.cli.summary import closing, opening, reset_peak_resident, resident_bytes
from penstock.config import LrScheduleConfig, OptimizerConfig, OptimizerName, TrainConfig
from penstock.data.batches import Batches
from penstock.data.tokens import TokenArray, TokenizedText, tokenize
from penstock.optim.spec import SGD, Adam, AdamW, Lion, OptimizerSpec, Override
from penstock.run.trace import TraceWriter

_OPTIMIZERS: Mapping[OptimizerName, type[OptimizerSpec]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "lion": Lion}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run works with, once everything is set up."""

    config: TrainConfig
    folder: Path
    display: Display
    engine: Engine
    train: Batches
    validation: Batches | None
    meter: Meter


def train(config: TrainConfig, *, overwrite: bool) -> int:
    """Carry out a run and return the exit code: 0, or 128 plus the signal that ended it early.

    Raises:
        ConfigError, BudgetError, ModelError, StoreError, NonFiniteError: as they come.
    """
    display = choose_display(sys.stdout)
    optimizer = optimizer_spec(config.optimizer)
    folder = claim(Path(config.run), overwrite=overwrite)
    (folder / "config.yaml").write_text(settings.dump(config), encoding="utf-8")
    share = None if config.evaluate is None else config.evaluate.share
    with display.working(f"Reading text and training a tokenizer of {config.data.vocabulary:,} tokens"):
        text = tokenize(config.data, folder, held_out=share)
    train_batches, validation = _batches(config, text)
    model = build_model(config.model, config.data)
    display.say(opening(config, text, parameter_count(model)))
    own = resident_bytes()
    with wrap(
        model,
        optimizer=optimizer,
        budget=config.budget,
        precision=config.precision,
        schedule=config.schedule,
        clip_grad_norm=config.clip_grad_norm,
        device=config.device,
        seed=config.seed,
    ) as engine:
        outline = Outline(
            steps=config.steps,
            parameters=parameter_count(model),
            given={"device": config.budget.device_bytes, "host": config.budget.host_bytes},
        )
        run = Run(
            config=config,
            folder=folder,
            display=display,
            engine=engine,
            train=train_batches,
            validation=validation,
            meter=Meter(outline=outline),
        )
        code = _steps(run)
        state_bytes = engine.plan.state_bytes
    traced = config.trace_steps != 0
    display.say(
        closing(run.meter, state_bytes=state_bytes, own_bytes=own, folder=folder, traced=traced, stopped=code != 0)
    )
    return code


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


def _steps(run: Run) -> int:
    """The training loop. Returns the exit code."""
    config, display, engine = run.config, run.display, run.engine
    scheduler = LambdaLR(engine.optimizer, lr_factor(config.lr_schedule, config.steps))
    reset_peak_resident()
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsFile(run.folder / "metrics.jsonl"))
        trace = None
        if config.trace_steps != 0:
            trace = stack.enter_context(TraceWriter(run.folder / "trace.json", steps=config.trace_steps))
        interrupt = stack.enter_context(Interrupt(display.notice, display.last_words))
        display.begin(run.meter)
        stack.callback(display.end)
        for index in range(config.steps):
            stats = engine.step(run.train.step(index))
            scheduler.step()
            if trace is not None:
                trace.step(engine.trace, engine.counters)
            held_out = _evaluate(run, index + 1, last=interrupt.requested)
            run.meter.disk_bytes = engine.plan.disk_bytes
            run.meter.add(stats, held_out)
            metrics.write(metrics_of(stats, held_out))
            display.update()
            if interrupt.requested:
                break
    return interrupt.exit_code


def _evaluate(run: Run, done: int, *, last: bool) -> float | None:
    """The mean held-out loss, when this step is followed by an evaluation."""
    evaluate = run.config.evaluate
    if evaluate is None or run.validation is None or last:
        return None
    if done % evaluate.every and done != run.config.steps:
        return None
    losses = [run.engine.evaluate(run.validation.step(index)) for index in range(evaluate.batches)]
    return sum(losses) / len(losses)
