"""The training loop of ``penstock train``."""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from torch.optim.lr_scheduler import LambdaLR

from penstock.cli.account import Account, NoAccount, Stretch
from penstock.cli.interrupt import Interrupt
from penstock.cli.metrics import METRICS_KEY, STEP_KEY, VALIDATION, MetricsFile, add_to_last, counted, metrics_of
from penstock.cli.run_snapshots import RunSnapshots
from penstock.cli.showing.meter import Meter
from penstock.cli.showing.summary import reset_peak_resident
from penstock.engine.trace import TraceWriter
from penstock.errors import ConfigError
from penstock.ranks.group import Ranks
from penstock.state.stats import StepStats

log = logging.getLogger("penstock")

_AFTER_COMMIT = {"bytes_written", "bytes_moved", "lane_seconds", "peak_bytes"}
"""Figures of a step that are not yet known, or not kept, when it is committed."""


def report_last(stretch: Stretch) -> Mapping[str, Any] | None:
    """Add what metrics lack of the step that the run goes on after; returns it.

    The line, if a kill came between the commit and it: without what the step took of the machine, and what was planned,
    which only the process knew that did it. The evaluation after the step, if the run was stopped before it.
    """
    last, lacks = stretch.engine.last_step, stretch.ranks.once("what metrics lack", lambda: _lacks(stretch))
    if lacks is None:
        return None
    assert last is not None
    held_out = _evaluate(stretch, last.step)
    if lacks == "evaluation":
        found = {"step": last.step, VALIDATION: held_out}
        if stretch.ranks.rank == 0:
            add_to_last(stretch.folder, stretch.first, found)
        return found
    figures = metrics_of(last, held_out) | (stretch.engine.position or {}).get(STEP_KEY, {})
    line = {key: found for key, found in figures.items() if key not in _AFTER_COMMIT}
    if stretch.ranks.rank == 0:
        meter = Meter(outline=stretch.meter.outline)
        with MetricsFile(stretch.folder, done=stretch.first) as metrics:
            meter.go_on(metrics.earlier())
            meter.add(last)
            line |= counted(meter)
            metrics.write(line)
    return line


def _lacks(stretch: Stretch) -> Literal["line", "evaluation"] | None:
    """The part of the last step that is missing; the lines of those before it are there, from here on."""
    last, behind = stretch.engine.last_step, stretch.engine.position or {}
    with MetricsFile(stretch.folder, done=stretch.first, committed=behind.get(METRICS_KEY, ())) as metrics:
        known = last is not None and last.step == stretch.first
        rebuilt = known and metrics.last < stretch.first
        if (gone := metrics.missing - rebuilt) > 0:
            said = (
                "%s lacks the lines of %d of the %d steps that are done: they were cut off or removed, and stay missing"
            )
            log.warning(said, metrics.path, gone, stretch.first)
        if not known:
            return None
        if rebuilt:
            return "line"
        return "evaluation" if not metrics.evaluated and _is_evaluated(stretch, stretch.first) else None


def run_steps(stretch: Stretch, missed: Mapping[str, Any] | None, begins: Callable[[], None]) -> int:
    """The training loop. Returns the exit code. ``missed``: the line that ``report_last`` has added. ``begins``: called
    before the first step, when nothing that was asked for can be refused any more.
    """
    config, display, engine, first = stretch.config, stretch.display, stretch.engine, stretch.first
    scheduler = LambdaLR(engine.optimizer, lambda index: config.lr_schedule.factor(first + index, config.step_count))
    reset_peak_resident()
    if first and engine.position is None:
        raise ConfigError(
            f"the state in {config.budget.disk_paths[0]} was trained by another loop, which kept no position in the "
            "data: go on with that, or start another run"
        )
    with ExitStack() as stack:
        steps = stack.enter_context(closing(stretch.train.steps(engine.position)))
        stop = _Stop(stretch.ranks, stretch.after.enter_context(Interrupt(display.notice, display.last_words)))
        account = stack.enter_context(Account(stretch, missed) if stretch.ranks.rank == 0 else NoAccount(stretch))
        trace = stack.enter_context(TraceWriter(stretch.trace, steps=config.trace_steps)) if stretch.trace else None
        snapshots = RunSnapshots.of(config.budget, stretch.folder, stretch.ranks)
        begins()
        for index, data in zip(range(first, config.step_count), steps, strict=False):
            behind = {**data.position, STEP_KEY: data.metrics(), **account.beside()}
            stats = engine.step(data.micro_batches, position=behind)
            plan = engine.plan
            taken = config.budget.slots * plan.snapshot_bytes if config.budget.disk_paths else 0
            told = (stats.bytes_written, plan.state_bytes, taken)
            written, state, on_disk = map(sum, zip(*stretch.ranks.gather_objects("bytes", told), strict=True))
            stats = replace(stats, bytes_written=written)
            _check_labels(stats)
            stop.interrupt.leave_lost_terminal()
            scheduler.step()
            if trace is not None:
                trace.step(engine.trace, engine.counters)
            account.stepped(stats, state, on_disk)
            held_out = None if stop.asked() else _evaluate(stretch, index + 1)
            account.wrote(stats, data, held_out)
            if snapshots is not None:
                snapshots.after(engine)
            if stop.asked():
                break
        display.end()
        if snapshots is not None:
            snapshots.last(engine)
        account.ends("stopped" if stop.code else "done")
    return stop.code


class _Stop:
    """The ends that were asked for: all ranks end after the same step, whichever of them was asked.

    ``code``: the exit code, 0 as long as nobody has.
    """

    def __init__(self, ranks: Ranks, interrupt: Interrupt) -> None:
        self._ranks = ranks
        self.interrupt = interrupt
        self.code = 0

    def asked(self) -> bool:
        self.code = self.code or max(self._ranks.gather_objects("end", self.interrupt.exit_code))
        return self.code != 0


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


def _evaluate(stretch: Stretch, done: int) -> float | None:
    """The mean loss per held-out token, when this step is followed by an evaluation."""
    if not _is_evaluated(stretch, done):
        return None
    evaluate = stretch.config.evaluate
    assert evaluate is not None
    assert stretch.validation is not None
    losses, labels = [], 0
    for step in islice(stretch.validation.once(), evaluate.batches):
        losses.append(stretch.engine.evaluate(step.micro_batches) * step.labels)
        labels += step.labels
    return math.fsum(losses) / labels


def _is_evaluated(stretch: Stretch, done: int) -> bool:
    """True if an evaluation follows the step."""
    evaluate = stretch.config.evaluate
    if evaluate is None or stretch.validation is None:
        return False
    return done % evaluate.every == 0 or done == stretch.config.step_count
