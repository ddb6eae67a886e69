"""Ops that ranks share: weights put together from their parts, gradients added up over all, the norm of all."""

from penstock.schedule.ir.ops import Op, refused
from penstock.schedule.meaning.ground import Ground
from penstock.schedule.meaning.values import NOW, Crossed, Gradient, OfPlace, Weights
from penstock.schedule.place import FP32, NORM_BYTES
from penstock.schedule.program import ALIGN


class BetweenRules(Ground):
    """Rules of GW, HW, DP, UP, UG, SG, HG, AR, HR and AN. All ranks do the same: what is true of this one's part is
    true of the whole."""

    def _gather(self, op: Op) -> None:
        """All of a group's weights from all ranks' parts; on two levels, from those of each rank of this host, which
        has those of its place on all hosts."""
        g, name = op.id.group, self._at(op, op.writes, "the group on the device")
        nbytes = self.needs.program.groups[g].numel * self.form.weight_bytes
        if self.needs.hosts == 1:
            part = self._part(op)
        else:
            of_place = self._value(op, self._at(op, op.reads, "what this rank has of the weights"), OfPlace)
            if op.reads[0] != name or of_place.group != g:
                raise refused(op, f"takes {op.reads[0]} for the weights of its group, of this rank's place, in place")
            part = Weights(*of_place)
        self._sends(op, nbytes, levels=self.needs.hosts > 1)
        self._put(op, name, part, "device", self._whole_weights(g))

    def _gather_of_place(self, op: Op) -> None:
        part, g = self._part(op), op.id.group
        name = self._at(op, op.writes, "the group on the device")
        self._sends(op, self.needs.program.groups[g].numel * self.form.weight_bytes)
        self._put(op, name, OfPlace(*part), "device", self._whole_weights(g))

    def _leave_crossed(self, op: Op) -> None:
        """Down to host memory, of weights that are all there, what had to cross between hosts for that."""
        g, source = op.id.group, self._at(op, op.reads, "the group on the device")
        value = self._value(op, source, Weights)
        if op.reads[0].kind != "W" or value.group != g:
            raise refused(op, f"takes {source} for the weights of its group on the device, which it is not")
        self._moves(op, self._whole_weights(g) // self.needs.crossed)
        self._put(op, self._at(op, op.writes, "what has crossed"), Crossed(*value), "host", op.nbytes)

    def _bring_crossed(self, op: Op) -> None:
        """The same up to the device again: on two levels, for the ranks of this host to gather."""
        g, source = op.id.group, self._at(op, op.reads, "what has crossed")
        value = self._value(op, source, Crossed)
        if value.group != g:
            raise refused(op, f"takes {source} for the weights of its group, which it is not")
        self._moves(op, self._whole_weights(g) // self.needs.crossed)
        there = Weights(*value) if self.needs.hosts == 1 else OfPlace(*value)
        self._put(op, self._at(op, op.writes, "the group on the device"), there, "device", self._whole_weights(g))

    def _part(self, op: Op) -> Weights:
        """This rank's part of a group's weights, all of it."""
        g = op.id.group
        part = self._value(op, self._at(op, op.reads, "this rank's part of the weights"), Weights)
        missing = [c.index for c in self.cuts[g] if part.versions.get(c.index) != NOW]
        if part.group != g or missing:
            raise refused(op, f"takes {op.reads[0]} for this rank's part of group {g}, which it is not, or not yet")
        return part

    def _lift(self, op: Op) -> None:
        """All ranks' parts of a chunk from the host to where they are exchanged."""
        c = self._chunk(op, trained=True)
        value = self._gradient(op, self._at(op, op.reads, "the gradient of all ranks' parts"), over="ranks")
        name = self._at(op, op.writes, "what is sent")
        self._moves(op, self.needs.parts * c.numel * FP32)
        self._put(op, name, value, "device", op.nbytes)

    def _exchange(self, op: Op) -> None:
        """Give each rank the sum of its own chunk, where every rank has a part (SG), or all of the sum of a chunk that
        all have (AR), piece by piece."""
        c, g, ranks = self._chunk(op, trained=True), op.id.group, self.needs.ranks
        piece = c.numel if self.needs.cut else -(-c.numel // ranks)
        self._at(op, op.writes, "the sum, and what is sent and received", count=2)
        part, through = op.writes
        total = self._to_add_up(op, through)
        self._sends(op, (1 if self.needs.cut else 2) * piece * FP32)
        self._room(op, through, "device", 2 * ranks * piece * FP32)
        self._used_up(op, through)
        value = Gradient(g, c.index, total, over="" if self.needs.copies == 1 else "copies")
        self._put(op, part, value, "device", c.numel * FP32)

    def _exchange_within(self, op: Op) -> None:
        """Give each rank of a host the sum of its own chunks and those of its place on all hosts, over the host."""
        c, ranks = self._chunk(op, trained=True), self.needs.ranks
        through = self._at(op, op.writes, "what is sent and received")
        value = Gradient(op.id.group, c.index, self._to_add_up(op, through), over="hosts")
        self._sends(op, c.numel * FP32, levels=True)
        self._put(op, through, value, "device", 2 * ranks * c.numel * FP32)

    def _exchange_between(self, op: Op) -> None:
        """Give each rank the sum of its own chunk, from those of each host."""
        c = self._chunk(op, trained=True)
        through = self._at(op, op.reads, "the sums of this host")
        value = self._gradient(op, through, over="hosts")
        self._at(op, op.writes, "the sum, and what is sent and received", count=2)
        if op.writes[1] != through:
            raise refused(op, f"takes {through}, which is a gradient of something else")
        self._sends(op, c.numel * FP32)
        self._used_up(op, through)
        self._put(op, op.writes[0], value._replace(over=""), "device", c.numel * FP32)

    def _to_add_up(self, op: Op, through: str) -> int:
        """The sum of all micro-batches of one stage, which an op adds up over ranks by way of a buffer."""
        g, source = op.id.group, self._at(op, op.reads, "the gradient on the device")
        if source == through:  # what is sent is there, and not taken from the gradient of a whole group
            total = self._gradient(op, source, over="ranks").sum
        else:
            total = self._gradient(op, source, (g, -1)).sum
        stage = -1 if op.id.visit is None else op.id.visit.stage
        if total != self.sums.whole([stage], self.schedule.micro_batches, self.needs.settings.strands):
            raise refused(
                op,
                f"adds up over ranks what is {self.sums.described(total)}: it has to be the sum of all micro-batches "
                "of one stage, or the numbers depend on the order of the schedule",
            )
        return total

    def _between_copies(self, op: Op) -> None:
        """Add up what the ranks of each copy have, which is the sum of theirs."""
        c, copies = self._chunk(op, trained=True), self.needs.copies
        name = self._at(op, op.reads, "the sum of this copy")
        self._at(op, op.writes, "the sum, and what is sent and received", count=2)
        value, through = self._gradient(op, name, over="copies"), op.writes[1]
        if op.writes[0] != name:
            raise refused(op, f"takes {name}, which is a gradient of something else")
        piece = -(-c.numel // copies)
        self._moves(op, 2 * piece * FP32 * (copies - 1))
        self._room(op, through, "device", 2 * copies * piece * FP32)
        self._used_up(op, through)
        self.values[name] = value._replace(over="")

    def _gather_norm(self, op: Op) -> None:
        self._read_partials(op)
        dealt = self.needs.program.dealt
        if dealt is None:
            self._sends(op, sum(self.cuts[g][c].numel for g, c in self.trained) // ALIGN * NORM_BYTES)
        else:
            self._moves(op, dealt.partials * NORM_BYTES * (dealt.ranks * self.needs.parts - 1))
        self.accesses.write(op, "norm of all")
        self.gathered = True

    def _used_up(self, op: Op, through: str) -> None:
        if through not in op.gives:
            raise refused(op, f"keeps {through}, which is of no use to anybody after it")
