"""Advice on what would help, in numbers: the plan is made again with one thing changed, and compared.

First by the linear program, on both sides for one chunk size. The best few of these are then searched for and simulated
like the plan itself, if its schedule is small enough for that to take no time; it can be less than the program promises
where a step is so short that filling and draining the lanes counts. Where nothing fits, the smallest change that makes
it fit is found by bisection.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import TIERS, Family, Tier, format_size
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.crossing import with_faster_link
from penstock.hardware.drives import count_of
from penstock.hardware.machine import Drive, at_pace
from penstock.planner.batches import MOST_MICRO_BATCHES
from penstock.planner.endurance import EnduranceError
from penstock.planner.proposals import Proposals
from penstock.planner.question import Question
from penstock.planner.search import Choice, estimate, estimate_lasting, search
from penstock.planner.task import Task

WORTH_SAYING = 1.02
SMALL = 4_000
"""Ops of a plan up to which advice on it is simulated."""
_SIMULATED, _OPS = 3, 8_000
"""advice to simulate, and ops for each"""
_MORE_HOST, _MORE_DEVICE = 32 << 30, 16 << 30
_MOST = 1 << 52
"""bytes beyond which a tier is no answer"""
_DOUBLED, _DRIVES = 7, 8
"""Doublings of host memory, and multiples of the drives, that are tried to see whether the drives last then."""
_KINDS = ("weights", "state", "gradients", "activations")
_DRIVE = Drive(path="a drive", read=1e9, write=1e9, read_both=1e9, write_both=1e9, free=_MOST)
"""stands for one that is not there, when all that is asked is whether something would fit"""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change, and the factor on tokens/s that it gives. ``simulated``: by the simulator, not the linear program."""

    change: str
    gain: float
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class _Variant:
    change: str
    task: Task
    micro_batch_size: int
    micro_batches: int
    family: Family | None = None

    @property
    def sequences(self) -> int:
        return self.micro_batch_size * self.micro_batches

    def question(self, chosen: Family) -> Question:
        task = replace(self.task, families=(self.family or chosen,))
        return task.question(self.micro_batch_size, self.micro_batches)


def advice(task: Task, micro_batch_size: int, choice: Choice) -> tuple[Advice, ...]:
    """The changes that would raise tokens/s by 2% or more over a choice, best first."""
    request = choice.request
    now = _Variant(change="", task=task, micro_batch_size=micro_batch_size, micro_batches=request.micro_batches)
    before = estimate(now.question(request.family), request.family)
    if before is None:
        return ()
    promised = []
    for variant in _variants(task, micro_batch_size, request.micro_batches, request.family):
        seconds = estimate(variant.question(request.family), variant.family or request.family)
        if seconds is not None:
            promised.append((before / seconds * variant.sequences / now.sequences, variant))
    promised.sort(key=lambda item: -item[0])
    worth = [item for item in promised if item[0] >= WORTH_SAYING]
    count = _SIMULATED if len(choice.plan.schedule.ops) <= SMALL else 0
    found = [a for _, variant in worth[:count] if (a := _simulated(variant, now, choice)) is not None]
    found += [Advice(change=variant.change, gain=gain, simulated=False) for gain, variant in worth[count:]]
    return tuple(sorted((a for a in found if a.gain >= WORTH_SAYING), key=lambda a: -a.gain))


def _simulated(variant: _Variant, now: _Variant, choice: Choice) -> Advice | None:
    """The advice with a simulated gain; None where shares would fit, but no whole groups do."""
    try:
        seconds = search(replace(variant.question(choice.request.family), simulated_ops=_OPS)).expected_seconds
    except BudgetError:
        return None
    gain = choice.expected_seconds / seconds * variant.sequences / now.sequences
    return Advice(change=variant.change, gain=gain, simulated=True)


