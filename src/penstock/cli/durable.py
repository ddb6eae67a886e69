"""The durability of a run: settled before it begins, written into its settings, and the same until its last step."""

from dataclasses import replace

from penstock.cli.disk_summary import gain_of_none, reason
from penstock.cli.split import Cut
from penstock.cli.task import as_free_here, task_of
from penstock.config import TrainConfig
from penstock.hardware.machine import Machine
from penstock.planner.ask import report
from penstock.planner.durability import Weighed, settled, undecided, weigh
from penstock.schedule.ir.ops import Schedule


def with_durability(
    config: TrainConfig,
    schedule: str | Schedule,
    machine: Machine | None,
    cut: Cut,
    ranks: int,
    hosts: int = 1,
) -> tuple[TrainConfig, Weighed | None]:
    """The settings with a durability, and what a step takes by durability where that can be told.

    A schedule of the user's own says itself where state lives. ``ranks``: that train it, on so many ``hosts``; of
    several every step is durable where the settings do not say otherwise.
    """
    budget = config.budget
    if isinstance(schedule, Schedule) or not budget.disk_paths:
        return config, None
    if machine is None or config.pipeline > 1:
        chosen = budget.by_default()
        if chosen.durability is None and budget.slots == 2:  # state is pinned in memory
            chosen = replace(budget, durability="interval")
        return replace(config, budget=chosen), None
    task, weighed = task_of(config, as_free_here(machine, budget.disk_paths), ranks=ranks, hosts=hosts), None
    if ranks == 1 and budget.may_keep_every_step:
        weighed = weigh(task, cut.size, config.sequences_per_step // cut.size)
    if budget.endurance is not None and ranks == 1:  # which durability the drives last with, the search finds out
        found = report(task, split=(cut.size, config.sequences_per_step // cut.size))
        return replace(config, budget=replace(budget, durability=found.forecast.task.budget.durability)), weighed
    default = weighed.default if weighed is not None and undecided(task) else "step"
    durability = settled(task, default).budget.durability
    return replace(config, budget=replace(budget, durability=durability)), weighed


def in_words(config: TrainConfig, weighed: Weighed | None) -> str:
    """The reason for a run's durability, and the gain of giving that up; begins with a semicolon, or is empty."""
    durability = config.budget.durability
    if weighed is None or durability is None:
        return ""
    why = reason(weighed) if durability == "interval" == weighed.default else None
    return "".join(f"; {words}" for words in (why, gain_of_none(weighed, durability)) if words)
