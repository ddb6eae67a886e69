"""The time, and the share of its drives' life, that a run of so many steps takes by the plan of one of them."""

import math
from dataclasses import dataclass

from penstock.hardware.drives import rated_bytes
from penstock.planner.endurance import DAY
from penstock.planner.forecast import Forecast


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """The time and the writes of a whole run. ``written``: bytes on the drives of a rank, repeated steps and commits of
    state in memory counted, snapshots not. ``life``: the share of what they are rated for; None: nobody says what that
    is."""

    steps: int
    tokens: int
    seconds: float
    written: float
    life: float | None

    @property
    def days(self) -> float:
        return self.seconds / DAY


def whole_run(f: Forecast, steps: int) -> WholeRun:
    """Training without a break; evaluations and the way to the first step are not counted."""
    seconds = steps * f.choice.expected_seconds
    written = f.written_per_day * seconds / DAY
    rated = rated_bytes(f.task.machine.drives)
    return WholeRun(
        steps=steps,
        tokens=steps * f.tokens,
        seconds=seconds,
        written=written,
        life=None if rated is None else written / rated,
    )


def steps_for(f: Forecast, tokens: int) -> int:
    """Steps that train on at least so many tokens."""
    return math.ceil(tokens / f.tokens)
