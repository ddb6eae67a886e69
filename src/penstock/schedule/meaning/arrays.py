"""Weights and optimizer state on their way from home and back, and what changes them."""

from penstock.schedule.ir.ops import Op, chunk_of
from penstock.schedule.meaning.ground import Ground
from penstock.schedule.meaning.values import (
    AFTER,
    BEFORE,
    LEFT,
    NOW,
    SHOWN,
    Gradient,
    State,
    Weights,
    refused,
)
from penstock.schedule.place import Chunk


class ArrayRules(Ground):
    """Rules of RW, UW, WW, UN, RS, OP, WS, OD and CM."""

    def _read_weights(self, op: Op) -> None:
        cut = self._chunks(op)
        self._home(op, self.place.weights, "disk")
        self._moves(op, sum(c.numel for c in cut) * self.form.weight_bytes)
        value = Weights(op.id.group, self._at_home(op, cut))
        if late := [c for c, version in value.versions.items() if version == BEFORE]:
            raise refused(op, f"reads chunk {op.id.group}.{late[0]} before the step before has brought it home")
        self._put(op, self._at(op, op.writes, "the chunk"), value, "host", op.nbytes)

    def _at_home(self, op: Op, cut: list[Chunk]) -> dict[int, int]:
        """The versions of chunks where they live, which are read."""
        for c in cut:
            self.outside.look(op, "weights", op.id.group, c.index)
        return {c.index: self.weights[op.id.group, c.index] for c in cut}

    def _load(self, op: Op) -> None:
        cut, g = self._chunks(op), op.id.group
        self._moves(op, sum(c.numel for c in cut) * self.form.weight_bytes)
        source = self.values.get(op.reads[0]) if op.reads else None
        if not op.reads:
            self._home(op, self.place.weights, "host")
            versions = self._at_home(op, cut)
        elif isinstance(source, Weights) and source.group == g and list(source.versions) == [c.index for c in cut]:
            versions = source.versions
        elif op.elements is not None:
            raise refused(op, f"takes {op.reads[0]} for {SHOWN[Weights]} of its elements, which it is not")
        else:
            versions = {self._chunk(op).index: self._new_weights(op, op.reads[0])}
        name = self._at(op, op.writes, "the group on the device")
        value = self.values.get(name) if name not in dict(op.takes) else None
        there = value.versions if isinstance(value, Weights) and value.group == g else {}
        total = self.needs.program.groups[g].numel * self.form.weight_bytes
        self._put(op, name, Weights(g, there | versions), "device", total)

    def _new_weights(self, op: Op, name: str) -> int:
        """The version of an op's chunk in a host buffer: of weights alone, or at the head of its fp32 state."""
        g, c = op.id.group, op.id.chunk
        value = self.values.get(name)
        if isinstance(value, Weights) and value.group == g and list(value.versions) == [c]:
            return value.versions[c]
        if isinstance(value, State) and value[:2] == (g, c) and not self.form.split and self.place.weights[g] == "disk":
            return value.version
        raise refused(op, f"takes {name} for {SHOWN[Weights]} of its chunk, which it is not")

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
        late = chunk_of(op) in self.late
        self.outside.look(op, "commit")
        if late and self.committed:
            raise refused(op, "ends the step before, which CM has committed already")
        if not late and not self.committed and "CM" in self.schedule.by_id:
            raise refused(op, "writes something of this step before CM has committed the one before")
        if late and "CM" not in self.schedule.by_id:
            raise refused(op, "ends the step before, which no op CM commits")

    def _commit(self, op: Op) -> None:
        self.outside.change(op, "commit")
        for g, c in sorted(self.late):
            disk = NOW if not self.place.state_on_disk(g, self.form) else self.on_disk[g, c]
            if (g, c) not in self.stepped or disk != NOW or self.weights[g, c] != NOW:
                raise refused(op, f"commits the step before, whose chunk {g}.{c} is not at home yet")
        self.committed = True

    def _read_state(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves_state(op, c)
        for what in self._arrays_on_disk(g):
            self.outside.look(op, what, g, c.index)
        value = State(g, c.index, self.on_disk[g, c.index])
        self._put(op, self._at(op, op.writes, "the state"), value, "host", self.form.state_slot_bytes * c.numel)

    def _moves_state(self, op: Op, c: Chunk) -> None:
        if not self.place.state_on_disk(op.id.group, self.form):
            raise refused(op, "is for state on disk, and nothing of it lives there")
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
                raise refused(op, f"takes {op.reads[1]} for its chunk's state, which it is not")
            self.values[op.reads[1]] = State(*tag, done)
        if disk != self.form.state_slot_bytes:
            self.outside.change(op, "state in memory", *tag)
        if leaves:
            new = self._at(op, tuple(name for name in op.writes if name not in op.reads), "new weights alone")
            self._put(op, new, Weights(g, {c.index: done}), "host", c.numel * self.form.weight_bytes)
        elif self.form.split or self.place.weights[g] == "host":
            self.outside.change(op, "weights", *tag)
            self.weights[tag] = done
        self.stepped.add(tag)

    def _check_step(self, op: Op, gradient: Gradient) -> bool:
        """Whether a step is of the gradient that the step before has left; else it is whole, and the norm is known."""
        tag = chunk_of(op)
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
                raise refused(op, "may run before NORM, which its group waits for")

    def _write_state(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves_state(op, c)
        self._bring_home(op)
        value = self._value(op, self._at(op, op.reads, "the state"), State)
        if value[:2] != (g, c.index):
            raise refused(op, f"takes {op.reads[0]} for its chunk's state, which it is not")
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
            raise refused(op, f"takes {op.reads[0]}, which is a gradient of something else")
        self._whole(op, gradient)
        self._may_step(op, early=False)
        self.outside.change(op, "weights", g)
        for c in self.cuts[g]:
            if c.trainable:
                if "NORM" not in self.schedule.by_id:
                    self._measured(op, c)
                self.weights[g, c.index] = self.on_disk[g, c.index] = AFTER
                self.stepped.add((g, c.index))
