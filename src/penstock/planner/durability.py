"""The durability of a run whose settings name none, and what each durability costs. With a disk every step can be
durable, if all that is trained is kept there; state in memory is faster where there is room for it, and a kill costs
more.

Weighed by the linear program, so that ``penstock plan`` and ``penstock train`` come to the same answer in no time.
"""

from dataclasses import dataclass, replace

from penstock.config import Budget, Durability
from penstock.errors import ConfigError
from penstock.planner.endurance import Commits
from penstock.planner.search import Choice, estimate
from penstock.planner.task import Task

TOO_MUCH = 0.10
"""Share of a step's time that durable steps may cost before a commit every few minutes is enough."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """Expected seconds of a step by durability: with all that is trained on disk, with commits of what is in memory now
    and then, and with none. None: there is no such plan, or it does not fit.
    """

    step: float | None
    interval: float | None
    none: float | None

    @property
    def default(self) -> Durability:
        """The durability of a run whose settings name none."""
        if self.interval is None:
            return "step"
        return "interval" if self.step is None or self.step / self.interval - 1 > TOO_MUCH else "step"

    def gain(self, durability: Durability) -> tuple[float, float] | None:
        """The gain of giving ``durability`` up altogether: seconds a step, and their share of it. None: unknown."""
        now = getattr(self, durability)
        if now is None or self.none is None or durability == "none":
            return None
        return max(now - self.none, 0.0), max(1 - self.none / now, 0.0) if now else 0.0


def weigh(task: Task, micro_batch_size: int, micro_batches: int) -> Weighed:
    """Expected seconds of a step with each durability. The task's budget says where state may live, whatever its
    durability is."""

    def seconds(durability: Durability) -> float | None:
        budget = _named(task.budget, durability)
        try:
            question = replace(task, budget=budget.with_pins()).question(micro_batch_size, micro_batches)
            found = [estimate(question, family) for family in question.possible_families]
        except ConfigError:  # a pin or speculate=True is in the way
            return None
        return min((s for s in found if s is not None), default=None)

    return Weighed(step=seconds("step"), interval=seconds("interval"), none=seconds("none"))


def kill_seconds(task: Task, choice: Choice) -> float | None:
    """Seconds of work that a kill costs at most; None: all of it."""
    budget, plan, step = task.budget, choice.plan, choice.expected_seconds
    if budget.durability == "step":
        return step * (2 if plan.settings.delay else 1)
    commits = Commits.of(budget, plan, task.machine.drives, step)
    return None if commits is None else max(budget.interval_seconds or 0.0, commits.period + commits.writing)


def undecided(task: Task) -> bool:
    """True if the planner is to choose between durable steps and state in memory."""
    return task.ranks == 1 and _open(task)


def _open(task: Task) -> bool:
    return task.budget.durability is None and task.budget.may_keep_every_step


def settled(task: Task, chosen: Durability = "step") -> Task:
    """The task with the durability that its run will have. ``chosen``: where it is ``undecided``. Of several ranks
    every step is durable where it can be."""
    budget = task.budget
    if _open(task):
        budget = _named(budget, chosen)
    elif budget.durability is None and budget.disk_paths and budget.slots == 2:  # state is pinned in memory
        budget = _named(budget, "interval")
    return replace(task, budget=budget.with_pins())


def _named(budget: Budget, durability: Durability) -> Budget:
    interval = budget.interval if durability == "interval" else None
    return replace(budget, durability=durability, interval=interval)
