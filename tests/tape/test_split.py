"""A backward in two parts is the whole one: the same bits whatever a block does with its weights, nothing computed
twice, and no weights read in the second part."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.compat.torch import TorchDispatchMode, packet_of
from penstock.errors import ModelError
from tests.any_functions import Product
from tests.models import MODELS, Case
from tests.stacks import WEIGHTS, WIDTH, Layer, assert_same_gradients, beside_vertical, stack, unequal
from tests.tape.test_autograd import HONOURED
from tests.tape.test_refusals import Smoothed
from tests.tape_reference import Bench, in_two_parts, vertical

pytestmark = pytest.mark.usefixtures("one_thread")


class Twice(Layer):
    """A module that is used twice, with the sums of its weights' gradients between other products."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.once, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.linear(self.norm(x)))
        x = self.once(x)
        return x + self.other(torch.tanh(self.other(x))) + self.linear(x)


class Alone(Layer):
    """Nothing but a product, of which all is there before the first part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Frozen(Layer):
    """A low-rank adapter beside a frozen weight; only one of its biases trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(requires_grad=False)
        self.linear.bias.requires_grad_()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) + self.up(self.down(x)))


class Merged(Frozen):
    """The same, merged: its gradients need the other factor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = self.linear.weight + self.up.weight @ self.down.weight
        return x + torch.tanh(self.last(nn.functional.linear(x, merged, self.linear.bias)))


class FromWeights(Layer):
    """Puts out what depends on weights alone besides, and has an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.embed(torch.arange(x.shape[1]) % 4)
        return self.last(torch.tanh(self.linear(x) + own)) + self.linear.weight.sum() * self.embed.weight.exp().mean()


class Masked(Layer):
    """Dropout, a weight that is cast, scaled and split, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.scale = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4), nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = nn.functional.dropout(x, 0.3).to(torch.float32).matmul(self.both.float().t()).chunk(2, -1)
        return x + self.linear((a * b.sigmoid()).to(x.dtype)) / self.scale


class HookedProduct(Layer):
    """Hooks on what a product returns, which the forward registers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x.flatten(0, 1), self.linear.weight.t())
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) * 3)
        return x + torch.tanh(y).view_as(x)


class Recomputed(Layer):
    """Recomputes a part of itself, beside a product that it does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=False)
        return x + self.other(inner)

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)


class ReadsTwice(Product):
    """Asks for what it has saved several times, and has a weight of its own."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors[0], ctx.saved_tensors[1]
        rows = gradients[0].flatten(0, 1)
        return gradients[0] @ weight.t(), x.flatten(0, 1).t() @ rows


class WithFunction(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ReadsTwice.apply(torch.tanh(self.linear(x)), self.own)
        return x + out


ODD: dict[str, type[nn.Module]] = {
    "used several times": Twice,
    "a product alone": Alone,
    "an adapter": Frozen,
    "a merged adapter": Merged,
    "from weights alone": FromWeights,
    "dropout, casts and pieces": Masked,
    "hooks on a product": HookedProduct,
    "a checkpoint and a product": Recomputed,
    "a function of its own": WithFunction,
}
CASES: dict[str, Case] = {
    **{f"model {name}": case for name, case in MODELS.items()},
    **{name: stack(layer) for name, layer in ODD.items()},
    **{name: stack(*HONOURED[name]) for name in HONOURED},
}
WHOLE = (
    "a reentrant checkpoint within a block",
    "a checkpoint within a block",
    "torch.func within a block",
    "a derivative within a block",
)


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", CASES)
def test_a_backward_in_two_parts_has_the_bits_of_a_whole_one(name: str) -> None:
    bench, whole, split = beside_vertical(CASES[name], in_two_parts, splits=True)
    assert_same_gradients(split, whole)
    assert any(stage.split is not None for stage in bench.stages) == (name not in WHOLE)
    assert all(stage.split is None for stage in bench.stages if stage.kind == "segment")


def test_hooks_on_parameters_are_called_once_for_each_micro_batch() -> None:
    """Of a product that waits, of one weight of several, and of a norm."""
    seen, case, names = Counter[str](), stack(Twice), ("once.weight", "linear.weight", "norm.bias")
    model = case.model()
    for name in names:
        model.layers[1].get_parameter(name).register_hook(lambda g, name=name: seen.update([name]) or g * 2)
    bench = Bench(case, model, moving=True, splits=True)
    bench.probe(unequal(case)[0])
    found = []
    for order in (vertical, in_two_parts):
        seen.clear()
        found.append(bench.step(unequal(case), WEIGHTS, order)[1])
        assert seen == dict.fromkeys(names, len(WEIGHTS))
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_a_block_that_changes_its_buffers_is_tried_and_recomputed_from_what_they_were() -> None:
    case = stack(Smoothed)
    bench = Bench(case, case.model(), moving=True, splits=True)
    bench.probe(unequal(case)[0])
    assert all((stage.split is None) == (stage.kind == "segment") for stage in bench.stages)


class Products(TorchDispatchMode):
    """Counts what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = packet_of(func).__name__
        self.count += name in ("mm", "addmm", "bmm", "baddbmm") or "attention" in name
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", ["model llama_sdpa", "model gpt2", "model bert", "used several times", "an adapter"])
def test_nothing_is_computed_twice(name: str) -> None:
    case = CASES[name]
    bench = Bench(case, case.model(), splits=True)
    micro_batches = case.micro_batches(2)
    bench.probe(micro_batches[0])
    bench.load_all()
    counts = []
    for order in (vertical, in_two_parts):
        with Products() as products:
            bench.step(micro_batches, [1.0, 1.0], order)
        counts.append(products.count)
    assert counts[0] == counts[1]


def test_products_of_weights_wait_and_the_rest_does_not() -> None:
    case = MODELS["llama"]
    bench = Bench(case, case.model(), splits=True)
    micro_batches = case.micro_batches(1)
    bench.probe(micro_batches[0])
    bench.load_all()
    made: dict[str, list[str]] = {}
    now = ""
    bench.tape.begin(0, micro_batches, [1.0], stages=bench.stages)
    bench.tape.on_gradient = lambda p, stage, gradient: made.setdefault(now, []).append(bench.names[id(p)])
    for direction, stage, mb in bench.events(in_two_parts, 1):
        now = f"{direction} {bench.stages[stage].name}"
        products = Products()
        with products:
            getattr(bench.tape, direction)(stage, mb)
        if direction == "backward_weights":
            assert products.count == 7, "queries, keys, values, output and three of the MLP"
    bench.tape.finish()
    assert not any(name.startswith("backward_inputs") for name in made)
    assert len(made["backward_weights model.layers.1"]) == 9


class Changing(Layer):
    """Recomputes a part of itself in the old way, from some micro-batch on."""

    changes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            x = checkpoint(torch.tanh, x, use_reentrant=True)
        return x + self.linear(x)


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
def test_a_block_that_can_no_longer_be_split_is_refused_by_name() -> None:
    case = stack(Changing)
    model = case.model()
    bench = Bench(case, model, splits=True)
    bench.probe(unequal(case)[0])
    bench.load_all()
    model.layers[1].changes = True
    with pytest.raises(
        ModelError, match=r"block 'layers\.1': its backward can only be run as a whole for micro-batch 0"
    ):
        bench.step(unequal(case), WEIGHTS, in_two_parts)
    model.layers[1].changes = False
    bench.step(unequal(case), WEIGHTS, in_two_parts)
