"""The pools of a running schedule: which buffer has which slot, and how many bytes each tier has in use."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch

from penstock.config import TIERS, Tier
from penstock.schedule.ir.ops import Op, Pool, Schedule, reserved_bytes
from penstock.schedule.place import page_up
from penstock.state.memory import DeviceSlab, HostSlab
from penstock.state.numa import near


class Pools:
    """Slots of every pool, carved out of one slab per tier when the plan is made; nothing is allocated in a step.

    Not thread-safe: the executor calls ``take`` and ``give`` under its lock. ``buffer`` may be called by any op that
    holds the buffer.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        backed = [pool for pool in schedule.pools if pool.backed]
        need = {tier: sum(page_up(p.size) * p.count for p in backed if p.tier == tier) for tier in TIERS}
        assert not need["disk"]
        with ExitStack() as undo:
            with near(device):
                self._host = HostSlab(need["host"], beside=device)
            undo.callback(self._host.close)
            self._device = DeviceSlab(need["device"], device)
            undo.pop_all()
        self.slots: dict[str, list[torch.Tensor]] = {}
        """pool -> its buffers, each of uint8 [size]"""
        takes = Counter(pool for op in schedule.ops for _, pool in op.takes)
        takes.update(pool for _, _, pool in schedule.carried)
        self._used = {pool.name: range(min(pool.count, takes[pool.name])) for pool in schedule.pools}
        """pool -> its slots; a schedule of the user's own may name any number more, which no op would ever take"""
        offset = dict.fromkeys(TIERS, 0)
        for pool in backed:
            slab = self._host.bytes if pool.tier == "host" else self._device.bytes
            step = page_up(pool.size)
            start = offset[pool.tier]
            self.slots[pool.name] = [slab[start + i * step :][: pool.size] for i in self._used[pool.name]]
            offset[pool.tier] = start + step * pool.count
        self._pools: dict[str, Pool] = {pool.name: pool for pool in schedule.pools}
        self._free: dict[str, list[int]] = {pool: list(slots) for pool, slots in self._used.items()}
        self._held: dict[str, tuple[str, int]] = {}
        self._carried = schedule.carried
        self._reserved = reserved_bytes(schedule)
        self.in_use: dict[Tier, int] = dict(self._reserved)
        """Bytes that are reserved, and of pools that own no memory those that are held."""
        self.peak: dict[Tier, int] = dict(self._reserved)
        self.samples: list[tuple[float, Tier, int]] = []
        self._started: dict[str, tuple[str, int]] = {}
        for name, _, origin in schedule.carried:
            self._started[name] = (origin, self._free[origin].pop())
        self.reset()

    def can_take(self, op: Op) -> bool:
        """True if every pool that the op takes from has a slot for it."""
        if len(op.takes) == 1:
            return bool(self._free[op.takes[0][1]])
        return all(
            len(self._free[pool]) >= sum(other == pool for _, other in op.takes) for pool in {p for _, p in op.takes}
        )

    def take(self, op: Op) -> list[tuple[str, int]]:
        """Give the op its buffers; returns their (pool, slot)."""
        taken = []
        for name, pool in op.takes:
            slot = self._free[pool].pop(0)
            self._held[name] = (pool, slot)
            taken.append((pool, slot))
            self._count(self._pools[pool], 1)
        return taken

    def give(self, op: Op) -> list[tuple[str, int]]:
        """Take back what the op gives; returns their (pool, slot)."""
        given = []
        for name in op.gives:
            pool, slot = self._held.pop(name)
            self._free[pool].append(slot)
            given.append((pool, slot))
            self._count(self._pools[pool], -1)
        return given

    def counted(self, pool: str) -> bool:
        """True if a pool only counts memory that torch allocates."""
        return not self._pools[pool].backed

    def buffer(self, name: str) -> torch.Tensor:
        """The bytes of a buffer that is held, as a uint8 tensor of its pool's size."""
        pool, slot = self._held[name]
        return self.slots[pool][slot]

    def slot(self, name: str) -> tuple[Pool, int]:
        """The pool of a buffer that is held, and which of its slots it has."""
        pool, slot = self._held[name]
        return self._pools[pool], slot

    def pieces(self, names: Sequence[str], offset: int, nbytes: int) -> Iterator[tuple[torch.Tensor, int]]:
        """``nbytes`` from byte ``offset`` on of buffers that hold one run of bytes together, one after the other:
        (part of a buffer, its first byte counted from ``offset``)."""
        end, begin = offset + nbytes, 0
        for buffer in map(self.buffer, names):
            first, last = max(offset, begin), min(end, begin + buffer.numel())
            if first < last:
                yield buffer[first - begin : last - begin], first - offset
            begin += buffer.numel()

    def reset(self) -> None:
        """Forget a step that was broken off: what is held is what a step starts with."""
        self._held.clear()
        self._free = {pool: list(slots) for pool, slots in self._used.items()}
        self.in_use = dict(self._reserved)
        for start, (pool, slot) in self._started.items():
            self._held[start] = (pool, slot)
            self._free[pool].remove(slot)

    def end_step(self, schedule: Schedule, over: Callable[[], None]) -> None:
        """Make the buffers that a step of this schedule hands on those that the next one starts with, once it is
        ``over``. Where that is broken off, the step is forgotten."""
        try:
            over()
            if schedule.carried:
                self._hand_on()
        except BaseException:
            self.reset()
            raise

    def _hand_on(self) -> None:
        assert self._held.keys() == {end for _, end, _ in self._carried}
        self._held = {start: self._held[end] for start, end, _ in self._carried}
        self._started = dict(self._held)

    def start_step(self) -> None:
        """Start new records of peaks and samples. On a GPU samples tell when ops were queued, not when they ran."""
        assert self._held.keys() == {start for start, _, _ in self._carried}
        self.peak = dict(self.in_use)
        now = time.perf_counter()
        self.samples = [(now, tier, used) for tier, used in self.in_use.items() if used]

    def _count(self, pool: Pool, sign: int) -> None:
        if pool.backed:
            return
        used = self.in_use[pool.tier] + sign * pool.size
        self.in_use[pool.tier] = used
        self.peak[pool.tier] = max(self.peak[pool.tier], used)
        self.samples.append((time.perf_counter(), pool.tier, used))

    def close(self) -> None:
        self.slots.clear()
        self._held.clear()
        self._host.close()
        self._device.close()