def _variants(task: Task, size: int, count: int, chosen: Family) -> Iterator[_Variant]:
    def variant(
        change: str, size: int = size, count: int = count, family: Family | None = None, **settings: Any
    ) -> Iterator[_Variant]:
        if (changed := _changed(task, **settings)) is not None:
            yield _Variant(change=change, task=changed, micro_batch_size=size, micro_batches=count, family=family)

    budget, machine = task.budget, task.machine
    more = _more(budget.host_bytes, _MORE_HOST)
    yield from variant(f"{format_size(more)} more host memory", budget=replace(budget, host=budget.host_bytes + more))
    more = _more(budget.device_bytes, _MORE_DEVICE)
    bigger = replace(budget, device=budget.device_bytes + more)
    yield from variant(f"{format_size(more)} more device memory", budget=bigger)
    if budget.disk_paths:
        n = count_of(machine.drives)
        drives = replace(machine, drives=machine.drives * 2)
        words = "a second drive like the first" if n == 1 else f"{2 * n} such drives instead of {n}"
        yield from variant(words, machine=drives, disk_free=2 * task.disk_free)
    if machine.device.kind == "cuda":
        yield from variant("a link between host and device twice as fast", machine=with_faster_link(machine, 2.0))
    device = at_pace(machine.device, flops=2.0, copy=2.0)
    yield from variant("a device that computes twice as fast", machine=replace(machine, device=device))
    host = at_pace(machine.host, optimizer=2.0)
    words = "an optimizer on the host twice as fast (more cores, faster memory)"
    yield from variant(words, machine=replace(machine, host=host))
    more_m = min(max(count + 1, count * 3 // 2), MOST_MICRO_BATCHES)
    if more_m > count:
        yield from variant(f"M = {more_m} micro-batches instead of {count}", count=more_m)
    if count % 2 == 0:
        words = f"{count // 2} micro-batches of {2 * size} sequences instead of {count} of {size}"
        yield from variant(words, size=2 * size, count=count // 2)
    if size % 2 == 0 and 2 * count <= MOST_MICRO_BATCHES:
        words = f"{2 * count} micro-batches of {size // 2} sequences instead of {count} of {size}"
        yield from variant(words, size=size // 2, count=2 * count)
    if task.needs_norm and task.precision != "fp16":
        # Without a norm only a delay lets gradients wait anywhere.
        unpinned = budget if task.delay else replace(budget, gradients=None)
        words = "no gradient clipping" + (" and no budget.gradients" if unpinned != budget else "")
        words += ", so that the optimizer need not wait"
        yield from variant(words, clip_grad_norm=None, speculate=None, budget=unpinned)
    kinds = ("weights", "gradients", "activations") if budget.durability == "step" else _KINDS
    pins = [kind for kind in kinds if getattr(budget, kind) is not None]
    if pins:
        unpinned = replace(budget, weights=None, state=None, gradients=None, activations=None).with_pins()
        words = ", ".join(f"budget.{kind}" for kind in pins)
        yield from variant(f"tiers chosen by the planner instead of {words}", budget=unpinned)
    if task.grad_dtype == "fp32":
        words = "grad_dtype bf16: gradients are rounded before norm and optimizer, which changes the numbers"
        yield from variant(words, grad_dtype="bf16")
    if task.speculate is False and task.may_speculate:
        yield from variant("speculate: steps before the norm is known", speculate=None)
    if task.speculate:
        yield from variant("waiting for the norm instead of speculate: true", speculate=False)
    if task.delay is not None and chosen == "vertical":
        yield from variant("a delay that the planner chooses", delay=None)
    if chosen == "horizontal":
        yield from variant("schedule: vertical instead of horizontal", family="vertical")


def _changed(task: Task, **settings: Any) -> Task | None:
    """The task with other settings; None: they contradict each other, so that nobody can be advised to choose them."""
    try:
        return replace(task, **settings)
    except ConfigError:
        return None


def _more(now: int, step: int) -> int:
    """A step that is worth a thought: the usual one, or as much again of a small budget."""
    return step if now >= step else now


# ---- what does not fit


def refusal(task: Task, micro_batch_size: int, micro_batches: int, why: BudgetError | None) -> BudgetError:
    """The error for what does not fit: each tier's smallest growth that makes it fit, the smallest one first."""
    growth: list[tuple[int, str]] = []
    if (never := Proposals(task.question(micro_batch_size, micro_batches)).hopeless()) is not None:
        return BudgetError(f"{_cut(task, micro_batch_size, micro_batches)} cannot be planned: {never}")
    for tier in _tiers(task):
        needed = _least(task, micro_batch_size, micro_batches, tier)
        if needed is not None and needed > task.given[tier]:
            more = round_up(needed - task.given[tier])
            growth.append((more, f"{format_size(more)} more {tier} ({format_size(needed)} in all)"))
    if not growth:
        words = " More of one tier alone does not help."
        if (both := _both(task, micro_batch_size, micro_batches)) is not None:
            words, why = f"{words} What makes it fit: {both}.", None
        if _fits_on_disk(task, micro_batch_size, micro_batches):
            words += " A directory on disk (budget.disk) does."
        said = "" if why is None else f" {why}"
        return BudgetError(f"{_does_not_fit(task, micro_batch_size, micro_batches)}{words}{said}")
    first, *others = [words for _, words in sorted(growth)]
    text = f"{_does_not_fit(task, micro_batch_size, micro_batches)} The smallest change that makes it fit: {first}"
    if _fits_on_disk(task, micro_batch_size, micro_batches):
        others.append("a directory on disk (budget.disk)")
    return BudgetError(text + (f"; or {', or '.join(others)}" if others else ""))


def _both(task: Task, size: int, count: int) -> str | None:
    """The growth of device and host memory that makes it fit, where neither does alone: the least of the device with
    any of the host, and the least of the host beside that. None: there is none."""
    grown, words = _with(task, "host", _MOST), list[str]()
    for tier in ("device", "host"):
        needed = _least(grown, size, count, tier)
        if needed is None:
            return None
        if (more := needed - task.given[tier]) > 0:
            words.append(f"{format_size(round_up(more))} more {tier} ({format_size(needed)} in all)")
        grown = _with(task, "device", needed)
    return " and ".join(words)


def worn_out(task: Task, size: int, count: int, why: EnduranceError) -> BudgetError:
    """The error for plans that all wear their drives too fast: what keeps to the endurance, each with its number, which
    the search has found a plan for."""

    def keeps(changed: Task | None, micro_batches: int = count) -> bool:
        try:
            question = None if changed is None else changed.question(size, micro_batches)
            if question is None or estimate_lasting(question, task.families[0]) is None:
                return False
            search(replace(question, simulated_ops=_OPS))
        except (ConfigError, BudgetError):
            return False
        return True

    worn = why.worn
    assert worn is not None, "it was found here"
    budget, machine, found = task.budget, task.machine, list[str]()
    # A step takes no longer for it than in proportion to its batch, and no longer than now with more drives. Plans that
    # were not the fastest may write less: half of it, let us say, before it is not worth a look.
    hopeful = max(2, math.ceil(worn.too_fast / 2))
    possible = (n for n in _doubled(count, MOST_MICRO_BATCHES) if n >= count * hopeful)
    larger = next((n for n in possible if keeps(task, n)), None)
    if larger is not None:
        below = range(larger // 2 + 1, larger)
        least = below[at] if (at := bisect_left(below, True, key=lambda n: keeps(task, n))) < len(below) else larger
        found.append(f"a batch of {size * least} sequences instead of {size * count} ({least} micro-batches of {size})")
    freed = replace(budget, durability="interval", state=None) if budget.durability == "step" else budget
    if freed != budget and keeps(_changed(task, budget=freed)):
        found.append("budget.durability: interval, which may keep state in memory")
    else:
        for host in _doubled(budget.host_bytes, budget.host_bytes << _DOUBLED):
            if keeps(_changed(task, budget=replace(freed, host=host))):
                words = f"{format_size(host - budget.host_bytes)} more host memory ({format_size(host)} in all)"
                found.append(words + (" with budget.durability: interval" if freed != budget else ""))
                break
    for times in range(hopeful, _DRIVES + 1):
        more = replace(machine, drives=machine.drives * times)
        if keeps(_changed(task, machine=more, disk_free=times * task.disk_free)):
            found.append(f"{count_of(more.drives)} such drives instead of {count_of(machine.drives)}")
            break
    found.append(worn.what_helps[1])
    return EnduranceError.of(worn, found)


def _doubled(count: int, most: int) -> Iterator[int]:
    while 2 * count <= most:
        count *= 2
        yield count


def _least(task: Task, size: int, count: int, tier: Tier) -> int | None:
    """The least size of a tier with which the search finds something, no less than there is: as it is printed, to one
    part in 128. None: none does."""

    def enough(nbytes: int) -> bool:
        return Proposals(_with(task, tier, nbytes).question(size, count)).fits()

    if not enough(_MOST):
        return None
    low = high = round_up(max(task.given[tier], 1 << 20))
    while not enough(high):
        low, high = high, round_up(4 * high)
    while high - low > low // 128 and (middle := round_up((low + high) // 2)) < high:
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def round_up(nbytes: int) -> int:
    """The least size with three digits in the unit in which it is printed that is no smaller."""
    if nbytes < 1024:
        return nbytes
    unit = 1024
    while nbytes / unit > 999 and unit < 1 << 40:
        unit *= 1024
    digits = max(2 - math.floor(math.log10(max(nbytes / unit, 1))), 0)
    return int(math.ceil(nbytes / unit * 10**digits) / 10**digits * unit)


def _with(task: Task, tier: Tier, nbytes: int) -> Task:
    if tier == "disk":
        return replace(task, disk_free=nbytes)
    grown: dict[str, Any] = {tier: nbytes}
    return replace(task, budget=replace(task.budget, **grown))


def _fits_on_disk(task: Task, size: int, count: int) -> bool:
    """True if a directory on disk, where there is none, makes it fit: on the machine's drives, or on one with room."""
    if task.budget.disk_paths:
        return False
    known = bool(task.machine.drives)
    drives = task.machine.drives or (_DRIVE,)
    there = replace(
        task,
        machine=replace(task.machine, drives=drives),
        budget=replace(task.budget, disk=[drive.path for drive in drives]),
        disk_free=task.disk_free if known else _MOST,
    )
    return Proposals(there.question(size, count)).fits()


def _tiers(task: Task) -> tuple[Tier, ...]:
    """The tiers that a plan may use."""
    return TIERS if task.budget.disk_paths else TIERS[:2]


def _does_not_fit(task: Task, size: int, count: int) -> str:
    given = ", ".join(f"{format_size(task.given[tier])} of {tier}" for tier in _tiers(task))
    question = task.question(size, count)
    large = Proposals(replace(question, most_ops=None)).fits()
    but = f" with a schedule of at most {question.most_ops:,} ops, and larger ones are not planned" if large else ""
    return f"{_cut(task, size, count)} does not fit in {given}{but}."


def _cut(task: Task, size: int, count: int) -> str:
    cut = f"{count} micro-batches" if count > 1 else "one micro-batch"
    return f"{task.shape.name} with {cut} of {size} x {task.sequence_length} tokens"
