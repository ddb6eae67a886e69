"""A schedule bound to the arrays of a run: what its ops need that is neither on them nor in its header."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import ScheduleError
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.check.clocks import Clocks
from penstock.schedule.check.late import late_chunks
from penstock.schedule.check.order import run_order
from penstock.schedule.check.rules import check_buffers
from penstock.schedule.ir.ops import ChunkAt, Op, Schedule
from penstock.schedule.ir.references import OF_UPDATES, Buffer, OpId
from penstock.schedule.place import BF16, FP32, Chunk, chunks, grain
from penstock.schedule.program import GroupSpec, Program
from penstock.state.arrays import Late
from penstock.store.layout import Grid, Region


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A schedule of a program, and what follows from the two. ``program`` has this rank's ``share`` of every group."""

    schedule: Schedule
    program: Program
    share: Share = WHOLE

    @cached_property
    def late(self) -> frozenset[ChunkAt]:
        """The chunks that a step steps for the step before."""
        return late_chunks(self.schedule)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Groups that have a gradient in a step, in ascending order."""
        return tuple(sorted({op.id.group for op in self.schedule.ops if op.id.kind in ("DG", "ND", "OD")}))

    @cached_property
    def normed(self) -> bool:
        """True if the norm is known within the step: else the optimizer computes its parts in passing."""
        return "NORM" in self.schedule.by_id

    @cached_property
    def last_loss(self) -> str:
        """The op after which all losses are there."""
        return next((op.id for op in reversed(self.schedule.lanes["compute"]) if op.id.kind == "E"), "")

    @cached_property
    def reads_ahead(self) -> frozenset[OpId]:
        """The reads of what the next step takes from disk for its first delayed chunks. It counts just where the next
        step has something left to it; one that has not (a run's first step, one after an evaluation, a repeat) reads
        anew before it begins."""
        ends = {end for _, end, _ in self.schedule.carried}
        return frozenset(
            op.id for op in self.schedule.lanes["read"] if op.id.kind == "RS" and not ends.isdisjoint(op.writes)
        )

    @cached_property
    def _cuts(self) -> list[Sequence[Chunk]]:
        return [chunks(g, self.schedule.chunk) for g in self.program.groups]

    def whole(self, numel: int) -> int:
        """Elements of a group of which a rank has ``numel``."""
        return self.share.size * numel

    def first(self, g: int) -> int:
        """The first of this rank's trained elements of a group."""
        return self.share.number * self.program.groups[g].trainable

    def group(self, op: Op) -> GroupSpec:
        """This rank's part of an op's group."""
        return self.program.groups[op.id.group]

    def chunk(self, op: Op) -> Chunk:
        """The elements that an op is about."""
        chunk = self._cuts[op.id.group][op.id.chunk]
        if op.elements is None:
            return chunk
        return replace(chunk, start=op.elements[0], numel=op.elements[1] - op.elements[0])

    def is_late(self, op: Op) -> bool:
        """True if an op belongs to a chunk, or to a group of matrices, that the step before has left to this one."""
        return (op.id.group, op.id.chunk if op.id.chunk >= 0 else 0) in self.late

    @cached_property
    def late_elements(self) -> Late:
        """The trained elements that a step leaves to the next one to step, by group; empty where it leaves none."""
        late: dict[int, list[range]] = {}
        for g, index in sorted(self.late):
            c = self._cuts[g][index]
            late.setdefault(g, []).append(range(c.start, c.start + c.numel))
        return late

    @cached_property
    def stepped(self) -> tuple[int, ...]:
        """Groups in the order in which a step changes them."""
        return tuple(dict.fromkeys(op.id.group for op in self.schedule.ops if op.id.kind in ("MU", "OP", "OD")))

    def scratch(self) -> tuple[dict[str, int], dict[str, Grid]]:
        """Bytes of each extent that the schedule needs on disk no longer than a step, and how they are cut."""
        sizes: dict[str, int] = {}
        grids: dict[str, Grid] = {}
        for op in self.schedule.lanes["write"]:
            if op.id.kind == "WG":
                width = BF16 if op.id.group in self.schedule.narrow else FP32
                numel, name = self.group(op).trainable, gradient_extent(op)
                sizes[name] = numel * width
                grids[name] = (Region(nbytes=numel * width, block=grain(numel) * width),)
            elif op.id.kind == "WC":
                sizes[activation_extent(op)] = op.nbytes
        return sizes, grids

    def check_rest(self) -> None:
        """Raises:
        ScheduleError: what a step leaves to the next one cannot be done by itself.
        """
        if self.late:
            handed_on = tuple((start, start, pool) for start, _, pool in self.schedule.carried)
            names = {start for start, _, _ in handed_on}
            kept = (replace(op, gives=tuple(n for n in op.gives if n not in names)) for op in self.rest.ops)
            alone = replace(self.rest, ops=tuple(kept), carried=handed_on)
            order = list(run_order(alone))
            check_buffers(alone, order, Clocks(order))  # what ops mean is ordered as it is in the whole step

    @cached_property
    def rest(self) -> Schedule:
        """A schedule of what a step does for the one before: late chunks are stepped and brought home, and committed.

        Its ops are in an order in which they can run, whatever order the schedule lists them in. Each waits for those
        of them that the schedule surely does before it, also where that follows from ops that are none of them. A
        buffer is taken by the first that touches it, if the step before has not handed it on, and given back by the
        last one, after all others.
        """
        order = list(run_order(self.schedule))
        own = (op for op in order if op.id not in self.reads_ahead)
        ops = [op for op in own if op.id == "CM" or (op.id.kind in OF_UPDATES and self.is_late(op))]
        before = _surely_before(ops, Clocks(order))
        carried = {start for start, _, _ in self.schedule.carried}
        pools = {name: pool for op in self.schedule.ops for name, pool in op.takes}
        touched: dict[Buffer, list[OpId]] = {}
        for op in ops:
            for name in dict.fromkeys((*op.writes, *op.reads)):
                touched.setdefault(name, []).append(op.id)
        first = {name: by[0] for name, by in touched.items()}
        last = {name: by[-1] for name, by in touched.items()}
        for by in touched.values():
            before[by[-1]].extend(by[:-1])
        alone = tuple(
            replace(
                op,
                after=tuple(dict.fromkeys(before[op.id])),
                takes=tuple((n, pools[n]) for n, by in first.items() if by == op.id and n not in carried),
                gives=tuple(n for n, by in last.items() if by == op.id),
            )
            for op in ops
        )
        return replace(self.schedule, name=f"{self.schedule.name}-rest", ops=alone, carried=())


def _surely_before(ops: Sequence[Op], clocks: Clocks) -> dict[OpId, list[OpId]]:
    """For each of some ops, of each lane the last of them that is surely done when it starts: those before it are, too.

    ``ops``: in an order in which they can run.
    """
    lanes: dict[str, list[Op]] = {}
    found: dict[OpId, list[OpId]] = {op.id: [] for op in ops}
    for op in ops:
        for lane in lanes.values():
            count = bisect_left(lane, True, key=lambda one: not clocks.before(one, op))
            found[op.id].extend(one.id for one in lane[max(count - 1, 0) : count])
        lanes.setdefault(op.lane, []).append(op)
    return found


def gradient_extent(op: Op) -> str:
    """The name of the extent in which the gradient of an op's group waits."""
    return f"gradient.{op.id.group}"


def activation_extent(op: Op) -> str:
    """The name of the extent in which an op's saved activation waits."""
    return f"activation.{op.id.stage}.{op.id.micro_batch}"


def refuse_others(schedule: Schedule, known: Mapping[str, object]) -> None:
    """Raises:
    ScheduleError: the schedule has ops that nothing here can run.
    """
    for op in schedule.ops:
        if op.id.kind not in known:
            raise ScheduleError(
                f"op {op.id} of schedule {schedule.name} is for lane {op.lane}, and ranks that train can do "
                f"{', '.join(sorted(known))}",
                op=op.id,
            )
