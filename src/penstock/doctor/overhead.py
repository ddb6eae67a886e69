"""The cost of ops besides their work: with the engine's own lanes the hand-over from one to the next, and what the
interpreter takes of each; of a model's own ops what the host takes to run them.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import nn

from penstock.runtime.access import copy
from penstock.runtime.executor import Action, Executor
from penstock.runtime.pools import Pools
from penstock.runtime.streams import streams_for
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.text import parse_schedule
from penstock.schedule.place import PAGE
from penstock.state.memory import HostSlab
from penstock.tape.watch import Watch

_CHUNKS = 200
_RUNS = 5
_BLOCKS = 4
_TOKENS = 8
_DISPATCH_RUNS = 15
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


def dispatch(where: torch.device) -> float:
    """Seconds that the host takes for an op of a model, as a tape counts them: the median of several runs of small
    blocks, forward, and once more for their backward. They compute next to nothing, in fp32."""
    blocks = nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(where)
    hidden = torch.zeros(1, _TOKENS, _Block.WIDTH, device=where, requires_grad=True)

    def run() -> None:
        with torch.no_grad():
            blocks(hidden)
        blocks(hidden).sum().backward()
        if where.type != "cpu":
            torch.accelerator.synchronize(where)

    def timed() -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    with (watch := Watch({}, lambda group: None)):  # and what a first run sets up is over
        run()
    return statistics.median(timed() for _ in range(_DISPATCH_RUNS)) / watch.ops


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (hidden * scale)


class _Block(nn.Module):
    """A decoder's block, with RMS norms, rotary positions and a gated MLP."""

    WIDTH = 64

    def __init__(self) -> None:
        super().__init__()
        width = self.WIDTH
        self.norms = nn.ModuleList(_Norm(width) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        *projections, out = self.attention
        normed = self.norms[0](hidden)
        heads = [project(normed).view(*hidden.shape[:2], 4, -1).transpose(1, 2) for project in projections]
        queries, keys = map(_rotated, heads[:2])
        mixed = F.scaled_dot_product_attention(queries, keys, heads[2], is_causal=True)
        hidden = hidden + out(mixed.transpose(1, 2).reshape(hidden.shape))
        gate, up, down = self.mlp
        normed = self.norms[1](hidden)
        result: torch.Tensor = hidden + down(F.silu(gate(normed)) * up(normed))
        return result


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return heads * 0.5 + torch.cat((-second, first), -1) * 0.5


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
