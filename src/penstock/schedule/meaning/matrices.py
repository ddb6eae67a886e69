"""The way of gradients of matrices, whose steps take them whole: momentum, updates, orthogonal updates."""

from penstock.schedule.ir.ops import Op, chunk_of, refused
from penstock.schedule.meaning.arrays import ArrayRules
from penstock.schedule.meaning.values import AFTER, NOW, Momentum, Update
from penstock.schedule.place import BF16


class MatrixRules(ArrayRules):
    """Rules of RM, MU, WM, UU, GU, HU, NS and DU."""

    def _momentum_bytes(self, op: Op, numel: int) -> int:
        """Bytes of the momentum of so many elements of an op's group, which has one."""
        g = op.id.group
        if g not in self.matrices:
            raise refused(op, "is for matrices that step in host memory, and its group is none of them")
        return self.form.momentum_bytes(self.needs.program.groups[g], numel)

    def _read_momentum(self, op: Op) -> None:
        c = self._chunk(op, trained=True)
        tag, nbytes = chunk_of(op), self._momentum_bytes(op, c.numel)
        self._home(op, self.place.state, "disk")
        self._moves(op, nbytes)
        self.accesses.read(op, "momentum", *tag)
        self._put(op, self._at(op, op.writes, "the momentum"), Momentum(*tag, self.momentum[tag]), "host", nbytes)

    def _make_update(self, op: Op) -> None:
        c = self._chunk(op, trained=True)
        tag, g = chunk_of(op), op.id.group
        self._momentum_bytes(op, c.numel)
        on_disk = self.place.state[g] == "disk"
        self._moves(op, self.form.momentum_step_bytes(self.needs.program.groups[g], c.numel, self._width(g)))
        self._at(op, op.reads, "gradient and momentum", count=1 + on_disk)
        self._at(op, op.writes, "momentum and update", count=1 + on_disk)
        late = self._check_step(op)
        done = NOW if late else AFTER
        if on_disk:
            name = op.reads[1]
            if op.writes[0] != name or self._value(op, name, Momentum) != Momentum(*tag, done - 1):
                raise refused(op, f"takes {name} for its chunk's momentum, to change it, which it is not")
            self.values[name] = Momentum(*tag, done)
        else:
            self.accesses.write(op, "momentum in memory", *tag)
            self.momentum[tag] = done
        update = Update(g, frozenset((c.index,)), late)
        self._put(op, op.writes[-1], update, "host", c.numel * BF16)

    def _write_momentum(self, op: Op) -> None:
        c = self._chunk(op, trained=True)
        self._home(op, self.place.state, "disk")
        self._moves(op, self._momentum_bytes(op, c.numel))
        self._bring_home(op)
        value = self._value(op, self._at(op, op.reads, "the momentum"), Momentum)
        if value[:2] != chunk_of(op):
            raise refused(op, f"takes {op.reads[0]} for its chunk's momentum, which it is not")
        self.accesses.write(op, "momentum", *chunk_of(op))
        self.momentum[chunk_of(op)] = value.version

    def _lift_update(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * BF16)
        value = self._value(op, self._at(op, op.reads, "the update"), Update)
        if value[:2] != (g, frozenset((c.index,))) or value.orthogonal:
            raise refused(op, f"takes {op.reads[0]} for its chunk's update, which it is not")
        name = self._at(op, op.writes, "the group's updates on the device")
        if name not in dict(op.takes):
            there = self._value(op, name, Update)
            if (there.group, there.late, there.orthogonal) != (g, value.late, False):
                raise refused(op, f"adds to {name}, which has updates of something else")
            value = value._replace(chunks=there.chunks | value.chunks)
        self._put(op, name, value, "device", self.needs.program.groups[g].trainable * BF16)

    def _all_of_group(self, op: Op, name: str) -> Update:
        value = self._value(op, name, Update)
        chunks = frozenset(c.index for c in self.cuts[op.id.group] if c.trainable)
        if value[:2] != (op.id.group, chunks) or value.orthogonal:
            raise refused(op, f"takes {name} for all updates of its group, which it is not, or not yet")
        return value

    def _gather_updates(self, op: Op) -> None:
        """All of a group's updates from all ranks' parts; on two levels, from those of each rank of this host."""
        value, part, name = self._part_of_updates(op)
        levels = self.needs.hosts > 1
        self._sends(op, part, levels=levels)
        if levels and (op.reads[0] != name or value.gathered != "place"):
            raise refused(op, f"takes {op.reads[0]} for the updates of its group, of this rank's place, in place")
        self._put(op, name, value._replace(gathered="all"), "device", self.needs.parts * part)

    def _gather_updates_of_place(self, op: Op) -> None:
        value, part, name = self._part_of_updates(op)
        self._sends(op, part)
        self._put(op, name, value._replace(gathered="place"), "device", self.needs.parts * part)

    def _part_of_updates(self, op: Op) -> tuple[Update, int, str]:
        """This rank's part of a group's updates, its bytes, and the buffer that all of them are put together in."""
        value = self._all_of_group(op, self._at(op, op.reads, "this rank's part of the updates"))
        return value, self.needs.program.groups[op.id.group].trainable * BF16, self._at(op, op.writes, "the updates")

    def _orthogonalise(self, op: Op) -> None:
        name = self._at(op, op.writes, "the updates")
        if op.reads != op.writes:
            raise refused(op, "changes updates in place: it has to read what it writes")
        value = self._all_of_group(op, name)
        if self.needs.cut and value.gathered != "all":
            raise refused(op, f"takes {name} for the updates of all ranks, which no op GU has gathered")
        self.values[name] = value._replace(orthogonal=True)

    def _update_down(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * BF16)
        value = self._value(op, self._at(op, op.reads, "the updates on the device"), Update)
        if value.group != g or not value.orthogonal:
            raise refused(op, f"takes {op.reads[0]} for orthogonal updates of its group, which they are not")
        name = self._at(op, op.writes, "the update")
        self._put(op, name, value._replace(chunks=frozenset((c.index,))), "host", op.nbytes)
