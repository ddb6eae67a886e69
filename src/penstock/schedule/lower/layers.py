"""A rank's ops on whole layers: those of its stages, in an order of visits, with weights whole or sharded.

A visit of a stage is the ops of its layers. Before it, what the stage before (or, backward, after) it has put out is
received, if that stage is on another rank; after it, its own result is sent. The last stage's backward begins with the
loss. A stage without layers receives and sends on. Data parallelism is one stage that every rank holds; what is sharded
over the ranks, and when gradients are combined, is the ``Sharding``:

| family | sharded | weights | gradients |
|---|---|---|---|
| ``single``, ``grad-accumulation``, pipelines | nothing | stay | stay |
| ``ddp`` | nothing | stay | all-reduced after the backward |
| ``weight-sharded`` | weights, state | gathered for each use | all-reduced after the backward |
| ``zero1`` | state | gathered after the step | reduce-scattered after the backward |
| ``zero2`` | state, gradients | gathered after the step | reduce-scattered during the backward |
| ``fsdp`` (also with pipelines) | all three | gathered for each use | reduce-scattered during the backward |

ZeRO and ZeRO-R are arXiv 1910.02054. Buffers, by name (``l`` a layer, or a stage where a stage is one op):

| buffer | pool | holds |
|---|---|---|
| ``A3m0`` ``Xm0`` | activations, received_activations | what layer 3 puts out; the model's input |
| ``K3m0`` | saved | what the forward of layer 3 keeps for its backward besides its input |
| ``D3m0`` ``DXm0`` | activation_gradients, received_gradients | the gradient with respect to ``A3m0``, ``Xm0`` |
| ``W3@F3`` | weights | all of layer 3's weights, gathered for one use |
| ``G3`` ``G3m0`` | gradients | the gradient of layer 3's weights, of all or of one micro-batch |
| ``P3`` | gradient_shards | this rank's part of it |
| ``C3m0`` ``N3m0`` | activation_shards, gathered_activations | this rank's part of ``A2m0``; all of it again (ZeRO-R) |
| ``T3.0`` | buffers | a piece of a gradient on its way (ZeRO-R) |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.config import Tier
from penstock.schedule.ir.ops import Pool, Schedule
from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op, stage_buffer, stage_op, visit
from penstock.schedule.lower.emitter import Emitter, Touched
from penstock.schedule.lower.mesh import ProcessGroup
from penstock.schedule.lower.orders import Order
from penstock.schedule.lower.request import Request, Sizes
from penstock.schedule.lower.stages import Stages


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """One row of the table above, and when a rank lets go of what it does not need any more.

    ``reduce``: what is done about gradients, and when. ``late``: what goes back only when a gradient's part is there,
    besides the gradient. ``flush``: until when the ends stay (what a rank has put out, and the gradient that it passes
    back or, of the model's input, that nobody needs): until they are passed on, the rank's last backward, or its
    optimizer step, which wait for the sends once. With ``backward`` each micro-batch has a gradient of the weights of
    its own, to be summed in the optimizer's step. Nothing needs all that; the known best solutions of the puzzles do
    it, and their peaks are what is to be reproduced.
    """

    weights: bool = False
    state: bool = False
    reduce: Literal["none", "all", "scatter-late", "scatter-early"] = "none"
    late: Literal["nothing", "weights", "all"] = "nothing"
    flush: Literal["passed", "backward", "step"] = "passed"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place in the world. Of ``shards`` each rank has a part of the layers ``joined``. Peers are
    ``first_rank`` + a rank of the pipeline. It goes through its stages ``steps`` times, one after another, each time
    with ``items`` micro-batches at once. ``model``: the ranks that keep one copy of each layer's input. ``upwards``:
    the optimizer steps the first layer first; otherwise the last one, whose gradient can cross the network first.
    """

    rank: int
    joined: tuple[int, ...]
    steps: int
    items: int
    shards: ProcessGroup
    first_rank: int
    model: ProcessGroup
    upwards: bool


def activation_pools(sizes: Sizes, items: int) -> dict[str, int]:
    """Size of a buffer of each pool that holds something of ``items`` micro-batches."""
    return {
        "activations": sizes.activation * items,
        "received_activations": sizes.activation * items,
        "saved": sizes.saved * items,
        "activation_gradients": sizes.activation_gradient * items,
        "received_gradients": sizes.activation_gradient * items,
    }


def lower_rank(request: Request, stages: Stages, seat: Seat, order: Order, sharding: Sharding) -> Schedule:
    """One rank's schedule: its visits in the order given, then the optimizer's steps (or within, if that is fused)."""
    rank = _Rank(request, stages, seat, sharding)
    visits = order(stages, seat.rank, seat.steps)
    for number, stay in enumerate(visits, start=1):
        match stay.kind:
            case "F":
                rank.forward(stay.stage, stay.micro_batch)
            case "W":
                rank.weight_gradients(stay.stage, stay.micro_batch)
            case _:
                rank.backward(stay.kind, stay.stage, stay.micro_batch, last=number == len(visits))
    rank.optimize()
    return rank.finish()


class _Rank(Emitter):
    """One rank's ops."""

    def __init__(self, request: Request, stages: Stages, seat: Seat, sharding: Sharding) -> None:
        self._request, self._sizes = request, request.sizes
        self._stages, self._seat, self._sharding = stages, seat, sharding
        self._items = seat.items
        self._held = frozenset(stages.held(seat.rank))
        self._gradients: dict[int, list[Buffer]] = {}
        self._backward: dict[int, OpId] = {}
        self._reduced: dict[int, tuple[OpId, ...]] = {}
        self._ends: list[Buffer] = []
        self._sent: list[OpId] = []
        self._visits = [visit("F", layer) for layer in seat.joined] + [visit("B", n) for n in reversed(seat.joined)]
        self._turns = {stay: turn for turn, stay in enumerate(self._visits)}
        self._gathered = 0  # visits whose weights have been gathered
        sizes = self._sizes
        pools = activation_pools(sizes, seat.items) | {
            "activation_shards": seat.model.share(sizes.activation * seat.items),
            "gathered_activations": sizes.activation * seat.items,
            "weights": sizes.weights,
            "gradients": sizes.gradient,
            "gradient_shards": seat.shards.share(sizes.gradient),
            "buffers": request.buffer_size or 0,
        }
        super().__init__(
            [Pool(name=name, tier="device", size=size, count=0, backed=False) for name, size in pools.items()],
            lookahead=request.lookahead,
        )

    def finish(self) -> Schedule:
        sizes, cut, held, shards = self._sizes, self._sharding, len(self._seat.joined), self._seat.shards
        fixed: tuple[tuple[Tier, str, int], ...] = (
            ("device", "weights", held * (shards.share(sizes.weights) if cut.weights else sizes.weights)),
            ("device", "state", held * (shards.share(sizes.state) if cut.state else sizes.state)),
        )
        return self.schedule(self._request.family, micro_batches=self._request.micro_batches, fixed=fixed)

    def _own(self, stage: int) -> range:
        return range(self._stages.firsts[stage], self._stages.firsts[stage + 1])

    def _others(self, stage: int, *, below: bool) -> list[int]:
        """Layers that this rank has a part of, and does not compute, before or after a stage of its own."""
        if len(self._seat.joined) == len(self._held):
            return []
        own = self._own(stage)
        return [layer for layer in self._seat.joined if (layer < own.start if below else layer >= own.stop)]

    def _peer(self, stage: int) -> int:
        """The rank that holds a stage, or -1: this one does, or there is no such stage."""
        if not 0 <= stage < self._stages.count:
            return -1
        peer = self._stages.rank_of(stage)
        return -1 if peer == self._seat.rank else self._seat.first_rank + peer

    # ---- between ranks

    def _receive(self, kind: str, layer: int, m: int, what: Buffer, pool: str, peer: int) -> tuple[OpId, ...]:
        size = self._sizes.activation if kind == "RA" else self._sizes.activation_gradient
        received = self.emit(
            stage_op(kind, layer, m),
            takes=((what, pool),),
            writes=(what,),
            nbytes=size * self._items,
            items=self._items,
            peer=peer,
        )
        return (received,)

    def _send(self, kind: str, layer: int, m: int, after: tuple[OpId, ...], peer: int, *, last: bool) -> None:
        what = stage_buffer(kind[1], layer, m)
        size = self._sizes.activation if kind == "SA" else self._sizes.activation_gradient
        gives: Iterable[Buffer] = (what,)
        if self._sharding.flush != "passed":
            self._ends.append(what)
            gives = self._flushed() if last and self._sharding.flush == "backward" else ()
        sent = self.emit(
            stage_op(kind, layer, m),
            after=after,
            reads=(what,),
            gives=gives,
            nbytes=size * self._items,
            items=self._items,
            peer=peer,
        )
        self._sent.append(sent)

    def _flushed(self) -> tuple[Buffer, ...]:
        gone, self._ends = tuple(self._ends), []
        return gone

    def _gather(self, kind: str, layer: int) -> tuple[OpId, ...]:
        """All of a layer's weights, for its forward or backward, and those of the visits after it that the network may
        be ahead of, in the same order on all ranks. Returns the layer's own gather, or nothing if weights are whole.
        """
        if not self._sharding.weights:
            return ()
        turn = self._turns[visit(kind, layer)]
        for stay in self._visits[self._gathered : turn + self._request.lookahead + 1]:
            buffer = group_buffer("W", stay.stage, visit=stay)
            op = Touched()
            op.make(buffer, "weights")
            if stay.kind == "F" and stay.stage not in self._held:  # only the others use it
                op.gives.append(buffer)
            self.collective(group_op("GW", stay.stage, visit=stay), self._seat.shards, self._sizes.weights, op)
            self._gathered += 1
        return (group_op("GW", layer, visit=visit(kind, layer)),)

    # ---- forward

    def forward(self, stage: int, m: int) -> None:
        own = self._own(stage)
        for layer in self._others(stage, below=True):
            self._gather("F", layer)
        after: tuple[OpId, ...] = ()
        if (before := self._peer(stage - 1)) >= 0:
            taken = stage_buffer("A", own.start - 1, m)
            after = self._receive("RA", own.start - 1, m, taken, "received_activations", before)
        for layer in own:
            after = (self._layer_forward(layer, m, after if layer == own.start else ()),)
        if (behind := self._peer(stage + 1)) >= 0:
            self._send("SA", own.stop - 1, m, after, behind, last=False)
        for layer in self._others(stage, below=False):
            self._gather("F", layer)

    def _layer_forward(self, layer: int, m: int, after: tuple[OpId, ...]) -> OpId:
        op, taken = Touched(), stage_buffer("A", layer - 1, m)
        gathered = self._gather("F", layer)
        if gathered:
            op.use_up(group_buffer("W", layer, visit=visit("F", layer)))
        if layer:
            op.reads.append(taken)
        else:  # the first layer loads the model's input itself
            op.make(taken, "activations")
        op.make(stage_buffer("A", layer, m), "activations")
        op.make(stage_buffer("K", layer, m), "saved")
        if self._seat.model.size > 1:
            op.make(stage_buffer("C", layer, m), "activation_shards")
            op.gives.append(taken)
        return self.compute(stage_op("F", layer, m), op, after=(*after, *gathered), items=self._items)

    # ---- backward

    def backward(self, kind: str, stage: int, m: int, *, last: bool) -> None:
        """``last``: no visit of this rank follows."""
        own = self._own(stage)
        for layer in reversed(self._others(stage, below=False)):
            self._scatter_part(layer)
        after = self._gradient_of_output(stage, own, m)
        before = self._peer(stage - 1)
        for layer in reversed(own):
            ends = last and layer == own.start and before < 0
            done = self._layer_backward(kind, layer, m, after, last=ends)
            after = (done,) if layer == own.start else ()
            if self._request.fused:
                self._optimize(layer)
        if before >= 0:
            self._send("SD", own.start - 1, m, after, before, last=last)
        for layer in reversed(self._others(stage, below=True)):
            self._scatter_part(layer)

    def _gradient_of_output(self, stage: int, own: range, m: int) -> tuple[OpId, ...]:
        """Receive the gradient of what a stage puts out, or compute the loss. Returns what the backward waits for."""
        layer = own.stop - 1
        put, gradient = stage_buffer("A", layer, m), stage_buffer("D", layer, m)
        if stage < self._stages.count - 1:
            behind = self._peer(stage + 1)
            return self._receive("RD", layer, m, gradient, "received_gradients", behind) if behind >= 0 else ()
        held = self._sharding.flush != "passed"
        self._ends += [put] if held else []
        loss = self.emit(
            stage_op("E", self._stages.layers, m),
            after=() if own else (stage_op("RA", layer, m),),
            takes=((gradient, "activation_gradients"),),
            reads=(put,),
            writes=(gradient,),
            gives=() if held else (put,),
            items=self._items,
        )
        return () if own else (loss,)

    def _layer_backward(self, kind: str, layer: int, m: int, after: tuple[OpId, ...], *, last: bool) -> OpId:
        taken, recalled = self._recall(layer, m)
        gathered = self._gather("B", layer)
        weights = [group_buffer("W", layer, visit=visit("B", layer))] if gathered else []
        used = [taken, stage_buffer("K", layer, m), stage_buffer("D", layer, m), *weights]
        late = {"nothing": [], "weights": weights, "all": used}[self._sharding.late]
        op = Touched(reads=[*used], gives=[name for name in used if kind == "B" and name not in late])
        if layer or self._sharding.flush != "passed":
            before = stage_buffer("D", layer - 1, m)
            op.make(before, "activation_gradients")
            self._ends += [] if layer else [before]
        if kind == "B":
            self._sum_gradient(layer, m, op)
        after = (*after, *gathered, *recalled)
        if last and self._sharding.flush == "backward":
            op.gives += self._flushed()
            after = (*after, *self._sent[-1:])
        done = self.compute(stage_op(kind, layer, m), op, after=after, items=self._items)
        self._backward[layer] = done
        if self._sharding.reduce == "scatter-early":
            self._reduce("SG", layer, done, gives=tuple(late))
        return done

    def _recall(self, layer: int, m: int) -> tuple[Buffer, tuple[OpId, ...]]:
        """The buffer with a layer's input, which is gathered first if it was kept in parts: by which op."""
        if self._seat.model.size == 1:
            return stage_buffer("A", layer - 1, m), ()
        op, gathered = Touched(), stage_buffer("N", layer, m)
        op.use_up(stage_buffer("C", layer, m))
        op.make(gathered, "gathered_activations")
        amount, after = self._sizes.activation * self._items, (stage_op("F", layer, m),)
        group = self._seat.model
        recalled = self.collective(stage_op("GC", layer, m), group, amount, op, after=after, items=self._items)
        return gathered, (recalled,)

    def _sum_gradient(self, layer: int, m: int, op: Touched) -> None:
        """Add the gradient of a layer's weights to what an op touches."""
        apart = self._sharding.flush == "backward"
        gradient = group_buffer("G", layer, micro_batch=m if apart else -1)
        known = self._gradients.setdefault(layer, [])
        if known and not apart:
            op.add_to(gradient)
        else:
            known.append(gradient)
            op.make(gradient, "gradients")

    def weight_gradients(self, stage: int, m: int) -> None:
        for layer in reversed(self._own(stage)):
            op = Touched()
            for kind, of in (("A", layer - 1), ("K", layer), ("D", layer)):
                op.use_up(stage_buffer(kind, of, m))
            self._sum_gradient(layer, m, op)
            self.compute(stage_op("W", layer, m), op, items=self._items)

    # ---- gradients and the optimizer

    def _scatter_part(self, layer: int) -> None:
        """A layer of another rank: this one has nothing to add to the gradient, but its part of the sum is from all."""
        (gathered,) = self._gather("B", layer)
        self._reduce("SG", layer, gathered, gives=(group_buffer("W", layer, visit=visit("B", layer)),))

    def _reduce(self, kind: str, layer: int, after: OpId, *, gives: tuple[Buffer, ...] = ()) -> None:
        """All-reduce a layer's gradient in place, or reduce-scatter it, at once or piece by piece through a buffer."""
        part, size = group_buffer("P", layer), self._sizes.gradient
        gradient = self._gradients.get(layer, [])
        piece = min(self._request.buffer_size or size, size)
        pieces = -(-size // piece) if piece else 1
        for chunk in range(pieces):
            buffer = [group_buffer("T", layer, chunk)] if self._request.buffer_size else []
            op = Touched(takes=[(name, "buffers") for name in buffer], reads=[*gradient], gives=[*buffer])
            if kind == "SG":
                op.takes += [(part, "gradient_shards")] if chunk == 0 else []
                op.writes += [part, *buffer]
            else:
                op.reads += buffer
                op.writes += [*gradient, *buffer]
            amount = piece
            if chunk == pieces - 1:
                amount = size - piece * chunk
                op.gives += [*gradient, *gives] if kind == "SG" else []
            ident = group_op(kind, layer, chunk if buffer else -1)
            self._reduced[layer] = (self.collective(ident, self._seat.shards, amount, op, after=(after,)),)

    def optimize(self) -> None:
        """The steps that are not fused into the backward."""
        if not self._request.fused:
            for layer in self._seat.joined if self._seat.upwards else reversed(self._seat.joined):
                self._optimize(layer)

    def _optimize(self, layer: int) -> None:
        reduce, seat = self._sharding.reduce, self._seat
        if reduce in ("all", "scatter-late"):
            self._reduce("AR" if reduce == "all" else "SG", layer, self._backward[layer])
        parts = (group_buffer("P", layer),) if reduce.startswith("scatter") else tuple(self._gradients[layer])
        after, gives = self._reduced.get(layer, ()), parts
        if self._sharding.flush == "step" and layer == seat.joined[0]:
            after, gives = (*after, *self._sent), (*parts, *self._flushed())
        done = self.emit(group_op("OD", layer), after=after, reads=parts, gives=gives)
        if reduce.startswith("scatter") and not self._sharding.weights:
            self.collective(group_op("GN", layer), seat.shards, self._sizes.weights, Touched(), after=(done,))
