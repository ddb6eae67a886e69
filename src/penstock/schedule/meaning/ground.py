"""The knowledge that a proof has of a step so far, and how it looks at what an op takes."""

from collections.abc import Mapping

from penstock.config import Tier
from penstock.errors import ScheduleError
from penstock.schedule.check.clocks import Clocks
from penstock.schedule.check.late import late_chunks
from penstock.schedule.ir.ops import ChunkAt, Op, Pool, Schedule, chunk_of, refused
from penstock.schedule.ir.references import Buffer
from penstock.schedule.meaning.sums import Sums
from penstock.schedule.meaning.values import (
    BEFORE,
    LEFT,
    NOW,
    OVER,
    SHOWN,
    Accesses,
    Gradient,
    Needs,
    State,
    V,
    Value,
    Weights,
)
from penstock.schedule.place import BF16, FP32, Chunk, chunks


class Ground:
    """The values of one step, op by op: what all rules of ops share."""

    def __init__(self, schedule: Schedule, needs: Needs, order: list[Op]) -> None:
        program, self.place, self.form = needs.program, needs.settings.place, needs.settings.form
        self.schedule, self.needs, self.stages = schedule, needs, program.stages
        self.cuts = [chunks(g, schedule.chunk) for g in program.groups]
        self.home = [self.place.home(g) for g in program.groups]
        self.passing = [self.place.stepped_in_passing(g) for g in program.groups]
        """group -> whether the weights that a step changes are in a buffer"""
        loaded = {name for op in order if op.id.kind == "RW" for name in op.writes}
        self.kept_weights = {chunk_of(op) for op in order if op.id.kind == "OP" and not loaded.isdisjoint(op.reads)}
        """chunks whose weights a load has brought to the buffer that their step takes them from"""
        clocks = Clocks(order)
        self.accesses = Accesses(clocks)
        self.pools: dict[str, Pool] = {pool.name: pool for pool in schedule.pools}
        self.pool_of: dict[str, Pool] = {start: self.pools[pool] for start, _, pool in schedule.carried}
        makers = [stage for stage in reversed(self.stages) if needs.train]
        uses = {g.index: [s.index for s in makers if g.index in s.gradients] for g in program.groups}
        self.sums = Sums()
        count = schedule.micro_batches
        self.whole = {g: self.sums.whole(stages, count, needs.settings.strands) for g, stages in uses.items() if stages}
        self.trained = {(g, c.index) for g in self.whole for c in self.cuts[g] if c.trainable}
        self.narrow, self.late = schedule.narrow, late_chunks(schedule, clocks)
        self.stepped_to: dict[ChunkAt, int] = {}
        """version of a chunk's weights that a step has changed in memory"""
        self.normed = False
        self.gathered = False
        """True: the norm's parts of all ranks are known"""
        self.partials: set[ChunkAt] = set()
        self.stepped: set[ChunkAt] = set()
        self.committed = False
        start = {(g, c.index): NOW for g, cut in enumerate(self.cuts) for c in cut} | dict.fromkeys(self.late, BEFORE)
        self.weights, self.at_home, self.state = dict(start), dict(start), dict(start)
        """version of each chunk's weights where stages find them, of the same at home, and of its state there"""
        self.matrices = {g.index for g in program.groups if g.whole and self.place.state[g.index] != "device"}
        """groups whose steps in host memory take matrices whole"""
        self.momentum = {tag: version for tag, version in start.items() if tag[0] in self.matrices}
        """version of each chunk's momentum at home"""
        self.extents: dict[ChunkAt, Gradient] = {tag: Gradient(*tag, LEFT) for tag in self.late}
        self.scratch: set[tuple[int, int]] = set()
        self.values: dict[str, Value] = {}
        self.activations: dict[tuple[int, int], str] = {}
        """(stage, micro-batch) -> the buffer that its saved activation is in while it is on the device"""
        self.crossed: set[str] = set()
        """ops that have sent or received"""
        self.besides: set[tuple[int, int]] = set()
        """(stage, micro-batch) of which what the stage is handed besides its input is there"""
        self.forward = [self._next(-1)] * schedule.micro_batches
        """micro-batch -> the stage of this rank whose forward is next"""
        self.turns = [0] * len(self.stages)
        """stage -> the micro-batch whose forward is next"""
        self.backward = [self._next(len(self.stages) - 1, back=True)] * schedule.micro_batches
        self.halves: set[tuple[int, int]] = set()
        """(stage, micro-batch) whose backward is half done"""
        self.inputs: dict[tuple[int, int], str | None] = {}
        """(stage, micro-batch) -> the buffer in which its latest op has found its input"""
        self.graphs: dict[tuple[int, int], str | None] = {}
        """(stage, micro-batch) whose graph is kept -> the buffer of the input that it holds"""
        self.kept_gradients: dict[ChunkAt, str] = {}
        """chunk that is left to the next step -> the buffer that its gradient is to be in at the end"""
        self.read_ahead: dict[str, Value] = {}
        """buffer -> what it is to have at the end, for the next step, of a chunk that is left to that"""
        ends = {start: end for start, end, _ in schedule.carried}
        for op in order:
            if op.id.kind in ("OP", "MU") and op.reads and op.reads[0] in ends:
                tag = chunk_of(op)
                self.values[op.reads[0]] = Gradient(*tag, LEFT)
                self.kept_gradients[tag] = ends.pop(op.reads[0])
        for op in order:
            for name in op.reads if op.id.kind == "OP" else ():
                if name in ends:
                    self._hand_on(op, name, ends.pop(name))
        if ends:
            raise ScheduleError(f"buffer {min(ends)} is carried on, and no step takes it", op=f"carry {min(ends)}")

    def _hand_on(self, op: Op, start: Buffer, end: Buffer) -> None:
        """The step ``op`` of a chunk finds what it takes from disk in ``start``, where the step before has read it, and
        the next one in ``end``."""
        g, c = chunk_of(op)
        if (g, c) not in self.late:
            raise refused(op, f"takes {start} from the step before, which has left it nothing to step")
        values: list[Value] = []
        for name, version in ((start, BEFORE), (end, NOW)):
            if name.holds not in ("state", "new weights") or (name.group, name.chunk) != (g, c):
                raise refused(op, f"hands {start} on as {end}, which are not both its chunk's state, or its weights")
            values.append(State(g, c, version) if name.holds == "state" else Weights(g, {c: version}))
        read = self.schedule.by_id.get(op.id.of("RS"))
        if read is None or end not in read.writes:  # a step that nothing was left to is brought there what that reads
            raise refused(
                op, f"hands {start} on as {end}, which no op {op.id.of('RS')} reads from disk for the next step"
            )
        self.values[start], self.read_ahead[end] = values

    def _next(self, stage: int, *, back: bool = False) -> int:
        """The stage of this rank that comes after one in the forward, or ``back``; the number of stages, or -1: none
        does."""
        to_come = range(stage - 1, -1, -1) if back else range(stage + 1, len(self.stages))
        return next((k for k in to_come if self.needs.program.has(k)), -1 if back else len(self.stages))

    def _lacks(self, ident: str) -> ScheduleError:
        return ScheduleError(f"the schedule has no op {ident}, which this model needs where its state lives", op=ident)

    def _chunk(self, op: Op, *, trained: bool = False) -> Chunk:
        """The chunk that an op is of. ``trained``: one with a gradient in this step."""
        g, c = op.id.group, op.id.chunk
        if c >= len(self.cuts[g]):
            raise refused(op, "is of a chunk that this model does not have")
        if trained and (g, c) not in self.trained:
            raise refused(op, "is of a chunk that has no gradient")
        return self.cuts[g][c]

    def _chunks(self, op: Op) -> list[Chunk]:
        """The chunks that a load of weights is of: the one in its id, or those that its elements are made of."""
        if op.elements is None:
            return [self._chunk(op)]
        first, end = op.elements
        found = [c for c in self.cuts[op.id.group] if first <= c.start and c.start + c.numel <= end]
        if not found or (found[0].start, found[-1].start + found[-1].numel) != (first, end):
            raise refused(op, f"is of elements {first}-{end}, which are no whole chunks of its group")
        if op.id.chunk not in {c.index for c in found}:
            raise refused(op, f"is of elements {first}-{end}, and the chunk in its id is not among them")
        return found

    def _value(self, op: Op, name: str, kind: type[V]) -> V:
        value = self.values.get(name)
        if not isinstance(value, kind):
            raise refused(op, f"takes {name} for {SHOWN[kind]}, which it is not")
        return value

    def _at(self, op: Op, names: tuple[str, ...], what: str, *, count: int = 1) -> str:
        """The first of the names, which are so many."""
        if len(names) != count:
            raise refused(op, f"has {len(names)} buffers for {what}, and needs {count}")
        return names[0] if names else ""

    def _moves(self, op: Op, nbytes: int) -> None:
        if op.nbytes != nbytes:
            raise refused(op, f"says that it moves {op.nbytes} bytes, and moves {nbytes}: write 'bytes {nbytes}'")

    def _put(self, op: Op, name: str, value: Value, tier: Tier, nbytes: int, *, backed: bool = True) -> None:
        """A buffer has a value from now on; it has room for that, where it is needed."""
        self._room(op, name, tier, nbytes, backed=backed)
        self.values[name] = value

    def _room(self, op: Op, name: str, tier: Tier, nbytes: int, *, backed: bool = True) -> None:
        pool = self.pool_of[name]
        if pool.tier != tier or pool.size < nbytes or pool.backed != backed:
            need = f"{nbytes} bytes on the {tier}{'' if backed else ', counted'}"
            raise refused(op, f"needs {need} for {name}, and pool {pool.name} is not that")

    def _sends(self, op: Op, share: int, *, levels: bool = False) -> None:
        """All ranks' shares, but for one: what each sends. On two ``levels``, within a host (``net``), to each other
        rank the shares of a rank on each host; between hosts (``nic``), one to the rank with this one's place."""
        needs = self.needs
        within = needs.hosts * (needs.on_host - 1) if levels else needs.ranks - 1
        self._moves(op, share * (needs.hosts - 1 if op.lane == "nic" else within))

    def _home(self, op: Op, tiers: Mapping[int, Tier] | tuple[Tier, ...], *wanted: Tier) -> None:
        if (tier := tiers[op.id.group]) not in wanted:
            what = "weights" if tiers is self.place.weights else "state"
            raise refused(op, f"is for {what} whose home is {' or '.join(wanted)}, and it is {tier}")

    def _gradient(self, op: Op, name: str, of: ChunkAt | None = None, over: str = "") -> Gradient:
        """The gradient ``of`` a group's chunk, -1: of all of it; or of the op's own. ``over``: as of ``Gradient``."""
        value = self.values.get(name)
        if not isinstance(value, Gradient) or value.over != over:
            raise refused(op, f"takes {name} for {OVER[over]}, which it is not")
        if value[:2] != (of or chunk_of(op)):
            raise refused(op, f"takes {name}, which is a gradient of something else")
        return value

    def _on_device(self, op: Op) -> None:
        """An op takes the gradient of its group on the device, which is whole."""
        self._whole(op, self._gradient(op, self._at(op, op.reads, "the gradient"), (op.id.group, -1)))

    def _whole(self, op: Op, gradient: Gradient) -> None:
        if gradient.sum != self.whole[gradient.group]:
            raise refused(
                op,
                f"takes a gradient that is {self.sums.described(gradient.sum)}, and has to be "
                f"{self.sums.described(self.whole[gradient.group])}: "
                "another order of the sum changes the numbers",
            )

    def _width(self, g: int) -> int:
        return BF16 if g in self.narrow else FP32

    def _whole_weights(self, g: int) -> int:
        """Bytes of all weights of a group that one rank has a part of."""
        return self.needs.parts * self.needs.program.groups[g].numel * self.form.weight_bytes

    def _read_partials(self, op: Op) -> None:
        for g, c in sorted(self.trained):
            self.accesses.read(op, "norm", g, c)
            if (g, c) not in self.partials:
                raise refused(op, f"needs the part of chunk {g}.{c}, which no op has computed yet")

    def _measured(self, op: Op, c: Chunk) -> None:
        self.accesses.write(op, "norm", op.id.group, c.index)
        self.partials.add((op.id.group, c.index))
