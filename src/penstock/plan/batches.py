"""How many sequences a step should have, and how to cut them into micro-batches; vertical against horizontal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import BudgetError, ConfigError
from penstock.plan.fit import Family
from penstock.plan.search import Choice, estimate, search
from penstock.plan.task import Task

_LARGEST_BATCH = 4096
_MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_MICRO_BATCHES = 256
"""more than so many make schedules too large to be worth a simulation"""
_EQUAL = 1.005
_SATURATED = 0.97


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to cut a batch, and the linear program's seconds for a step of it."""

    micro_batch_size: int
    micro_batches: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """A global batch (sequences), its tokens, and the linear program's tokens/s by family; None: it does not fit."""

    batch: int
    tokens: int
    tokens_per_second: dict[Family, float | None]


def splits(task: Task, batch: int) -> list[Split]:
    """Ways to cut a batch that fit, best first; of equal ones the largest micro-batches, which have the fewest ops."""
    found = list(_splits(task, batch))
    least = min((split.seconds for split in found), default=0.0)
    return sorted(found, key=lambda s: (s.seconds > least * _EQUAL, -s.micro_batch_size, s.seconds))


def _splits(task: Task, batch: int) -> Iterator[Split]:
    for size in _MICRO_BATCH_SIZES:
        if batch % size or not batch // size <= _MICRO_BATCHES:
            continue
        question = task.question(size, batch // size)
        seconds = [s for s in (estimate(question, family) for family in task.families) if s is not None]
        if not seconds:
            break  # larger ones take more memory
        yield Split(micro_batch_size=size, micro_batches=batch // size, seconds=min(seconds))


def choose(task: Task, batch: int) -> tuple[Choice, Split]:
    """The best plan for a global batch: the two best ways to cut it are searched.

    Raises:
        BudgetError: it does not fit.
        ConfigError: it cannot be cut into few enough micro-batches.
    """
    if batch < 1:
        raise ConfigError(f"batch={batch}: must be at least 1")
    found = splits(task, batch)
    if not found:
        search(task.question(1, batch))  # says why
        raise BudgetError(f"a batch of {batch} sequences does not fit")
    best: tuple[Choice, Split] | None = None
    for split in found[:2]:
        if split.seconds > found[0].seconds * _EQUAL and best is not None:
            break
        question = task.question(split.micro_batch_size, split.micro_batches)
        choice = search(replace(question, simulated_ops=question.simulated_ops // 2))
        if best is None or choice.seconds < best[0].seconds:
            best = choice, split
    assert best is not None
    return best


def saturating(points: Sequence[Point], family: Family) -> int:
    """The smallest batch of a curve whose tokens/s are within 3% of the best of it."""
    rates = {point.batch: point.tokens_per_second[family] or 0.0 for point in points}
    most = max(rates.values())
    return min(batch for batch, rate in rates.items() if rate >= most * _SATURATED)


def curve(task: Task, *, micro_batch_size: int | None = None, until: int = _LARGEST_BATCH) -> list[Point]:
    """Tokens/s over the global batch, doubled until the gain is under 1%, at most ``until`` sequences.

    ``micro_batch_size``: sequences of a micro-batch where the batch has so many; None: the best for each batch.
    """
    points: list[Point] = []
    batch, before = 1, 0.0
    while batch <= until:
        rates = {family: _rate(task, family, batch, micro_batch_size) for family in _FAMILIES}
        points.append(Point(batch=batch, tokens=batch * task.sequence_length, tokens_per_second=rates))
        now = max((rate for rate in rates.values() if rate is not None), default=0.0)
        if now == 0.0 or now < before * 1.01:
            break
        batch, before = batch * 2, now
    return points


_FAMILIES: tuple[Family, ...] = ("vertical", "horizontal")


def _rate(task: Task, family: Family, batch: int, micro_batch_size: int | None) -> float | None:
    one = replace(task, families=(family,))
    if micro_batch_size is None:
        found = splits(one, batch)
        seconds = found[0].seconds if found else None
    else:
        size = min(micro_batch_size, batch)
        seconds = estimate(one.question(size, batch // size), family)
    return None if seconds is None else batch * task.sequence_length / seconds
