"""The outputs of stages, and gradients with respect to them: how long each lives on the device, and how it moves.

    A{k}m{m}   the outputs of stage k for micro-batch m, on the device, from its forward on; Xm{m} the model's input
    a{k}m{m}   the same, brought back for the backward of stage k+1
    D{k}m{m}   gradients with respect to them
    C{k}m{m}   the host copy (and C{k}m{m}.1 ... where it takes several buffers); c{k}m{m} the host copy that was read
               back from disk
    K{k}m{m}   what the forward of stage k keeps for its backward besides its input: its graph; or the first part of a
               backward for the second, besides that and the gradient of its output
    C{k}m{m}   with partitioned activations: this rank's part of the input of stage k; N{k}m{m} all of it again

The last block's outputs are used by the epilogue at once and never leave; nor do those of its inputs that have room.

Where stages are spread over ranks, outputs and gradients are received from the rank that has the stage before, or
after, and sent on to the next one; what else a stage is handed (``Dealt.besides``) comes from rank 0, and stays until
the rank's last backward of the micro-batch. Whoever reads first what has come, from another rank or tier, waits for it.
"""

from collections.abc import Sequence

from penstock.schedule.ir.references import Buffer, OpId, stage_buffer, stage_op
from penstock.schedule.lower.activation_provision import RECEIVED, RESTORED, SPLIT
from penstock.schedule.lower.build import Builder
from penstock.schedule.lower.emitter import Touched
from penstock.schedule.lower.route import Message, Visit
from penstock.schedule.place import page_up


