"""Rules of messages between the ranks of a pipeline: outputs of stages, and gradients with respect to them."""

from penstock.schedule.ir.ops import Op, refused
from penstock.schedule.meaning.ground import Ground
from penstock.schedule.meaning.values import Activation


class CrossingRules(Ground):
    """Rules of SA, RA, SD and RD. Each is done once for each stage and micro-batch whose output crosses."""

    def _cross(self, op: Op) -> None:
        k, m, dealt = op.id.stage, op.id.micro_batch, self.needs.program.dealt
        assert dealt is not None
        gradient, sends = op.id.kind in ("SD", "RD"), op.id.lane == "send"
        here, there = (k + 1, k) if op.id.kind in ("SD", "RA") else (k, k + 1)
        if k + 1 >= len(self.stages) or not dealt.crosses(k) or not dealt.has(here):
            raise refused(op, "is of what does not cross between this rank and another one")
        if op.peer != dealt.of_stages[there]:
            raise refused(op, f"is to or from rank {op.peer}, and rank {dealt.of_stages[there]} has stage {there}")
        size = self.stages[k].gradient if gradient else self.stages[k].activation
        self._moves(op, size)
        self.crossed.add(op.id)
        value = Activation(k, m, gradient)
        if not sends:
            name = self._at(op, op.writes, "what is received")
            self._put(op, name, value, "device", size, backed=False)
            if not gradient:
                self.activations[k, m] = name
                self.accesses.write(op, "saved activation", k, m)
            return
        name = self._at(op, op.reads, "what is sent")
        if self._value(op, name, Activation) != value:
            raise refused(op, f"sends {name}, which is something else")
        if not gradient:
            self.accesses.read(op, "saved activation", k, m)
            del self.activations[k, m]

    def _cross_besides(self, op: Op) -> None:
        """A stage is handed arguments besides its input: by the model's own code, once that has come there."""
        k, m, dealt = op.id.stage, op.id.micro_batch, self.needs.program.dealt
        assert dealt is not None
        sends = op.id.lane == "send"
        if not dealt.besides[k] or dealt.has(k) == sends or (sends and dealt.rank):
            raise refused(op, "is of what does not cross between this rank and another one")
        if op.peer != (dealt.of_stages[k] if sends else 0):
            raise refused(op, f"is to or from rank {op.peer}, and rank {dealt.of_stages[k]} has stage {k}")
        self._moves(op, dealt.besides[k])
        self.crossed.add(op.id)
        if sends:
            self.accesses.read(op, "besides", k, m)
            if (k, m) not in self.besides:
                raise refused(op, "comes before the code that makes what it sends")
        else:
            self.accesses.write(op, "besides", k, m)
            self.besides.add((k, m))

    def _to_cross(self) -> list[str]:
        """The ids of all that has to cross in the step."""
        dealt, train = self.needs.program.dealt, self.needs.train
        if dealt is None:
            return []
        found = []
        for k, stage in enumerate(self.stages[:-1]):
            if not dealt.crosses(k):
                continue
            kinds = ("SA", "RD") if dealt.has(k) else ("RA", "SD") if dealt.has(k + 1) else ()
            wanted = [kind for kind in kinds if kind[1] == "A" or (train and stage.gradient)]
            found += [f"{kind}{k}m{m}" for kind in wanted for m in range(self.schedule.micro_batches)]
        besides = [k for k, nbytes in enumerate(dealt.besides) if nbytes and (dealt.has(k) or not dealt.rank)]
        kind = "RX" if dealt.rank else "SX"
        return found + [f"{kind}{k}m{m}" for k in besides for m in range(self.schedule.micro_batches)]
