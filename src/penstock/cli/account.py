"""A stretch of a run, and the record of each step: in ``metrics.jsonl``, for trackers, on the display, beside what was
predicted.

Of several ranks the first keeps it for all. The figures of memory and links are its own.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from penstock.cli.kept_files import KEPT_KEY
from penstock.cli.launch import seconds_to_end
from penstock.cli.metrics import METRICS_KEY, MetricsFile, metrics_of, with_figures
from penstock.cli.run_folder import trace_path, write_prediction
from penstock.cli.settings import plain
from penstock.cli.showing.display import Display
from penstock.cli.showing.meter import Meter
from penstock.cli.showing.pace import Pace
from penstock.cli.trackers import start_trackers
from penstock.config import TrainConfig
from penstock.data.batches import Batches, HeldOut, Step
from penstock.data.stream import Prepared
from penstock.engine.engine import Engine
from penstock.ranks.group import Ranks
from penstock.report.prediction import Prediction
from penstock.report.sentence import format_time
from penstock.report.trace_file import Ran
from penstock.report.waits import held_up
from penstock.schedule.ir.lanes import Lane
from penstock.sim.result import Simulation
from penstock.state.stats import StepStats

log = logging.getLogger("penstock")


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A run from a start to a stop. ``ranks``: who trains. ``after``: contexts that last until the engine is closed,
    which may take as long as a commit. ``first``: steps that earlier stretches have done. ``kept``: the digest of what
    the run keeps beside its store, which each commit has."""

    config: TrainConfig
    folder: Path
    ranks: Ranks
    display: Display
    engine: Engine
    after: ExitStack
    kept: str
    train: Batches
    validation: HeldOut | None
    first: int
    meter: Meter
    pace: Pace

    @property
    def trace(self) -> Path | None:
        return None if self.config.trace_steps == 0 else trace_path(self.folder, self.first, self.ranks.rank)


class NoAccount:
    """The account of a rank which leaves all of it to the first one."""

    def __init__(self, stretch: Stretch) -> None:
        self._kept = stretch.kept

    def beside(self) -> dict[str, Any]:
        """Entries of the next step's commit beside the place in the data: each by its key."""
        return {KEPT_KEY: self._kept}

    def stepped(self, stats: StepStats, state: int, on_disk: int) -> None:
        """A step is done. ``state``, ``on_disk``: bytes of all ranks' state, and those of it that are at home there."""

    def wrote(self, stats: StepStats, data: Step, held_out: float | None) -> None:
        """A step is in the metrics, with the evaluation that follows it (``held_out``: its mean loss), if one does."""

    def ends(self, how: Literal["done", "stopped"]) -> None:
        """The run is over: ``"done"``, or ``"stopped"``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


class Account(NoAccount):
    """The account of the first rank. While it is open, the display shows the run."""

    def __init__(self, stretch: Stretch, missed: Mapping[str, Any] | None) -> None:
        """``missed``: a line of metrics that was added when the run went on: trackers are to have it, too."""
        super().__init__(stretch)
        self._stretch = stretch
        self._known: Simulation | None = None
        self._held: dict[Lane, float] = {}
        self._to_end = seconds_to_end()
        config, display = stretch.config, stretch.display
        with ExitStack() as stack:
            self._metrics = stack.enter_context(MetricsFile(stretch.folder, done=stretch.first))
            stretch.meter.go_on(self._metrics.earlier())
            self._trackers = start_trackers(config.trackers, stretch.folder, plain(config), done=stretch.first)
            stack.callback(self._trackers.close, "failed")  # whatever ends the run ends them
            if missed is not None:
                self._trackers.log(missed["step"], missed)
            display.begin(stretch.meter)
            stack.callback(display.end)
            self._stack = stack.pop_all()

    def beside(self) -> dict[str, Any]:
        return super().beside() | {METRICS_KEY: self._metrics.unflushed}

    def stepped(self, stats: StepStats, state: int, on_disk: int) -> None:
        stretch = self._stretch
        self._held = _held_up(stretch.engine)
        stretch.meter.planned(stretch.engine.plan, state, on_disk)
        self._foretell(stats.step)
        if slow := stretch.pace.check(stats, self._known):
            log.warning(slow)
        if self._to_end is not None and stats.seconds > self._to_end:
            log.warning(
                "step %d took %s: Ctrl-C, or another signal to torchrun, loses the step under way: torchrun kills its "
                "ranks %d s later. Start it with --shutdown-timeout SECONDS, of more than a step, unless you did",
                stats.step,
                format_time(stats.seconds),
                self._to_end,
            )
            self._to_end = None

    def wrote(self, stats: StepStats, data: Step, held_out: float | None) -> None:
        stretch, meter = self._stretch, self._stretch.meter
        meter.add(stats, held_out, self._held)
        if worn := meter.wears(stretch.config.budget.interval_seconds or 0.0):
            log.warning(worn)
        if not isinstance(stretch.train.stream, Prepared):
            meter.truncated = data.lost
        line = with_figures(metrics_of(stats, held_out), meter, self._held) | data.metrics()
        self._metrics.write(line)
        self._trackers.log(stats.step, line)
        if stats.plan_change is not None:
            stretch.display.say(f"step {stats.step}: {stats.plan_change}")
        stretch.display.update()

    def ends(self, how: Literal["done", "stopped"]) -> None:
        self._trackers.close(how)

    def _foretell(self, step: int) -> None:
        """Take in what is predicted: op by op where the plan is new, and the seconds of a step with all runs that are
        expected of it. In the run's folder is what was predicted of the last steps that are traced."""
        stretch, simulation = self._stretch, self._stretch.engine.prediction
        stretch.meter.predicted = seconds = stretch.engine.expected_seconds
        if simulation is None or seconds is None or simulation is self._known:
            return
        self._known = simulation
        prediction = Prediction.of(simulation, budget=stretch.meter.outline.given, first=step)
        traced = stretch.config.trace_steps
        if traced is None or step - stretch.first <= max(traced, 1):
            try:
                write_prediction(stretch.folder, prediction)
            except OSError as error:
                log.warning("training goes on, and %s lacks its prediction: %s", stretch.folder, error.strerror)
        stretch.meter.forecast(seconds, prediction.bottleneck)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)


def _held_up(engine: Engine) -> dict[Lane, float]:
    """Seconds that each lane held up the step that was just done."""
    ran = [Ran(id=e.op, lane=e.lane, start=e.start, end=e.end, nbytes=e.bytes) for e in engine.trace]
    return held_up(ran, engine.plan.schedule)
