"""A run of a pipeline before it runs: the cut of its batch, and what to expect of a step.

What rank 0 sends besides activations (masks, position embeddings) is known only once the model is there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from penstock.cli.task import form_of, requests_of, shape_of
from penstock.config import TrainConfig
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.machine import Machine
from penstock.hardware.sharing import link_of_messages, of_pipeline
from penstock.planner.batches import cuts, uncut
from penstock.planner.dealt import Pace, Pipeline
from penstock.planner.task import MOST_OPS, rate_name_of
from penstock.planner.update_mode import expected_repeats
from penstock.shape.model import ModelShape, stage_times

T = TypeVar("T")


def expected(
    config: TrainConfig, shape: ModelShape, machine: Machine, size: int, count: int, ranks: int, hosts: int = 1
) -> Pipeline:
    """A step of so many micro-batches of so many sequences for each pipeline of all ``ranks``, on a machine, or on
    ``hosts`` that are such machines, by the order of preference.

    Raises:
        BudgetError: it does not fit on a rank; says on which.
        ConfigError: the profile lacks what the settings need, or the model's blocks cannot be dealt out.
    """
    kind = machine.device.kind
    precision = config.precision_on(kind)
    profile = shape.profile(size, config.data.sequence_length, form_of(config, kind))
    beside = ranks // config.pipeline
    of_rank = of_pipeline(machine, ranks, hosts=hosts, beside=beside, cp=config.cp)
    times = stage_times(profile, of_rank, precision)
    link = link_of_messages(machine, ranks, hosts, beside)
    optimizer = rate_name_of(config.optimizer.name, config.optimizer.spec.moment_count, precision)
    pace = Pace(
        machine=lambda _: of_rank,
        times=lambda _: times,
        optimizer=optimizer,
        link=None if link is None else lambda *_: link,
        repeats=expected_repeats(config),
    )
    return Pipeline.by_preference(size, profile, requests_of(config, shape, kind, size, count, ranks, hosts), pace)


def fitting(config: TrainConfig, ranks: int, make: Callable[[int, int], T]) -> Iterator[T]:
    """The results of ``make`` for the cuts of a batch that fit, the largest micro-batches first: of the sequences of a
    micro-batch, and of the micro-batches that each of those has who share them of all ``ranks``.

    Raises:
        BudgetError: none fits.
        ConfigError: the batch cannot be cut into few enough micro-batches.
    """
    sequences, sharing = config.sequences_per_step, config.sharing(ranks)
    if not (found := cuts(sequences // sharing)):
        raise ConfigError(f"batch: {sequences} sequences: {uncut(sequences, sharing)}")
    fits, refusal = False, BudgetError()
    for size, count in reversed(found):
        try:
            made = make(size, count)
        except BudgetError as error:
            refusal = error
            continue
        fits = True
        yield made
    if not fits:
        raise refusal


def fastest(config: TrainConfig, machine: Machine, ranks: int, hosts: int = 1) -> list[Pipeline]:
    """The cuts of a batch, of which each pipeline of all ``ranks`` has an equal part, that fit, by the order of
    preference: the one with the shortest predicted step first.

    Raises: as ``fitting`` and ``expected``.
    """
    shape, found = shape_of(config, machine.device.kind), list[Pipeline]()
    for one in fitting(config, ranks, lambda size, n: expected(config, shape, machine, size, n, ranks, hosts)):
        found.append(one)
        if one.step.plans.ops > MOST_OPS:
            break  # smaller micro-batches have more ops
    return sorted(found, key=lambda one: one.step.seconds)


def in_comparison(found: Sequence[Pipeline]) -> str:
    """The reason for the first of some cuts, in words."""
    best, *others = found
    compared = [f"{e.count} of {e.size}: {e.step.seconds / best.step.seconds:.2f}x" for e in others[:3]]
    return "predicted to be the fastest" + (f" ({', '.join(compared)})" if compared else "")
