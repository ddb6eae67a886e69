"""Gradients and saved activations: what is made in a step, waits, and is used up in it or in the next one."""

from penstock.schedule.ir.ops import Op, refused
from penstock.schedule.meaning.ground import Ground
from penstock.schedule.meaning.values import LEFT, Activation, Gradient, Kept
from penstock.schedule.place import BF16, FP32, Chunk, page_up


class WaitingRules(Ground):
    """Rules of DG, AG, NG, ND, NORM, WG, RG, DC, WC, RC and UC."""

    def _down(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        name, shared = self._at(op, op.reads, "the gradient on the device"), self.needs.shared
        there = self.values.get(name)
        if shared and isinstance(there, Gradient) and there[:2] == (g, -1):
            self._all_parts_down(op, c, there)
            return
        width, cast = self._width(g), g in self.narrow
        source = self._gradient(op, name, (g, c.index if shared else -1))
        name = self._at(op, op.writes, "the gradient", count=1 + cast)
        if cast:
            self._whole(op, source)
            if self.needs.settings.grad_dtype != "bf16":
                raise refused(op, "rounds a gradient to bf16: give grad_dtype='bf16'")
            if op.writes[1] not in dict(op.takes):
                raise refused(op, f"rounds a gradient in {op.writes[1]}, which it has to take for that")
            self._room(op, op.writes[1], "device", c.numel * BF16)
        self._moves(op, c.numel * width)
        self._put(op, name, Gradient(g, c.index, source.sum), "host", op.nbytes)

    def _all_parts_down(self, op: Op, c: Chunk, source: Gradient) -> None:
        """Bring down a gradient before ranks exchange it: all their parts of it, in fp32, as these are summed first."""
        self._moves(op, self.needs.parts * c.numel * FP32)
        name = self._at(op, op.writes, "the gradient")
        self._put(op, name, Gradient(op.id.group, c.index, source.sum, over="ranks"), "host", op.nbytes)

    def _add(self, op: Op) -> None:
        c = self._chunk(op, trained=True)
        into = self._at(op, op.writes, "the sum")
        what = self._at(op, tuple(name for name in op.reads if name != into), "what is added")
        early = self.needs.shared and op.id.visit is not None  # what is summed of visits is exchanged after that
        self._moves(op, 3 * c.numel * FP32 * (self.needs.parts if early else 1))
        total, part = (self._gradient(op, name, over="ranks" if early else "") for name in (into, what))
        if not early and (LEFT in (total.sum, part.sum) or op.id.group in self.narrow):
            raise refused(op, "adds to a gradient that is whole already")
        self.values[into] = total._replace(sum=self.sums.added(total.sum, part.sum))

    def _measure(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * self._width(g))
        self._whole(op, self._gradient(op, self._at(op, op.reads, "the gradient")))
        self._measured(op, c)

    def _measure_on_device(self, op: Op) -> None:
        g = op.id.group
        self._on_device(op)
        for c in self.cuts[g]:
            if c.trainable:
                self._measured(op, c)

    def _norm(self, op: Op) -> None:
        if self.needs.normed_apart:
            self.accesses.read(op, "norm of all")
            if not self.gathered:
                raise refused(op, "needs the parts of all ranks, which no op AN has gathered yet")
        self._read_partials(op)
        self.accesses.write(op, "norm")
        self.normed = True

    def _put_aside(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * self._width(g))
        self.accesses.write(op, "gradient", g, c.index)
        self.extents[g, c.index] = self._gradient(op, self._at(op, op.reads, "the gradient"))

    def _fetch(self, op: Op) -> None:
        c, g = self._chunk(op, trained=True), op.id.group
        self._moves(op, c.numel * self._width(g))
        self.accesses.read(op, "gradient", g, c.index)
        if (g, c.index) not in self.extents:
            raise refused(op, "reads what no op has written to disk")
        self._put(op, self._at(op, op.writes, "the gradient"), self.extents[g, c.index], "host", op.nbytes)

    def _activation(self, op: Op) -> int:
        """Bytes of the saved activation that an op moves."""
        k = op.id.stage
        if k >= len(self.stages) or not self.stages[k].activation:
            raise refused(op, "is of a stage that has no saved activation")
        return self.stages[k].activation

    def _leave(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        self._moves(op, self._activation(op))
        if self.forward[m] < k + 2 or self.activations.get((k, m)) not in op.reads:
            raise refused(op, f"takes a saved activation that is not on the device or that stage {k + 1} has not used")
        self.accesses.write(op, "saved activation", k, m)
        del self.activations[k, m]
        self._hold(op)

    def _hold(self, op: Op) -> None:
        """A saved activation is in the host buffers that an op writes, one after the other."""
        room = sum(self.pool_of[name].size for name in op.writes)
        if room < op.nbytes:
            raise refused(op, f"needs {op.nbytes} bytes on the host, and its buffers have {room}")
        for i, name in enumerate(op.writes):
            self._put(op, name, Kept(op.id.stage, op.id.micro_batch, i, len(op.writes)), "host", 0)

    def _held(self, op: Op) -> None:
        for i, name in enumerate(op.reads):
            if self._value(op, name, Kept) != Kept(op.id.stage, op.id.micro_batch, i, len(op.reads)):
                raise refused(op, f"takes {name} for part {i} of its saved activation, which it is not")
        if not op.reads:
            raise refused(op, "reads no buffer")

    def _write_saved_activation(self, op: Op) -> None:
        self._moves(op, page_up(self._activation(op)))
        self._held(op)
        self._at(op, op.reads, "the saved activation")
        if self.pool_of[op.reads[0]].size < op.nbytes:
            raise refused(op, f"writes whole pages, and {op.reads[0]} has {self.pool_of[op.reads[0]].size} bytes")
        self.accesses.write(op, "saved activation on disk", op.id.stage, op.id.micro_batch)
        self.scratch.add((op.id.stage, op.id.micro_batch))

    def _read_saved_activation(self, op: Op) -> None:
        self._moves(op, page_up(self._activation(op)))
        self.accesses.read(op, "saved activation on disk", op.id.stage, op.id.micro_batch)
        if (op.id.stage, op.id.micro_batch) not in self.scratch:
            raise refused(op, "reads what no op has written to disk")
        self._at(op, op.writes, "the saved activation")
        self._hold(op)

    def _come_back(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        self._moves(op, self._activation(op))
        self._held(op)
        if (k, m) in self.activations or self.backward[m] <= k:
            raise refused(op, "brings back a saved activation that is on the device, or that nobody needs any more")
        name = self._at(op, op.writes, "the saved activation on the device")
        if name not in dict(op.takes):
            raise refused(op, f"writes {name}, which it has to take for that")
        self._put(op, name, Activation(k, m, False), "device", op.nbytes)
        self.activations[k, m] = name
        self.accesses.write(op, "saved activation", k, m)
