"""What the probe reports is what is: stages, reads, gradients, saved activations, and bytes."""

import copy
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.schedule.program import Stage
from penstock.tape.watch import Watch
from tests import models
from tests.models import MODELS, Case
from tests.stacks import Layer, Stack, stack
from tests.tape.test_refusals import Begins
from tests.tape_reference import Bench, Order, in_two_parts, vertical

HIDDEN = 2 * 12 * 32 * 4
"""Bytes of the small models' hidden states: rows x length x width, fp32."""
LARGEST = {
    **dict.fromkeys(("llama", "llama_sdpa", "gpt2", "mixtral", "bert"), 1.1),
    "t5": 1.15,  # gradients that collect where an output has several readers count from the forward on
    "skips": 1.3,
}
"""How far above a run's the largest number of bytes may be that the probe says."""


pytestmark = pytest.mark.usefixtures("one_thread")


def probed(case: Case, *, train: bool = True) -> Bench:
    bench = Bench(case, case.model(), moving=True)
    bench.probe(case.micro_batches(1)[0], train=train)
    return bench


def group(bench: Bench, name: str) -> int:
    return next(g.spec.index for g in bench.groups if g.spec.name == name)


def wide(build: str) -> Case:
    """A model whose embedding is large enough to be a group of its own."""
    return Case(build=lambda: getattr(models, build)(vocab_size=9000), micro_batch=MODELS[build].micro_batch, blocks=3)


def test_llama_is_prologue_calls_epilogue() -> None:
    bench = probed(wide("llama"))
    embed, head, small = (group(bench, f"ends.{n}") for n in ("model.embed_tokens", "lm_head", "small"))
    layers = [group(bench, f"blocks.model.layers.{i}") for i in range(3)]
    first, *calls, last = bench.stages
    assert [s.name for s in bench.stages] == ["prologue", *(f"model.layers.{i}" for i in range(3)), "epilogue"]
    assert (first.kind, first.forward_reads, first.backward_reads, first.gradients) == (
        "segment",
        (embed,),
        (),
        (embed,),
    )
    assert [(s.forward_reads, s.backward_reads, s.gradients) for s in calls] == [((g,), (g,), (g,)) for g in layers]
    assert (last.forward_reads, last.gradients) == ((head, small), (head, small))
    assert [(s.activation, s.gradient) for s in (first, *calls)] == [(HIDDEN, HIDDEN)] * 4
    assert [s.kept for s in calls] == [0, 0, 0]
    assert (last.activation, last.gradient, last.kept) == (0, 0, 0)


def test_t5_has_a_segment_between_encoder_and_decoder() -> None:
    bench = probed(MODELS["t5"])
    ends = group(bench, "ends.small")
    names = [(s.kind, s.name) for s in bench.stages]
    assert names[3] == ("segment", "after encoder.block.1")
    assert [kind for kind, _ in names] == ["segment", "call", "call", "segment", "call", "call", "call", "segment"]
    assert bench.stages[3].forward_reads == bench.stages[3].backward_reads == bench.stages[3].gradients == (ends,)
    # The encoder's output is read by every decoder block, so it stays; the decoder's own hidden states may leave. The
    # position bias that the first of the two encoder blocks makes is read by the second alone, so it may leave too.
    bias = 4 * 12 * 12 * 4
    assert [s.activation for s in bench.stages] == [HIDDEN, HIDDEN + bias, 0, *[HIDDEN // 2] * 4, 0]


def test_a_tied_weight_has_gradients_at_both_ends() -> None:
    bench = probed(wide("gpt2"))
    tied = group(bench, "ends.transformer.wte")
    assert [tied in s.gradients for s in bench.stages] == [True, False, False, False, True]
    assert tied not in bench.stages[0].backward_reads


def note_gradients(bench: Bench) -> set[tuple[int, int]]:
    """From now on filled with the stages that have gradients, each with the group that it has one of."""
    seen: set[tuple[int, int]] = set()
    owner = {id(s.parameter): g.spec.index for g in bench.groups for s in g.slices}
    bench.tape.on_gradient = lambda p, stage, g: seen.add((stage, owner[id(p)]))
    return seen


def reported(bench: Bench) -> set[tuple[int, int]]:
    return {(s.index, g) for s in bench.stages for g in s.gradients}


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in LARGEST])
def test_each_parameter_with_a_gradient_is_reported(name: str) -> None:
    bench = probed(MODELS[name])
    seen = note_gradients(bench)
    bench.tape.begin(0, MODELS[name].micro_batches(1), [1.0], stages=bench.stages)
    bench.run(vertical, 1)
    bench.tape.finish()
    assert seen == reported(bench)


