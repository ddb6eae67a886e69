"""Private names of accelerate: its wrapper of an optimizer. And what its own parts must not do, or do otherwise, by
their public names.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import BatchSampler


def note_skipped(optimizer: Any, skipped: bool) -> None:
    """Tell accelerate's wrapper of an optimizer whether the step was skipped, if this is one: the learning rate stays.

    Without: learning rate schedules would go on past steps that were not taken.
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer._is_overflow = skipped


def never_wrap(accelerator: Accelerator) -> None:
    """Have models prepared as for evaluation. Without: several processes would each put theirs into torch's
    DistributedDataParallel, which sends all weights around, and holds gradients of them all.
    """
    prepare = partial(accelerator.prepare_model, evaluation_mode=True)
    accelerator.prepare_model = prepare


def before_gather(accelerator: Accelerator, check: Callable[[], None]) -> None:
    """Have ``check`` called before anything is gathered from all processes, so that it can refuse. Without: where it is
    gathered within a forward processes would wait for each other for ever.
    """
    gather = accelerator.gather

    def gathered(tensor: Any) -> Any:
        check()
        return gather(tensor)

    accelerator.gather = gathered


def deal_neighbours(loader: Any, micro_batches: int) -> None:
    """Have each of several processes take neighbouring ``micro_batches`` of each step, where it would take every n-th
    of n processes. Then a step's micro-batches, process by process, are in the order that one process has them in. A
    loader that deals out in another way (pieces of batches, an iterable dataset) stays as it is.
    """
    shard = getattr(loader, "batch_sampler", None)
    if isinstance(shard, BatchSamplerShard) and shard.num_processes > 1 and not shard.split_batches:
        shard.batch_sampler = Neighbours(shard.batch_sampler, shard.num_processes, micro_batches)


class Neighbours(BatchSampler):
    """Batches in the order in which processes take them in turns, so that each has neighbours. For two with two batches
    a step, of ``0 1 2 3`` that is ``0 2 1 3``: the first takes ``0 1``.

    At the end of an epoch there may be fewer; if they cannot be dealt out evenly they stay as they are.
    """

    def __init__(self, batches: BatchSampler, processes: int, each: int) -> None:
        """``each``: batches of a step that a process has."""
        self.batches = batches
        self.processes, self.each = processes, each
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Accelerate tells it the epoch."""
        return self.batches.sampler

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        step: list[list[int]] = []
        for batch in self.batches:
            step.append(batch)
            if len(step) == self.processes * self.each:
                yield from self._in_turns(step)
                step = []
        yield from step if len(step) % self.processes else self._in_turns(step)

    def _in_turns(self, step: list[list[int]]) -> Iterator[list[int]]:
        each = len(step) // self.processes
        return (step[process * each + turn] for turn in range(each) for process in range(self.processes))
