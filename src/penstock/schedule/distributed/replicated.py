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
from penstock.schedule.distributed.recorder import Recorder, Take
from penstock.schedule.distributed.request import Request
from penstock.schedule.op import Schedule
from penstock.schedule.world import World


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
        self._reduced: dict[int, str] = {}
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

    def _input(self, layer: int, m: int) -> str:
        return f"A{layer - 1}m{m}" if layer else f"Xm{m}"

    def _gather(self, kind: str, layer: int) -> tuple[str, ...]:
        """All of a layer's weights, for its forward or backward, and those of the visits after it that the network may
        be ahead of. Returns the layer's own gather, or nothing if weights are not sharded.
        """
        if not self._sharding.weights:
            return ()
        turn = layer if kind == "F" else 2 * self._layers - 1 - layer
        while self._gathered <= min(turn + self._request.lookahead, 2 * self._layers - 1):
            forward = self._gathered < self._layers
            ahead = self._gathered if forward else 2 * self._layers - 1 - self._gathered
            visit = f"{'F' if forward else 'B'}{ahead}"
            buffer = f"W{ahead}@{visit}"
            self.out.whole(
                "GW",
                ahead,
                visit=visit,
                takes=((buffer, "weights"),),
                writes=(buffer,),
                nbytes=ring_bytes(self._sizes.weights, self._replicas),
                group=self._data,
            )
            self._gathered += 1
        return (f"GW{layer}@{kind}{layer}",)

    def _forward(self, layer: int, m: int) -> None:
        after = self._gather("F", layer)
        weights = (f"W{layer}@F{layer}",) if after else ()
        taken, put, kept = self._input(layer, m), f"A{layer}m{m}", f"K{layer}m{m}"
        takes: tuple[Take, ...] = ((put, "activations"), (kept, "saved"))
        writes: tuple[str, ...] = (put, kept)
        if not layer:
            takes = ((taken, "activations"), *takes)
            writes = (taken, *writes)  # the first layer loads the model's input itself
        gives = weights
        if self._model:
            takes = (*takes, (f"C{layer}m{m}", "activation_shards"))
            writes = (*writes, f"C{layer}m{m}")
            gives = (*gives, taken)
        reads = (*weights, taken) if layer else weights
        self.out.step(
            "F", layer, m, after=after, takes=takes, reads=reads, writes=writes, gives=gives, items=self._items
        )

    def _loss(self, m: int) -> None:
        put, gradient = f"A{self._layers - 1}m{m}", f"D{self._layers - 1}m{m}"
        self.out.step(
            "E",
            self._layers,
            m,
            takes=((gradient, "activation_gradients"),),
            reads=(put,),
            writes=(gradient,),
            gives=() if self._sharding.keeps_ends else (put,),
            items=self._items,
        )

    def _backward(self, layer: int, m: int) -> None:
        reads: tuple[str, ...] = (self._recall(layer, m), f"K{layer}m{m}", f"D{layer}m{m}")
        after = self._gather("B", layer)
        if after:
            reads = (*reads, f"W{layer}@B{layer}")
        if self._model:
            after = (*after, f"GC{layer}m{m}")
        gives, gradient = reads, f"G{layer}"
        takes: tuple[Take, ...] = ()
        writes: tuple[str, ...] = (gradient,)
        if layer or self._sharding.keeps_ends:
            before = f"D{layer - 1}m{m}" if layer else f"DXm{m}"
            takes, writes = ((before, "activation_gradients"),), (before, gradient)
        if m:
            reads = (*reads, gradient)
        else:
            takes = (*takes, (gradient, "gradients"))
        # Activations and gathered weights could go now. In the known best solution of the FSDP puzzle they go with
        # the whole gradient, when its part is there.
        late = self._sharding.weights and self._sharding.reduce == "scatter-early"
        done = self.out.step(
            "B",
            layer,
            m,
            after=after,
            takes=takes,
            reads=reads,
            writes=writes,
            gives=() if late else gives,
            items=self._items,
        )
        if self._sharding.reduce == "scatter-early":
            self._reduce("SG", layer, done, gives=gives if late else ())

    def _recall(self, layer: int, m: int) -> str:
        """The buffer with a layer's input, which is gathered first if it was kept in parts."""
        if not self._model:
            return self._input(layer, m)
        part, gathered = f"C{layer}m{m}", f"N{layer}m{m}"
        self.out.step(
            "GC",
            layer,
            m,
            after=(f"F{layer}m{m}",),
            takes=((gathered, "gathered_activations"),),
            reads=(part,),
            writes=(gathered,),
            gives=(part,),
            nbytes=ring_bytes(self._sizes.activation * self._items, self._request.ranks // self._replicas),
            items=self._items,
            group=self._model,
        )
        return gathered

    def _reduce(self, kind: str, layer: int, after: str, *, gives: tuple[str, ...] = ()) -> None:
        """All-reduce a layer's gradient in place, or reduce-scatter it, at once or piece by piece through a buffer."""
        gradient, part = f"G{layer}", f"P{layer}"
        size = self._sizes.gradient
        piece = min(self._request.buffer_size or size, size)
        pieces = split(size, piece) if piece else 1
        for chunk in range(pieces):
            last = chunk == pieces - 1
            amount = size - piece * chunk if last else piece
            buffer: tuple[str, ...] = (f"T{layer}.{chunk}",) if self._request.buffer_size else ()
            takes: tuple[Take, ...] = tuple((name, "buffers") for name in buffer)
            if kind == "SG" and chunk == 0:
                takes = (*takes, (part, "gradient_shards"))
            given = (gradient, *gives) if kind == "SG" and last else ()
            self._reduced[layer] = self.out.whole(
                kind,
                layer,
                chunk=chunk if buffer else -1,
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
            self._reduce("AR" if reduce == "all" else "SG", layer, f"B{layer}m{self._steps - 1}")
        gradient = f"P{layer}" if reduce.startswith("scatter") else f"G{layer}"
        gives: tuple[str, ...] = (gradient,)
        if self._sharding.keeps_ends and layer == 0:
            gives = (gradient, f"A{self._layers - 1}m0", "DXm0")
        after = (self._reduced[layer],) if layer in self._reduced else ()
        done = self.out.whole("OD", layer, after=after, reads=(gradient,), gives=gives)
        if reduce.startswith("scatter") and not self._sharding.weights:
            self.out.whole(
                "GN",
                layer,
                after=(done,),
                nbytes=ring_bytes(self._sizes.weights, self._replicas),
                group=self._data,
            )
