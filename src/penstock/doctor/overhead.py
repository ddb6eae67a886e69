"""The cost of an op besides its work: the hand-over from lane to lane, on a schedule whose ops do nothing."""

import statistics
import time

import torch

from penstock.runtime.executor import Executor
from penstock.runtime.pools import Pools
from penstock.runtime.streams import HostStreams
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.text import parse_schedule

_CHUNKS = 200


def hand_over() -> float:
    """Seconds from an op's end to the start of one on another lane that has waited for it; median of several runs.

    The schedule is a chain (read, step, write, read, ...), so that its time is nothing but hand-overs. Lanes that have
    more to do than to wait for each other pay less.
    """
    lines = ["schedule overhead micro-batches 1 chunk 4096"]
    before = ""
    for i in range(_CHUNKS):
        for kind in ("RS", "OP", "WS"):
            lines.append(f"{kind}0.{i}{before}")
            before = f" after {kind}0.{i}"
    schedule = parse_schedule("\n".join(lines))
    pools = Pools(schedule, torch.device("cpu"))
    executor = Executor(schedule, pools, _nothing, HostStreams())
    try:
        return statistics.median(_timed(executor) for _ in range(5)) / len(schedule.ops)
    finally:
        executor.close()
        pools.close()


def _nothing(op: Op) -> int:
    return 0


def _timed(executor: Executor) -> float:
    begun = time.perf_counter()
    executor.run()
    return time.perf_counter() - begun
