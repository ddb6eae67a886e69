"""Private names of accelerate: its wrapper of an optimizer. And what its own parts must not do, or do otherwise, by
their public names.
"""

import atexit
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import memory
from torch import distributed as dist
from torch import nn
from torch.utils.data import BatchSampler


def note_skipped(optimizer: Any, skipped: bool) -> None:
    """Tell accelerate's wrapper of an optimizer whether the step was skipped, if this is one: the learning rate stays.

    Without: learning rate schedules would go on past steps that were not taken.
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer._is_overflow = skipped


def take_for_no_memory(kind: type[Exception]) -> None:
    """From now on ``find_executable_batch_size`` tries a smaller batch after an error of this ``kind``, too.

    A function is put in the place of ``should_reduce_batch_size``, in the module that calls it. Without: the search,
    which knows errors of torch's by their words, would end at the first size that there is no plan for.
    """
    known = memory.should_reduce_batch_size
    if "penstock_kind" in vars(known):
        return

    def should_reduce_batch_size(exception: Exception) -> bool:
        return isinstance(exception, kind) or known(exception)

    vars(should_reduce_batch_size)["penstock_kind"] = kind
    memory.should_reduce_batch_size = should_reduce_batch_size


def leave_model(accelerator: Accelerator) -> None:
    """Have models prepared as for evaluation, and left where they are. Without: several processes would each put theirs
    into torch's DistributedDataParallel, which sends all weights around, and holds gradients of them all; and where
    they are on the CPU each would copy it whole, from ``cpu`` to ``cpu:1``.
    """
    prepare = accelerator.prepare_model

    def prepared(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        found: nn.Module = prepare(model, device_placement=False, evaluation_mode=True)
        return found

    accelerator.prepare_model = prepared


def keep_processes(accelerator: Accelerator) -> None:
    """Have the end of training leave the processes' group to whatever comes after it, until they end. Without: whoever
    starts ``torch.distributed`` anew, as the arguments of the next trainer do, may look for the group before for ever.
    """

    def end() -> None:
        for tracker in accelerator.trackers:
            tracker.finish()
        atexit.unregister(_leave)
        atexit.register(_leave)

    accelerator.end_training = end


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def note_gathered(accelerator: Accelerator, note: Callable[[Any, bool], bool]) -> None:
    """Have ``note`` see all that is to be gathered from all processes, and whether it is for metrics; it may refuse.
    Where it returns True nothing is gathered, and the caller goes on with what this process has. Without: processes
    would wait for each other for ever where something is gathered within a forward, as TRL's ``compute_loss`` does.
    """
    gather, for_metrics = accelerator.gather, accelerator.gather_for_metrics

    def gathered(tensor: Any) -> Any:
        return tensor if note(tensor, False) else gather(tensor)

    def gathered_for_metrics(input_data: Any, *args: Any, **kwargs: Any) -> Any:
        return input_data if note(input_data, True) else for_metrics(input_data, *args, **kwargs)

    accelerator.gather, accelerator.gather_for_metrics = gathered, gathered_for_metrics


def counted_values(accelerator: Accelerator) -> int | None:
    """The number of values that count of those that processes gather for metrics, the first ones: accelerate takes them
    for examples, and drops what is more than an epoch's examples in its last batches. None: all of them. Without:
    what is logged of an epoch's last step could be other than what TRL's own run logs.
    """
    state = accelerator.gradient_state
    return state.remainder if state.end_of_dataloader and state.remainder > 0 else None


class Ahead:
    """Batches of a loader that accelerate has prepared, up to ``count`` of which are there before the first of them is
    used; the last is by itself. ``waiting``: those that are there, the one in use first.

    Without: each batch that is evaluated would have all weights stream by. The loader says, to whoever gathers, that it
    is at its end when it has handed out its last batch; here it does so while that is used.
    """

    def __init__(self, loader: Any, count: int) -> None:
        self._loader, self._count = loader, count
        self.waiting: list[Any] = []

    @staticmethod
    def can(loader: Any) -> bool:
        """True of a loader that says when it is at its end."""
        return hasattr(loader, "end_of_dataloader")

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __iter__(self) -> Iterator[Any]:
        there: list[Any] = []  # of this iteration: others may look into the loader meanwhile
        for batch in self._loader:
            if self._loader.end_of_dataloader:
                self._loader.end_of_dataloader = False
                yield from self._in_use(there)
                self._loader.end_of_dataloader = True
            there.append(batch)
            if self._loader.end_of_dataloader or len(there) == self._count:
                yield from self._in_use(there)

    def _in_use(self, there: list[Any]) -> Iterator[Any]:
        while there:
            self.waiting = there
            yield there[0]
            del there[0]


def deal_neighbours(loader: Any, micro_batches: int) -> bool:
    """Have each of several processes take neighbouring ``micro_batches`` of each step, where it would take every n-th
    of n processes. Then a step's micro-batches, process by process, are in the order that one process has them in.
    False: the loader deals out in another way (pieces of batches, an iterable dataset), and stays as it is. Without:
    several processes would add gradients up in another order than one process, and get other bits.
    """
    shard = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or shard.num_processes == 1 or shard.split_batches:
        return False
    dealt = shard.batch_sampler = Neighbours(shard.batch_sampler, shard.num_processes, micro_batches)
    vars(shard)["set_epoch"] = dealt.set_epoch  # the library comes no further where it skips a resumed epoch's first
    return True


class Neighbours(BatchSampler):
    """Batches in the order in which processes take them in turns, so that each has neighbours. For two with two batches
    a step, of ``0 1 2 3`` that is ``0 2 1 3``: the first takes ``0 1``.

    At the end of an epoch all processes have as many, as accelerate would have it: what is missing is taken from the
    epoch's beginning, or what is too much is dropped. Without: as ``deal_neighbours``.
    """

    def __init__(self, batches: BatchSampler, processes: int, each: int) -> None:
        """``each``: batches of a step that a process has."""
        self.batches = batches
        self.processes, self.each = processes, each
        self._size: int | None = getattr(batches, "batch_size", None)  # a user's own sampler may have none
        self.batch_size, self.drop_last = self._size, getattr(batches, "drop_last", False)  # type: ignore[assignment]

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """Accelerate tells it the epoch."""
        return self.batches.sampler

    def set_epoch(self, epoch: int) -> None:
        """The library tells a user's own batches the epoch."""
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        all_rows = self._rows()
        while rows := list(islice(all_rows, self.each)):
            for turn in range(len(rows)):
                for process in range(self.processes):
                    place = process * len(rows) + turn
                    yield rows[place // self.processes][place % self.processes]

    def _rows(self) -> Iterator[list[list[int]]]:
        """A batch for each process, again and again."""
        first: list[list[int]] | None = None
        row: list[list[int]] = []
        for batch in self.batches:
            if len(row) == self.processes:
                yield row
                row = []
            row.append(batch)
            if len(row) == self.processes and first is None:
                first = row
        if row and not self.drop_last:
            yield self._filled(row, first or row)
        elif len(row) == self.processes:
            yield row

    def _filled(self, row: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        """The last batches, with as much of the first ones as is missing, over and over if need be."""
        if self._size is None:
            return list(islice(chain(row, cycle(first)), self.processes))
        spare = cycle(chain.from_iterable(first))
        missing: list[list[int]] = [[]] * (self.processes - len(row))
        return [[*batch, *islice(spare, self._size - len(batch))] for batch in [*row, *missing]]
