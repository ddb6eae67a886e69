"""A backward through a graph that its forward has kept is the one that computes the block again: the same bits
wherever weights are by then, nothing computed twice, and no more memory than the probe has found."""

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ModelError
from penstock.tape.watch import Watch
from tests.models import MODELS, Case
from tests.stacks import WEIGHTS, WIDTH, Layer, assert_same_gradients, beside_vertical, stack, unequal
from tests.tape.test_autograd import HONOURED
from tests.tape.test_refusals import Smoothed
from tests.tape.test_rules import drawn_beside
from tests.tape.test_split import ODD, Products
from tests.tape_reference import Bench, Order, horizontal, vertical, with_graphs

pytestmark = pytest.mark.usefixtures("one_thread")


class ByGradient(Layer):
    """Takes another way where a gradient is asked for, which rounds otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + (y * 3 / 3 if torch.is_grad_enabled() else y)


class Computes(Layer):
    """Has a product with a weight that it computes itself: torch takes another kernel where that has a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.transpose(0, 1).contiguous().transpose(0, 1)
        return x + torch.tanh(turned @ (self.linear.weight * 2))


class Collects(Layer):
    """Puts what it has computed into a list as well, which holds a tensor already."""

    def forward(self, x: torch.Tensor, found: list[torch.Tensor] | None = None) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if found is not None:
            found.append(y)
        return x + y


class Random(Layer):
    """Draws in its forward, and where its own gradient comes by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(nn.functional.dropout(x, 0.2))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * torch.rand(()))
        return x + y


class Through(Layer):
    """Hands one of its inputs on as it is, beside what it computes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.linear(x)), x


