"""The needs of stages: their weights, saved activation and gradient, in the order of each micro-batch."""

from collections.abc import Collection, Mapping

from penstock.schedule.ir.ops import Op, refused
from penstock.schedule.ir.references import Buffer
from penstock.schedule.meaning.ground import Ground
from penstock.schedule.meaning.values import AFTER, BEFORE, NOW, Activation, Gradient, Graph, Half, Weights
from penstock.schedule.place import FP32
from penstock.schedule.program import Stage


class ComputeRules(Ground):
    """Rules of F, E, B, I, W and AD."""

    def _compute(self, op: Op) -> None:
        kind, k, m, last = op.id.kind, op.id.stage, op.id.micro_batch, len(self.stages) - 1
        back = kind in ("B", "I")
        turn = self.backward[m] == k and self.forward[m] > last if back else self.forward[m] == k
        turn = (k, m) in self.halves if kind == "W" else turn
        if k > last or (kind == "E") != (k == last) or not turn or (back and not self.needs.train):
            raise refused(op, "is not the stage that its micro-batch comes to next")
        if kind == "I" and self.stages[k].split is None:
            raise refused(op, "is the first part of a backward that can only be run as a whole: write B")
        if kind in ("F", "E"):
            self._check_turn(op)
        stage, taken = self.stages[k], dict(op.takes)
        read = self._read_by(kind, stage)
        for g in read:
            self._check_weights(op, g)
        added = stage.gradients if self.needs.train and kind in "BEW" else ()
        self._check_no_more(op, {g for g in read if self.place.weights[g] != "device"}, added)
        self._check_activations(op, stage)
        self._check_half(op, stage)
        self._check_graph(op, stage)
        if kind == "F":
            self._check_besides(op)
        for g in added:
            self._sum_on_device(op, g, taken)
        if back:
            self.backward[m] = self._next(k, back=True)
        elif kind != "W":
            self.forward[m] = self._next(k)

    def _check_besides(self, op: Op) -> None:
        """Refuse a stage before all that it is handed besides its input has come; the model's code goes on up to its
        next own stage."""
        k, m, dealt = op.id.stage, op.id.micro_batch, self.needs.program.dealt
        if dealt is None:
            return
        if dealt.rank and dealt.besides[k]:
            self.accesses.read(op, "besides", k, m)
            if (k, m) not in self.besides:
                raise refused(
                    op, f"needs what stage {k} is handed besides its input, which no op RX{k}m{m} has brought"
                )
        for other in () if dealt.rank else dealt.others_after(k):
            self.accesses.write(op, "besides", other, m)
            self.besides.add((other, m))

    def _check_turn(self, op: Op) -> None:
        """A stage's forwards go through micro-batches in order: what a model counts as it runs depends on that."""
        k, m = op.id.stage, op.id.micro_batch
        if m != self.turns[k]:
            raise refused(op, f"comes before micro-batch {self.turns[k]} of its stage, and their forwards go in order")
        self.turns[k] += 1

    def _check_no_more(self, op: Op, read: Collection[int], added: Collection[int]) -> None:
        """Weights that are read become a model's parameters, and gradients that are written its sums: no others are."""
        for names, kind, groups in ((op.reads, "W", read), (op.writes, "G", added)):
            for name in names:
                if name.kind == kind and name.group not in groups:
                    raise refused(op, f"has {name}, and its stage has no use for that")

    def _read_by(self, kind: str, stage: Stage) -> list[int]:
        if kind == "W":
            return []  # it reads what the first part has left
        found = {*stage.backward_reads} if kind in ("B", "I") else {*stage.forward_reads}
        if kind == "E" and self.needs.train:
            found |= {*stage.backward_reads}
        return sorted(g for g in found if self.cuts[g])

    def _check_weights(self, op: Op, g: int) -> None:
        """The weights of a group are there, whole, and not stepped yet."""
        if self.place.weights[g] == "device":
            self.accesses.read(op, "weights", g)
            versions = {c.index: self.weights[g, c.index] for c in self.cuts[g]}
        else:
            found = [name for name in op.reads if name.kind == "W" and name.group == g]
            if len(found) != 1:
                raise refused(op, f"reads {len(found)} buffers with weights of group {g}, and needs one")
            versions = self._value(op, found[0], Weights).versions
        for c in self.cuts[g]:
            if versions.get(c.index) != NOW:
                state = {None: "not there", BEFORE: "not stepped for the step before", AFTER: "stepped already"}
                raise refused(op, f"reads chunk {g}.{c.index} of the weights, which is {state[versions.get(c.index)]}")

    def _check_activations(self, op: Op, stage: Stage) -> None:
        """The saved activation and the gradient that a stage reads are on the device; it puts out its own."""
        k, m, kind = stage.index, op.id.micro_batch, op.id.kind
        into = self.stages[k - 1] if k else None
        fresh = tuple(n for n, _ in op.takes if n in op.writes and n.holds != "saved" and not self.pool_of[n].backed)
        if into is not None and into.activation:
            self.accesses.read(op, "saved activation", k - 1, m)
            self.inputs[k, m] = self.activations.get((k - 1, m))
            if self.inputs[k, m] not in op.reads:
                raise refused(op, f"needs stage {k - 1}'s saved activation on the device, in a buffer that it reads")
            if kind in ("B", "E", "W") or not self.needs.train:
                del self.activations[k - 1, m]  # nobody reads it after that
        if kind in ("B", "I", "W") and stage.gradient:
            found = [self.values.get(name) for name in op.reads]
            if Activation(k, m, True) not in found:
                raise refused(op, f"needs the gradient of what stage {k} put out, in a buffer that it reads")
        if kind == "F" and stage.activation:
            name = self._at(op, fresh, "its saved activation")
            self._put(op, name, Activation(k, m, False), "device", stage.activation, backed=False)
            self.activations[k, m] = name
            self.accesses.write(op, "saved activation", k, m)
        elif kind in ("B", "I", "E") and self.needs.train and into is not None and into.gradient:
            name = self._at(op, fresh, "the gradient of its input")
            self._put(op, name, Activation(k - 1, m, True), "device", into.gradient, backed=False)

    def _check_half(self, op: Op, stage: Stage) -> None:
        """The first part of a backward leaves something to the second, which takes it."""
        k, m = stage.index, op.id.micro_batch
        if op.id.kind == "I":
            name = self._at(op, tuple(n for n in op.writes if n.holds == "saved"), "what the second part needs")
            self._put(op, name, Half(k, m), "device", stage.split or 0, backed=False)
            self.halves.add((k, m))
        elif op.id.kind == "W":
            if Half(k, m) not in [self.values.get(name) for name in op.reads]:
                raise refused(op, "needs what the first part of its backward has left, in a buffer that it reads")
            self.halves.remove((k, m))

    def _check_graph(self, op: Op, stage: Stage) -> None:
        """A forward may keep its graph, for its backward to go through. Its input stays where the graph has it."""
        k, m = stage.index, op.id.micro_batch
        names = tuple(name for name in op.writes if name.holds == "saved")
        if op.id.kind == "F" and names:
            if stage.graph is None or not self.needs.train:
                raise refused(op, f"has {names[0]}, and the graph of its stage cannot be kept")
            name = self._at(op, names, "its graph")
            self._put(op, name, Graph(k, m), "device", stage.graph, backed=False)
            self.graphs[k, m] = self.inputs.get((k, m))
        elif op.id.kind in ("B", "I") and (k, m) in self.graphs:
            if op.id.kind == "I" or Graph(k, m) not in [self.values.get(name) for name in op.reads]:
                raise refused(op, "needs the graph that its forward has kept, in a buffer that it reads: write B")
            if self.graphs.pop((k, m)) != self.inputs.get((k, m)):
                raise refused(op, "reads its input elsewhere than its forward, whose graph holds it where it was")

    def _add_strand(self, op: Op) -> None:
        """One strand of a group's gradient, or a sum of some, to another one."""
        name = self._at(op, op.writes, "the sum")
        if len(op.reads) != 2 or name not in op.reads:
            raise refused(op, "needs two buffers, and adds the one that it only reads to the one that it writes")
        (what,) = (other for other in op.reads if other != name)
        into, part = (self._gradient(op, one, (op.id.group, -1)) for one in (name, what))
        self.values[name] = into._replace(sum=self.sums.added(into.sum, part.sum))

    def _sum_on_device(self, op: Op, g: int, taken: Mapping[Buffer, str]) -> None:
        names = tuple(name for name in op.writes if name.kind == "G" and name.group == g)
        name = self._at(op, names, f"the gradient of group {g}")
        new = self.sums.one(op.id.stage, op.id.micro_batch)
        if name not in taken:
            new = self.sums.added(self._gradient(op, name, (g, -1)).sum, new)
        trained = self.needs.parts * self.needs.program.groups[g].trainable
        self._put(op, name, Gradient(g, -1, new), "device", trained * FP32)
