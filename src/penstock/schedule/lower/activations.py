"""Checkpoints and their gradients: how long each lives on the device, and when it leaves and comes back.

    A{k}m{m}   the outputs of stage k for micro-batch m, on the device, from its forward on
    a{k}m{m}   the same, brought back for the backward of stage k+1
    D{k}m{m}   gradients with respect to them
    C{k}m{m}   the host copy (and C{k}m{m}.1 ... where it takes several buffers); c{k}m{m} the host copy that was read
               back from disk

The last block's outputs are used by the epilogue at once and never leave; nor do those of its inputs that have room.
"""

from collections.abc import Sequence

from penstock.schedule.ir.references import Buffer, OpId, stage_buffer, stage_op
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Touched
from penstock.schedule.lower.route import Visit
from penstock.schedule.place import page_up


class Activations:
    """Knows which activations each compute op touches, and emits their way out and back."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self.stages = builder.program.stages
        self.train = builder.s.train
        self.tier = builder.s.place.checkpoints

    def touched(self, op: Touched, visit: Visit, m: int) -> None:
        """Add the activations of one compute op to what it touches."""
        kind, k, last = visit.kind, visit.stage, len(self.stages) - 1
        if kind != "B" and k < last and self.stages[k].checkpoint:
            op.make(stage_buffer("A", k, m), "activations")
        if k > 0 and self.stages[k - 1].checkpoint:
            away = kind == "B" and m in self.b.provision.leaving(k - 1, visit.micro_batches)
            taken = stage_buffer("a" if away else "A", k - 1, m)
            op.reads.append(taken)
            if kind != "F" or not self.train:
                op.gives.append(taken)
        if self.train and kind != "F":
            if k > 0 and self.stages[k - 1].gradient:
                op.make(stage_buffer("D", k - 1, m), "activation_gradients")
            if k < last and self.stages[k].gradient:
                op.use_up(stage_buffer("D", k, m))

    def down(self, k: int, micro_batches: Sequence[int]) -> None:
        """Emit the way out of stage k's checkpoints, after stage k+1 has used them."""
        nbytes = self.stages[k].checkpoint
        for m in self.b.provision.leaving(k, micro_batches):
            pool = "checkpoints_out" if self.tier == "disk" else self.b.provision.checkpoints_pool
            host = self._host(k, m)
            down = self.b.emit(
                stage_op("DC", k, m),
                after=[stage_op("F", k + 1, m)],
                takes=[(name, pool) for name in host],
                reads=[stage_buffer("A", k, m)],
                writes=host,
                gives=[stage_buffer("A", k, m)],
                nbytes=nbytes,
            )
            if self.tier == "disk":
                self.b.emit(down.of("WC"), after=[down], reads=host, gives=host, nbytes=page_up(nbytes))

    def _host(self, k: int, m: int) -> list[Buffer]:
        """The host buffers of a checkpoint: one, or in a pool that it shares with smaller ones, several."""
        return [stage_buffer("C", k, m, part=part) for part in range(self.b.provision.checkpoint_parts)]

    def up(self, k: int, micro_batches: Sequence[int]) -> dict[int, list[OpId]]:
        """Emit the way back of the checkpoints that the backward of stage ``k + 1`` reads; what it waits for."""
        nbytes = self.stages[k].checkpoint
        ready: dict[int, list[OpId]] = {}
        last_stage = len(self.stages) - 1
        for m in self.b.provision.leaving(k, micro_batches):
            host, after = self._host(k, m), [stage_op("DC", k, m)]
            if self.tier == "disk":
                host = [stage_buffer("c", k, m)]
                takes = [(host[0], "checkpoints_in")]
                after = [stage_op("WC", k, m)]
                after = [
                    self.b.emit(stage_op("RC", k, m), after=after, takes=takes, writes=host, nbytes=page_up(nbytes))
                ]
            # The pool of activations changes hands: the forward's takers are done before the first one comes back.
            after.append(stage_op("F", last_stage - 1, micro_batches[-1]))
            back = stage_buffer("a", k, m)
            ready[m] = [
                self.b.emit(
                    stage_op("UC", k, m),
                    after=after,
                    takes=[(back, "activations")],
                    reads=host,
                    writes=[back],
                    gives=host,
                    nbytes=nbytes,
                )
            ]
        return ready
