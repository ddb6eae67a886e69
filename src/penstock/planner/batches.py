"""The number of sequences that a step should have, and their cut into micro-batches; vertical against horizontal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config import Family
from penstock.errors import BudgetError, ConfigError
from penstock.planner.endurance import EnduranceError
from penstock.planner.proposals import EQUAL
from penstock.planner.question import FAMILIES
from penstock.planner.search import GOOD_ENOUGH, Choice, estimate, estimate_lasting, search
from penstock.planner.task import MOST_OPS, Task

_LARGEST_BATCH = 4096
_LARGEST_MICRO_BATCH = 32
"""sequences; larger ones gain nothing and are many to try"""
_MICRO_BATCHES = 256
"""A batch is cut into no more than so many: more make schedules too large to be worth a simulation."""
MOST_MICRO_BATCHES = 1024
"""Above so many even those that are asked for are refused: a plan for them takes too long."""
_A_FEW = 4
_TRIED = 2
_WORTH = 1.03
_SAMPLES = (64, 8, 1)
"""batches that the size of a micro-batch is tried with"""


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
    """Ways to cut a batch that fit, best first, for the task's first family.

    Of equal ones the largest micro-batches, which have the fewest ops, that leave a few to overlap with each other.
    """
    found: list[Split] = []
    for size, count in cuts(batch):
        seconds = estimate(task.question(size, count), task.families[0])
        if seconds is not None:
            found.append(Split(micro_batch_size=size, micro_batches=count, seconds=seconds))
        elif found:  # larger ones hold more at once, and have no more ops
            break
    least = min((split.seconds for split in found), default=0.0)
    return sorted(found, key=lambda s: (s.seconds > least * EQUAL, s.micro_batches < _A_FEW, -s.micro_batch_size))


def cuts(batch: int) -> list[tuple[int, int]]:
    """(sequences in a micro-batch, micro-batches): ways to cut a batch without a rest, small micro-batches first."""
    sizes = range(1, min(batch, _LARGEST_MICRO_BATCH) + 1)
    whole = [(size, batch // size) for size in sizes if batch % size == 0]
    return [(size, count) for size, count in whole if count <= _MICRO_BATCHES]


def uncut(batch: int, parts: int = 1) -> str:
    """The reason that a batch has no ``cuts``, and what to do. ``parts``: the number of equal ones that it is first
    shared in, of which each is cut."""
    count = parts * _MICRO_BATCHES
    most = count * _LARGEST_MICRO_BATCH
    return (
        f"a batch is cut into at most {count:,} equal micro-batches of at most {_LARGEST_MICRO_BATCH} sequences, and "
        f"this one cannot be: say yourself how it is cut (micro_batch_size), or give a batch of "
        f"{'fewer' if batch > most else 'another number of'} sequences, {most:,} at most"
    )


def choose(task: Task, batch: int, found: Sequence[Split] | None = None) -> tuple[Choice, Split]:
    """The best plan for a global batch. The second best way to cut it is searched too, unless the best is as good as
    the linear program says that it can be. ``found``: its ``splits``, where they are known.

    Raises:
        BudgetError: it does not fit, with micro-batches of one sequence.
        ConfigError: it cannot be cut into few enough micro-batches.
    """
    if not cuts(batch):
        raise ConfigError(f"batch={batch}: {uncut(batch)}")
    found = splits(task, batch) if found is None else found
    best: tuple[Choice, Split] | None = None
    least = min((split.seconds for split in found), default=0.0)
    first = cuts(batch)[0]
    refusal: BudgetError | None = None
    tried = worn = 0
    for split in found or [Split(micro_batch_size=first[0], micro_batches=first[1], seconds=0.0)]:
        if best is not None and (
            tried == _TRIED or split.seconds > least * EQUAL or best[0].expected_seconds <= least * GOOD_ENOUGH
        ):
            break
        try:
            beat = math.inf if best is None else best[0].expected_seconds
            choice = search(task.question(split.micro_batch_size, split.micro_batches), beat=beat)
        except EnduranceError as error:
            refusal, worn = error, worn + 1
            if worn == _TRIED and best is None:  # each writes as much in a step: a slow way to cut it is no way out
                break
            continue
        except BudgetError as error:  # shares fit, but no whole groups
            refusal = error
            continue
        tried += 1
        if best is None or choice.expected_seconds < best[0].expected_seconds:
            best = choice, split
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def saturating(task: Task) -> int:
    """The smallest batch, a power of two, with which twice as many sequences would gain less than 3% of tokens/s.

    Raises:
        BudgetError: not even one sequence fits; says why.
    """
    whole, task = task, replace(task, budget=replace(task.budget, endurance=None))
    at_once = next((found[0].micro_batch_size for n in _SAMPLES if (found := splits(task, n))), None)
    if at_once is None:
        search(task.question(1, 1))  # says why, or finds what linear programs do not: host pools that nothing needs
        return 1
    batch, best = 1, _rate(task, task.families[0], 1, 1)
    while batch < min(_LARGEST_BATCH, at_once * _MICRO_BATCHES):
        more = _rate(task, task.families[0], 2 * batch, min(at_once, 2 * batch))
        if best is not None and (more is None or more < best * _WORTH):
            break
        batch, best = 2 * batch, more
    if whole.budget.endurance is not None:  # a larger batch writes no more in a step, which takes longer
        larger = [batch << n for n in range(_LARGEST_BATCH.bit_length()) if batch << n <= at_once * _MICRO_BATCHES]
        batch = next((n for n in larger if _lasts(whole, n, min(at_once, n))), batch)
    return batch


def _lasts(task: Task, batch: int, micro_batch_size: int) -> bool:
    question = task.question(micro_batch_size, batch // micro_batch_size)
    return estimate_lasting(question, task.families[0]) is not None


def curve(task: Task, micro_batch_size: int, *, until: int, also: int | None = None) -> list[Point]:
    """Tokens/s over the global batch, up to ``until`` sequences or as many as a batch may be cut into: powers of two in
    one micro-batch, then ``micro_batch_size`` and its doubles. By the linear program alone, however many ops a schedule
    would have.

    ``also``: another batch to have in it, a multiple of ``micro_batch_size``.
    """
    until = min(until, _MICRO_BATCHES * micro_batch_size)
    powers = [1 << power for power in range(until.bit_length())]
    asked = {n for n in powers if n < micro_batch_size} | {micro_batch_size * n for n in powers}
    points = []
    for batch in sorted({n for n in asked if n <= until} | ({also} if also else set())):
        rates = {family: _rate(task, family, batch, min(micro_batch_size, batch), most_ops=None) for family in FAMILIES}
        points.append(Point(batch=batch, tokens=batch * task.sequence_length, tokens_per_second=rates))
    return points


def _rate(
    task: Task, family: Family, batch: int, micro_batch_size: int, *, most_ops: int | None = MOST_OPS
) -> float | None:
    delay = None if family == "horizontal" else task.delay  # only vertical has one
    task = replace(task, families=(family,), delay=delay)
    question = task.question(micro_batch_size, batch // micro_batch_size)
    seconds = estimate(replace(question, most_ops=most_ops), family)
    return None if seconds is None else batch * task.sequence_length / seconds