def test_the_probe_leaves_no_trace() -> None:
    case = MODELS["skips"]
    model = case.model()
    before = copy.deepcopy(dict(model.named_buffers()))
    bench = Bench(case, model, moving=True)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    bench.probe(case.micro_batches(1)[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())


def test_a_buffer_that_held_nothing_holds_nothing_after_the_probe() -> None:
    case = stack(Begins)
    bench = Bench(case, model := case.model(), moving=True)
    bench.probe(case.micro_batches(1)[0])
    assert [layer.mean for layer in model.layers] == [None] * 3


class Scaled(Layer):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x * scale)


def scaled(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, torch.full((), 0.5))
    return x


def test_numbers_that_lie_elsewhere_are_no_saved_activation_of_the_device() -> None:
    """What a block is handed from the processor, while it runs on another device."""
    case = stack(Scaled, scaled)
    offloads = []
    for device in ("cpu", "meta"):
        bench = Bench(case, case.model().to(device))
        bench.probe({name: tensor.to(device) for name, tensor in case.micro_batches(1)[0].items()})
        offloads.append([facts.offload for facts in bench.tape.facts])
    assert [len(places) for places in offloads[0]] == [2, 2, 2, 1, 0]
    assert [len(places) for places in offloads[1]] == [1, 1, 1, 1, 0]


class Choosing(Layer):
    """Reads weights of the head as well, for numbers that fall (by ``sign`` 1) from the first feature to the last."""

    sign = 1
    ask: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.told = SimpleQueue[bool | None]()  # where what a probe puts stays, unlike in a list
        """of each call: the weights had their values; None: it has read none"""
        self.others: list[nn.Linear] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(self.sign * (x[..., 0] - x[..., -1]).sum() < 0):
            self.told.put(None)
            return super().forward(x)
        shift = self.ask(self.others[0].weight).sum()
        self.told.put(bool(shift.isfinite()))
        return super().forward(x) + shift


ASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": torch.sum,
    "listed": lambda weight: torch.cat([weight]),
    "turned": lambda weight: weight.T,
    "turned, of two dimensions": lambda weight: weight.mT,
    "turned, were it complex": lambda weight: weight.H,
    "its data": lambda weight: weight.data,
}


@pytest.mark.parametrize("way", ASKS)
def test_a_block_that_is_called_on_other_numbers_finds_the_weights_that_these_ask_for(way: str) -> None:
    case = stack(Choosing)
    model = case.model()
    for layer, sign in zip(model.layers, (1, -1, 1), strict=True):
        layer.ask, layer.sign, layer.others = ASKS[way], sign, [model.head]
    Bench(case, model, moving=True).probe(case.micro_batches(1)[0])
    found = [[layer.told.get() for _ in range(layer.told.qsize())] for layer in model.layers]
    assert all(len(one) == 3 for one in found)  # a forward, a call on other numbers, a recomputation
    assert any(one == [None, True, None] for one in found)
    assert not any(False in one for one in found)


