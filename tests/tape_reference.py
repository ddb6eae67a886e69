"""The smallest executor of a tape, and the plain PyTorch loop that it must equal.

``Bench`` keeps every group's weights in a flat buffer, as the real executor does. With ``moving=True`` it takes away
whatever it may: weights are attached only while a stage that reads them runs, each time at another address, and
saved activations are dropped as soon as they are made and restored just before they are read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from penstock.schedule.program import Stage
from penstock.tape import rng
from penstock.tape.blocks import Block, find_blocks
from penstock.tape.facts import Learned
from penstock.tape.groups import group_parameters
from penstock.tape.tape import Tape
from tests.models import Case, MicroBatch

CPU = torch.device("cpu")
Gradients = dict[str, torch.Tensor]

SEED = 7


def vertical(stages: int, count: int) -> Iterator[tuple[str, int, int]]:
    """Stage by stage: every micro-batch goes through a stage before the next stage starts."""
    yield from (("forward", s, mb) for s in range(stages) for mb in range(count))
    yield from (("backward", s, mb) for s in reversed(range(stages - 1)) for mb in range(count))


def horizontal(stages: int, count: int) -> Iterator[tuple[str, int, int]]:
    """Micro-batch by micro-batch, forward and backward."""
    for mb in range(count):
        yield from (("forward", s, mb) for s in range(stages))
        yield from (("backward", s, mb) for s in reversed(range(stages - 1)))


def in_two_parts(stages: int, count: int) -> Iterator[tuple[str, int, int]]:
    """All micro-batches at once, as vertically; the second parts of backwards come after all that is left of a
    micro-batch."""
    yield from (("forward", s, mb) for s in range(stages) for mb in range(count))
    for mb in range(count):
        yield from (("backward_inputs", s, mb) for s in reversed(range(stages - 1)))
        yield from (("backward_weights", s, mb) for s in reversed(range(stages - 1)))


def with_graphs(stages: int, count: int) -> Iterator[tuple[str, int, int]]:
    """As vertically, with graphs kept from forwards to backwards."""
    yield from (("forward_kept", s, mb) for s in range(stages) for mb in range(count))
    yield from (("backward", s, mb) for s in reversed(range(stages - 1)) for mb in range(count))


Order = Callable[[int, int], Iterator[tuple[str, int, int]]]


class Bench:
    """A model on a tape, all of whose weights live in flat buffers of the test."""

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        *,
        moving: bool = False,
        splits: bool = False,
        blocks: Sequence[nn.Module] | None = None,
    ) -> None:
        self.case = case
        first = next(model.parameters())
        self.dtype, self.device = first.dtype, first.device
        self.moving = moving
        self.blocks = find_blocks(model, blocks)
        self.groups = group_parameters(model, self.blocks)
        self.flats = [torch.zeros(g.spec.numel, dtype=self.dtype, device=self.device) for g in self.groups]
        self.names = {id(s.parameter): s.name for g in self.groups for s in g.slices}
        for group, flat in zip(self.groups, self.flats, strict=True):
            for s in group.slices:
                flat[s.offset : s.offset + s.numel].copy_(s.parameter.detach().flatten())
            group.detach(self.dtype, self.device)
        self.attached: dict[int, torch.Tensor] = {}
        loss_fn, device = case.loss_fn, self.device
        self.tape = Tape(model, self.blocks, self.groups, loss_fn, seed=SEED, device=device, splits=splits)
        self.learned: Learned  # by the latest probe
        self.stages: tuple[Stage, ...] = ()

    def load(self, group: int) -> None:
        assert group not in self.attached
        self.attached[group] = self.flats[group].clone() if self.moving else self.flats[group]
        self.groups[group].attach(self.attached[group])

    def unload(self, group: int) -> None:
        flat = self.attached.pop(group)
        if self.moving:
            flat.fill_(float("nan"))  # as the next weights in the same buffer would
        self.groups[group].detach(self.dtype, self.device)

    def load_all(self) -> None:
        for group in range(len(self.groups)):
            self.load(group)

    def probe(self, micro_batch: MicroBatch, *, train: bool = True) -> tuple[Stage, ...]:
        learned = self.tape.probe(micro_batch, self.load, self.unload, all_copies=self.moving, train=train, alone=True)
        assert not self.attached
        self.learned, self.stages, self.tape.facts = learned, learned.stages, learned.facts
        return self.stages

    @contextmanager
    def weights(self, groups: Sequence[int]) -> Iterator[None]:
        """The groups attached while inside, when weights move."""
        for group in groups if self.moving else ():
            self.load(group)
        yield
        for group in groups if self.moving else ():
            self.unload(group)

    def step(
        self, micro_batches: Sequence[MicroBatch], weights: Sequence[float], order: Order = vertical, step: int = 0
    ) -> tuple[list[torch.Tensor], Gradients]:
        """One step's losses and gradients, summed over micro-batches per stage, then over stages."""
        sums: dict[tuple[int, str], torch.Tensor] = {}

        def on_gradient(parameter: nn.Parameter, stage: int, gradient: torch.Tensor) -> None:
            key = (stage, self.names[id(parameter)])
            sums[key] = sums[key] + gradient if key in sums else gradient

        self.tape.on_gradient = on_gradient
        self.tape.begin(step, micro_batches, weights, stages=self.stages)
        try:
            self.run(order, len(micro_batches))
            losses = self.tape.losses()
            self.tape.finish()
        except BaseException:
            self.tape.abort()
            raise
        total: Gradients = {}
        for (_, name), gradient in sums.items():
            total[name] = total[name] + gradient if name in total else gradient
        return losses, total

    def plain_step(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], weights: Sequence[float], step: int = 0
    ) -> tuple[list[torch.Tensor], Gradients]:
        """``plain_step`` with a copy that the tape does not have."""
        blocks = [Block(name=b.name, module=model.get_submodule(b.name)) for b in self.blocks]
        return plain_step(self.case, model, blocks, self.stages, micro_batches, weights, step)

    def run(self, order: Order, count: int) -> None:
        """All stages of all micro-batches, with weights and saved activations coming and going."""
        away: dict[tuple[int, int], list[torch.Tensor]] = {}
        for direction, stage, mb in self.events(order, count):
            own = self.stages[stage]
            forward = direction in ("forward", "forward_kept")
            reads = own.forward_reads if forward else () if direction == "backward_weights" else own.backward_reads
            if (stage - 1, mb) in away and direction != "backward_weights":
                self.tape.saved_activations.restore(stage - 1, mb, [t.clone() for t in away[stage - 1, mb]])
            with self.weights(reads):
                if forward:
                    self.tape.forward(stage, mb, keep=direction == "forward_kept", stay=not self.moving)
                else:
                    getattr(self.tape, direction)(stage, mb)
            if self.moving and direction == "forward":
                for k in (stage, stage - 1):
                    tensors = self.tape.saved_activations.of(k, mb)
                    if tensors and (k, mb) not in away:
                        away[k, mb] = [t.detach().clone() for t in tensors]
                    self.tape.saved_activations.drop(k, mb)

    def events(self, order: "Order", count: int) -> Iterator[tuple[str, int, int]]:
        """All stages of all micro-batches, with those backwards as a whole that cannot be run in two parts, and those
        forwards without a graph whose graph cannot be kept."""
        for direction, stage, mb in order(len(self.stages), count):
            if direction == "forward_kept":
                yield "forward" if self.stages[stage].graph is None else direction, stage, mb
            elif self.stages[stage].split is not None or not direction.startswith("backward_"):
                yield direction, stage, mb
            elif direction == "backward_inputs":
                yield "backward", stage, mb

    def evaluate(self, micro_batches: Sequence[MicroBatch], order: Order = vertical) -> list[torch.Tensor]:
        """The losses of a forward that keeps nothing."""
        self.tape.begin(0, micro_batches, [1.0] * len(micro_batches), stages=self.stages, train=False)
        self.run(lambda s, m: (x for x in order(s, m) if x[0] == "forward"), len(micro_batches))
        self.tape.finish()
        return self.tape.losses()


