"""The parts that every offload schedule is made of: weights in, gradients out, optimizer step, checkpoints.

A family (``vertical``, ``horizontal``) decides the order of visits; a ``Builder`` emits the ops of each. The order of
emission is each lane's order, so look-ahead is written down here and nowhere else.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.config import Tier
from penstock.schedule.op import Op, Pool, Schedule, parse_word
from penstock.schedule.place import FP32, Chunk, Settings, chunks
from penstock.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One stay of a stage's weights on the device: its compute ops, in order, on the given micro-batches."""

    kind: str  # F, E or B
    stage: int
    micro_batches: tuple[int, ...]
    name: str

    def ops(self) -> list[str]:
        return [f"{self.kind}{self.stage}m{m}" for m in self.micro_batches]


def size_classes(sizes: Iterable[int]) -> list[int]:
    """Buffer sizes such that every size fits in a class at most twice as large."""
    classes: list[int] = []
    for size in sorted(set(sizes), reverse=True):
        if size and (not classes or size < classes[-1] / 2):
            classes.append(size)
    return classes


def class_of(size: int, classes: Sequence[int]) -> int:
    """The size of the smallest class that holds ``size``."""
    return min(c for c in classes if c >= size)


class Builder:
    """Collects ops and pools. Invariant: a buffer is taken once, given once, and its pool has one taking lane
    at a time."""

    def __init__(self, program: Program, settings: Settings, visits: Sequence[Visit]) -> None:
        settings.place.check(program, settings.form)
        self.program = program
        self.s = settings
        self.visits = list(visits)
        self.ops: list[Op] = []
        self.pools: dict[str, Pool] = {}
        self.cuts: list[tuple[Chunk, ...]] = [chunks(g, settings.chunk) for g in program.groups]
        self._loads = 0
        self._ready: dict[str, list[str]] = defaultdict(list)
        self.last_visit: dict[int, int] = {}
        self.gradient_visits: dict[int, list[int]] = defaultdict(list)
        for i, visit in enumerate(self.visits):
            for g in (*self.reads(visit), *self.gradients(visit)):
                self.last_visit[g] = i
            for g in self.gradients(visit):
                self.gradient_visits[g].append(i)
        self.uses = {g: len({self.visits[i].stage for i in v}) for g, v in self.gradient_visits.items()}

    # ---- what a visit touches

    def reads(self, visit: Visit) -> tuple[int, ...]:
        stage = self.program.stages[visit.stage]
        if visit.kind == "F":
            return stage.forward_reads
        if visit.kind == "B":
            return stage.backward_reads
        return tuple(sorted({*stage.forward_reads, *(stage.backward_reads if self.s.train else ())}))

    def gradients(self, visit: Visit) -> tuple[int, ...]:
        return self.program.stages[visit.stage].gradients if self.s.train and visit.kind in "BE" else ()

    def moving(self, visit: Visit) -> list[int]:
        """Groups whose weights this visit brings to the device."""
        return [g for g in self.reads(visit) if self.s.place.weights[g] != "device"]

    def trained_chunks(self, g: int) -> list[Chunk]:
        return [c for c in self.cuts[g] if c.trainable]

    # ---- emission

    def emit(
        self,
        ident: str,
        *,
        after: Iterable[str] = (),
        takes: Iterable[tuple[str, str]] = (),
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        gives: Iterable[str] = (),
        nbytes: int = 0,
    ) -> str:
        self.ops.append(
            Op(
                id=ident,
                word=parse_word(ident),
                after=tuple(dict.fromkeys(after)),
                takes=tuple(takes),
                reads=tuple(reads),
                writes=tuple(writes),
                gives=tuple(gives),
                nbytes=nbytes,
            )
        )
        return ident

    def pool(self, name: str, tier: Tier, size: int, count: int, *, backed: bool = True) -> str:
        """A pool's name; the pool grows to the largest count asked for."""
        old = self.pools.get(name)
        count = max(count, old.count if old else 0)
        self.pools[name] = Pool(name=name, tier=tier, size=size, count=count, backed=backed)
        return name

    # ---- weights

    def weight_buffer(self, g: int, visit: Visit) -> str:
        return f"W{g}@{visit.name}"

    def weight_pools(self) -> None:
        """Device pools for weights by size class, each with room for one visit's needs and what is prefetched."""
        moved = {g for visit in self.visits for g in self.moving(visit)}
        nbytes = {g: self.program.groups[g].numel * self.s.form.weight_bytes for g in sorted(moved)}
        classes = size_classes(nbytes.values())
        self._weight_pool = {g: f"weights.{classes.index(class_of(n, classes))}" for g, n in nbytes.items()}
        for size_index, size in enumerate(classes):
            name = f"weights.{size_index}"
            need = [sum(self._weight_pool[g] == name for g in self.moving(v)) for v in self.visits]
            ahead = self.s.depths.weights - 1 if sum(n > 0 for n in need) > 2 else 0
            self.pool(name, "device", size, max(need) + ahead)

    def load(self, until: int) -> None:
        """Emit the loads of all visits up to and including index ``until``."""
        while self._loads <= min(until, len(self.visits) - 1):
            visit = self.visits[self._loads]
            for g in self.moving(visit):
                self._load_group(g, visit)
            self._loads += 1

    def _load_group(self, g: int, visit: Visit) -> None:
        buffer = self.weight_buffer(g, visit)
        on_disk = self.s.place.weights[g] == "disk"
        stage_bytes = self.s.chunk * self.s.form.weight_bytes
        for c in self.cuts[g]:
            nbytes = c.numel * self.s.form.weight_bytes
            tag = f"{g}.{c.index}@{visit.name}"
            if on_disk:
                pool = self.pool("stage_in", "host", stage_bytes, self.s.depths.stage_in)
                self.emit(f"RW{tag}", takes=[(f"i{tag}", pool)], writes=[f"i{tag}"], nbytes=nbytes)
            last = self.emit(
                f"UW{tag}",
                after=[f"RW{tag}"] if on_disk else [],
                takes=[(buffer, self._weight_pool[g])] if c is self.cuts[g][0] else [],
                reads=[f"i{tag}"] if on_disk else [],
                writes=[buffer],
                gives=[f"i{tag}"] if on_disk else [],
                nbytes=nbytes,
            )
        self._ready[visit.name].append(last)

    # ---- gradients

    def gradient_buffer(self, g: int, visit: Visit) -> str:
        if self.s.place.state[g] == "device":
            return f"G{g}"
        return f"G{g}@{visit.name}"

    def gradient_pools(self) -> None:
        """Device pools for gradients: shared by size class; a group that steps there has a buffer of its own."""
        stay = {g for g in self.gradient_visits if self.s.place.state[g] == "device"}
        assert all(self.uses[g] == 1 for g in stay), "a tied group cannot keep its state on the device"
        sizes = {g: self.program.groups[g].trainable * FP32 for g in self.gradient_visits}
        classes = size_classes(n for g, n in sizes.items() if g not in stay)
        shared = {g: size for g, size in sizes.items() if g not in stay}
        self._gradient_pool = {g: f"gradients.{classes.index(class_of(n, classes))}" for g, n in shared.items()}
        for i, size in enumerate(classes):
            name = f"gradients.{i}"
            need = [sum(self._gradient_pool.get(g) == name for g in self.gradients(v)) for v in self.visits]
            ahead = self.s.depths.gradients - 1 if sum(n > 0 for n in need) > 2 else 0
            self.pool(name, "device", size, max(need) + ahead)
        for g in stay:
            self._gradient_pool[g] = self.pool(f"gradients.of{g}", "device", sizes[g], 1)

    def compute(self, visit: Visit, waits: dict[int, list[str]], checkpoints: dict[int, "Buffers"]) -> list[str]:
        """Emit a visit's compute ops; ``waits`` and ``checkpoints`` are per micro-batch."""
        weights = [self.weight_buffer(g, visit) for g in self.moving(visit)]
        grads = [self.gradient_buffer(g, visit) for g in self.gradients(visit)]
        index = self.visits.index(visit)
        done = []
        for m in visit.micro_batches:
            first, last = m == visit.micro_batches[0], m == visit.micro_batches[-1]
            takes = [
                (self.gradient_buffer(g, visit), self._gradient_pool[g])
                for g in self.gradients(visit)
                if first and (self.s.place.state[g] != "device" or self.gradient_visits[g][0] == index)
            ]
            io = checkpoints[m]
            done.append(
                self.emit(
                    f"{visit.kind}{visit.stage}m{m}",
                    after=[*(self._ready.pop(visit.name, []) if first else []), *waits.get(m, [])],
                    takes=[*takes, *io.takes],
                    reads=[*weights, *grads, *io.reads],
                    writes=[*grads, *io.writes],
                    gives=[*(weights if last else []), *io.gives],
                )
            )
        return done

    def finish(self, name: str, fixed: tuple[tuple[Tier, str, int], ...]) -> Schedule:
        return Schedule(
            name=name,
            micro_batches=self.s.micro_batches,
            chunk=self.s.chunk,
            pools=tuple(self.pools.values()),
            ops=tuple(self.ops),
            fixed=tuple(item for item in fixed if item[2]),
        )


@dataclass(kw_only=True)
class Buffers:
    """Activation buffers that one compute op takes, reads, writes and gives."""

    takes: list[tuple[str, str]]
    reads: list[str]
    writes: list[str]
    gives: list[str]
