"""Views of weights, which leave between stages: handed to blocks and returned by them as in a plain loop, or refused.

``EXACT``: three micro-batches of unequal length give the gradients of a plain loop, with weights that leave after each
stage. ``REFUSED``: a ModelError that names the parameter.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from tests.models import VOCABULARY
from tests.stacks import WIDTH, Layer, Run, Stack, assert_exact, assert_same_gradients, beside_vertical, stack, unequal
from tests.tape_reference import Bench, horizontal, vertical, with_graphs

pytestmark = pytest.mark.usefixtures("one_thread")


class Scaled(Layer):
    """Is handed a second tensor."""

    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        scale = scale["scale"] if isinstance(scale, dict) else scale
        return super().forward(x * scale)


class Crossed(Layer):
    """Attends, in a way, from learned queries to what came before."""

    def forward(self, queries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(queries + x.mean(1, keepdim=True))


class Gated(Layer):
    """Returns a view of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.gate.view(1, 1, -1)


def add_scales(model: Stack) -> None:
    model.scales = nn.Parameter(torch.linspace(0.5, 1.5, 3 * WIDTH, dtype=torch.double).view(3, WIDTH))


def add_frozen_scales(model: Stack) -> None:
    add_scales(model)
    model.scales.requires_grad_(requires_grad=False)


def run_rows(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, model.scales[i])
    return x


def run_rows_in_dicts(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, {"scale": model.scales[i]})
    return x


def run_one_view(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """All blocks are handed the same view."""
    scale = model.scales[:1]
    for layer in model.layers:
        x = layer(x, scale)
    return x


def run_queries(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """The first block's input is a weight, for every row of the micro-batch, as that of a resampler is."""
    queries = model.scales.expand(x.shape[0], -1, -1)
    for layer in model.layers:
        queries = layer(queries, x)
    return x + queries.mean(1, keepdim=True)


def run_gated(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x, gate = layer(x)
        x = x * gate
    return x


EXACT: Mapping[str, tuple[type[nn.Module], Run, Callable[[Any], None]]] = {
    "rows": (Scaled, run_rows, add_scales),
    "rows of a frozen weight": (Scaled, run_rows, add_frozen_scales),
    "rows in containers": (Scaled, run_rows_in_dicts, add_scales),
    "one view for all": (Scaled, run_one_view, add_scales),
    "learned queries": (Crossed, run_queries, add_scales),
    "returned": (Gated, run_gated, lambda model: None),
}


@pytest.mark.parametrize("name", EXACT)
def test_views_that_blocks_are_handed_and_return_are_exact(name: str) -> None:
    layer, run, change = EXACT[name]
    found, _ = assert_exact(stack(layer, run), change, (vertical, horizontal))
    assert ("scales" in found) == (change is add_scales)


def test_a_view_that_a_block_returns_is_the_same_with_its_graph_kept() -> None:
    bench, usual, found = beside_vertical(stack(Gated, run_gated), with_graphs)
    assert all(s.graph is not None for s in bench.stages if s.kind == "call")
    assert_same_gradients(found, usual)


@pytest.mark.parametrize("name", EXACT)
def test_views_are_what_they_were_in_an_evaluation(name: str) -> None:
    layer, run, change = EXACT[name]
    case = stack(layer, run)
    model = case.model().double()
    change(model)
    micro_batches = unequal(case)
    with torch.no_grad():
        wanted = [case.loss_fn(copy.deepcopy(model), mb) for mb in micro_batches]
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batches[0], train=False)
    assert bench.evaluate(micro_batches) == wanted


# -- what is refused ------------------------------------------------------------------------------------------------


def behind_blocks(view: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    """A forward that takes a view of the embedding in front of the blocks, and uses it behind them."""

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        table = view(model.embed.weight)
        for layer in model.layers:
            x = layer(x)
        return x + table.sum()

    return run


def run_rows_taken_at_once(model: Stack, x: torch.Tensor) -> torch.Tensor:
    rows = model.scales.unbind()
    for row, layer in zip(rows, model.layers, strict=True):
        x = layer(x, row)
    return x


def run_rows_of_data(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, model.scales.data[i])
    return x


class Keeps(torch.autograd.Function):
    """A product whose weight it keeps beside what autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.detach()
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        return gradient @ ctx.weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


def run_keeping(model: Stack, x: torch.Tensor) -> torch.Tensor:
    product: Any = Keeps.apply
    x = product(x, model.scales)
    for layer in model.layers:
        x = layer(x)
    return x


def add_square(model: Stack) -> None:
    model.scales = nn.Parameter(torch.eye(WIDTH, dtype=torch.double))


REFUSED: Mapping[str, tuple[type[nn.Module], Run, Callable[[Any], None], str]] = {
    "transposed": (
        Layer,
        behind_blocks(torch.t),
        lambda model: None,
        "the model itself reads a view of parameter 'embed.weight'",
    ),
    "detached": (
        Layer,
        behind_blocks(torch.Tensor.detach),
        lambda model: None,
        "the model itself reads a view of parameter 'embed.weight'",
    ),
    "all rows at once": (Scaled, run_rows_taken_at_once, add_scales, "reads a view of parameter 'scales', of shape"),
    "rows of data": (Scaled, run_rows_of_data, add_scales, "block 'layers.0' reads a view of parameter 'scales'"),
    "for a backward": (Layer, run_keeping, add_square, "the backward of the model itself reads a view of .*'scales'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_view_that_is_read_when_its_weight_has_left_is_refused(name: str) -> None:
    layer, run, change, message = REFUSED[name]
    with pytest.raises(ModelError, match=rf"{message}.* take the view where it is used, or keep a copy"):
        assert_exact(stack(layer, run), change)


def add_pairs(model: Stack) -> None:
    """Their first number, counted in complex ones, lies in no weight."""
    model.before = nn.Parameter(torch.ones(WIDTH, dtype=torch.double))
    model.pairs = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.double))


def run_pairs(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x = (x * torch.view_as_complex(model.pairs)).real
    for layer in model.layers:
        x = layer(x)
    return x * model.before


def test_a_view_under_another_dtype_that_a_backward_needs_is_refused() -> None:
    with pytest.raises(ModelError, match=rf"view of a weight of shape \({WIDTH}, 2\) .* under another dtype"):
        assert_exact(stack(Layer, run_pairs), add_pairs)


def test_a_copy_of_a_view_may_be_kept() -> None:
    assert_exact(stack(Layer, behind_blocks(lambda weight: weight.t().clone())))


class Recurrent(nn.Module):
    """Stands in for an embedding, so that nothing of its param group is read before it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.lstm(nn.functional.one_hot(tokens, VOCABULARY).float())[0]


def test_weights_that_an_op_is_handed_in_a_list_have_their_place_when_they_are_saved() -> None:
    """As torch's LSTM hands its own over. That of fp32 on a processor is one op."""
    case = stack()
    model: Any = case.model()
    model.embed = Recurrent()
    plain, micro_batch = copy.deepcopy(model), case.micro_batches(1)[0]
    bench = Bench(case, model, moving=True)
    bench.probe(micro_batch)
    _, found = bench.step([micro_batch], [1.0])
    case.loss_fn(plain, micro_batch).backward()
    assert_same_gradients(found, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