class Activations:
    """Knows which activations each compute op touches, and emits their way out and back, or to and from a rank."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self.stages = builder.program.stages
        self.tier = builder.s.place.activations
        self.train = builder.s.train
        self._parted = builder.seat.model.size > 1
        self._last_readers = ("BEW" if self.train else "FE") + ("F" if self._parted else "")
        self._moves = self.train and self.tier != "device"
        pools = builder.provision.pools
        self._saves, self._splits = "saved" in pools, SPLIT in pools
        self._gradients_pool = "activation_gradients" if "activation_gradients" in pools else "activations"
        self._puts_out: dict[Buffer, OpId] | None = None
        """buffer that may be sent to another rank -> the op that fills it; None: nothing is sent"""
        if any(isinstance(step, Message) for step in builder.route.walk):
            self._puts_out = {}
        self._besides: dict[tuple[int, int], OpId] = {}
        """(stage, micro-batch) -> the op that brings what the stage is handed besides its input"""
        streams = RECEIVED in pools
        self._into = {
            "RA": RECEIVED if streams else "received_activations",
            "RD": RECEIVED if streams else "received_gradients",
        }
        self._came: dict[Buffer, OpId] = {}
        """buffer that has come to the device and that nobody has read yet -> the op that brings it"""

    def touched(self, op: Touched, visit: Visit, m: int) -> list[OpId]:
        """Add the activations of one compute op to what it touches; what it waits for among them."""
        kind, k, own = visit.kind, visit.stage, self.stages[visit.stage]
        taken = self._input(visit, m)
        received = self.stages[k - 1].activation if k else self.b.seat.inputs
        if received:
            if kind == "F" and not k:
                op.make(taken, "activations")
            else:
                op.reads.append(taken)
            if kind in self._last_readers:
                op.gives.append(taken)
        if kind == "F":
            if own.activation:
                op.make(stage_buffer("A", k, m), "activations")
            if self._saves:
                op.make(stage_buffer("K", k, m), "saved")
            elif self._keeps_graph(visit, m):
                op.make(stage_buffer("K", k, m), self.b.provision.activations.graphs_pool[k])
            if received and self._parted:
                op.make(stage_buffer("C", k, m), "activation_shards")
        elif self.train:
            if k and kind != "W" and self.stages[k - 1].gradient:
                op.make(stage_buffer("D", k - 1, m), self._gradients_pool)
            if kind != "E":
                used = [stage_buffer("D", k, m)] if own.gradient else []
                used += [stage_buffer("K", k, m)] if self._saves or self._keeps_graph(visit, m) else []
                op.reads += used
                op.gives += used if kind != "I" else []
            if self._splits and kind == "I":
                op.make(stage_buffer("K", k, m), SPLIT)
            elif self._splits and kind == "W":
                op.use_up(stage_buffer("K", k, m))
        if self._puts_out is not None:
            ident = stage_op(kind, k, m)
            if kind == "F":
                self._puts_out[stage_buffer("A", k, m)] = ident
            elif k and kind != "W":
                self._puts_out[stage_buffer("D", k - 1, m)] = ident
        besides = [self._besides.pop((k, m))] if (k, m) in self._besides else []
        if not self._came:
            return besides
        return besides + [self._came.pop(name) for name in (taken, stage_buffer("D", k, m)) if name in self._came]

    def _keeps_graph(self, visit: Visit, m: int) -> bool:
        """True if a visit's call of one micro-batch makes a graph that is kept, or has one that was."""
        return visit.kind in "FB" and self.b.provision.activations.keeps_graph(visit.stage, m, visit.micro_batches)

    def _input(self, visit: Visit, m: int) -> Buffer:
        """The buffer in which a visit finds what the stage before it has put out."""
        if visit.kind == "B" and self._parted:
            return stage_buffer("N", visit.stage, m)
        back = visit.kind in ("B", "I", "W")
        if back and self._moves and m in self.b.provision.activations.leaving(visit.stage - 1, visit.micro_batches):
            return stage_buffer("a", visit.stage - 1, m)
        return stage_buffer("A", visit.stage - 1, m)

    # ---- between tiers

    def around(self, index: int) -> None:
        """Emit what follows the compute ops of a visit: the way out of the saved activations that it was the last to
        use in the forward, and the way back of those that the next backward reads, before the weights of the one after
        it."""
        if not self._moves:
            return
        visit = self.b.visits[index]
        if visit.kind == "F":
            self._down(visit.stage - 1, visit.micro_batches)
        if index + 1 < len(self.b.visits) and (following := self.b.visits[index + 1]).kind in "BI":
            self._up(following.stage - 1, following.micro_batches)

    def _down(self, k: int, micro_batches: Sequence[int]) -> None:
        """Emit the way out of stage k's saved activations, after stage k+1 has used them."""
        for m in self.b.provision.activations.leaving(k, micro_batches):
            pool = "saved_activations_out" if self.tier == "disk" else self.b.provision.saved_activations_pool
            host, nbytes = self._host(k, m), self.stages[k].activation
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
        """The host buffers of a saved activation: one, or in a pool that it shares with smaller ones, several."""
        return [stage_buffer("C", k, m, part=part) for part in range(self.b.provision.activation_parts)]

    def _up(self, k: int, micro_batches: Sequence[int]) -> None:
        """Emit the way back of the saved activations that the backward of stage ``k + 1`` reads."""
        for m in self.b.provision.activations.leaving(k, micro_batches):
            host, after, nbytes = self._host(k, m), [stage_op("DC", k, m)], self.stages[k].activation
            if self.tier == "disk":
                host = [stage_buffer("c", k, m)]
                takes = [(host[0], "saved_activations_in")]
                after = [stage_op("WC", k, m)]
                after = [
                    self.b.emit(stage_op("RC", k, m), after=after, takes=takes, writes=host, nbytes=page_up(nbytes))
                ]
            back = stage_buffer("a", k, m)
            self._came[back] = self.b.emit(
                stage_op("UC", k, m),
                after=after,
                takes=[(back, RESTORED)],
                reads=host,
                writes=[back],
                gives=host,
                nbytes=nbytes,
            )

    # ---- between ranks

    def recall(self, visit: Visit) -> None:
        """Gather the input that a backward reads, where each rank has kept its part."""
        if not self._parted or visit.kind != "B":
            return
        k, seat = visit.stage, self.b.seat
        size = (self.stages[k - 1].activation if k else seat.inputs) * seat.items
        for m in visit.micro_batches:
            op, gathered = Touched(), stage_buffer("N", k, m)
            if size:
                op.use_up(stage_buffer("C", k, m))
                op.make(gathered, "gathered_activations")
            after = [stage_op("F", k, m)]
            gather = self.b.collective(stage_op("GC", k, m), seat.model, size, op, after=after, items=seat.items)
            self._came[gathered] = gather

    def cross(self, message: Message) -> None:
        """Emit what passes between this rank and another one."""
        ident, peer, items = message.ident, message.peer, self.b.seat.items
        if ident.kind in ("SX", "RX"):
            self._cross_besides(ident, peer)
            return
        outputs, own = ident.kind in ("RA", "SA"), self.stages[ident.stage]
        size = (own.activation if outputs else own.gradient) * items
        name = stage_buffer("A" if outputs else "D", ident.stage, ident.micro_batch)
        names = [name] if size else []
        if ident.lane == "recv":
            takes = [(name, self._into[ident.kind])] if size else []
            self._came[name] = self.b.emit(ident, takes=takes, writes=names, nbytes=size, items=items, peer=peer)
            return
        after = self._came.pop(name, None)  # where this rank has nothing of the stage
        if after is None:
            assert self._puts_out is not None
            after = self._puts_out.pop(name)
        self.b.emit(ident, after=[after], reads=names, gives=names, nbytes=size, items=items, peer=peer)

    def _cross_besides(self, ident: OpId, peer: int) -> None:
        """Emit what passes besides the input of a stage. It lies in memory that is counted with what is kept."""
        dealt, k, m = self.b.program.dealt, ident.stage, ident.micro_batch
        assert dealt is not None
        if ident.kind == "RX":
            self._besides[k, m] = self.b.emit(ident, nbytes=dealt.besides[k], peer=peer)
            return
        own = max(stage for stage in range(k) if dealt.has(stage))
        self.b.emit(ident, after=[stage_op("F", own, m)], nbytes=dealt.besides[k], peer=peer)
