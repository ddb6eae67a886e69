"""Ranks that all hold the whole model, or a part of each layer, and compute different micro-batches.

The families differ in what is sharded over the ranks, and in when gradients are combined:

| family | sharded | weights | gradients |
|---|---|---|---|
| ``single``, ``grad-accumulation`` | nothing: one rank | stay | stay |
| ``ddp`` | nothing | stay | all-reduced after the backward |
| ``weight-sharded`` | weights, state | gathered for each use | all-reduced after the backward |
| ``zero1`` | state | gathered after the step | reduce-scattered after the backward |
| ``zero2`` | state, gradients | gathered after the step | reduce-scattered during the backward |
| ``fsdp`` | state, gradients, weights | gathered for each use | reduce-scattered during the backward |

ZeRO and ZeRO-R are arXiv 1910.02054. All ranks do the same, so they share one schedule. With partitioned activations,
ranks come in groups that stand for model parallelism: a group computes the same micro-batches, each rank its slice of
every layer (sizes and costs are those of the slice), and each keeps a part of what all of them need again.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError
from penstock.schedule.distributed.pipeline import activation_pools
from penstock.schedule.distributed.recorder import Recorder
from penstock.schedule.distributed.request import Request
from penstock.schedule.ir.ops import Schedule, Take
from penstock.schedule.ir.references import Buffer, OpId, group_buffer, group_op, stage_buffer, stage_op, visit
from penstock.schedule.ir.worlds import World


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """One row of the table above.

    ``reduce``: what is done about gradients, and when. ``keeps_ends``: the model's output and the gradient of its input
    stay to the end of the step. Nothing needs them; the known best solutions of these puzzles hold them, and their
    peaks are what is to be reproduced. ``step_of_one``: micro-batches go one after another, not all at once.
    """

    weights: bool = False
    state: bool = False
    reduce: Literal["none", "all", "scatter-late", "scatter-early"] = "none"
    keeps_ends: bool = False
    step_of_one: bool = False


def build_replicated(request: Request, sharding: Sharding) -> World:
    """Every rank computes its share of the micro-batches.

    Raises:
        ConfigError: ranks or micro-batches that cannot be shared evenly.
    """
    together = request.partition_activations or 1
    if request.ranks % together:
        raise ConfigError(
            f"{request.family}: partition_activations={together} does not divide {request.ranks} ranks into groups: "
            "choose a divisor"
        )
    replicas = request.ranks // together
    if request.micro_batches % replicas:
        raise ConfigError(
            f"{request.family}: {request.micro_batches} micro-batches cannot be shared evenly by {replicas} ranks"
            f"{' (groups)' if together > 1 else ''}: ask for a multiple of {replicas}"
        )
    if request.partition_activations is None:
        shared = _Writer(request, sharding, "all", "").schedule()
        groups = {"all": tuple(range(request.ranks))} if sharding.reduce != "none" else {}
        return World(name=request.family, ranks=(shared,) * request.ranks, groups=groups)
    data = {f"data{i}": tuple(range(i, request.ranks, together)) for i in range(together)}
    model = {f"model{i}": tuple(range(i * together, (i + 1) * together)) for i in range(replicas)}
    ranks = [
        _Writer(request, sharding, f"data{r % together}", f"model{r // together}").schedule()
        for r in range(request.ranks)
    ]
    return World(name=request.family, ranks=tuple(ranks), groups=data | model)


def split(amount: int, parts: int) -> int:
    """Size of a part; the last one is padded."""
    return -(-amount // parts)


def ring_bytes(amount: int, ranks: int) -> int:
    """What a rank sends in an all-gather or reduce-scatter of ``amount`` in all; an all-reduce is one of each."""
    return amount * (ranks - 1) // ranks


class _Writer:
    """One rank's ops. ``data``: group of the ranks that hold the same layers; ``model``: group of those that share
    activations, or empty.
    """

    def __init__(self, request: Request, sharding: Sharding, data: str, model: str) -> None:
        sizes, together = request.sizes, request.partition_activations or 1
        self._request = request
        self._sizes = sizes
        self._sharding = sharding
        self._data, self._model = data, model
        self._replicas = request.ranks // together
        self._items = 1 if sharding.step_of_one else request.micro_batches // self._replicas
        self._layers = request.layers
        self._steps = request.micro_batches if sharding.step_of_one else 1
        self._reduced: dict[int, OpId] = {}
        self._gathered = 0  # visits whose weights have been gathered: all forwards, then all backwards
        self.out = Recorder(
            activation_pools(sizes, self._items)
            | {
                "activation_shards": split(sizes.activation * self._items, together),
                "gathered_activations": sizes.activation * self._items,
                "weights": sizes.weights,
                "gradients": sizes.gradient,
                "gradient_shards": split(sizes.gradient, self._replicas),
                "buffers": request.buffer_size or 0,
            }
        )

    def schedule(self) -> Schedule:
        for m in range(self._steps):
            for layer in range(self._layers):
                self._forward(layer, m)
            self._loss(m)
            for layer in reversed(range(self._layers)):
                self._backward(layer, m)
                if self._request.fused:
                    self._optimize(layer)
        if not self._request.fused:
            for layer in reversed(range(self._layers)):  # the last layer's gradient can cross the network first
                self._optimize(layer)
        sizes, cut, fixed = self._sizes, self._sharding, self._layers
        return self.out.finish(
            self._request.family,
            self._request.micro_batches,
            fixed=(
                ("device", "weights", fixed * (split(sizes.weights, self._replicas) if cut.weights else sizes.weights)),
                ("device", "state", fixed * (split(sizes.state, self._replicas) if cut.state else sizes.state)),
            ),
            lookahead=self._request.lookahead,
        )

    def _input(self, layer: int, m: int) -> Buffer:
        return stage_buffer("A", layer - 1, m)

    def _gather(self, kind: str, layer: int) -> tuple[OpId, ...]:
        """All of a layer's weights, for its forward or backward, and those of the visits after it that the network may
        be ahead of. Returns the layer's own gather, or nothing if weights are not sharded.
        """
        if not self._sharding.weights:
            return ()
        turn = layer if kind == "F" else 2 * self._layers - 1 - layer
        while self._gathered <= min(turn + self._request.lookahead, 2 * self._layers - 1):
            forward = self._gathered < self._layers
            ahead = self._gathered if forward else 2 * self._layers - 1 - self._gathered
            stay = visit("F" if forward else "B", ahead)
            buffer = group_buffer("W", ahead, visit=stay)
            self.out.emit(
                group_op("GW", ahead, visit=stay),
                takes=((buffer, "weights"),),
                writes=(buffer,),
                nbytes=ring_bytes(self._sizes.weights, self._replicas),
                group=self._data,
            )
            self._gathered += 1
        return (group_op("GW", layer, visit=visit(kind, layer)),)

    def _forward(self, layer: int, m: int) -> None:
        after = self._gather("F", layer)
        weights = (group_buffer("W", layer, visit=visit("F", layer)),) if after else ()
        taken, put, kept = self._input(layer, m), stage_buffer("A", layer, m), stage_buffer("K", layer, m)
        takes: tuple[Take, ...] = ((put, "activations"), (kept, "saved"))
        writes: tuple[Buffer, ...] = (put, kept)
        if not layer:
            takes = ((taken, "activations"), *takes)
            writes = (taken, *writes)  # the first layer loads the model's input itself
        gives = weights
        if self._model:
            takes = (*takes, (stage_buffer("C", layer, m), "activation_shards"))
            writes = (*writes, stage_buffer("C", layer, m))
            gives = (*gives, taken)
        reads = (*weights, taken) if layer else weights
        self.out.emit(
            stage_op("F", layer, m),
            after=after,
            takes=takes,
            reads=reads,
            writes=writes,
            gives=gives,
            items=self._items,
        )

    def _loss(self, m: int) -> None:
        put, gradient = stage_buffer("A", self._layers - 1, m), stage_buffer("D", self._layers - 1, m)
        self.out.emit(
            stage_op("E", self._layers, m),
            takes=((gradient, "activation_gradients"),),
            reads=(put,),
            writes=(gradient,),
            gives=() if self._sharding.keeps_ends else (put,),
            items=self._items,
        )

    def _backward(self, layer: int, m: int) -> None:
        reads: tuple[Buffer, ...] = (self._recall(layer, m), stage_buffer("K", layer, m), stage_buffer("D", layer, m))
        after = self._gather("B", layer)
        if after:
            reads = (*reads, group_buffer("W", layer, visit=visit("B", layer)))
        if self._model:
            after = (*after, stage_op("GC", layer, m))
        gives, gradient = reads, group_buffer("G", layer)
        takes: tuple[Take, ...] = ()
        writes: tuple[Buffer, ...] = (gradient,)
        if layer or self._sharding.keeps_ends:
            before = stage_buffer("D", layer - 1, m)
            takes, writes = ((before, "activation_gradients"),), (before, gradient)
        if m:
            reads = (*reads, gradient)
        else:
            takes = (*takes, (gradient, "gradients"))
        # Activations and gathered weights could go now. In the known best solution of the FSDP puzzle they go with
        # the whole gradient, when its part is there.
        late = self._sharding.weights and self._sharding.reduce == "scatter-early"
        done = self.out.emit(
            stage_op("B", layer, m),
            after=after,
            takes=takes,
            reads=reads,
            writes=writes,
            gives=() if late else gives,
            items=self._items,
        )
        if self._sharding.reduce == "scatter-early":
            self._reduce("SG", layer, done, gives=gives if late else ())

    def _recall(self, layer: int, m: int) -> Buffer:
        """The buffer with a layer's input, which is gathered first if it was kept in parts."""
        if not self._model:
            return self._input(layer, m)
        part, gathered = stage_buffer("C", layer, m), stage_buffer("N", layer, m)
        self.out.emit(
            stage_op("GC", layer, m),
            after=(stage_op("F", layer, m),),
            takes=((gathered, "gathered_activations"),),
            reads=(part,),
            writes=(gathered,),
            gives=(part,),
            nbytes=ring_bytes(self._sizes.activation * self._items, self._request.ranks // self._replicas),
            items=self._items,
            group=self._model,
        )
        return gathered

    def _reduce(self, kind: str, layer: int, after: OpId, *, gives: tuple[Buffer, ...] = ()) -> None:
        """All-reduce a layer's gradient in place, or reduce-scatter it, at once or piece by piece through a buffer."""
        gradient, part = group_buffer("G", layer), group_buffer("P", layer)
        size = self._sizes.gradient
        piece = min(self._request.buffer_size or size, size)
        pieces = split(size, piece) if piece else 1
        for chunk in range(pieces):
            last = chunk == pieces - 1
            amount = size - piece * chunk if last else piece
            buffer: tuple[Buffer, ...] = (group_buffer("T", layer, chunk),) if self._request.buffer_size else ()
            takes: tuple[Take, ...] = tuple((name, "buffers") for name in buffer)
            if kind == "SG" and chunk == 0:
                takes = (*takes, (part, "gradient_shards"))
            given = (gradient, *gives) if kind == "SG" and last else ()
            self._reduced[layer] = self.out.emit(
                group_op(kind, layer, chunk if buffer else -1),
                after=(after,),
                takes=takes,
                reads=(gradient,) if kind == "SG" else (gradient, *buffer),
                writes=(part, *buffer) if kind == "SG" else (gradient, *buffer),
                gives=(*buffer, *given),
                nbytes=ring_bytes(amount, self._replicas) * (1 if kind == "SG" else 2),
                group=self._data,
            )

    def _optimize(self, layer: int) -> None:
        reduce = self._sharding.reduce
        if reduce in ("all", "scatter-late"):
            self._reduce("AR" if reduce == "all" else "SG", layer, stage_op("B", layer, self._steps - 1))
        gradient = group_buffer("P", layer) if reduce.startswith("scatter") else group_buffer("G", layer)
        gives: tuple[Buffer, ...] = (gradient,)
        if self._sharding.keeps_ends and layer == 0:
            gives = (gradient, stage_buffer("A", self._layers - 1, 0), stage_buffer("D", -1, 0))
        after = (self._reduced[layer],) if layer in self._reduced else ()
        done = self.out.emit(group_op("OD", layer), after=after, reads=(gradient,), gives=gives)
        if reduce.startswith("scatter") and not self._sharding.weights:
            self.out.emit(
                group_op("GN", layer),
                after=(done,),
                nbytes=ring_bytes(self._sizes.weights, self._replicas),
                group=self._data,
            )
