"""Proves that a schedule computes the step that it is for, whatever made it.

The checker's rules order every two accesses to a buffer of which one writes it. Here the same is asked of what lies
outside the pools: weights and state at home, what waits on disk, the sums of the norm, the commit. Then every timing
gives the values that one order gives. That order is gone through once, with values that say what they are: "chunk 1 of
group 5's weights, not stepped yet", "the gradient of stage 3, of micro-batches 0 and 1, added up in this order".

An op is refused when something that it takes is not what it has to be. In the end every chunk that has a gradient is
stepped once, from the sum that all schedules make (micro-batches in order within a stage, then stages in backward
order), or is left to the next step with that gradient kept, and all of it is where it lives.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from penstock.config import GradDtype, Tier
from penstock.errors import ScheduleError
from penstock.schedule.clocks import Clocks
from penstock.schedule.ir.ops import Op, Pool, Schedule
from penstock.schedule.ir.references import Buffer
from penstock.schedule.order import run_order
from penstock.schedule.place import BF16, FP32, Chunk, Format, Placement, Settings, chunks, page_up
from penstock.schedule.program import Program, Stage

BEFORE, NOW, AFTER = -1, 0, 1
"""Versions of a chunk: without the step that the step before has left; as this step's stages need it; stepped."""

Sum = tuple["Sum | int", "Sum | int"]
"""A gradient as it was added up: ``(stage, micro-batch)``, or two sums of which the second was added to the first."""

LEFT: Sum = (-1, -1)
"""The whole gradient of the step before."""

ChunkId = tuple[int, int]
"""(group, chunk)"""


class Weights(NamedTuple):
    """Chunks of a group's weights. ``versions``: chunk -> version."""

    group: int
    versions: dict[int, int]


class Gradient(NamedTuple):
    """A group's gradient on the device (``chunk`` -1), or one chunk of it on the host or on disk."""

    group: int
    chunk: int
    sum: Sum


class State(NamedTuple):
    """Those arrays of a chunk's optimizer state that live on disk."""

    group: int
    chunk: int
    version: int


class Activation(NamedTuple):
    """A stage's checkpoint on the device, or the gradient with respect to it."""

    stage: int
    micro_batch: int
    gradient: bool


class Kept(NamedTuple):
    """One part of so many of a checkpoint in host memory."""

    stage: int
    micro_batch: int
    part: int
    parts: int


Value = Weights | Gradient | State | Activation | Kept
V = TypeVar("V", Weights, Gradient, State, Activation, Kept)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a step has to compute, and where its arrays live.

    ``place``: of weights and state; where gradients and checkpoints wait is the schedule's own affair. ``wait``:
    whether the numbers of a step depend on the global norm of its gradients.
    """

    program: Program
    place: Placement
    form: Format
    wait: bool
    grad_dtype: GradDtype = "fp32"
    train: bool = True

    @staticmethod
    def of(program: Program, settings: Settings) -> "Needs":
        """Those of what is built from these settings."""
        s = settings
        return Needs(program=program, place=s.place, form=s.form, wait=s.wait, grad_dtype=s.grad_dtype, train=s.train)


def prove(schedule: Schedule, needs: Needs) -> None:
    """Prove a schedule that the checker's rules hold for.

    Raises:
        ScheduleError: names the op that takes something else than it has to, or what is missing in the end.
    """
    order = list(run_order(schedule))
    step = _Step(schedule, needs, order)
    for op in order:
        step.run(op)
    step.finish()


def narrow_groups_of(schedule: Schedule) -> frozenset[int]:
    """Groups whose gradients cross to the host, and wait, in bf16: those that take a buffer for that on the device."""
    return frozenset(op.id.group for op in schedule.lanes["d2h"] if op.id.kind == "DG" and len(op.writes) > 1)


def late_chunks(schedule: Schedule) -> frozenset[ChunkId]:
    """The chunks that a step steps for the step before, which has left their gradients: in a buffer that is carried
    on, or on disk, where they are read before this step's own are written.
    """
    left, written = {start for start, _, _ in schedule.carried}, set[ChunkId]()
    for op in schedule.ops:
        tag = op.id.group, op.id.chunk
        if op.id.kind == "WG":
            written.add(tag)
        elif op.id.kind == "RG" and tag not in written:
            left |= {*op.writes}
    steps = (op for op in schedule.ops if op.id.kind == "OP")
    return frozenset((op.id.group, op.id.chunk) for op in steps if not left.isdisjoint(op.reads))


def whole_sum(stages: Iterable[int], micro_batches: int) -> Sum:
    """How every schedule adds a group's gradient up. ``stages``: those that make one, in backward order."""
    total: Sum | None = None
    for stage in stages:
        part: Sum = (stage, 0)
        for m in range(1, micro_batches):
            part = part, (stage, m)
        total = part if total is None else (total, part)
    assert total is not None
    return total


