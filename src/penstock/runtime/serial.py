"""The oracle: the same schedule and actions with no overlap at all, one op at a time in the caller's thread."""

from collections.abc import Callable, Sequence
from functools import partial

from penstock.runtime.pools import Pools
from penstock.runtime.streams import Mark, Streams, settle
from penstock.schedule.check.order import run_order
from penstock.schedule.ir.ops import Op, Schedule


class SerialExecutor:
    """Runs a schedule in one order that is known to be possible. Same interface as ``Executor``."""

    def __init__(
        self,
        schedule: Schedule,
        pools: Pools,
        act: Callable[[Op], int],
        streams: Streams,
        order: Sequence[Op] | None = None,
    ) -> None:
        """``order``: one in which the ops can run; None: found."""
        self.schedule = schedule
        self.pools = pools
        self.marks: dict[str, Mark] = {}
        self._act = act
        self._streams = streams
        self._order = tuple(run_order(schedule) if order is None else order)

    def run(self) -> None:
        """Run every op once, waiting for each before the next."""
        self.marks = {}
        try:
            self.pools.start_step()
            self._streams.restart()
            for op in self._order:
                self._run_op(op)
            self.pools.end_step(self.schedule, partial(self._streams.resolve, self.marks.values()))
        except BaseException as error:  # be it an interrupt between two ops
            settle(self._streams, error)
            self.pools.reset()
            raise

    def _run_op(self, op: Op) -> None:
        self.pools.take(op)
        try:
            mark = self._streams.mark(op.lane)
            with self._streams.on(op.lane):
                self._streams.begin(mark, ())
                mark.moved = self._act(op)
                self._streams.end(mark)
            self._streams.synchronize()
        except BaseException as error:
            error.add_note(f"in op {op.id} of schedule {self.schedule.name}")
            raise
        self.marks[op.id] = mark
        self.pools.give(op)

    def close(self) -> None:
        """Nothing to do: nothing runs in the background."""
