"""Pipelines beside each other, whose weights, gradients and state are sharded: ``pipeline-fsdp``.

Ranks are dealt out pipeline by pipeline: with S stages, rank r holds stage r mod S of pipeline r div S. Who takes part
in the collectives of a layer is a choice:

- ``stage``: the ranks that hold the layer, one of each pipeline; they share it among themselves;
- ``world``: all ranks, each of which keeps a part of every layer and joins every gather, also of layers that it does
  not compute. That is the last of the LLM training puzzles, which has no process groups.

There are as many pipelines as the micro-batches allow: the largest number that divides both ranks and micro-batches.
"""

from math import gcd

from penstock.errors import ConfigError
from penstock.schedule.distributed.pipeline import activation_pools
from penstock.schedule.distributed.recorder import Recorder
from penstock.schedule.distributed.replicated import ring_bytes, split
from penstock.schedule.distributed.request import Request
from penstock.schedule.distributed.stages import Stages
from penstock.schedule.ir.ops import Schedule, Take
from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op, stage_buffer, stage_op, visit
from penstock.schedule.ir.worlds import World


def build_grid(request: Request) -> World:
    """One forward and one backward of each pipeline's share of the micro-batches, all of them at once.

    Raises:
        ConfigError: a stage would have no layer.
    """
    pipelines = gcd(request.ranks, request.micro_batches)
    per_pipeline = request.ranks // pipelines
    layers = per_pipeline if request.stage_ops else request.layers
    if layers < per_pipeline:
        raise ConfigError(
            f"pipeline-fsdp with ranks={request.ranks} and micro_batches={request.micro_batches} has {per_pipeline} "
            f"stages to a pipeline, which need a layer each, and got layers={layers}: ask for fewer ranks, or for more "
            "micro-batches, as there are as many pipelines as divide both"
        )
    stages = Stages(layers=layers, ranks=per_pipeline, per_rank=1, folded=False)
    if request.gather_group == "stage":
        groups = {f"stage{s}": tuple(range(s, request.ranks, per_pipeline)) for s in range(per_pipeline)}
    else:
        groups = {"all": tuple(range(request.ranks))}
    ranks = [_Writer(request, stages, rank, groups).schedule() for rank in range(request.ranks)]
    return World(name=request.family, ranks=tuple(ranks), groups=groups)


