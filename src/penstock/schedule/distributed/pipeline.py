"""Pipelines: a rank's order of steps, as ops on layers, with what it passes to and gets from other ranks.

A step of a stage is the ops of its layers. Before it, what the stage before (or, backward, after) it has put out is
received, if that stage is on another rank; after it, its own result is sent. The last stage's backward begins with the
loss. A stage without layers receives and sends on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.schedule.distributed.orders import Step
from penstock.schedule.distributed.recorder import Recorder
from penstock.schedule.distributed.request import Request, Sizes
from penstock.schedule.distributed.stages import Stages
from penstock.schedule.ir.ops import Schedule, Take
from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op, stage_buffer, stage_op
from penstock.schedule.ir.worlds import World

Order = Callable[[Stages, int, int], list[Step]]


@dataclass(frozen=True, kw_only=True)
class Flush:
    """When a rank lets go of what it does not need any more.

    ``held``: what a rank has put out stays until its last backward is done, where it waits for its sends once, and each
    micro-batch has its own gradient of the weights, to be summed in the optimizer's step. That is GPipe as in the known
    best solution of the puzzle. Otherwise a buffer goes back when its send is done, and gradients are summed at once.

    ``items``: micro-batches that go through as one.
    """

    held: bool = False
    items: int = 1


def build_pipeline(request: Request, stages: Stages, order: Order, flush: Flush) -> World:
    """A world of ``stages.ranks`` ranks, each of which does its steps in the order given."""
    ranks = [_rank(request, stages, rank, order, flush) for rank in range(stages.ranks)]
    return World(name=request.family, ranks=tuple(ranks), groups={})


def activation_pools(sizes: Sizes, items: int) -> dict[str, int]:
    """Size of a buffer of each pool that holds something of ``items`` micro-batches."""
    return {
        "activations": sizes.activation * items,
        "received_activations": sizes.activation * items,
        "saved": sizes.saved * items,
        "activation_gradients": sizes.activation_gradient * items,
        "received_gradients": sizes.activation_gradient * items,
    }


def _rank(request: Request, stages: Stages, rank: int, order: Order, flush: Flush) -> Schedule:
    steps = order(stages, rank, request.micro_batches // flush.items)
    writer = _Writer(request.sizes, stages, rank, flush)
    for number, (kind, stage, m) in enumerate(steps, start=1):
        if kind == "F":
            writer.forward(stage, m)
        elif kind == "W":
            writer.weight_gradients(stage, m)
        else:
            writer.backward(kind, stage, m, last=number == len(steps))
    writer.optimize()
    held = len(stages.held(rank))
    return writer.out.finish(
        request.family,
        request.micro_batches,
        fixed=(
            ("device", "weights", held * request.sizes.weights),
            ("device", "state", held * request.sizes.state),
        ),
        lookahead=request.lookahead,
    )


class _Writer:
    """One rank's ops. Buffers are those of ``recorder``."""

    def __init__(self, sizes: Sizes, stages: Stages, rank: int, flush: Flush) -> None:
        self.out = Recorder(activation_pools(sizes, flush.items) | {"gradients": sizes.gradient})
        self._stages = stages
        self._rank = rank
        self._held = flush.held
        self._items = flush.items
        self._passed = sizes.activation * flush.items
        self._passed_back = sizes.activation_gradient * flush.items
        self._layers = stages.held(rank)
        self._gradients: dict[int, list[Buffer]] = {layer: [] for layer in self._layers}
        self._to_flush: list[Buffer] = []
        self._last_sent: tuple[OpId, ...] = ()

    def _peer(self, stage: int) -> int:
        """The rank that holds a stage, or -1: this one does, or there is no such stage."""
        if not 0 <= stage < self._stages.count:
            return -1
        peer = self._stages.rank_of(stage)
        return -1 if peer == self._rank else peer

    def forward(self, stage: int, m: int) -> None:
        first, end = self._stages.firsts[stage], self._stages.firsts[stage + 1]
        before, behind = self._peer(stage - 1), self._peer(stage + 1)
        taken = stage_buffer("A", first - 1, m)
        after: tuple[OpId, ...] = ()
        if before >= 0:
            after = (
                self.out.emit(
                    stage_op("RA", first - 1, m),
                    takes=((taken, "received_activations"),),
                    writes=(taken,),
                    nbytes=self._passed,
                    items=self._items,
                    peer=before,
                ),
            )
        for layer in range(first, end):
            put, kept = stage_buffer("A", layer, m), stage_buffer("K", layer, m)
            takes: tuple[Take, ...] = ((put, "activations"), (kept, "saved"))
            ident = self.out.emit(
                stage_op("F", layer, m),
                after=after,
                takes=takes if layer else ((taken, "activations"), *takes),
                reads=(taken,) if layer else (),  # the first layer loads the model's input itself
                writes=(put, kept) if layer else (taken, put, kept),
                items=self._items,
            )
            after, taken = (ident,) if layer == end - 1 else (), put
        if behind >= 0:
            self._send("SA", end - 1, m, taken, after, behind, last=False)

    def _send(
        self, kind: str, layer: int, m: int, what: Buffer, after: tuple[OpId, ...], peer: int, *, last: bool
    ) -> None:
        gives: tuple[Buffer, ...] = (what,)
        if self._held:
            self._to_flush.append(what)
            gives = self._flushed() if last else ()
        sent = self.out.emit(
            stage_op(kind, layer, m),
            after=after,
            reads=(what,),
            gives=gives,
            nbytes=self._passed if kind == "SA" else self._passed_back,
            items=self._items,
            peer=peer,
        )
        self._last_sent = (sent,)

    def _flushed(self) -> tuple[Buffer, ...]:
        gone, self._to_flush = tuple(self._to_flush), []
        return gone

    def backward(self, kind: str, stage: int, m: int, *, last: bool) -> None:
        """``last``: no step of this rank follows."""
        first, end = self._stages.firsts[stage], self._stages.firsts[stage + 1]
        after = self._gradient_of_output(stage, end - 1, m)
        before = self._peer(stage - 1)
        for layer in range(end - 1, first - 1, -1):
            ident = self._layer_backward(kind, layer, m, after, last=last and layer == first and before < 0)
            after = (ident,) if layer == first else ()
        if before >= 0:
            self._send("SD", first - 1, m, stage_buffer("D", first - 1, m), after, before, last=last)

    def _gradient_of_output(self, stage: int, layer: int, m: int) -> tuple[OpId, ...]:
        """Receive the gradient of what a stage puts out, or compute the loss. Returns what the backward waits for."""
        put, gradient = stage_buffer("A", layer, m), stage_buffer("D", layer, m)
        if stage == self._stages.count - 1:
            if self._held:
                self._to_flush.append(put)
            empty = layer not in self._gradients
            loss = self.out.emit(
                stage_op("E", self._stages.layers, m),
                after=(stage_op("RA", layer, m),) if empty else (),
                takes=((gradient, "activation_gradients"),),
                reads=(put,),
                writes=(gradient,),
                gives=() if self._held else (put,),
                items=self._items,
            )
            return (loss,) if empty else ()
        behind = self._peer(stage + 1)
        if behind < 0:
            return ()
        received = self.out.emit(
            stage_op("RD", layer, m),
            takes=((gradient, "received_gradients"),),
            writes=(gradient,),
            nbytes=self._passed_back,
            items=self._items,
            peer=behind,
        )
        return (received,)

    def _layer_backward(self, kind: str, layer: int, m: int, after: tuple[OpId, ...], *, last: bool) -> OpId:
        reads: tuple[Buffer, ...] = (
            stage_buffer("A", layer - 1, m),
            stage_buffer("K", layer, m),
            stage_buffer("D", layer, m),
        )
        takes: tuple[Take, ...] = ()
        writes: tuple[Buffer, ...] = ()
        gives = reads if kind == "B" else ()
        if layer:
            writes = (stage_buffer("D", layer - 1, m),)
            takes = ((writes[0], "activation_gradients"),)
        elif self._held:
            # Nobody needs the gradient of the model's input. The known solution has it, and holds it to the flush.
            writes = (stage_buffer("D", -1, m),)
            takes = ((writes[0], "activation_gradients"),)
            self._to_flush.append(writes[0])
        if kind == "B":
            takes, reads, writes = self._sum_gradient(layer, m, takes, reads, writes)
        if last and self._held:
            gives = (*gives, *self._flushed())
            after = (*after, *self._last_sent)
        return self.out.emit(
            stage_op(kind, layer, m),
            after=after,
            takes=takes,
            reads=reads,
            writes=writes,
            gives=gives,
            items=self._items,
        )

    def _sum_gradient(
        self, layer: int, m: int, takes: tuple[Take, ...], reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]
    ) -> tuple[tuple[Take, ...], tuple[Buffer, ...], tuple[Buffer, ...]]:
        """Add the gradient of a layer's weights to what an op touches."""
        gradient = group_buffer("G", layer, micro_batch=m if self._held else -1)
        known = self._gradients[layer]
        if known and not self._held:
            return takes, (*reads, gradient), (*writes, gradient)
        known.append(gradient)
        return (*takes, (gradient, "gradients")), reads, (*writes, gradient)

    def weight_gradients(self, stage: int, m: int) -> None:
        first, end = self._stages.firsts[stage], self._stages.firsts[stage + 1]
        for layer in range(end - 1, first - 1, -1):
            gives = (stage_buffer("A", layer - 1, m), stage_buffer("K", layer, m), stage_buffer("D", layer, m))
            takes, reads, writes = self._sum_gradient(layer, m, (), gives, ())
            self.out.emit(
                stage_op("W", layer, m), takes=takes, reads=reads, writes=writes, gives=gives, items=self._items
            )

    def optimize(self) -> None:
        for layer in sorted(self._layers):
            gradients = tuple(self._gradients[layer])
            self.out.emit(group_op("OD", layer), reads=gradients, gives=gradients)
