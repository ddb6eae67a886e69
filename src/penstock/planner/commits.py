"""Commits of state in memory beside a plan's steps (``budget.durability: interval``): their bytes, and how often."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import Budget
from penstock.hardware.drives import together
from penstock.hardware.machine import Drive
from penstock.planner.plan import Plan


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
