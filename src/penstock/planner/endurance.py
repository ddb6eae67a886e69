"""The wear of a plan's drives beside what ``budget.endurance`` allows: bytes a day of training without a break, by its
steps and by commits of state in memory beside them (``budget.durability: interval``)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import Budget, format_size
from penstock.config.sizes import three_digits
from penstock.errors import BudgetError
from penstock.hardware.drives import count_of, spread, stripe_weights, together
from penstock.hardware.machine import Drive, Machine
from penstock.planner.plan import Plan

DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Commits:
    """Bytes that one commit writes and the seconds that it takes to, and the seconds from one to the next."""

    nbytes: int
    writing: float
    period: float

    @staticmethod
    def of(budget: Budget, plan: Plan, drives: Sequence[Drive], step: float) -> "Commits | None":
        """The commits of a plan whose steps take ``step`` seconds; None: by its durability there are none.

        They begin as in ``engine.due``: by the clock after the first step from which one step more, and the writing,
        would end too late, and not before the commit before is written.
        """
        if budget.durability != "interval":
            return None
        nbytes = in_memory(plan)
        writing = nbytes / together(drives).write
        if budget.interval_steps is not None:
            return Commits(nbytes=nbytes, writing=writing, period=max(budget.interval_steps * step, writing))
        assert budget.interval_seconds is not None
        wait = max(budget.interval_seconds - step - writing, writing)
        return Commits(nbytes=nbytes, writing=writing, period=max(math.ceil(wait / step), 1) * step)


def in_memory(plan: Plan) -> int:
    """Bytes of weights and state that a step changes and leaves in memory: what of them is not on disk at home."""
    place, form = plan.settings.place, plan.settings.form
    return sum(
        group.numel * form.weight_bytes * (place.home(group) != "disk")
        + form.state_bytes(group) * (place.state[group.index] != "disk")
        for group in plan.program.groups
        if group.trainable
    )


def allowance(budget: Budget, machine: Machine) -> float | None:
    """Bytes a day that all drives together may be written, striped; None: as many as there are."""
    if budget.endurance is None or not machine.drives:
        return None
    each = [budget.endurance.bytes_per_day / drive.directories for drive in machine.drives]
    return spread(each, stripe_weights(machine.drives))


def written_per_day(budget: Budget, plan: Plan, machine: Machine, runs: float, expected: float) -> float:
    """Bytes a day that a plan writes whose steps take ``expected`` seconds each, with ``runs`` of a step on average:
    what the steps write, and commits of state in memory, where it is committed now and then. Snapshots not counted.
    """
    step = plan.schedule.bytes_per_lane().get("write", 0) * runs
    commits = Commits.of(budget, plan, machine.drives, expected)
    return (step / expected + (0.0 if commits is None else commits.nbytes / commits.period)) * DAY


@dataclass(frozen=True, kw_only=True)
class Worn:
    """A plan that wears its drives too fast: bytes that a step writes, its seconds, bytes a day that are written and
    allowed, parameters that are trained, and drives."""

    written: float
    seconds: float
    per_day: float
    allowed: float
    parameters: int
    drives: int

    @property
    def too_fast(self) -> float:
        """The bytes that are written, as a multiple of those that are allowed."""
        return self.per_day / self.allowed

    def __str__(self) -> str:
        return (
            f"its steps of {three_digits(self.seconds)} s write {format_size(self.written)} each, "
            f"{self.written / self.parameters:.3g} bytes per parameter, or {format_size(self.per_day)} a day, and "
            f"budget.endurance allows {format_size(self.allowed)} a day"
        )

    @property
    def what_helps(self) -> tuple[str, ...]:
        """The changes that, by arithmetic alone, keep to the allowance."""
        drives = math.ceil(self.drives * self.too_fast)
        fewer = self.written / self.parameters / self.too_fast
        return (
            f"steps of {three_digits(self.seconds * self.too_fast)} s that write as much (a larger batch)",
            f"at most {fewer:.3g} bytes written per parameter (state in memory, or less state: optimizer.moments)",
            f"{drives} such drives instead of {self.drives}, where steps are not faster for it",
        )


def worn_by(budget: Budget, plan: Plan, machine: Machine, runs: float, expected: float) -> Worn | None:
    """The wear by a plan of one rank that trains, if it is more than ``budget.endurance`` allows the drives of its
    ``machine``. ``runs``, ``expected``: as of ``written_per_day``."""
    allowed = allowance(budget, machine)
    if allowed is None or (per_day := written_per_day(budget, plan, machine, runs, expected)) <= allowed:
        return None
    return Worn(
        written=runs * plan.schedule.bytes_per_lane().get("write", 0),
        seconds=expected,
        per_day=per_day,
        allowed=allowed,
        parameters=max(sum(group.trainable for group in plan.program.groups), 1),
        drives=count_of(machine.drives),
    )


class EnduranceError(BudgetError):
    """No plan keeps to ``budget.endurance``. ``worn``: what the best one does; None where another rank has said so."""

    def __init__(self, message: str, *, worn: Worn | None = None) -> None:
        super().__init__(message)
        self.worn = worn

    @staticmethod
    def of(worn: Worn, what_helps: Sequence[str] = ()) -> "EnduranceError":
        """``what_helps``: what is known to; none: what does by arithmetic."""
        helps = ", or ".join(what_helps or worn.what_helps)
        return EnduranceError(f"the plan wears its drives too fast: {worn}. What would help: {helps}", worn=worn)
