"""Weights and optimizer state on their way from home and back, and what changes them."""

from penstock.schedule.ir.ops import Op, chunk_of, refused
from penstock.schedule.ir.references import Buffer, group_buffer
from penstock.schedule.meaning.ground import Ground
from penstock.schedule.meaning.values import AFTER, BEFORE, LEFT, NOW, SHOWN, State, Update, Weights
from penstock.schedule.place import Chunk


class ArrayRules(Ground):
    """Rules of RW, UW, WW, UN, RS, OP, WS, OD and CM."""

    def _read_weights(self, op: Op) -> None:
        cut = self._chunks(op)
        self._home(op, self.place.weights, "disk")
        self._moves(op, sum(c.numel for c in cut) * self.form.weight_bytes)
        value = Weights(op.id.group, self._found(op, cut))
        if late := [c for c, version in value.versions.items() if version == BEFORE]:
            raise refused(op, f"reads chunk {op.id.group}.{late[0]} before the step before has brought it home")
        self._put(op, self._at(op, op.writes, "the chunk"), value, "host", op.nbytes)

    def _found(self, op: Op, cut: list[Chunk]) -> dict[int, int]:
        """The versions of chunks where stages find them, which are read."""
        for c in cut:
            self.accesses.read(op, "weights", op.id.group, c.index)
        return {c.index: self.weights[op.id.group, c.index] for c in cut}

    def _load(self, op: Op) -> None:
        cut, g = self._chunks(op), op.id.group
        self._moves(op, sum(c.numel for c in cut) * self.form.weight_bytes)
        source = self.values.get(op.reads[0]) if op.reads else None
        if not op.reads:
            self._home(op, self.place.weights, "host")
            versions = self._found(op, cut)
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
        """The version of the weights of an op's chunk, alone in a host buffer."""
        g, c = op.id.group, op.id.chunk
        value = self.values.get(name)
        if isinstance(value, Weights) and value.group == g and list(value.versions) == [c]:
            return value.versions[c]
        raise refused(op, f"takes {name} for {SHOWN[Weights]} of its chunk, which it is not")

    def _stepped_weights(self, op: Op, c: Chunk) -> int:
        """The version of new weights that an op reads: from their buffer, or in memory where the step has left them."""
        g = op.id.group
        if self.passing[g]:
            return self._new_weights(op, self._at(op, op.reads, "the new weights"))
        self._at(op, op.reads, "new weights, which are in memory", count=0)
        self.accesses.read(op, "stepped weights", g, c.index)
        return self.stepped_to.get((g, c.index), self.at_home[g, c.index])

    def _write_weights(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        if self.home[g] != "disk":
            raise refused(op, f"is for weights whose home is disk, and it is {self.home[g]}")
        self._moves(op, c.numel * self.form.weight_bytes)
        self._bring_home(op)
        self.accesses.write(op, self._home_of_weights(g), g, c.index)
        self.at_home[g, c.index] = self._stepped_weights(op, c)
        if self.place.weights[g] == "disk":
            self.weights[g, c.index] = self.at_home[g, c.index]

    def _home_of_weights(self, g: int) -> str:
        """The key, outside of all buffers, of the weights at home: stages find these, or a copy of them."""
        return "weights" if self.home[g] == self.place.weights[g] else "weights at home"

    def _renew(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._home(op, self.place.weights, "device")
        if self.place.state[g] == "device":
            raise refused(op, "is for a copy of weights, and these are at home where stages find them")
        self._moves(op, c.numel * self.form.weight_bytes)
        version = self._stepped_weights(op, c)
        self.accesses.write(op, "weights", g)
        self.weights[g, c.index] = version

    def _bring_home(self, op: Op) -> None:
        """Check that a write to disk is of the step before until that is committed, and of this one from then on."""
        late = chunk_of(op) in self.late
        self.accesses.read(op, "commit")
        if late and self.committed:
            raise refused(op, "ends the step before, which CM has committed already")
        if not late and not self.committed and "CM" in self.schedule.by_id:
            raise refused(op, "writes something of this step before CM has committed the one before")
        if late and "CM" not in self.schedule.by_id:
            raise refused(op, "ends the step before, which no op CM commits")

    def _commit(self, op: Op) -> None:
        self.accesses.write(op, "commit")
        for tag in sorted(self.late):
            versions = (self.weights[tag], self.at_home[tag], self.state[tag])
            if tag not in self.stepped or versions != (NOW, NOW, NOW):
                raise refused(op, f"commits the step before, whose chunk {tag[0]}.{tag[1]} is not at home yet")
        self.committed = True

    def _state_moves(self, g: int) -> bool:
        """True if a step reads a group's state from disk, and writes it there."""
        return self.place.state[g] == "disk" and self._state_bytes(g) > 0

    def _state_bytes(self, g: int, numel: int = 1) -> int:
        """Bytes of what the step of a chunk has of its state, besides the momentum of matrices."""
        return self.form.passed_bytes(self.needs.program.groups[g], numel)

    def _read_state(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        state, new = self._state_moves(g), self.passing[g] and (g, c.index) not in self.kept_weights
        if not (state or new):
            raise refused(op, "is for what a step reads from disk, and there is nothing there that it has to read")
        nbytes, weights = self._state_bytes(g, c.numel), self.form.weight_bytes * c.numel
        self._moves(op, nbytes * state + weights * (new and self.form.steps_weights))
        self._at(op, op.writes, "what a step reads", count=state + new)
        into = list(op.writes)
        if state:
            self.accesses.read(op, "state", g, c.index)
            self._named(op, into[0], "state")
            value = State(g, c.index, self.state[g, c.index])
            self._put(op, into.pop(0), value, "host", nbytes)
        if new:
            if self.form.steps_weights:
                self.accesses.read(op, self._home_of_weights(g), g, c.index)
            self._named(op, into[0], "new weights")
            self._put(op, into.pop(0), Weights(g, {c.index: self.at_home[g, c.index]}), "host", weights)

    def _named(self, op: Op, name: Buffer, holds: str) -> None:
        """A step on the host finds its buffers by their names."""
        if (name.holds, name.group, name.chunk) != (holds, *chunk_of(op)):
            wanted = group_buffer("S" if holds == "state" else "O", *chunk_of(op))
            raise refused(op, f"has {name} where what is run looks for {wanted}: call it that")

    def _step(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        tag, state, new = (g, c.index), self._state_moves(g), self.passing[g]
        self._home(op, self.place.state, "host", "disk")
        self._moves(op, self.form.step_bytes(self.needs.program.groups[g], c.numel, self._width(g)))
        self._at(op, op.reads, "gradient, state and weights", count=1 + state + new)
        late = self._check_update(op) if g in self.matrices else self._check_step(op)
        done, through = NOW if late else AFTER, list(op.reads[1:])
        if op.writes != op.reads[1:]:
            raise refused(op, "changes other buffers than those of the state and the weights that it reads")
        if state:
            if self._value(op, through[0], State) != State(*tag, done - 1):
                raise refused(op, f"takes {through[0]} for its chunk's state, which it is not")
            self.values[through.pop(0)] = State(*tag, done)
        else:
            self.accesses.write(op, "state in memory", *tag)
            self.state[tag] = done
        if new:
            self._named(op, through[0], "new weights")
            if self._new_weights(op, through[0]) != done - 1:
                raise refused(op, f"takes {through[0]} for its chunk's weights, which it is not")
            self.values[through[0]] = Weights(g, {c.index: done})
        else:
            self.accesses.write(op, "stepped weights", *tag)
            self.stepped_to[tag] = done
            if self.home[g] != "disk":
                self.at_home[tag] = done
        if self.place.weights[g] == "host":
            self.accesses.write(op, "weights", *tag)
            self.weights[tag] = done
        self.stepped.add(tag)

    def _check_update(self, op: Op) -> bool:
        """Check the orthogonal updates that a step of matrices takes; their gradient was checked where they were made.
        True if it is the one that the step before has left."""
        update = self._value(op, op.reads[0], Update)
        if (update.group, update.chunks, update.orthogonal) != (op.id.group, frozenset((op.id.chunk,)), True):
            raise refused(op, f"takes {op.reads[0]} for its chunk of orthogonal updates, which it is not")
        return update.late

    def _check_step(self, op: Op) -> bool:
        """True if a step is of the gradient that the step before has left; else it is whole, and the norm is known."""
        tag, gradient = chunk_of(op), self._gradient(op, op.reads[0])
        if gradient.sum == LEFT:
            return True
        self._whole(op, gradient)
        self._may_step(op, early=self.schedule.speculative and self.place.all_on_disk(op.id.group))
        if "NORM" not in self.schedule.by_id:  # the step computes its part in passing
            self._measured(op, self.cuts[tag[0]][tag[1]])
        return False

    def _may_step(self, op: Op, *, early: bool) -> None:
        if self.needs.settings.wait and not early:
            self.accesses.read(op, "norm")
            if not self.normed:
                raise refused(op, "may run before NORM, which its group waits for")

    def _write_state(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        if not self._state_moves(g):
            raise refused(op, "is for state on disk, and nothing of it lives there")
        self._moves(op, self._state_bytes(g, c.numel))
        self._bring_home(op)
        value = self._value(op, self._at(op, op.reads, "the state"), State)
        if value[:2] != (g, c.index):
            raise refused(op, f"takes {op.reads[0]} for its chunk's state, which it is not")
        self.accesses.write(op, "state", g, c.index)
        self.state[g, c.index] = value.version

    def _step_on_device(self, op: Op) -> None:
        g = op.id.group
        self._home(op, self.place.state, "device")
        self._on_device(op)
        self._may_step(op, early=False)
        self.accesses.write(op, "weights", g)
        for c in self.cuts[g]:
            if c.trainable:
                if "NORM" not in self.schedule.by_id:
                    self._measured(op, c)
                self.weights[g, c.index] = self.at_home[g, c.index] = self.state[g, c.index] = AFTER
                self.stepped.add((g, c.index))
