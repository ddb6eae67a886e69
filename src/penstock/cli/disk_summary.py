"""A run's use of the disk, in words: the space it takes, what a kill costs, and what less durability would gain."""

from collections.abc import Sequence
from pathlib import Path

from penstock.config import INTERVAL, Budget, Durability, format_size, parse_duration
from penstock.hardware.drives import in_proportion, spread
from penstock.hardware.profiles import on_one_drive
from penstock.planner.durability import Weighed
from penstock.planner.plan import Plan
from penstock.report.sentence import format_time
from penstock.store.directory import is_there
from penstock.store.manifest import DATA, Manifest


def space(budget: Budget, ranks: int, hosts: int = 1, host: int = 0) -> str:
    """The disk space that is taken, all of it from the start, on one ``host`` of several. The stores of its ``ranks``
    are there by now."""
    if not budget.disk_paths:
        kept = "and no snapshots, so that the trained model cannot be exported" if budget.durability == "none" else ""
        return f"no state on disk (budget.disk){' ' if kept else ''}{kept}"
    each = ranks // hosts
    stores = budget.stores(ranks, hosts)[host * each :][:each]
    size = sum((path / DATA).stat().st_size for paths in stores for path in paths)
    slots = "twice the state, in two slots" if budget.slots == 2 else "the state in one slot"
    where = ", ".join(map(str, budget.disk_paths)) + _shares(stores)
    on_each = f" on each of {hosts} hosts" if hosts > 1 else ""
    return f"{format_size(size)} of disk taken in {where}{on_each}: {slots}"


def _shares(stores: Sequence[Sequence[Path]]) -> str:
    """The proportion in which stores are striped over their drives; empty where that is even."""
    found = dict.fromkeys(Manifest.read(paths[0]).weights for paths in stores)
    words = [in_proportion(weights) for weights in found if weights]
    return f", striped {' and '.join(words)}" if words else ""


def allowed_per_day(budget: Budget, ranks: int, hosts: int = 1) -> float | None:
    """Bytes a day that all drives of a run may be written together, striped as its stores are; None: any."""
    if budget.endurance is None:
        return None
    there = [path for path in budget.disk_paths if path.is_dir()]
    total, users = 0.0, dict(zip(there, on_one_drive(there), strict=True))
    for rank in range(ranks):
        own = budget.of_rank(rank, ranks, hosts)
        assert own.endurance is not None
        first = own.disk_paths[0]
        weights = Manifest.read(first).weights if is_there(first / DATA) else ()
        drives = [path.parent if ranks > 1 else path for path in own.disk_paths]
        each = [own.endurance.bytes_per_day / users.get(path, 1) for path in drives]
        total += spread(each, weights or (1,) * len(each))
    return total


def cost_of_a_kill(budget: Budget, plan: Plan | None) -> str | None:
    """The loss when the run is killed, in words. Without a plan it may not be known: None."""
    if budget.durability == "none":
        return "a kill costs the whole run"
    if not budget.disk_paths:
        often = _minutes(parse_duration(INTERVAL))
        return f"a snapshot in the run's folder every {often} or step: a kill costs at most that"
    if budget.durability == "interval" and (seconds := budget.interval_seconds) is not None:
        return f"a commit every {_minutes(seconds)} or step: a kill costs at most that"
    if budget.durability == "interval":
        return f"a commit every {budget.interval_steps} steps: a kill costs the steps since the last one"
    if plan is None:
        return None
    place = plan.settings.place
    if not all(place.all_on_disk(group.index) for group in plan.program.groups if group.trainable):
        return "state in memory is kept at the end only: a kill costs the whole run (see budget.durability)"
    if budget.slots == 1:
        return "with one slot a kill within a step costs the whole run"
    before = " and the one before" if plan.settings.delay else ""
    return f"every step is a commit: a kill costs the step in flight{before}"


def gain_of_none(weighed: Weighed, durability: Durability) -> str | None:
    """The gain of a run with ``durability: none`` over this one, in words; None: too little to say, or not known."""
    gain = weighed.gain(durability)
    if gain is None or gain[1] < _WORTH_SAYING:
        return None
    return f"budget.durability none would gain ~{gain[1]:.0%} ({format_time(gain[0])} a step)"


def reason(weighed: Weighed) -> str:
    """The reason that a plan which was free to choose keeps state in memory."""
    if weighed.step is None or weighed.interval is None:
        return "with durable steps it does not fit"
    return f"durable steps (budget.durability step) would take ~{weighed.step / weighed.interval - 1:.0%} longer"


_WORTH_SAYING = 0.005


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
