"""Checkpoints and their gradients: how long each lives on the device, and when it leaves and comes back.

    A{k}m{m}   the outputs of stage k for micro-batch m, on the device, from its forward on
    a{k}m{m}   the same, brought back for the backward of stage k+1
    D{k}m{m}   gradients with respect to them
    C{k}m{m}   the host copy (and C{k}m{m}.1 ... where it takes several buffers); c{k}m{m} the host copy that was read
               back from disk

The last block's outputs are used by the epilogue at once and never leave; nor do those of its inputs that have room.
"""

from collections.abc import Sequence

from penstock.schedule.build import Buffers, Builder
from penstock.schedule.place import page_up
from penstock.schedule.route import Visit


class Activations:
    """Knows, for each compute op, which activation buffers it takes, reads, writes and gives."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self.stages = builder.program.stages
        self.train = builder.s.train
        self.tier = builder.s.place.checkpoints

    def buffers(self, visit: Visit, m: int) -> Buffers:
        """Activation buffers of one compute op."""
        k, last = visit.stage, len(self.stages) - 1
        io = Buffers(takes=[], reads=[], writes=[], gives=[])
        if visit.kind in "FE":
            if k < last and self.stages[k].checkpoint:
                io.takes.append((f"A{k}m{m}", "activations"))
                io.writes.append(f"A{k}m{m}")
            if k > 0 and self.stages[k - 1].checkpoint:
                io.reads.append(f"A{k - 1}m{m}")
                if k == last or not self.train:
                    io.gives.append(f"A{k - 1}m{m}")
        if visit.kind == "B" and k > 0 and self.stages[k - 1].checkpoint:
            name = f"{'a' if m in self.b.provision.leaving(k - 1, visit.micro_batches) else 'A'}{k - 1}m{m}"
            io.reads.append(name)
            io.gives.append(name)
        if self.train and visit.kind in "BE":
            if k > 0 and self.stages[k - 1].gradient:
                io.takes.append((f"D{k - 1}m{m}", "activation_gradients"))
                io.writes.append(f"D{k - 1}m{m}")
            if k < last and self.stages[k].gradient:
                io.reads.append(f"D{k}m{m}")
                io.gives.append(f"D{k}m{m}")
        return io

    def down(self, k: int, micro_batches: Sequence[int]) -> None:
        """Emit the way out of stage k's checkpoints, after stage k+1 has used them."""
        nbytes = self.stages[k].checkpoint
        for m in self.b.provision.leaving(k, micro_batches):
            pool = "checkpoints_out" if self.tier == "disk" else self.b.provision.checkpoints_pool
            host = self._host(k, m)
            self.b.emit(
                f"DC{k}m{m}",
                after=[f"F{k + 1}m{m}"],
                takes=[(name, pool) for name in host],
                reads=[f"A{k}m{m}"],
                writes=host,
                gives=[f"A{k}m{m}"],
                nbytes=nbytes,
            )
            if self.tier == "disk":
                self.b.emit(f"WC{k}m{m}", after=[f"DC{k}m{m}"], reads=host, gives=host, nbytes=page_up(nbytes))

    def _host(self, k: int, m: int) -> list[str]:
        """The host buffers of a checkpoint: one, or in a pool that it shares with smaller ones, several."""
        parts = range(1, self.b.provision.checkpoint_parts)
        return [f"C{k}m{m}", *(f"C{k}m{m}.{part}" for part in parts)]

    def up(self, k: int, micro_batches: Sequence[int]) -> dict[int, list[str]]:
        """Emit the way back of the checkpoints that the backward of stage ``k + 1`` reads; what it waits for."""
        nbytes = self.stages[k].checkpoint
        ready: dict[int, list[str]] = {}
        last_stage = len(self.stages) - 1
        for m in self.b.provision.leaving(k, micro_batches):
            host, after = self._host(k, m), [f"DC{k}m{m}"]
            if self.tier == "disk":
                host = [f"c{k}m{m}"]
                takes = [(host[0], "checkpoints_in")]
                after = [
                    self.b.emit(f"RC{k}m{m}", after=[f"WC{k}m{m}"], takes=takes, writes=host, nbytes=page_up(nbytes))
                ]
            # The pool of activations changes hands: the forward's takers are done before the first one comes back.
            after.append(f"F{last_stage - 1}m{micro_batches[-1]}")
            ready[m] = [
                self.b.emit(
                    f"UC{k}m{m}",
                    after=after,
                    takes=[(f"a{k}m{m}", "activations")],
                    reads=host,
                    writes=[f"a{k}m{m}"],
                    gives=host,
                    nbytes=nbytes,
                )
            ]
        return ready
