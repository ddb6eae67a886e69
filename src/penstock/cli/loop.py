"""The training loop of ``penstock train``, and what it says and writes down about each step."""

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from penstock.cli.interrupt import Interrupt
from penstock.cli.kept_files import KEPT_KEY
from penstock.cli.metrics import METRICS_KEY, MetricsFile
from penstock.cli.recipe import lr_factor
from penstock.cli.run_folder import trace_path, write_prediction
from penstock.cli.run_snapshots import RunSnapshots
from penstock.cli.settings import plain
from penstock.cli.showing.display import Display
from penstock.cli.showing.meter import Meter
from penstock.cli.showing.metrics import metrics_of, with_figures
from penstock.cli.showing.pace import Pace
from penstock.cli.showing.summary import reset_peak_resident
from penstock.cli.trackers import Trackers, start_trackers
from penstock.config import TrainConfig
from penstock.data.batches import Batches, HeldOut
from penstock.data.stream import Prepared
from penstock.engine.engine import Engine
from penstock.engine.trace import TraceWriter
from penstock.errors import ConfigError
from penstock.report.prediction import Prediction
from penstock.report.trace_file import Ran
from penstock.report.waits import held_up
from penstock.schedule.ir.lanes import Lane
from penstock.sim.result import Simulation
from penstock.state.stats import StepStats

log = logging.getLogger("penstock")


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A run from a start, or a resumption, to a stop. ``first``: steps that earlier stretches have done. ``kept``: the
    digest of what the run keeps beside its store, which each commit has."""

    config: TrainConfig
    folder: Path
    display: Display
    engine: Engine
    kept: str
    train: Batches
    validation: HeldOut | None
    first: int
    meter: Meter
    pace: Pace

    @property
    def trace(self) -> Path | None:
        return None if self.config.trace_steps == 0 else trace_path(self.folder, self.first)


def report_last(stretch: Stretch) -> Mapping[str, Any] | None:
    """Add the line of the step that the run goes on after, if a kill came between its commit and its line; returns it.

    It lacks what is known only while a step is done: its data, and what it took of the machine.
    """
    last = stretch.engine.last_step
    behind = stretch.engine.position or {}
    with MetricsFile(stretch.folder, done=stretch.first, committed=behind.get(METRICS_KEY, ())) as metrics:
        if last is None or not metrics.last < stretch.first == last.step:
            return None
        line = metrics_of(last, _evaluate(stretch, last.step))
        metrics.write(line)
        return line


def run_steps(stretch: Stretch, missed: Mapping[str, Any] | None = None) -> int:
    """The training loop. Returns the exit code. ``missed``: the line that ``report_last`` has added: trackers are to
    have it, too."""
    config, display, engine, first = stretch.config, stretch.display, stretch.engine, stretch.first
    factor = lr_factor(config.lr_schedule, config.step_count)
    scheduler = LambdaLR(engine.optimizer, lambda index: factor(first + index))
    reset_peak_resident()
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsFile(stretch.folder, done=first))
        stretch.meter.go_on(metrics.earlier())
        trace = stack.enter_context(TraceWriter(stretch.trace, steps=config.trace_steps)) if stretch.trace else None
        trackers = _trackers(stretch, stack)
        if missed is not None:
            trackers.log(missed["step"], missed)
        interrupt = stack.enter_context(Interrupt(display.notice, display.last_words))
        display.begin(stretch.meter)
        stack.callback(display.end)
        known: Simulation | None = None
        snapshots = RunSnapshots.of(config.budget, stretch.folder)
        if first and engine.position is None:
            raise ConfigError(
                f"the state in {config.budget.disk_paths[0]} was trained by another loop, which kept no position in "
                "the data: go on with that, or start another run"
            )
        steps = stack.enter_context(closing(stretch.train.steps(engine.position)))
        for index, data in zip(range(first, config.step_count), steps, strict=False):
            beside = {KEPT_KEY: stretch.kept, METRICS_KEY: metrics.unflushed}
            stats = engine.step(data.micro_batches, position={**data.position, **beside})
            _check_labels(stats)
            interrupt.leave_lost_terminal()
            scheduler.step()
            if trace is not None:
                trace.step(engine.trace, engine.counters)
            held = _held_up(engine)
            stretch.meter.planned(engine.plan)
            known = _foretell(stretch, known)
            if slow := stretch.pace.check(stats, known):
                log.warning(slow)
            held_out = None if interrupt.requested else _evaluate(stretch, index + 1)
            stretch.meter.add(stats, held_out, held)
            if not isinstance(stretch.train.stream, Prepared):
                stretch.meter.truncated = data.lost
            line = with_figures(metrics_of(stats, held_out), stretch.meter, held) | data.metrics()
            metrics.write(line)
            trackers.log(stats.step, line)
            display.update()
            if snapshots is not None:
                snapshots.after(engine)
            if interrupt.requested:
                break
        display.end()
        if snapshots is not None:
            snapshots.last(engine)
        trackers.close("stopped" if interrupt.requested else "done")
    return interrupt.exit_code


def _check_labels(stats: StepStats) -> None:
    """Raise ConfigError for a model whose loss does not compare each token with the next one, where that could not be
    seen without its weights (``cli.model``).
    """
    if stats.labels != "but the first":
        seen = "compares each position with its own label" if stats.labels else "is computed by none of torch's losses"
        raise ConfigError(
            f"the model's loss {seen}: given text, it would not learn to predict the next token. Train it from Python, "
            "with labels of your own (penstock.wrap)"
        )


def _trackers(stretch: Stretch, stack: ExitStack) -> Trackers:
    """The run's trackers, started; whatever ends the run ends them."""
    config = stretch.config
    trackers = start_trackers(config.trackers, stretch.folder, plain(config), done=stretch.first)
    stack.callback(trackers.close, "failed")
    return trackers


def _held_up(engine: Engine) -> dict[Lane, float]:
    """Seconds that each lane held up the step that was just done."""
    ran = [Ran(id=e.op, lane=e.lane, start=e.start, end=e.end, nbytes=e.bytes) for e in engine.trace]
    return held_up(ran, engine.plan.schedule)


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
    """The mean loss per held-out token, when this step is followed by an evaluation."""
    evaluate = stretch.config.evaluate
    if evaluate is None or stretch.validation is None:
        return None
    if done % evaluate.every and done != stretch.config.step_count:
        return None
    losses, labels = [], 0
    for step in islice(stretch.validation.once(), evaluate.batches):
        losses.append(stretch.engine.evaluate(step.micro_batches) * step.labels)
        labels += step.labels
    return math.fsum(losses) / labels
