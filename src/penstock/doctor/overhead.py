"""The cost of ops besides their work, with the engine's own lanes: the hand-over from one to the next, and what the
interpreter takes of each."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch

from penstock.runtime.access import copy
from penstock.runtime.executor import Action, Executor
from penstock.runtime.pools import Pools
from penstock.runtime.streams import streams_for
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.place import PAGE
from penstock.state.memory import HostSlab

_CHUNKS = 200
_RUNS = 5
_WAY = ("DG{}.{}@B0", "OP{}.{}", "UN{}.{}")
"""A chunk's way from the device through the optimizer and back: three lanes, two of them streams of a device."""


def hand_over(where: torch.device) -> float:
    """Seconds from an op's end to the start of one on another lane that has waited for it; median of several runs.

    The schedule is a chain (down, step, up, down, ...) of ops that do nothing, so that its time is nothing but
    hand-overs. Lanes that have more to do than to wait for each other pay less.
    """
    names = [kind.format(0, i) for i in range(_CHUNKS) for kind in _WAY]
    lines = [f"{name} after {before}" for before, name in itertools.pairwise(names)]
    return _each([names[0], *lines], _nothing, where, time.perf_counter)


def interpreter(where: torch.device) -> float:
    """Seconds of the processor, in all lanes, for an op that makes views of two buffers and copies a page, as actions
    do; median of several runs. Nothing waits for anything."""
    with ExitStack() as closing:
        slab = HostSlab(4 * PAGE, beside=where)
        closing.callback(slab.close)
        there = torch.zeros(2 * PAGE, dtype=torch.uint8, device=where)

        def page(of: torch.Tensor, i: int) -> torch.Tensor:
            return of[i * PAGE : (i + 1) * PAGE].view(torch.float32)

        def act(op: Op) -> int:
            if op.lane == "d2h":
                copy(page(slab.bytes, 0), page(there, 0))
            elif op.lane == "h2d":
                copy(page(there, 1), page(slab.bytes, 1))
            else:
                copy(page(slab.bytes, 2), page(slab.bytes, 3))
            return PAGE

        names = [kind.format(0, i) for i in range(_CHUNKS) for kind in _WAY]
        return _each(names, act, where, time.process_time)


def _nothing(op: Op) -> int:
    return 0


def _each(ops: Iterable[str], act: Action, where: torch.device, clock: Callable[[], float]) -> float:
    """Seconds that one of these ops takes by a clock: the median over some runs of them all."""
    schedule = parse_schedule("\n".join(["schedule overhead micro-batches 1 chunk 4096", *ops]))
    streams = streams_for(where)
    with ExitStack() as closing:
        pools = Pools(schedule, where)
        closing.callback(pools.close)
        executor = Executor(schedule, pools, act, streams)
        closing.callback(executor.close)

        def timed() -> float:
            begun = clock()
            executor.run()
            return clock() - begun

        with streams.around_caller():
            return statistics.median(timed() for _ in range(_RUNS)) / len(schedule.ops)