class _Outside:
    """Accesses to what is in no buffer: each two to one place are ordered if one of them changes it."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._changed: dict[tuple[str | int, ...], Op] = {}
        self._looked: dict[tuple[str | int, ...], list[Op]] = defaultdict(list)

    def look(self, op: Op, *place: str | int) -> None:
        if place in self._changed:
            self._check(self._changed[place], op, place)
        self._looked[place].append(op)

    def change(self, op: Op, *place: str | int) -> None:
        for other in (*self._looked.pop(place, ()), *([self._changed[place]] if place in self._changed else [])):
            if other is not op:
                self._check(other, op, place)
        self._changed[place] = op

    def _check(self, first: Op, second: Op, place: tuple[str | int, ...]) -> None:
        if not self._clocks.before(first, second):
            where = f"{place[0]} {'.'.join(map(str, place[1:]))}".rstrip()
            message = f"op {second.id} may run before {first.id}, which it has to come after: both are about {where}"
            raise ScheduleError(message, op=second.id)


class _Step:
    """The values of one step, op by op."""

    def __init__(self, schedule: Schedule, needs: Needs, order: list[Op]) -> None:
        program, self.place, self.form = needs.program, needs.place, needs.form
        self.schedule, self.needs, self.stages = schedule, needs, program.stages
        self.cuts = [chunks(g, schedule.chunk) for g in program.groups]
        self.outside = _Outside(Clocks(order))
        self.pools: dict[str, Pool] = {pool.name: pool for pool in schedule.pools}
        self.pool_of: dict[str, Pool] = {start: self.pools[pool] for start, _, pool in schedule.carried}
        makers = [stage for stage in reversed(self.stages) if needs.train]
        uses = {g.index: [s.index for s in makers if g.index in s.gradients] for g in program.groups}
        self.whole = {g: whole_sum(stages, schedule.micro_batches) for g, stages in uses.items() if stages}
        self.trained = {(g, c.index) for g in self.whole for c in self.cuts[g] if c.trainable}
        self.narrow, self.late = narrow_groups_of(schedule), late_chunks(schedule)
        self.normed = False
        self.partials: set[ChunkId] = set()
        self.stepped: set[ChunkId] = set()
        self.committed = False
        start = {(g, c.index): NOW for g, cut in enumerate(self.cuts) for c in cut} | dict.fromkeys(self.late, BEFORE)
        self.weights, self.on_disk = dict(start), dict(start)
        """version of each chunk's weights at home, and of what state lives on disk"""
        self.extents: dict[ChunkId, Gradient] = {tag: Gradient(*tag, LEFT) for tag in self.late}
        self.scratch: set[tuple[int, int]] = set()
        self.values: dict[str, Value] = {}
        self.activations: dict[tuple[int, int], str] = {}
        """(stage, micro-batch) -> the buffer that its checkpoint is in while it is on the device"""
        self.forward = [0] * schedule.micro_batches
        self.backward = [len(self.stages) - 2] * schedule.micro_batches
        self.kept_gradients: dict[ChunkId, str] = {}
        """chunk that is left to the next step -> the buffer that its gradient is to be in at the end"""
        ends = {start: end for start, end, _ in schedule.carried}
        for op in order:
            if op.id.kind == "OP" and op.reads and op.reads[0] in ends:
                tag = op.id.group, op.id.chunk
                self.values[op.reads[0]] = Gradient(*tag, LEFT)
                self.kept_gradients[tag] = ends.pop(op.reads[0])
        if ends:
            raise ScheduleError(f"buffer {min(ends)} is carried on, and no step takes it", op=f"carry {min(ends)}")
        self._kinds: dict[str, Callable[[Op], None]] = {
            **dict.fromkeys(("F", "E", "B"), self._compute),
            "RW": self._read_weights,
            "UW": self._load,
            "WW": self._write_weights,
            "UN": self._renew,
            "DG": self._down,
            "AG": self._add,
            "NG": self._measure,
            "ND": self._measure_on_device,
            "NORM": self._norm,
            "WG": self._put_aside,
            "RG": self._fetch,
            "RS": self._read_state,
            "OP": self._step,
            "WS": self._write_state,
            "OD": self._step_on_device,
            "CM": self._commit,
            "DC": self._leave,
            "WC": self._write_checkpoint,
            "RC": self._read_checkpoint,
            "UC": self._come_back,
        }

    def run(self, op: Op) -> None:
        self.pool_of |= {name: self.pools[pool] for name, pool in op.takes}
        what = self._kinds.get(op.id.kind)
        if what is None:
            raise _refused(op, "is for a rank among several: training runs one")
        what(op)
        for name in op.gives:
            value = self.values.pop(name, None)
            if isinstance(value, Activation) and self.activations.get(value[:2]) == name and not value.gradient:
                raise _refused(op, f"gives {name} back, which a checkpoint is still in")

    def finish(self) -> None:
        """All stages have run, and everything that has a gradient is stepped, or left with it."""
        for m, (forward, backward) in enumerate(zip(self.forward, self.backward, strict=True)):
            if forward < len(self.stages) or (self.needs.train and backward >= 0):
                stage = f"F{forward}m{m}" if forward < len(self.stages) - 1 else f"E{forward}m{m}"
                raise self._lacks(stage if forward < len(self.stages) else f"B{backward}m{m}")
        for g, c in sorted(self.trained):
            if (g, c) not in self.stepped:
                raise self._lacks(f"OD{g}" if self.place.state[g] == "device" else f"OP{g}.{c}")
            if (g, c) not in self.partials:
                raise self._lacks(f"NG{g}.{c}")
            want = NOW if (g, c) in self.late else AFTER
            if self.on_disk[g, c] != want and self.place.state_on_disk(g, self.form):
                raise self._lacks(f"WS{g}.{c}")
            if self.weights[g, c] != want:
                raise self._lacks(f"{'WW' if self.place.weights[g] == 'disk' else 'UN'}{g}.{c}")
        for tag in sorted(self.late):
            kept = self.values.get(self.kept_gradients[tag]) if tag in self.kept_gradients else self.extents.get(tag)
            if kept != Gradient(*tag, self.whole[tag[0]]):
                what = f"chunk {tag[0]}.{tag[1]} is left to the next step, and its gradient is not kept for that"
                raise ScheduleError(what, op=f"OP{tag[0]}.{tag[1]}")

    # ---- what an op takes

    def _lacks(self, ident: str) -> ScheduleError:
        return ScheduleError(f"the schedule has no op {ident}, which this model needs where its state lives", op=ident)

    def _chunk(self, op: Op, *, trained: bool = False) -> Chunk:
        """The chunk that an op is of. ``trained``: one with a gradient in this step."""
        g, c = op.id.group, op.id.chunk
        if not (0 <= g < len(self.cuts) and 0 <= c < len(self.cuts[g])):
            raise _refused(op, "is of a chunk that this model does not have")
        if trained and (g, c) not in self.trained:
            raise _refused(op, "is of a chunk that has no gradient")
        return self.cuts[g][c]

    def _value(self, op: Op, name: str, kind: type[V]) -> V:
        value = self.values.get(name)
        if not isinstance(value, kind):
            raise _refused(op, f"takes {name} for {_SHOWN[kind]}, which it is not")
        return value

    def _at(self, op: Op, names: tuple[str, ...], what: str, *, count: int = 1) -> str:
        """The first of the names, which are so many."""
        if len(names) != count:
            raise _refused(op, f"has {len(names)} buffers for {what}, and needs {count}")
        return names[0] if names else ""

    def _moves(self, op: Op, nbytes: int) -> None:
        if op.nbytes != nbytes:
            raise _refused(op, f"says that it moves {op.nbytes} bytes, and moves {nbytes}: write 'bytes {nbytes}'")

    def _put(self, op: Op, name: str, value: Value, tier: Tier, nbytes: int, *, backed: bool = True) -> None:
        """A buffer has a value from now on; it has room for that, where it is needed."""
        pool = self.pool_of[name]
        if pool.tier != tier or pool.size < nbytes or pool.backed != backed:
            need = f"{nbytes} bytes on the {tier}{'' if backed else ', counted'}"
            raise _refused(op, f"needs {need} for {name}, and pool {pool.name} is not that")
        self.values[name] = value

    def _home(self, op: Op, tiers: Mapping[int, Tier] | tuple[Tier, ...], *wanted: Tier) -> None:
        if (tier := tiers[op.id.group]) not in wanted:
            what = "weights" if tiers is self.place.weights else "state"
            raise _refused(op, f"is for {what} whose home is {' or '.join(wanted)}, and it is {tier}")

    def _gradient(self, op: Op, name: str) -> Gradient:
        """The gradient of an op's chunk in host memory."""
        value = self._value(op, name, Gradient)
        if value[:2] != (op.id.group, op.id.chunk):
            raise _refused(op, f"takes {name}, which is a gradient of something else")
        return value

    def _whole(self, op: Op, gradient: Gradient) -> None:
        if gradient.sum != self.whole[gradient.group]:
            raise _refused(
                op,
                f"takes a gradient that is {_told(gradient.sum)}, and has to be {_told(self.whole[gradient.group])}: "
                "another order of the sum changes the numbers",
            )

    def _width(self, g: int) -> int:
        return BF16 if g in self.narrow else FP32

    # ---- compute

    def _compute(self, op: Op) -> None:
        kind, k, m, last = op.id.kind, op.id.stage, op.id.micro_batch, len(self.stages) - 1
        turn = self.backward[m] == k and self.forward[m] > last if kind == "B" else self.forward[m] == k
        if k > last or (kind == "E") != (k == last) or not turn or (kind == "B" and not self.needs.train):
            raise _refused(op, "is not the stage that its micro-batch comes to next")
        stage, taken = self.stages[k], dict(op.takes)
        for g in self._read_by(kind, stage):
            self._check_weights(op, g)
        self._check_activations(op, stage)
        if self.needs.train and kind in "BE":
            for g in stage.gradients:
                self._sum_on_device(op, g, taken)
        if kind == "B":
            self.backward[m] -= 1
        else:
            self.forward[m] += 1

    def _read_by(self, kind: str, stage: Stage) -> list[int]:
        found = {*stage.backward_reads} if kind == "B" else {*stage.forward_reads}
        if kind == "E" and self.needs.train:
            found |= {*stage.backward_reads}
        return sorted(g for g in found if self.cuts[g])

    def _check_weights(self, op: Op, g: int) -> None:
        """The weights of a group are there, whole, and not stepped yet."""
        if self.place.weights[g] == "device":
            self.outside.look(op, "weights", g)
            versions = {c.index: self.weights[g, c.index] for c in self.cuts[g]}
        else:
            found = [v for v in map(self.values.get, op.reads) if isinstance(v, Weights) and v.group == g]
            if len(found) != 1:
                raise _refused(op, f"reads {len(found)} buffers with weights of group {g}, and needs one")
            versions = found[0].versions
        for c in self.cuts[g]:
            if versions.get(c.index) != NOW:
                state = {None: "not there", BEFORE: "not stepped for the step before", AFTER: "stepped already"}
                raise _refused(op, f"reads chunk {g}.{c.index} of the weights, which is {state[versions.get(c.index)]}")

    def _check_activations(self, op: Op, stage: Stage) -> None:
        """The checkpoint and the gradient that a stage reads are on the device; it puts out its own."""
        k, m, kind = stage.index, op.id.micro_batch, op.id.kind
        into = self.stages[k - 1] if k else None
        fresh = tuple(name for name, _ in op.takes if name in op.writes and not self.pool_of[name].backed)
        if into is not None and into.checkpoint:
            self.outside.look(op, "checkpoint", k - 1, m)
            if self.activations.get((k - 1, m)) not in op.reads:
                raise _refused(op, f"needs the checkpoint of stage {k - 1} on the device, in a buffer that it reads")
            if kind != "F" or not self.needs.train:
                del self.activations[k - 1, m]  # nobody reads it after that
        if kind == "B" and stage.gradient:
            found = [self.values.get(name) for name in op.reads]
            if Activation(k, m, True) not in found:
                raise _refused(op, f"needs the gradient of what stage {k} put out, in a buffer that it reads")
        if kind == "F" and stage.checkpoint:
            name = self._at(op, fresh, "its checkpoint")
            self._put(op, name, Activation(k, m, False), "device", stage.checkpoint, backed=False)
            self.activations[k, m] = name
            self.outside.change(op, "checkpoint", k, m)
        elif kind != "F" and self.needs.train and into is not None and into.gradient:
            name = self._at(op, fresh, "the gradient of its input")
            self._put(op, name, Activation(k - 1, m, True), "device", into.gradient, backed=False)

    def _sum_on_device(self, op: Op, g: int, taken: Mapping[Buffer, str]) -> None:
        names = tuple(name for name in op.writes if name.kind == "G" and name.group == g)
        name = self._at(op, names, f"the gradient of group {g}")
        new: Sum = (op.id.stage, op.id.micro_batch)
        if name not in taken:
            new = self._value(op, name, Gradient).sum, new
        self._put(op, name, Gradient(g, -1, new), "device", self.needs.program.groups[g].trainable * FP32)

    # ---- weights

    def _read_weights(self, op: Op) -> None:
        c, g = self._chunk(op), op.id.group
        self._home(op, self.place.weights, "disk")
        self.outside.look(op, "weights", g, c.index)
        self._moves(op, c.numel * self.form.weight_bytes)
        value = Weights(g, {c.index: self.weights[g, c.index]})
        self._put(op, self._at(op, op.writes, "the chunk"), value, "host", op.nbytes)

    def _load(self, op: Op) -> None:
        c, g = self._chunk(op), op.id.group
        self._moves(op, c.numel * self.form.weight_bytes)
        if op.reads:
            version = self._new_weights(op, op.reads[0])
        else:
            self._home(op, self.place.weights, "host")
            self.outside.look(op, "weights", g, c.index)
            version = self.weights[g, c.index]
        name = self._at(op, op.writes, "the group on the device")
        value = self.values.get(name) if name not in dict(op.takes) else None
        there = value.versions if isinstance(value, Weights) and value.group == g else {}
        total = self.needs.program.groups[g].numel * self.form.weight_bytes
        self._put(op, name, Weights(g, there | {c.index: version}), "device", total)

    def _new_weights(self, op: Op, name: str) -> int:
        """The version of an op's chunk in a host buffer: of weights alone, or at the head of its fp32 state."""
        g, c = op.id.group, op.id.chunk
        value = self.values.get(name)
        if isinstance(value, Weights) and value.group == g and list(value.versions) == [c]:
            return value.versions[c]
        if isinstance(value, State) and value[:2] == (g, c) and not self.form.split and self.place.weights[g] == "disk":
            return value.version
        raise _refused(op, f"takes {name} for {_SHOWN[Weights]} of its chunk, which it is not")

    def _write_weights(self, op: Op) -> None:
        c, g = self._chunk(op), op.id.group
        self._home(op, self.place.weights, "disk")
        self._moves(op, c.numel * self.form.weight_bytes)
        self._bring_home(op)
        self.outside.change(op, "weights", g, c.index)
        self.weights[g, c.index] = self._new_weights(op, self._at(op, op.reads, "the new weights"))

    def _renew(self, op: Op) -> None:
        c, g = self._chunk(op), op.id.group
        self._home(op, self.place.weights, "device")
        self._moves(op, c.numel * self.form.weight_bytes)
        self.outside.change(op, "weights", g)
        self.weights[g, c.index] = self._new_weights(op, self._at(op, op.reads, "the new weights"))

    def _bring_home(self, op: Op) -> None:
        """What is written to disk is the step before's until that is committed, and this one's from then on."""
        late = (op.id.group, op.id.chunk) in self.late
        self.outside.look(op, "commit")
        if late and self.committed:
            raise _refused(op, "ends the step before, which CM has committed already")
        if not late and not self.committed and "CM" in self.schedule.by_id:
            raise _refused(op, "writes something of this step before CM has committed the one before")
        if late and "CM" not in self.schedule.by_id:
            raise _refused(op, "ends the step before, which no op CM commits")

    def _commit(self, op: Op) -> None:
        self.outside.change(op, "commit")
        for g, c in sorted(self.late):
            disk = NOW if not self.place.state_on_disk(g, self.form) else self.on_disk[g, c]
            if (g, c) not in self.stepped or disk != NOW or self.weights[g, c] != NOW:
                raise _refused(op, f"commits the step before, whose chunk {g}.{c} is not at home yet")
        self.committed = True

    # ---- gradients

    def _down(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        width, cast = self._width(g), g in self.narrow
        source = self._value(op, self._at(op, op.reads, "the gradient on the device"), Gradient)
        if (source.group, source.chunk) != (g, -1):
            raise _refused(op, f"takes {op.reads[0]}, which is a gradient of something else")
        name = self._at(op, op.writes, "the gradient", count=1 + cast)
        if cast:
            self._whole(op, source)
            if self.needs.grad_dtype != "bf16":
                raise _refused(op, "rounds a gradient to bf16: give grad_dtype='bf16'")
            self._put(op, op.writes[1], source, "device", c.numel * BF16)
        self._moves(op, c.numel * width)
        self._put(op, name, Gradient(g, c.index, source.sum), "host", op.nbytes)

    def _add(self, op: Op) -> None:
        c = self._chunk(op, trained=True)
        self._moves(op, 3 * c.numel * FP32)
        into = self._at(op, op.writes, "the sum")
        what = self._at(op, tuple(name for name in op.reads if name != into), "what is added")
        total, part = self._gradient(op, into), self._gradient(op, what)
        if LEFT in (total.sum, part.sum) or op.id.group in self.narrow:
            raise _refused(op, "adds to a gradient that is whole already")
        self.values[into] = Gradient(total.group, total.chunk, (total.sum, part.sum))

    def _measure(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * self._width(g))
        self._whole(op, self._gradient(op, self._at(op, op.reads, "the gradient")))
        self._measured(op, c)

    def _measure_on_device(self, op: Op) -> None:
        g = op.id.group
        gradient = self._value(op, self._at(op, op.reads, "the gradient"), Gradient)
        if (gradient.group, gradient.chunk) != (g, -1):
            raise _refused(op, f"takes {op.reads[0]}, which is a gradient of something else")
        self._whole(op, gradient)
        for c in self.cuts[g]:
            if c.trainable:
                self._measured(op, c)

    def _measured(self, op: Op, c: Chunk) -> None:
        self.outside.change(op, "norm", op.id.group, c.index)
        self.partials.add((op.id.group, c.index))

    def _norm(self, op: Op) -> None:
        for g, c in sorted(self.trained):
            self.outside.look(op, "norm", g, c)
            if (g, c) not in self.partials:
                raise _refused(op, f"needs the part of chunk {g}.{c}, which no op has computed yet")
        self.outside.change(op, "norm")
        self.normed = True

    def _put_aside(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * self._width(g))
        self.outside.change(op, "gradient", g, c.index)
        self.extents[g, c.index] = self._gradient(op, self._at(op, op.reads, "the gradient"))

    def _fetch(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * self._width(g))
        self.outside.look(op, "gradient", g, c.index)
        if (g, c.index) not in self.extents:
            raise _refused(op, "reads what no op has written to disk")
        self._put(op, self._at(op, op.writes, "the gradient"), self.extents[g, c.index], "host", op.nbytes)

    # ---- optimizer

    def _read_state(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves_state(op, c)
        for what in self._arrays_on_disk(g):
            self.outside.look(op, what, g, c.index)
        value = State(g, c.index, self.on_disk[g, c.index])
        self._put(op, self._at(op, op.writes, "the state"), value, "host", self.form.state_slot_bytes * c.numel)

    def _moves_state(self, op: Op, c: Chunk) -> None:
        if not self.place.state_on_disk(op.id.group, self.form):
            raise _refused(op, "is for state on disk, and nothing of it lives there")
        self._moves(op, self.place.state_on_disk(op.id.group, self.form) * c.numel)

    def _arrays_on_disk(self, g: int) -> list[str]:
        """In fp32 the master copy is the weights."""
        return ["state", *(["weights"] if not self.form.split and self.place.weights[g] == "disk" else [])]

    def _step(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        tag, disk = (g, c.index), self.place.state_on_disk(g, self.form)
        self._home(op, self.place.state, "host", "disk")
        self._moves(op, self.form.step_bytes(self._width(g)) * c.numel)
        leaves = self.form.split and self.place.weights[g] != "host"
        self._at(op, op.reads, "gradient and state", count=1 + bool(disk))
        self._at(op, op.writes, "state and new weights", count=bool(disk) + leaves)
        late = self._check_step(op, self._gradient(op, op.reads[0]))
        done = NOW if late else AFTER
        if disk:
            if self._value(op, op.reads[1], State) != State(*tag, done - 1) or op.reads[1] not in op.writes:
                raise _refused(op, f"takes {op.reads[1]} for its chunk's state, which it is not")
            self.values[op.reads[1]] = State(*tag, done)
        if disk != self.form.state_slot_bytes:
            self.outside.change(op, "state in memory", *tag)
        if leaves:
            (new,) = (name for name in op.writes if name not in op.reads)
            self._put(op, new, Weights(g, {c.index: done}), "host", c.numel * self.form.weight_bytes)
        elif self.form.split or self.place.weights[g] == "host":
            self.outside.change(op, "weights", *tag)
            self.weights[tag] = done
        self.stepped.add(tag)

    def _check_step(self, op: Op, gradient: Gradient) -> bool:
        """Whether a step is of the gradient that the step before has left; else it is whole, and the norm is known."""
        tag = op.id.group, op.id.chunk
        if gradient.sum == LEFT:
            return True
        self._whole(op, gradient)
        self._may_step(op, early=self.schedule.speculative and self.place.all_on_disk(op.id.group, self.form))
        if "NORM" not in self.schedule.by_id:  # the step computes its part in passing
            self._measured(op, self.cuts[tag[0]][tag[1]])
        return False

    def _may_step(self, op: Op, *, early: bool) -> None:
        if self.needs.wait and not early:
            self.outside.look(op, "norm")
            if not self.normed:
                raise _refused(op, "may run before NORM, which its group waits for")

    def _write_state(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves_state(op, c)
        self._bring_home(op)
        value = self._value(op, self._at(op, op.reads, "the state"), State)
        if value[:2] != (g, c.index):
            raise _refused(op, f"takes {op.reads[0]} for its chunk's state, which it is not")
        for what in self._arrays_on_disk(g):
            self.outside.change(op, what, g, c.index)
        self.on_disk[g, c.index] = value.version
        if "weights" in self._arrays_on_disk(g):
            self.weights[g, c.index] = value.version

    def _step_on_device(self, op: Op) -> None:
        g = op.id.group
        self._home(op, self.place.state, "device")
        gradient = self._value(op, self._at(op, op.reads, "the gradient"), Gradient)
        if (gradient.group, gradient.chunk) != (g, -1):
            raise _refused(op, f"takes {op.reads[0]}, which is a gradient of something else")
        self._whole(op, gradient)
        self._may_step(op, early=False)
        self.outside.change(op, "weights", g)
        for c in self.cuts[g]:
            if c.trainable:
                if "NORM" not in self.schedule.by_id:
                    self._measured(op, c)
                self.weights[g, c.index] = self.on_disk[g, c.index] = AFTER
                self.stepped.add((g, c.index))

    # ---- checkpoints

    def _checkpoint(self, op: Op) -> int:
        """Bytes of the checkpoint that an op moves."""
        k = op.id.stage
        if k >= len(self.stages) or not self.stages[k].checkpoint:
            raise _refused(op, "is of a stage that has no checkpoint")
        return self.stages[k].checkpoint

    def _leave(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        self._moves(op, self._checkpoint(op))
        if self.forward[m] < k + 2 or self.activations.get((k, m)) not in op.reads:
            raise _refused(op, f"takes a checkpoint that is not on the device, or that stage {k + 1} has yet to use")
        self.outside.change(op, "checkpoint", k, m)
        del self.activations[k, m]
        self._hold(op, op.writes, op.nbytes)

    def _hold(self, op: Op, names: tuple[str, ...], nbytes: int) -> None:
        """A checkpoint is in host buffers, one after the other."""
        room = sum(self.pool_of[name].size for name in names)
        if room < nbytes:
            raise _refused(op, f"needs {nbytes} bytes on the host, and its buffers have {room}")
        for i, name in enumerate(names):
            self._put(op, name, Kept(op.id.stage, op.id.micro_batch, i, len(names)), "host", 0)

    def _held(self, op: Op) -> None:
        for i, name in enumerate(op.reads):
            if self._value(op, name, Kept) != Kept(op.id.stage, op.id.micro_batch, i, len(op.reads)):
                raise _refused(op, f"takes {name} for part {i} of its checkpoint, which it is not")
        if not op.reads:
            raise _refused(op, "reads no buffer")

    def _write_checkpoint(self, op: Op) -> None:
        self._moves(op, page_up(self._checkpoint(op)))
        self._held(op)
        self._at(op, op.reads, "the checkpoint")
        if self.pool_of[op.reads[0]].size < op.nbytes:
            raise _refused(op, f"writes whole pages, and {op.reads[0]} has {self.pool_of[op.reads[0]].size} bytes")
        self.outside.change(op, "checkpoint on disk", op.id.stage, op.id.micro_batch)
        self.scratch.add((op.id.stage, op.id.micro_batch))

    def _read_checkpoint(self, op: Op) -> None:
        self._moves(op, page_up(self._checkpoint(op)))
        self.outside.look(op, "checkpoint on disk", op.id.stage, op.id.micro_batch)
        if (op.id.stage, op.id.micro_batch) not in self.scratch:
            raise _refused(op, "reads what no op has written to disk")
        self._at(op, op.writes, "the checkpoint")
        self._hold(op, op.writes, op.nbytes)

    def _come_back(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        self._moves(op, self._checkpoint(op))
        self._held(op)
        if (k, m) in self.activations or self.backward[m] <= k:
            raise _refused(op, "brings back a checkpoint that is on the device, or that nobody needs any more")
        name = self._at(op, op.writes, "the checkpoint on the device")
        self._put(op, name, Activation(k, m, False), "device", op.nbytes, backed=False)
        self.activations[k, m] = name
        self.outside.change(op, "checkpoint", k, m)


_SHOWN: dict[type, str] = {
    Weights: "weights",
    Gradient: "a gradient",
    State: "optimizer state",
    Activation: "an activation",
    Kept: "a checkpoint",
}


def _told(total: Sum) -> str:
    """A sum as people read it: ``B3m0 + B3m1``."""
    if total == LEFT:
        return "the step before's"
    first, second = total
    if isinstance(first, int):
        return f"stage {first} of micro-batch {second}"
    assert not isinstance(second, int)
    return f"({_told(first)} + {_told(second)})"


def _refused(op: Op, what: str) -> ScheduleError:
    return ScheduleError(f"op {op.id} {what}", op=op.id)
