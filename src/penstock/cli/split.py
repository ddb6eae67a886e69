"""The cut of a run's batch into micro-batches: settled before its first step, and the same until its last.

The numbers of a run depend on the cut (each micro-batch's loss is a mean of its own, rounded), so it is part of what a
run is: it is written into the run's settings, and a resumed run takes it from there.
"""

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.launch import how_to_start, in_words
from penstock.cli.pipeline import fastest, fitting, in_comparison
from penstock.cli.task import as_free_here, requests_of, shape_of, task_of
from penstock.config import TrainConfig
from penstock.config.batch import dealt, other_batch
from penstock.config.step import STRANDS, check_deal, check_pipeline, check_strands, sharing
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.machine import DeviceKind, Machine
from penstock.planner.ask import refused_batch
from penstock.planner.batches import Split, choose, cuts, splits
from penstock.planner.dealt import plans_of
from penstock.planner.durability import settled, undecided
from penstock.planner.endurance import EnduranceError
from penstock.planner.fit import fit
from penstock.planner.places import Asked
from penstock.planner.task import Task
from penstock.schedule.ir.ops import Schedule
from penstock.shape.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Micro-batches of ``size`` sequences, and why in words. ``smaller``: sizes to fall back to, the largest first, if
    the model at hand turns out to need more than was expected of it; none where the size was asked for.
    """

    size: int
    reason: str
    smaller: tuple[int, ...] = ()

    def words(self, sequences: int) -> str:
        """For the user."""
        count = sequences // self.size
        return f"{count} micro-batch{'es' * (count > 1)} of {self.size} sequence{'s' * (self.size > 1)}: {self.reason}"


def check_shared(config: TrainConfig, ranks: int) -> None:
    """Raises ConfigError: several ranks cannot train such a run, or not with such a batch."""
    if ranks > STRANDS:
        raise ConfigError(f"{ranks:,} ranks are started, and at most {STRANDS:,} train one run: start fewer")
    groups = config.sharing(ranks)
    check_of_pipeline(config, ranks)
    check_sums(config, ranks)
    if groups * config.cp == 1:
        return
    dealt_batch(config, groups, "pipelines" if config.pipeline > 1 else "ranks")


def dealt_batch(config: TrainConfig, groups: int, who: str = "ranks") -> tuple[int | None, int]:
    """The part of a step that each of so many groups of ranks has, which are called ``who``: (sequences in a
    micro-batch, micro-batches), or where the settings leave their size to the plan (None, sequences).

    Raises:
        ConfigError: they cannot all have as many.
    """
    size = config.micro_batch_size
    what, each = ("sequences", 1) if size is None else ("micro-batches", size)
    return size, dealt(config.sequences_per_step // each, what, groups, other_batch(groups, each), who)


def check_sums(config: TrainConfig, ranks: int) -> None:
    """Raises ConfigError: so many ranks cannot share the ``strands`` that gradients are to be summed in."""
    if config.strands is not None:
        check_strands(config.strands, config.sharing(ranks) * config.cp)


def check_of_pipeline(config: TrainConfig, ranks: int) -> None:
    """Raises ConfigError: a setting is not for so many ranks in such pipelines; or it is for pipelines, and there are
    none."""
    if config.pipeline > 1:
        asked = f"pipeline={config.pipeline} of {in_words(ranks)}"
        check_pipeline(config, config.schedule, config.replan, asked, ranks // config.pipeline)
    check_deal(config.deal, dealt=config.pipeline > 1)


def check_goes_on(config: TrainConfig, strands: int, ranks: int, flags: str = "") -> None:
    """A run keeps its batch, and from snapshot to snapshot its ``strands``: are these ranks a number that shares both?
    ``flags``: of the command that goes on, where the settings are not those that the run has.

    Raises:
        ConfigError: they are not; says which ones are.
    """
    count = config.sequences_per_step // (config.micro_batch_size or 1)
    alike = config.copies * config.cp
    numbers = (number for number in sharing(strands) if not number % alike and not count % (number // config.cp))
    able = [number * config.pipeline for number in numbers]
    if ranks in able:
        return
    said = (
        f"{config.run}: {in_words(ranks, pipeline=config.pipeline)} cannot share the {count} micro-batches and "
        f"strands={strands} of its steps, which stay as they are"
    )
    if able:
        nearest = max((number for number in able if number < ranks), default=able[0])
        said += f". {' or '.join(map(str, able))} can: {how_to_start(nearest)} resume {shlex.quote(config.run)}{flags}"
    raise ConfigError(said)


def cut_batch(
    config: TrainConfig,
    schedule: str | Schedule,
    machine: Machine | None,
    kind: DeviceKind,
    ranks: int = 1,
    hosts: int = 1,
) -> Cut:
    """The cut of a step's sequences, with as many micro-batches on each of the ``ranks``, which are on so many
    ``hosts``. ``machine``: to predict for; ``kind``: of the device that computes.

    Raises:
        ConfigError: the batch cannot be cut as a schedule of the user's own wants it, or into few enough pieces.
        BudgetError: it does not fit, however it is cut.
    """
    each = config.sequences_per_step // config.sharing(ranks)
    if isinstance(schedule, Schedule):
        return _as_scheduled(config, schedule, config.sharing(ranks))
    if config.micro_batch_size is not None:
        return Cut(size=config.micro_batch_size, reason="as micro_batch_size says")
    if each == 1:
        return Cut(size=1, reason="there is no other way")
    found = _largest(config, kind, ranks, hosts) if machine is None else _fastest(config, machine, ranks, hosts)
    smaller = tuple(size for size, _ in reversed(cuts(each)) if size < found[0])
    return Cut(size=found[0], reason=found[1], smaller=smaller)


def _as_scheduled(config: TrainConfig, schedule: Schedule, ranks: int) -> Cut:
    sequences, count = config.sequences_per_step, schedule.micro_batches * ranks
    size, rest = divmod(sequences, count)
    if rest or not size:
        raise ConfigError(
            f"batch: {sequences} sequences cannot be cut into the {count} equal micro-batches of the schedule of your "
            f"own ({config.schedule}): give a multiple of {count}"
        )
    if config.micro_batch_size not in (None, size):
        raise ConfigError(
            f"micro_batch_size={config.micro_batch_size}: the schedule of your own ({config.schedule}) has {count} "
            f"micro-batches, so that the {sequences} sequences of a step make micro-batches of {size}: drop it"
        )
    return Cut(size=size, reason="as many as the schedule of your own has")


def _fastest(config: TrainConfig, machine: Machine, ranks: int, hosts: int) -> tuple[int, str]:
    """The size with the shortest predicted step, and how many times as long others would take."""
    if config.pipeline > 1:
        in_order = fastest(config, machine, ranks, hosts)
        return in_order[0].size, in_comparison(in_order)
    machine = as_free_here(machine, config.budget.disk_paths)
    sequences = config.sequences_per_step // config.sharing(ranks)
    best, found = _best(task_of(config, machine, ranks=ranks, hosts=hosts), sequences)
    others = [split for split in found if split.micro_batch_size != best.micro_batch_size]
    # Ratios of the linear program's seconds: seconds themselves are promised once the model's own stages were timed.
    # What it takes for faster than the best is so by half a percent at most, and was searched and found slower.
    ratios = [max(s.seconds / best.seconds, 1.0) if best.seconds else 1.0 for s in others[:3]]
    compared = [f"{s.micro_batches} of {s.micro_batch_size}: {r:.2f}x" for s, r in zip(others[:3], ratios, strict=True)]
    unfit = [size for size, _ in cuts(sequences) if size > max(s.micro_batch_size for s in (best, *others))]
    if unfit:
        compared.append(f"{sequences // unfit[0]} of {unfit[0]} do not fit")
    return best.micro_batch_size, "predicted to be the fastest" + (f" ({', '.join(compared)})" if compared else "")


def _best(task: Task, sequences: int) -> tuple[Split, list[Split]]:
    """The best cut of a step's sequences, and all that fit: with commits now and then where only so the drives last.

    Raises:
        BudgetError: none fits, or none keeps to the drives' endurance; says what would help.
    """
    named = settled(task)
    found = splits(named, sequences)
    try:
        return choose(named, sequences, found)[1], found
    except BudgetError as error:
        refused = error
    if isinstance(refused, EnduranceError) and undecided(task):
        seldom = settled(task, "interval")
        found = splits(seldom, sequences)
        with suppress(EnduranceError):  # else what every durable step would need is said
            return choose(seldom, sequences, found)[1], found
    raise refused_batch(named, sequences, refused) from None


def _largest(config: TrainConfig, kind: DeviceKind, ranks: int, hosts: int) -> tuple[int, str]:
    """The largest size that fits: without a machine's profile there is nothing else to choose by."""
    shape = shape_of(config, kind)

    def fitted(size: int, count: int) -> int:
        _check_fits(config, shape, kind, size, count, ranks, hosts)
        return size

    size = next(fitting(config, ranks, fitted))
    said = " (plan: null, so nothing is predicted)" if config.plan is None and size > 1 else ""
    return size, f"the largest that fit{said}"


def check_fits(config: TrainConfig, cut: Cut, kind: DeviceKind, ranks: int, hosts: int) -> None:
    """Plan a step of a run that has not begun, as far as its model's shape tells what it takes: the model itself may
    turn out to take more.

    Raises:
        BudgetError: it does not fit.
    """
    if isinstance(config.schedule, Path):  # it says itself where state lives
        return
    count = config.sequences_per_step // config.sharing(ranks) // cut.size
    _check_fits(config, shape_of(config, kind), kind, cut.size, count, ranks, hosts)


def _check_fits(
    config: TrainConfig, shape: ModelShape, kind: DeviceKind, size: int, count: int, ranks: int, hosts: int
) -> None:
    requests = requests_of(config, shape, kind, size, count, ranks, hosts)
    if config.pipeline > 1:
        plans_of([Asked(request=request) for request in requests])
    else:
        fit(requests[0])