def hand_on(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What a layer was handed, and has returned, is read besides."""
    for layer in model.layers:
        y, before = layer(x)
        x = y + 0.1 * before
    return x


def collect(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers put what they compute into a list."""
    found: list[torch.Tensor] = []
    for layer in model.layers:
        x = layer(x, found)
    return x + torch.stack(found).sum(0)


def change(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The model's own code changes what its graph has saved."""
    y = torch.exp(x)
    y += 1
    for layer in model.layers:
        y = layer(y)
    return y


MORE: dict[str, type[nn.Module]] = {"random in both directions": Random}
CASES: dict[str, Case] = {
    **{f"model {name}": case for name, case in MODELS.items()},
    **{name: stack(layer) for name, layer in (*ODD.items(), *MORE.items())},
    **{name: stack(*HONOURED[name]) for name in HONOURED},
}
COMPUTED_AGAIN = (
    "a function of its own",
    "a reentrant checkpoint within a block",
    "functions with a backward of their own",
    "torch.func within a block",
)


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.sampled(4, values=False)
@pytest.mark.parametrize("name", CASES)
def test_a_backward_through_a_kept_graph_has_the_bits_of_one_that_computes_again(name: str) -> None:
    bench, again, kept = beside_vertical(CASES[name], with_graphs, stays=True)
    assert_same_gradients(kept, again)
    assert all(stage.graph is None for stage in bench.stages if stage.kind == "segment")
    if not name.startswith("model "):
        assert any(stage.graph is not None for stage in bench.stages) == (name not in COMPUTED_AGAIN)


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", ["model llama_sdpa", "model gpt2", "model bert", "used several times", "an adapter"])
def test_a_block_is_computed_once(name: str) -> None:
    case = CASES[name]
    bench = Bench(case, case.model())
    micro_batches = case.micro_batches(2)
    bench.probe(micro_batches[0])
    bench.load_all()
    forward = Products()
    bench.tape.begin(0, micro_batches[:1], [1.0], stages=bench.stages)
    with forward:
        for stage in range(len(bench.stages) - 1):
            bench.tape.forward(stage, 0)
    bench.tape.abort()
    counts = []
    for order in (vertical, with_graphs):
        with Products() as products:
            bench.step(micro_batches, [1.0, 1.0], order)
        counts.append(products.count)
    assert counts[0] - counts[1] == 2 * forward.count > 0


@pytest.mark.parametrize(
    "name",
    ["model llama_sdpa", "model gpt2", "model mixtral", "model t5", "dropout, casts and pieces", "closes over"],
)
def test_a_graph_holds_no_more_than_the_probe_has_found(name: str) -> None:
    case = (CASES | ASKED)[name]
    bench = Bench(case, case.model())
    (micro_batch,) = case.micro_batches(1)
    bench.probe(micro_batch)
    bench.load_all()
    assert sum(stage.graph is not None for stage in bench.stages) > 1
    for stay in (False, True):
        bench.tape.begin(0, [micro_batch], [1.0], stages=bench.stages)
        watch = Watch({}, lambda _: None)
        with watch:
            for stage in bench.stages[:-1]:
                before = watch.peak = watch.live
                bench.tape.forward(stage.index, 0, keep=stage.graph is not None, stay=stay)
                if stage.graph is not None:
                    put_out = stage.activation + stage.kept
                    assert watch.live - before <= stage.graph + put_out
                    assert watch.peak - before <= stage.graph + put_out + stage.forward_peak
        bench.tape.abort()


def test_what_a_call_hands_on_is_what_it_was_handed() -> None:
    """It has its gradient from both: the model's own code, and the block."""
    bench, again, kept = beside_vertical(stack(Through, hand_on), with_graphs)
    assert_same_gradients(kept, again)
    assert all(stage.graph is not None for stage in bench.stages if stage.kind == "call")


@pytest.mark.parametrize("case", [stack(ByGradient), stack(Computes), stack(Smoothed), stack(Collects, collect)])
def test_other_bits_buffers_and_containers_are_computed_again(case: Case) -> None:
    bench = Bench(case, case.model(), moving=True)
    bench.probe(unequal(case)[0])
    assert all(stage.graph is None for stage in bench.stages)


def test_what_is_changed_in_place_after_a_graph_has_saved_it_is_an_error() -> None:
    """In the model's own code, too, whose graphs are packed: torch does not look where there are hooks."""
    case = stack(Layer, change)
    bench = Bench(case, case.model())
    with pytest.raises(ModelError, match="changed in place after it was used"):
        bench.probe(unequal(case)[0])


@pytest.mark.parametrize("stay", [False, True])
def test_a_step_that_is_broken_off_lets_its_graphs_go(stay: bool) -> None:
    case = CASES["model gpt2"]
    bench = Bench(case, case.model())
    (micro_batch,) = case.micro_batches(1)
    bench.probe(micro_batch)
    bench.load_all()
    watch = Watch({}, lambda _: None)
    bench.tape.begin(0, [micro_batch], [1.0], stages=bench.stages)
    with watch:
        before = watch.live
        for stage in bench.stages[:-1]:
            bench.tape.forward(stage.index, 0, keep=True, stay=stay)
        held = watch.live - before
        bench.tape.abort()
    assert held > sum(stage.graph or 0 for stage in bench.stages) // 2
    assert watch.live - before < held // 10


class Squashed(Layer):
    """Returns what its graph has saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def change_returned(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The model's own code changes what a block has returned."""
    for layer in model.layers:
        y = layer(x)
        y += x
        x = y
    return x


SEEN: ContextVar[list[torch.Tensor]] = ContextVar("SEEN")


class ReadsBeside(Layer):
    """Reads what the model's own code has put into a context variable."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(SEEN.get()[-1]))


def put_beside(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        SEEN.set([x])
        x = layer(x)
    return x


class Conjugated(Layer):
    """Needs a weight as complex numbers, and with the other sign."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(self.both)
        return x + torch.tanh(self.linear(x)) * turned.conj().imag + (x * turned).real


class Turned(Layer):
    """Needs a weight as complex numbers, whose first one, counted in these, lies in no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.both = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale + (x * torch.view_as_complex(self.both)).real


class CountsAround(Layer):
    """Counts its calls in a buffer, and differentiates by a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + torch.func.grad(lambda y: torch.tanh(self.linear(y)).sum())(x)


class DrawsBeside(Layer):
    """Draws from numpy's generator, and from where that is then where its own gradient comes by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * drawn_beside().to(x.dtype)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * drawn_beside().to(x.dtype))
        return x + y


class Odd(Layer):
    """Puts out numbers of a kind that few operations know."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.linear(x)), torch.zeros(3, dtype=torch.uint16)


def first_of_both(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x, _ = layer(x)
    return x


class ClosesOver(Layer):
    """Recomputes a part of itself, in which it reads a tensor that no argument tells of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x] * 8, -1)
        inner: torch.Tensor = checkpoint(lambda y: torch.tanh(self.linear(y)) * wide.mean(), x, use_reentrant=False)
        return x + inner


class Refills(Layer):
    """Fills a table of its own anew in each call, as far as that goes, and its graph saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table[: x.shape[1]]
        table.copy_(torch.arange(x.shape[1]).unsqueeze(1).cos())
        return x + torch.tanh(self.linear(x * table))


ASKED: dict[str, Case] = {
    "changes what is returned": stack(Squashed, change_returned),
    "reads beside": stack(ReadsBeside, put_beside),
    "other views of weights": stack(Conjugated),
    "other views of weights further on": stack(Turned),
    "buffers and transforms": stack(CountsAround),
    "odd outputs": stack(Odd, first_of_both),
    "numbers of numpy": stack(DrawsBeside),
    "closes over": stack(ClosesOver),
    "fills a table anew": stack(Refills),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_graph_cannot_follow_is_computed_again(name: str) -> None:
    bench, again, kept = beside_vertical(ASKED[name], with_graphs, stays=True)
    assert_same_gradients(kept, again)
    able = [stage.graph is not None for stage in bench.stages if stage.kind == "call"]
    kept_at_first = ("changes what is returned", "odd outputs", "closes over", "fills a table anew")
    assert all(able) if name in kept_at_first else not any(able)


class InFull(Layer):
    """Uses a weight three times, with parts in full precision in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(2):
            y = self.linear(y)
            with torch.autocast("cpu", enabled=False):
                y = y.float() * 1.1
        return x + torch.tanh(self.linear(y))


def in_bf16(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        for layer in model.layers:
            x = layer(x)
    return x


@pytest.mark.parametrize("order", [horizontal, with_graphs])
def test_a_weight_is_cast_in_a_recomputation_as_often_as_in_the_forward(order: Order) -> None:
    """Autocast knows its cast until its outermost region ends, in which the call was."""
    bench, again, found = beside_vertical(stack(InFull, in_bf16), order)
    assert_same_gradients(found, again)
    case = stack(InFull, in_bf16)
    micro_batches, plain = unequal(case), case.model()
    _, wanted = bench.plain_step(plain, micro_batches, WEIGHTS)
    assert_same_gradients(again, wanted)


def test_rows_that_are_alike_do_not_hide_other_bits() -> None:
    case = stack(ByGradient)
    bench = Bench(case, case.model())
    micro_batch = unequal(case)[0]
    bench.probe({key: torch.cat([tensor[:1]] * 2) for key, tensor in micro_batch.items()})
    assert all(stage.graph is None for stage in bench.stages)