class Halving(Layer):
    """Halves weights for numbers that rise from the first feature to the last: as ``Choosing``, by ``sign``. Its own,
    or ``others``, of which it reads nothing."""

    sign = 1

    def __init__(self) -> None:
        super().__init__()
        self.others: list[nn.Linear] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(self.sign * (x[..., 0] - x[..., -1]).sum() < 0):
            with torch.no_grad():
                (self.others or [self.linear])[0].weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_that_a_probe_has_seen_written_to_are_as_they_were(sign: int, own: bool, moving: bool) -> None:
    """Be it in the call on other numbers alone, and be they those of another part of the model."""
    case = stack(Halving)
    model = case.model()
    for layer in model.layers:
        layer.sign, layer.others = sign, [] if own else [model.head]
    bench = Bench(case, model, moving=moving)
    before = [flat.clone() for flat in bench.flats]
    with pytest.raises(ModelError, match="changes a parameter"):
        bench.probe(case.micro_batches(1)[0])
    assert all(map(torch.equal, bench.flats, before))


def test_a_probe_without_backward_says_so() -> None:
    bench = probed(MODELS["t5"], train=False)
    nothing = [(s.backward_reads, s.gradients, s.gradient, s.backward_peak) for s in bench.stages]
    assert nothing == [((), (), 0, 0)] * len(bench.stages)
    assert bench.stages[4].forward_reads == (group(bench, "blocks.decoder.block.0"),)


# -- bytes ----------------------------------------------------------------------------------------------------------


def predicted(bench: Bench, order: Order, count: int) -> Iterator[tuple[str, int, int]]:
    """Live bytes at most, op by op, as the fields of the stages say, when nothing leaves the device."""
    stages: tuple[Stage, ...] = bench.stages
    alive: dict[tuple[str, int, int], int] = {}
    for direction, s, mb in bench.events(order, count):
        stage, below = stages[s], stages[s - 1] if s else None
        if direction == "forward":
            alive["activation", s, mb], alive["kept", s, mb] = stage.activation, stage.kept
        if below is not None and (direction in ("backward", "backward_inputs") or s == len(stages) - 1):
            alive["gradient", s - 1, mb] = below.gradient
        if direction == "backward_inputs":
            alive["split", s, mb] = stage.split or 0
        back = stage.peak(split=True) if order is in_two_parts else stage.backward_peak
        peak = stage.forward_peak if direction == "forward" else back
        yield direction, s, sum(alive.values()) + peak
        if direction in ("backward", "backward_weights") or s == len(stages) - 1:
            for key in (("kept", s, mb), ("split", s, mb), ("gradient", s, mb), ("activation", s - 1, mb)):
                alive.pop(key, None)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("order", [vertical, in_two_parts])
def test_bytes_and_gradients_are_those_of_a_run(name: str, order: Order) -> None:
    """Every op of a tracked step stays below what the probe says, and the largest comes close to it. Behind the step
    nothing is alive, without the help of the garbage collector: activations must not hang on reference cycles."""
    case, count = MODELS[name], 2
    bench = Bench(case, case.model(), splits=order is in_two_parts)
    micro_batches = case.micro_batches(1) * count  # what an expert computes depends on the tokens
    bench.probe(micro_batches[0])
    bench.load_all()
    seen, watch = note_gradients(bench), Watch({}, lambda group: None)
    bench.tape.begin(0, micro_batches, [1.0] * count, stages=bench.stages)
    measured = []
    for direction, stage, mb in bench.events(order, count):
        watch.peak = watch.live
        with watch:
            getattr(bench.tape, direction)(stage, mb)
        measured.append((direction, stage, watch.peak))
    expected = list(predicted(bench, order, count))
    slack = 64 * count  # losses, and the step's own scalars
    # A hundredth more: a gradient that is a view keeps its siblings alive (router logits, which are concatenated).
    over = [(m, e) for m, e in zip(measured, expected, strict=True) if m[2] > 1.01 * e[2] + slack]
    assert not over
    assert max(e[2] for e in expected) <= LARGEST[name] * max(m[2] for m in measured)
    assert seen == reported(bench)
    bench.tape.finish()
    assert watch.live <= (count + 1) * 4  # losses and a placeholder of one element
