"""The schedule IR: ops on lanes, buffers from pools. Plain data with a text form that parses back.

An op's *id* is a short word that says everything about it; no two ops of a schedule share one.

| id | lane | what it does |
|---|---|---|
| ``F3m0`` ``B3m0`` ``E9m0`` | compute | forward, recompute + backward of stage 3, epilogue (both), for micro-batch 0 |
| ``RW5.1@F3`` | read | weights of group 5, chunk 1, from disk to a host buffer, for visit ``F3`` |
| ``UW5.1@F3`` | h2d | the same chunk up to the device |
| ``DG5.1@B3`` | d2h | gradient chunk down to host memory, in bf16 if it takes a buffer for that on the device |
| ``AD5.1@B2`` | compute | add strand 1 of the gradient to the one before it, on the device |
| ``AG5.1@B2`` ``AG5.1@sum2`` | cpu | add it, or that of another stage, to the chunk that is already there |
| ``UG5.1@B3`` | h2d | the chunk of all ranks' parts up again, when all micro-batches are in it, to be exchanged |
| ``NG5.1`` ``ND5`` ``NORM`` | cpu, compute, cpu | partial sums of squares (host, device); the global norm |
| ``WG5.1`` ``RG5.1`` | write, read | gradient chunk to disk and back, while it waits for the norm |
| ``RS5.1`` ``OP5.1`` ``WS5.1`` | read, cpu, write | what the step needs of a chunk on disk; step; its state back |
| ``WW5.1`` ``UN5.1`` | write, h2d | the chunk's new weights to disk; up to the device, to the copy that stages find |
| ``RM5.1`` ``MU5.1`` ``WM5.1`` | read, cpu, write | Muon: a chunk's momentum from disk; it takes the gradient in,
and an update is made of both; momentum back |
| ``UU5.1`` ``GU5`` ``NS5`` ``DU5.1`` | h2d, net, compute, d2h | that up to the device; those of all ranks' parts; all
of the group's updates made orthogonal there; a chunk of that down, for ``OP5.1`` in the place of a gradient |
| ``OD5`` | compute | optimizer step of a group whose state lives on the device |
| ``DC3m0`` ``WC3m0`` ``RC3m0`` ``UC3m0`` | d2h, write, read, h2d | stage 3's saved activation down, to disk, back, up |
| ``I3m0`` ``W3m0`` | compute | backward of stage 3 split: gradient of its input, gradient of its weights |
| ``GW5@F3`` ``GN5`` | net | all-gather of group 5's weights for a visit; of its new weights after a sharded step |
| ``AR5`` ``AR5.1@B3`` ``SG5.1@B3`` | net | all-reduce, reduce-scatter of group 5's gradient, or of a chunk of it |
| ``AN`` | net | all-reduce of the norm |
| ``HW5@F3`` ``HU5`` ``HG5.1@B3`` | nic | the part between hosts of collectives on two levels: the gathers before
``GW5@F3`` and ``GU5``, the reduce-scatter after ``SG5.1@B3``, which themselves are within each host then |
| ``DP5@F3`` ``UP5@B3`` | d2h, h2d | of group 5's weights, what had to cross between hosts: down to host memory when it
has for visit ``F3``, and up again for visit ``B3``, for which nothing has to |
| ``HR5.1@B3`` | nic | all-reduce, between copies of the state, of what each has scattered within itself |
| ``CM`` | write | commit of the step before, whose delayed steps are all on disk now |
| ``GC3m0`` | net | all-gather of a saved activation of stage 3 that is kept in parts (ZeRO-R) |
| ``SA3m0`` ``RA3m0`` | send, recv | the activation that stage 3 puts out, to the peer, from the peer |
| ``SD3m0`` ``RD3m0`` | send, recv | the gradient with respect to it |
| ``SX3m0`` ``RX3m0`` | send, recv | what stage 3 is handed besides its input, and its rank has not had before |

A collective has a ``group`` of ranks, each of which has an op of the same id; a ``send`` has the ``recv`` of the same
activation or gradient on its ``peer``. ``items`` is the number of micro-batches that one op computes at once.

A *visit* is one stay of a group's weights on the device: ``F3`` for all micro-batches of a stage (vertical),
``F3m0`` for one of them (horizontal).

A *buffer* is taken from a pool by one op and given back by a later one. ``reads`` and ``writes`` name the buffers
that an op touches, so that the checker can prove that no op races another.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from penstock.config import TIERS, Tier
from penstock.errors import ScheduleError
from penstock.schedule.ir.lanes import LOCAL_LANES, Lane
from penstock.schedule.ir.references import Buffer, OpId

Take = tuple[Buffer, str]
"""A buffer, and the pool that it is taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One unit of work. ``after``: ids of ops of the same rank that must be done; ``takes``: (buffer, pool);
    ``nbytes``: moved; ``items``: micro-batches computed at once; ``peer``: the other rank of a send or recv, else -1;
    ``group``: name of the process group of a collective, else empty.
    """

    id: OpId
    after: tuple[OpId, ...] = ()
    takes: tuple[Take, ...] = ()
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    gives: tuple[Buffer, ...] = ()
    nbytes: int = 0
    items: int = 1
    peer: int = -1
    group: str = ""
    elements: tuple[int, int] | None = None
    """(first, end) of what a load of weights is of, where that is not the chunk in its id but several of them"""

    @property
    def lane(self) -> Lane:
        return self.id.lane

    def __str__(self) -> str:
        parts: list[str] = [self.id]
        for label, values in (
            ("after", self.after),
            ("take", [f"{name}={pool}" for name, pool in self.takes]),
            ("read", self.reads),
            ("write", self.writes),
            ("give", self.gives),
        ):
            if values:
                parts += [label, ",".join(values)]
        for label, value, default in (
            ("bytes", self.nbytes, 0),
            ("items", self.items, 1),
            ("peer", self.peer, -1),
            ("group", self.group, ""),
            ("elements", None if self.elements is None else f"{self.elements[0]}-{self.elements[1]}", None),
        ):
            if value != default:
                parts += [label, str(value)]
        return " ".join(parts)


def refused(op: Op, what: str) -> ScheduleError:
    """The error that an op is the reason for; ``what`` goes on from its id."""
    return ScheduleError(f"op {op.id} {what}", op=op.id)


ChunkAt = tuple[int, int]
"""A group and one of its chunks."""


def chunk_of(op: Op) -> ChunkAt:
    """The chunk that an op is of."""
    return op.id.group, op.id.chunk


def has_graph(op: Op) -> bool:
    """True if a forward makes a graph that is kept, or a backward goes through one."""
    return op.id.kind in ("F", "B") and any(name.holds == "saved" for name in (*op.reads, *op.writes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """``count`` buffers of ``size`` bytes each on one tier.

    ``backed``: the pool owns its memory. Otherwise it only counts what torch's allocator holds (activations).
    """

    name: str
    tier: Tier
    size: int
    count: int
    backed: bool = True

    def __str__(self) -> str:
        return f"pool {self.name} {self.tier} {self.count} x {self.size}{'' if self.backed else ' counted'}"


def peak_bytes(pools: Iterable[Pool], fixed: Iterable[tuple[Tier, str, int]], tier: Tier) -> int:
    """Bytes of a tier with all pools full, plus what is held all the time."""
    full = sum(pool.size * pool.count for pool in pools if pool.tier == tier)
    return full + sum(nbytes for where, _, nbytes in fixed if where == tier)


Carried = tuple[Buffer, Buffer, str]
"""(name at the start, name at the end, pool) of a buffer that a step hands on to the next one."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """All ops of one step of one rank. The order of ``ops`` is each lane's order, and one in which they can run one by
    one; ``fixed`` is memory held all the time.
    """

    name: str
    micro_batches: int
    """number of micro-batches of the step; each has a number below this"""
    chunk: int
    """Largest number of elements of a chunk; a group's chunks are given by ``chunks()`` of the builder. 0: groups are
    not cut, and group l is what stage l computes with (the schedules that do not offload)."""
    pools: tuple[Pool, ...]
    ops: tuple[Op, ...]
    fixed: tuple[tuple[Tier, str, int], ...] = field(default=())
    """(tier, what, bytes) that the whole step holds: resident weights and state, working memory."""
    carried: tuple[Carried, ...] = ()
    """Buffers that are held when the step starts, as the step before has left them, and when it ends."""
    speculative: bool = False
    """True if steps of chunks that come from disk and go back there need not come after the norm: see
    ``Settings.speculate``."""

    @cached_property
    def by_id(self) -> dict[str, Op]:
        return {op.id: op for op in self.ops}

    @cached_property
    def lanes(self) -> dict[Lane, tuple[Op, ...]]:
        lanes: dict[Lane, list[Op]] = {lane: [] for lane in LOCAL_LANES}
        for op in self.ops:
            lanes.setdefault(op.lane, []).append(op)
        return {lane: tuple(ops) for lane, ops in lanes.items()}

    @cached_property
    def narrow(self) -> frozenset[int]:
        """Groups whose gradients cross to the host, and wait, in bf16: those that take a buffer for that on the
        device."""
        return frozenset(op.id.group for op in self.lanes["d2h"] if op.id.kind == "DG" and len(op.writes) > 1)

    def bytes_per_lane(self) -> dict[Lane, int]:
        return {lane: sum(op.nbytes for op in ops) for lane, ops in self.lanes.items()}

    def peak_bytes(self, tier: Tier) -> int:
        """Upper bound of the bytes in use on a tier: all pools full, plus what is fixed."""
        return peak_bytes(self.pools, self.fixed, tier)

    def __repr__(self) -> str:
        """``str`` is the text form, which may be long."""
        return f"<Schedule {self.name}: {len(self.ops)} ops, {self.micro_batches} micro-batches>"

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        header = f"schedule {self.name} micro-batches {self.micro_batches} chunk {self.chunk}"
        yield f"{header} speculative" if self.speculative else header
        for tier, what, nbytes in self.fixed:
            yield f"fixed {tier} {what} {nbytes}"
        yield from map(str, self.pools)
        for start, end, pool in self.carried:
            yield f"carry {start} {end} {pool}"
        yield from map(str, self.ops)


def graphs_kept(schedule: Schedule) -> int:
    """The number of calls of a step whose graph is kept for their backward."""
    return sum(op.id.kind == "F" and has_graph(op) for op in schedule.ops)


def reserved_bytes(schedule: Schedule) -> dict[Tier, int]:
    """Bytes that a schedule takes of each tier before its first op: what is fixed, and the pools that own their
    memory."""
    owned = [pool for pool in schedule.pools if pool.backed]
    return {tier: peak_bytes(owned, schedule.fixed, tier) for tier in TIERS}