def plain_step(
    case: Case,
    model: nn.Module,
    blocks: Sequence[Block],
    stages: Sequence[Stage],
    micro_batches: Sequence[MicroBatch],
    weights: Sequence[float],
    step: int = 0,
) -> tuple[list[torch.Tensor], Gradients]:
    """The step by plain gradient accumulation, drawing the same random numbers at the same places."""
    device = next(model.parameters()).device
    position: dict[str, int] = defaultdict(int)
    calls = [s.index for s in stages if s.kind == "call"]

    def seed(stage: int) -> None:
        rng.seed(SEED, step, position["micro_batch"], stage, rng.FORWARD, device)

    def before(*_: object) -> None:
        seed(calls[position["call"]])

    def after(*_: object) -> None:
        stage = calls[position["call"]]
        position["call"] += 1
        if stages[stage + 1].kind == "segment":
            seed(stage + 1)

    hooks = [b.module.register_forward_pre_hook(before) for b in blocks]
    hooks += [b.module.register_forward_hook(after) for b in blocks]
    model.zero_grad()
    losses = []
    for index, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True)):
        position |= {"micro_batch": index, "call": 0}
        seed(0)
        loss = case.loss_fn(model, micro_batch)
        (loss * weight).backward()
        losses.append(loss.detach().reshape(()))
    for hook in hooks:
        hook.remove()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: Gradients, wanted: Gradients) -> float:
    """The largest over parameters of |found - wanted| over the largest gradient of the model."""
    assert found.keys() == wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values())
    differences = [(found[name] - wanted[name]).abs().max().cpu() for name in wanted]
    return float(torch.stack(differences).max()) / scale  # of torch: Python's own passes over a NaN
