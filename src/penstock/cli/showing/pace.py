"""Steps that take much longer than predicted: which lane was slow, in numbers that a drive's data sheet has."""

from penstock.config.sizes import three_digits
from penstock.report.sentence import format_time
from penstock.schedule.ir.lanes import Lane
from penstock.sim.result import Simulation
from penstock.state.stats import StepStats

SLOW = 3.0
"""Times its prediction that a step must take to be called slow; a prediction is 10% off at worst."""

LOST = 0.5
"""Seconds that it must have lost, too: tiny steps are late for any reason."""


class Pace:
    """Compares each step with the prediction of its plan, and speaks when steps begin to be slow."""

    def __init__(self) -> None:
        self._plan: Simulation | None = None
        self._slow = False

    def check(self, stats: StepStats, prediction: Simulation | None) -> str | None:
        """A warning at the first of several slow steps, which names the lane that was slow; None: nothing to say. The
        step that a plan was made in does not count: it planned and warmed up, too."""
        if prediction is not self._plan or prediction is None:
            self._plan, self._slow = prediction, False
            return None
        before = self._slow
        lost = stats.seconds - prediction.time
        self._slow = stats.seconds > SLOW * prediction.time and lost > LOST
        return _words(stats, prediction) if self._slow and not before else None


def _words(stats: StepStats, prediction: Simulation) -> str:
    # A lane of which nothing is planned waits for another rank: what it receives is that one's work.
    planned = {lane: seconds for lane, seconds in prediction.busy(0).items() if seconds > 0}
    moved = prediction.world.ranks[0].bytes_per_lane()
    lane: Lane = max(planned, key=lambda lane: stats.lane_seconds.get(lane, 0.0) - planned[lane])
    head = (
        f"step {stats.step} took {format_time(stats.seconds)}, {three_digits(stats.seconds / prediction.time)}x the "
        f"{format_time(prediction.time)} predicted"
    )
    busy = stats.lane_seconds.get(lane, 0.0)
    if busy <= planned[lane]:
        return f"{head}: no lane was slower than planned; is the machine busy with something else?"
    every, lost = prediction.busy(0), stats.seconds - prediction.time
    late = sum(max(0.0, seconds - every.get(each, 0.0)) for each, seconds in stats.lane_seconds.items())
    if late < lost / 2:
        outside = f"{format_time(lost - late)} of that went by outside of its ops"
        return f"{head}: {outside}, in a search for another plan, or as the machine is busy with something else"
    if moved.get(lane, 0) and stats.bytes_moved.get(lane, 0):
        rate, assumed = stats.bytes_moved[lane] / busy / 1e9, moved[lane] / planned[lane] / 1e9
        return f"{head}: the {lane} lane moved {rate:.3g} GB/s where the plan assumed {assumed:.3g}. {_REMEDY}"
    assumed_time = format_time(planned[lane])
    return f"{head}: the {lane} lane was busy for {format_time(busy)} where the plan assumed {assumed_time}. {_REMEDY}"


_REMEDY = "If it stays so, run penstock doctor: the next plan is for what it then measures"