class _Writer:
    """One rank's ops. Buffers are those of ``recorder``."""

    def __init__(self, request: Request, stages: Stages, rank: int, groups: dict[str, tuple[int, ...]]) -> None:
        self._request = request
        self._sizes = request.sizes
        self._pipeline, self._stage = divmod(rank, stages.ranks)
        self._rank = rank
        self._count = stages.count
        self._layers = stages.layers
        self._mine = range(stages.firsts[self._stage], stages.firsts[self._stage + 1])
        everybody = "all" in groups
        self._group = "all" if everybody else f"stage{self._stage}"
        self._shards = len(groups[self._group])
        self._joined = range(stages.layers) if everybody else self._mine
        self._items = request.micro_batches // (request.ranks // stages.ranks)
        self._sent: tuple[OpId, ...] = ()
        self._visits = [("F", layer) for layer in self._joined] + [("B", layer) for layer in reversed(self._joined)]
        self._turns = {visit: turn for turn, visit in enumerate(self._visits)}
        self._gathered = 0  # visits whose weights have been gathered
        self.out = Recorder(
            activation_pools(self._sizes, self._items)
            | {
                "weights": self._sizes.weights,
                "gradients": self._sizes.gradient,
                "gradient_shards": split(self._sizes.gradient, self._shards),
            }
        )

    def schedule(self) -> Schedule:
        for layer in self._joined:
            self._forward(layer)
        for layer in reversed(self._joined):
            self._backward(layer)
        for layer in self._joined:
            self._optimize(layer)
        sizes, joined = self._sizes, len(self._joined)
        return self.out.finish(
            self._request.family,
            self._request.micro_batches,
            fixed=(
                ("device", "weights", joined * split(sizes.weights, self._shards)),
                ("device", "state", joined * split(sizes.state, self._shards)),
            ),
            lookahead=self._request.lookahead,
        )

    def _activation(self, layer: int) -> Buffer:
        return stage_buffer("A", layer, self._pipeline)

    def _gradient(self, layer: int) -> Buffer:
        return stage_buffer("D", layer, self._pipeline)

    def _gather(self, kind: str, layer: int) -> OpId:
        """All of a layer's weights, for its forward or backward, and those of the visits after it that the network may
        be ahead of, in the same order on all ranks. Returns the layer's own gather.
        """
        turn = self._turns[kind, layer]
        for ahead, other in self._visits[self._gathered : turn + self._request.lookahead + 1]:
            stay = visit(ahead, other)
            buffer = group_buffer("W", other, visit=stay)
            unused = ahead == "F" and other not in self._mine
            self.out.emit(
                group_op("GW", other, visit=stay),
                takes=((buffer, "weights"),),
                writes=(buffer,),
                gives=(buffer,) if unused else (),
                nbytes=ring_bytes(self._sizes.weights, self._shards),
                group=self._group,
            )
            self._gathered += 1
        return group_op("GW", layer, visit=visit(kind, layer))

    def _receive(self, kind: str, layer: int, what: Buffer, pool: str, peer: int) -> OpId:
        size = self._sizes.activation if kind == "RA" else self._sizes.activation_gradient
        return self.out.emit(
            stage_op(kind, layer, self._pipeline),
            takes=((what, pool),),
            writes=(what,),
            nbytes=size * self._items,
            items=self._items,
            peer=peer,
        )

    def _send(self, kind: str, layer: int, what: Buffer, after: OpId, peer: int) -> None:
        size = self._sizes.activation if kind == "SA" else self._sizes.activation_gradient
        sent = self.out.emit(
            stage_op(kind, layer, self._pipeline),
            after=(after,),
            reads=(what,),
            nbytes=size * self._items,
            items=self._items,
            peer=peer,
        )
        self._sent = (*self._sent, sent)

    def _forward(self, layer: int) -> None:
        if layer not in self._mine:
            self._gather("F", layer)
            return
        taken, put, kept = (
            self._activation(layer - 1),
            self._activation(layer),
            stage_buffer("K", layer, self._pipeline),
        )
        after: tuple[OpId, ...] = ()
        if layer == self._mine[0] and self._stage:
            after = (self._receive("RA", layer - 1, taken, "received_activations", self._rank - 1),)
        takes: tuple[Take, ...] = ((put, "activations"), (kept, "saved"))
        weights = group_buffer("W", layer, visit=visit("F", layer))
        done = self.out.emit(
            stage_op("F", layer, self._pipeline),
            after=(*after, self._gather("F", layer)),
            takes=takes if layer else ((taken, "activations"), *takes),
            reads=(weights, taken) if layer else (weights,),
            writes=(put, kept) if layer else (taken, put, kept),
            gives=(weights,),
            items=self._items,
        )
        if layer == self._mine[-1]:
            if self._stage < self._count - 1:
                self._send("SA", layer, put, done, self._rank + 1)
            else:
                self._loss(layer)

    def _loss(self, layer: int) -> None:
        gradient = self._gradient(layer)
        self.out.emit(
            stage_op("E", self._layers, self._pipeline),
            takes=((gradient, "activation_gradients"),),
            reads=(self._activation(layer),),
            writes=(gradient,),
            items=self._items,
        )

    def _backward(self, layer: int) -> None:
        if layer not in self._mine:
            # It has nothing to add to the gradient, but its part of the sum is from all.
            gathered = self._gather("B", layer)
            self._scatter(layer, gathered, gives=(group_buffer("W", layer, visit=visit("B", layer)),))
            return
        received: tuple[OpId, ...] = ()
        if layer == self._mine[-1] and self._stage < self._count - 1:
            put = self._gradient(layer)
            received = (self._receive("RD", layer, put, "received_gradients", self._rank + 1),)
        gathered = self._gather("B", layer)
        used = (self._activation(layer - 1), stage_buffer("K", layer, self._pipeline), self._gradient(layer))
        before, gradient, weights = (
            self._gradient(layer - 1),
            group_buffer("G", layer),
            group_buffer("W", layer, visit=visit("B", layer)),
        )
        done = self.out.emit(
            stage_op("B", layer, self._pipeline),
            after=(*received, gathered),
            takes=((before, "activation_gradients"), (gradient, "gradients")),
            reads=(*used, weights),
            writes=(before, gradient),
            gives=used,
            items=self._items,
        )
        self._scatter(layer, done, reads=(gradient,), gives=(weights, gradient))
        if layer == self._mine[0] and self._stage:
            self._send("SD", layer - 1, before, done, self._rank - 1)

    def _scatter(self, layer: int, after: OpId, *, gives: tuple[Buffer, ...], reads: tuple[Buffer, ...] = ()) -> None:
        part = group_buffer("P", layer)
        self.out.emit(
            group_op("SG", layer),
            after=(after,),
            takes=((part, "gradient_shards"),),
            reads=reads,
            writes=(part,),
            gives=gives,
            nbytes=ring_bytes(self._sizes.gradient, self._shards),
            group=self._group,
        )

    def _optimize(self, layer: int) -> None:
        """The first step is the flush: what a rank has put out stays until then, when it waits for its sends once, as
        in the known best solution of the puzzle, and so does the gradient of the model's input, which nobody needs.
        """
        part = group_buffer("P", layer)
        first = layer == self._joined[0]
        ends = (self._activation(self._mine[-1]), self._gradient(self._mine[0] - 1))
        self.out.emit(
            group_op("OD", layer),
            after=(group_op("SG", layer), *(self._sent if first else ())),
            reads=(part,),
            gives=(part, *ends) if first else (part,),
        )
