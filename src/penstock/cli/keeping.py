"""What a run keeps on disk, in words: the space it takes, and what a kill would cost."""

from penstock.config import Budget, format_size
from penstock.plan.fit import Plan
from penstock.store.store import DATA


def space(budget: Budget) -> str:
    """The disk space that is taken, all of it from the start. The store is there by now."""
    if not budget.disk_paths:
        return "no state on disk, so that the trained model cannot be exported (budget.disk)"
    size = sum((path / DATA).stat().st_size for path in budget.disk_paths)
    slots = "twice the state, in two slots" if budget.slots == 2 else "the state in one slot"
    return f"{format_size(size)} of disk taken in {', '.join(map(str, budget.disk_paths))}: {slots}"


def cost_of_a_kill(budget: Budget, plan: Plan | None) -> str | None:
    """What is lost when the run is killed. Without a plan it may not be known: None."""
    if not budget.disk_paths or budget.durability == "none":
        return "a kill costs the whole run"
    if budget.durability == "interval":
        return f"a commit every {budget.interval} steps: a kill costs the steps since the last one"
    if plan is None:
        return None
    place, form = plan.settings.place, plan.settings.form
    if not all(place.all_on_disk(group.index, form) for group in plan.program.groups if group.trainable):
        return "state in memory is kept at the end only: a kill costs the whole run (see budget.durability)"
    if budget.slots == 1:
        return "with one slot a kill within a step costs the whole run"
    before = " and the one before" if plan.settings.delay else ""
    return f"every step is a commit: a kill costs the step in flight{before}"
